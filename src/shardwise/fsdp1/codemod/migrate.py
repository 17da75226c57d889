"""migrate(): rewrite FSDP1 programs to FSDP2, and check each rewritten file before it is written."""

from __future__ import annotations

import difflib
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import SourceError
from shardwise.findings import Severity, SourceFinding, Status, unreadable_source
from shardwise.fsdp1.codemod.draft import finding_at, status_fields
from shardwise.fsdp1.codemod.flow import flow_of
from shardwise.fsdp1.codemod.framework_files import convert_yaml, may_hold_config
from shardwise.fsdp1.codemod.model_calls import runs_units
from shardwise.fsdp1.codemod.program import Program
from shardwise.fsdp1.codemod.rewriting import imported_elsewhere, left_alone, rewrite, undone
from shardwise.fsdp1.codemod.writing import starts_offloaded
from shardwise.linting.files import LintSettings
from shardwise.linting.lint import lint_text
from shardwise.progress import Progress
from shardwise.source.files import find_files, map_files, read_bytes, write_bytes
from shardwise.source.syntax import FileContext, decode
from shardwise.source.torch_pin import Version, gone, lacking, newest_torch, project_torch

Target = Literal["torch", "shardwise"]
TARGETS: tuple[Target, ...] = ("torch", "shardwise")
_CONCERNED = ("fsdp", "fullyshard", "shardedgradscaler")
_YAML = (".yaml", ".yml")
_WRAPS = ("SW101", Status.REWRITTEN)
_UNSTABLE = "would be changed again by a second run"
_MAX_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class MigratedFile:
    """What became of one file."""

    path: str
    before: str
    output: str
    """The text after the rewrite, the same as before where nothing was rewritten."""
    findings: tuple[SourceFinding, ...]
    encoding: str = "utf-8"

    @property
    def changed(self) -> bool:
        """Whether the text differs."""
        return self.before != self.output


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """What became of a program: every file that was changed or has a finding."""

    files: tuple[MigratedFile, ...] = field(default_factory=tuple)
    num_read: int = 0
    """Files looked at."""

    @property
    def findings(self) -> tuple[SourceFinding, ...]:
        """All findings, in the order of the files."""
        return tuple(finding for file in self.files for finding in file.findings)

    @property
    def summary(self) -> dict[str, int]:
        """Counts: of files, and of findings by what became of the code."""
        counts = Counter(finding.status for finding in self.findings)
        calls = [finding for finding in self.findings if finding.code == "SW101"]
        return {
            "files_read": self.num_read,
            "files_changed": sum(file.changed for file in self.files),
            "constructors": len(calls),
            "constructors_rewritten": sum(finding.status is Status.REWRITTEN for finding in calls),
            **{status.value: counts[status] for status in Status},
        }

    def to_dict(self) -> dict[str, Any]:
        """As `--format json` has it.

        Ranks:
            Local.
        """
        shown = ("code", "line", "status", "message", "fix")
        files = [
            {
                "path": file.path,
                "changed": file.changed,
                "output": file.output,
                "findings": [{name: getattr(finding, name) for name in shown} for finding in file.findings],
            }
            for file in self.files
        ]
        return {"files": files, "summary": self.summary}


def migrate(
    paths: Iterable[str | Path],
    *,
    target: Target = "torch",
    write: bool = False,
    progress: Progress | None = None,
    num_processes: int | None = None,
) -> Migration:
    """Rewrite the FSDP1 code in files and folders to FSDP2.

    All files given are read as one program, so that names can be followed between modules. A call is rewritten only
    if all of it can be; the rest is left as it is, with a finding that says what a person must decide. A rewritten file
    is checked before it is written: it compiles, other files still find in it what they import, lint finds no new
    error in it, and a second run changes nothing.

    Args:
        paths: Python files, YAML files of frameworks, and folders of them.
        target: `torch` writes plain `fully_shard`; `shardwise` writes `sw.shard`.
        write: Change the files, each atomically; otherwise nothing is changed on disk.
        progress: Told about each file.
        num_processes: Default: one a core, when there are enough files.

    Raises:
        SourceError: A path does not exist, the target is unknown, or a file cannot be written.

    Ranks:
        Local.
    """
    if target not in TARGETS:
        raise SourceError(f"the target is {target!r}", where="--target", fix=f"choose among {', '.join(TARGETS)}")
    paths = list(paths)
    found = find_files(paths, (".py", *_YAML))
    texts, unreadable = _read(found)
    program, rewritten = _rewrite_all(texts, target, num_processes, progress)
    files = {file.path: file for file in (*unreadable, *_checked(rewritten, program, target, num_processes))}
    for _ in range(_MAX_ROUNDS):  # what a second run would do about the files left alone is done at once
        now = texts | {path: (file.output, texts[path][1]) for path, file in files.items() if file.changed}
        if sum(file.changed for file in files.values()) == sum(file.changed for file in rewritten):
            break
        between, again = _rewrite_all(now, target, num_processes, None)
        changed = [one for one in _checked(again, between, target, num_processes) if one.changed]
        for one in changed:
            first = files.get(one.path)
            is_again = first is not None and first.changed
            files[one.path] = _restored(first, _UNSTABLE) if first is not None and is_again else one
        if not changed:
            break
    files = [files[path] for path in sorted(files)]
    pinned = project_torch(paths)
    files = [_with_lacking(file, program, pinned) for file in files]
    migration = Migration(files=tuple(files), num_read=len(found))
    if write:
        write_migration(migration)
    return migration


def _rewrite_all(
    texts: Mapping[str, tuple[str, str]], target: Target, num_processes: int | None, progress: Progress | None
) -> tuple[Program, list[MigratedFile]]:
    """The files as one program, and those that have findings or are changed, not checked yet."""
    program = Program({path: text for path, (text, _) in texts.items() if not path.endswith(_YAML)})
    jobs = [path for path, (text, _) in texts.items() if _is_concerned(path, text) or path in flow_of(program).files]
    more = [path for path in program.texts if runs_units(program, path) or starts_offloaded(program, path)]
    jobs = list(dict.fromkeys(jobs + more))
    left_alone(program)  # read once, before there are several processes that would each find out

    def work(path: str) -> MigratedFile:
        return _migrate_file(path, *texts[path], program, target)

    done = map_files(work, jobs, num_processes=num_processes, progress=progress)
    return program, [file for file in done if file.changed or file.findings]


def write_migration(migration: Migration) -> None:
    """Change the files on disk, each atomically."""
    for file in migration.files:
        if file.changed:
            write_bytes(file.path, file.output.encode(file.encoding))


def _read(paths: Sequence[str]) -> tuple[dict[str, tuple[str, str]], list[MigratedFile]]:
    """Text and encoding by path, and the files that cannot be decoded."""
    texts, unreadable = {}, []
    for path in paths:
        data = None
        try:
            data = read_bytes(path)
            if not path.endswith(_YAML) or may_hold_config(data.decode("utf-8", errors="replace")):
                texts[path] = decode(data, path)
        except SourceError as error:
            if data is None or _is_concerned(path, data.decode("latin-1")):
                unreadable.append(_unreadable(path, error))
    return texts, unreadable


def _is_concerned(path: str, text: str) -> bool:
    """Whether a file names FSDP at all, or is a config that may."""
    lower = text.lower()
    return path.endswith(_YAML) or any(word in lower for word in _CONCERNED)


def _migrate_file(path: str, text: str, encoding: str, program: Program, target: Target) -> MigratedFile:
    try:
        if path.endswith(_YAML):
            output, findings = convert_yaml(text, path)
        else:
            output, findings = rewrite(program.file(path), program, target)
    except SourceError as error:
        return _unreadable(path, error, text)
    return MigratedFile(path=path, before=text, output=output, findings=tuple(findings), encoding=encoding)


def _checked(
    files: list[MigratedFile], program: Program, target: Target, num_processes: int | None
) -> list[MigratedFile]:
    """The files, those as they were whose rewrite does not pass every check."""
    outputs = {file.path: file.output for file in files if file.changed}
    told = [one for file in files for one in file.findings if one.status is not Status.REWRITTEN]
    after = Program(program.texts | {path: text for path, text in outputs.items() if path in program.texts})
    left_alone(after)

    def work(path: str) -> str:
        is_code = path in program.texts
        decided = [one.line for one in told if one.path == path]
        failed = failed_check(path, program, after, decided) if is_code else ""
        is_stable = failed or not _migrate_file(path, outputs[path], "", after, target).changed
        return failed or ("" if is_stable else _UNSTABLE)

    failed = dict(zip(outputs, map_files(work, list(outputs), num_processes=num_processes), strict=True))
    wraps = {one.path for file in files for one in file.findings if (one.code, one.status) == _WRAPS}
    undone_now, flow = [path for path in wraps if failed.get(path)], flow_of(program)
    stay = {path for path, place in left_alone(program).items() if place}.union(undone_now)
    for path in failed.keys() - wraps if undone_now else ():
        fed = flow.fed_by(path, left_alone(program))
        if left := [one for one in undone_now if path in flow.reached_by(one) or (one in fed and stay.issuperset(fed))]:
            failed[path] = failed[path] or f"would be given FSDP1's models by {left[0]}, which is left alone"
    return [_restored(file, why) if (why := failed.get(file.path)) else file for file in files]


def _with_lacking(file: MigratedFile, program: Program, pinned: tuple[Version, str] | None) -> MigratedFile:
    """A rewritten file with a finding about the names that the project's torch, or the file's own, lacks."""
    if not file.changed or file.path not in program.texts:
        return file
    before = program.file(file.path)
    absent = tuple(
        finding_at(
            before, node, "SW137", f"{name} is in no torch that has FSDP2", Status.NEEDS_DECISION, f"use {instead}"
        )
        for node, name, instead in gone(before)
    )
    file = replace(file, findings=(*absent, *file.findings))
    own = newest_torch(file.before) if "/// script" in file.before else None
    version, place = (own, file.path) if own is not None else pinned or (None, "")
    after = FileContext(file.output, file.path)
    names = lacking(before, after, version) if version is not None else []
    if not names or version is None:
        return file
    message = f"torch {version[0]}.{version[1]}, the newest that {place} allows, lacks {', '.join(names)}"
    fix = "raise the pin to torch>=2.6 together with the rewrite"
    finding = finding_at(before, after.tree, "SW137", message, Status.NEEDS_DECISION, fix)
    return replace(file, findings=(finding, *file.findings))


def _restored(file: MigratedFile, why: str) -> MigratedFile:
    findings = tuple(undone(finding, f"the rewritten file {why}") for finding in file.findings)
    return replace(file, output=file.before, findings=findings)


def _unreadable(path: str, error: SourceError, text: str = "") -> MigratedFile:
    message = f"the file is skipped: it {error.what}"
    fix = "make it a file that Python can read, and run migrate again"
    fields = status_fields("SW180", Status.NEEDS_DECISION)
    finding = unreadable_source(path, error, message=message, fix=fix, **fields)
    return MigratedFile(path=path, before=text, output=text, findings=(finding,))


def failed_check(path: str, before: Program, after: Program, decided: Collection[int] = ()) -> str:
    """Why a rewritten Python file must not be written; empty if nothing is wrong with it.

    Args:
        path: Of the file.
        before: The program as it was.
        after: The program with every rewrite.
        decided: The lines of the file as it was about which a finding already tells a person.
    """
    text = after.texts[path]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about strings and comparisons of the file's own
            compile(text, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return f"would not compile: {error}"
    return _lost_import(path, before, after) or _new_error(path, before.texts[path], text, decided)


def _lost_import(path: str, before: Program, after: Program) -> str:
    old, new = before.file(path), after.file(path)
    lost = old.scopes[old.tree].names.keys() - new.scopes[new.tree].names.keys()
    if lost and not new.scopes[new.tree].stars:
        for name, place in sorted(imported_elsewhere(after, new).items()):
            if name in lost:
                return f"would no longer have {name}, which {place} takes from it"
    return ""


def _new_error(path: str, before: str, after: str, decided: Collection[int]) -> str:
    """What lint calls an error after the rewrite and did not before, and no finding tells a person about."""
    found = _errors(after, path)
    known = Counter(finding.code for finding in _errors(before, path)) if found else Counter()
    said = _became(before, after, decided) if found else set()
    for finding in found:
        known[finding.code] -= 1
        about = {finding.line, *map(int, re.findall(r"\bline (\d+)", finding.message))}
        if known[finding.code] < 0 and about.isdisjoint(said):
            return f"would have an error that lint finds, {finding.code} on line {finding.line}: {finding.message}"
    return ""


def _became(before: str, after: str, lines: Collection[int]) -> set[int]:
    """The lines of the new text that stand where these lines of the old one stood."""
    old, new = ([line.strip() for line in text.splitlines()] for text in (before, after))
    found = set[int]()
    for _, start, end, new_start, new_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        some = [line - 1 - start for line in lines if start < line <= end]
        is_same = end - start == new_end - new_start
        found.update(
            (new_start + one + 1 for one in some) if is_same else range(new_start + 1, new_end + 1) if some else ()
        )
    return found


def _errors(text: str, path: str) -> list[SourceFinding]:
    return [one for one in lint_text(text, path, LintSettings()).findings if one.severity is Severity.ERROR]
