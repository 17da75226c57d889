"""migrate(): rewrite FSDP1 programs to FSDP2."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import SourceError
from shardwise.findings import Severity, SourceFinding, Status
from shardwise.fsdp1.codemod.draft import KINDS
from shardwise.fsdp1.codemod.framework_files import convert_yaml, may_hold_config
from shardwise.fsdp1.codemod.program import Program
from shardwise.fsdp1.codemod.rewriting import rewrite, stays_everywhere
from shardwise.progress import NoProgress, Progress
from shardwise.source.syntax import decode

Target = Literal["torch", "shardwise"]
TARGETS: tuple[Target, ...] = ("torch", "shardwise")
_CONCERNED = ("fsdp", "fullyshard", "shardedgradscaler")
_SKIPPED = {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".tox", ".mypy_cache", ".ruff_cache"}
_YAML = (".yaml", ".yml")
_FEW = 24  # files; a second process costs more than it saves below


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
        """As `--format json` has it."""
        return {
            "files": [
                {
                    "path": file.path,
                    "changed": file.changed,
                    "output": file.output,
                    "findings": [
                        {
                            "code": finding.code,
                            "line": finding.line,
                            "status": finding.status.value,
                            "message": finding.message,
                            "fix": finding.fix,
                        }
                        for finding in file.findings
                    ],
                }
                for file in self.files
            ],
            "summary": self.summary,
        }


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
    if all of it can be; the rest is left as it is, with a finding that says what a person must decide.

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
    found = list(dict.fromkeys(_find(paths)))
    texts = _read(found)
    program = Program({path: text for path, (text, _) in texts.items() if not path.endswith(_YAML)})
    jobs = [path for path, (text, _) in texts.items() if _is_concerned(path, text) or program.handed(path)]
    heard = progress or NoProgress()
    heard.start(len(jobs), "files")
    files = []
    for file in _run(jobs, texts, program, target, num_processes):
        heard.advance()
        if file.changed or file.findings:
            files.append(file)
    heard.finish()
    files = sorted([*files, *texts.problems], key=lambda file: file.path)
    if write:
        for file in files:
            if file.changed:
                _write(file)
    return Migration(files=tuple(files), num_read=len(found))


class _Texts(dict[str, tuple[str, str]]):
    """Text and encoding by path, and the files that could not be decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[MigratedFile] = []


def _find(paths: Iterable[str | Path]) -> Iterator[str]:
    for path in map(Path, paths):
        if path.is_file():
            yield str(path)
        elif path.is_dir():
            for folder, folders, names in os.walk(path):
                folders[:] = sorted(name for name in folders if name not in _SKIPPED)
                yield from (os.path.join(folder, name) for name in sorted(names) if name.endswith((".py", *_YAML)))
        else:
            raise SourceError(f"there is no {path}", where=str(path), fix="give files or folders that exist")


def _read(paths: Sequence[str]) -> _Texts:
    texts = _Texts()
    for path in paths:
        data = b""
        try:
            data = Path(path).read_bytes()
            if not path.endswith(_YAML) or may_hold_config(data.decode("utf-8", errors="replace")):
                texts[path] = decode(data, path)
        except OSError as error:
            texts.problems.append(_unreadable(path, f"cannot be read: {error.strerror}"))
        except SourceError as error:
            if _is_concerned(path, data.decode("latin-1")):
                texts.problems.append(_unreadable(path, error.what))
    return texts


def _is_concerned(path: str, text: str) -> bool:
    """Whether a file names FSDP at all, or is a config that may."""
    lower = text.lower()
    return path.endswith(_YAML) or any(word in lower for word in _CONCERNED)


def _run(
    jobs: Sequence[str], texts: _Texts, program: Program, target: Target, num_processes: int | None
) -> Iterator[MigratedFile]:
    wanted = num_processes or (os.cpu_count() or 1)
    if wanted == 1 or (num_processes is None and len(jobs) < _FEW):
        yield from (_migrate_file(path, *texts[path], program, target) for path in jobs)
        return
    program.handed("")  # once, before there are several processes that would each find out
    stays_everywhere(program)
    largest_first = sorted(jobs, key=lambda path: -len(texts[path][0]))
    with ProcessPoolExecutor(wanted, initializer=_start, initargs=(program, dict(texts), target)) as pool:
        yield from pool.map(_migrate_in_worker, largest_first, chunksize=4)


_worker: dict[str, Any] = {}


def _start(program: Program, texts: dict[str, tuple[str, str]], target: Target) -> None:
    _worker.update(program=program, texts=texts, target=target)


def _migrate_in_worker(path: str) -> MigratedFile:
    text, encoding = _worker["texts"][path]
    return _migrate_file(path, text, encoding, _worker["program"], _worker["target"])


def _migrate_file(path: str, text: str, encoding: str, program: Program, target: Target) -> MigratedFile:
    try:
        if path.endswith(_YAML):
            output, findings = convert_yaml(text, path)
        else:
            output, findings = rewrite(program.file(path), program, target)
    except SourceError as error:
        return _unreadable(path, error.what, text, error.where)
    return MigratedFile(path=path, before=text, output=output, findings=tuple(findings), encoding=encoding)


def _unreadable(path: str, what: str, text: str = "", where: str = "") -> MigratedFile:
    place = re.search(r":(\d+)(?::(\d+))?$", where)
    line, column = (int(place[1]), int(place[2] or 1)) if place else (1, 1)
    finding = SourceFinding(
        code="SW180",
        name=KINDS["SW180"].name,
        message=f"the file is left alone: it {what}",
        where=f"{path}:{line}:{column}",
        severity=Severity.WARNING,
        fix="make it a file that Python can read, and run migrate again",
        path=path,
        line=line,
        column=column,
        status=Status.NEEDS_DECISION,
    )
    return MigratedFile(path=path, before=text, output=text, findings=(finding,))


def _write(file: MigratedFile) -> None:
    """Replace the file in one step: a reader, or a crash, sees the old text or the new."""
    path = Path(os.path.realpath(file.path))
    try:
        mode = path.stat().st_mode
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".shardwise")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(file.output.encode(file.encoding))
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(temporary, mode & 0o7777)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except (OSError, UnicodeEncodeError) as error:
        raise SourceError(f"cannot write: {error}", where=file.path, fix="check the folder's permissions") from error
