"""lint(): run the rules over files, in several processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shardwise.errors import SourceError
from shardwise.findings import Safety, Severity, SourceFinding, unreadable_source
from shardwise.linting import files
from shardwise.linting.files import RELEVANT, LintSettings, allowed_in, is_excluded, read_settings, with_codes
from shardwise.linting.registry import UNREADABLE, LintContext, all_rules
from shardwise.progress import Progress
from shardwise.source.edits import apply, choose
from shardwise.source.files import STDIN, find_files, map_files, read_bytes, write_bytes
from shardwise.source.syntax import FileContext, decode

_MAX_PASSES = 10  # a fix can uncover another; no file has needed more than three
_SUFFIXES = frozenset({".py", ".pyw"})


@dataclass(frozen=True, slots=True)
class Linted:
    """One file after linting."""

    path: str
    findings: tuple[SourceFinding, ...]
    """What is left to report."""
    text: str
    """As it stands after fixes; empty for files without findings."""
    num_fixed: int = 0


def lint(
    paths: Iterable[str | Path] | str | Path,
    *,
    select: Iterable[str] | None = None,
    ignore: Iterable[str] | None = None,
    preview: bool = False,
    progress: Progress | None = None,
) -> list[SourceFinding]:
    """Find mistakes in files and folders; nothing is changed and nothing is run.

    Settings come from `[tool.shardwise.lint]` of the nearest pyproject.toml.

    Args:
        paths: Python files, or folders to search for them.
        select: Codes, or starts of codes, to look for instead of all.
        ignore: Codes, or starts of codes, to leave out.
        preview: Run new rules too.
        progress: Hears of each file.

    Returns:
        The findings by path and line.

    Raises:
        SourceError: A path does not exist.
        ConfigError: A code or setting is wrong.

    Ranks:
        Local.
    """
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    settings = settings_for(select=select, ignore=ignore, preview=preview)
    linted = lint_files(paths, settings, progress=progress)
    return [finding for file in linted for finding in file.findings]


def settings_for(
    *, select: Iterable[str] | None = None, ignore: Iterable[str] | None = None, preview: bool = False
) -> LintSettings:
    """The settings of the current folder's project, changed by arguments."""
    settings = with_codes(read_settings(Path.cwd()), select, ignore)
    return replace(settings, preview=settings.preview or preview)


def lint_files(
    paths: Sequence[str | Path],
    settings: LintSettings,
    *,
    fixes: frozenset[Safety] = frozenset(),
    progress: Progress | None = None,
) -> list[Linted]:
    """Lint files in parallel, applying fixes of the given safeties; files without findings are left out.

    Raises:
        SourceError: A path does not exist, or a fixed file cannot be written.
    """
    chosen = find_files(paths, _SUFFIXES, partial(is_excluded, settings=settings))
    all_rules()  # loaded before worker processes are, so that each has them
    work = partial(lint_file, settings=settings, fixes=fixes)
    found = map_files(work, chosen, progress=progress, label="lint")
    return [file for file in found if file is not None]


def lint_file(path: str, settings: LintSettings, fixes: frozenset[Safety] = frozenset()) -> Linted | None:
    """Lint one file, and write it when fixes changed it; None where there is nothing to say.

    Standard input is never written; its text, fixed or not, is in what is returned.
    """
    try:
        data = read_bytes(path)
        if not RELEVANT.search(data) and path != STDIN:
            return None
        text, encoding = decode(data, path)
    except SourceError as error:
        unreadable = _unreadable(path, error, settings)
        return Linted(path, tuple(unreadable), "") if unreadable else None
    linted = lint_text(text, path, settings, fixes=fixes)
    if linted.num_fixed and path != STDIN:
        write_bytes(path, linted.text.encode(encoding))
    return linted if linted.findings or linted.num_fixed or path == STDIN else None


def lint_text(text: str, path: str, settings: LintSettings, *, fixes: frozenset[Safety] = frozenset()) -> Linted:
    """Lint a text, and fix it as far as asked; `path` is for messages and per-file settings."""
    num_fixed = 0
    for _ in range(_MAX_PASSES):
        findings = _find(text, path, settings)
        chosen = choose([finding for finding in findings if finding.safety in fixes])
        if not chosen:
            break
        changed = apply(text, [edit for finding in chosen for edit in finding.edits])
        try:
            FileContext(changed)
        except SourceError:
            break  # never leave a file worse than it was
        text, num_fixed = changed, num_fixed + len(chosen)
    return Linted(path, tuple(findings), text, num_fixed)


def _find(text: str, path: str, settings: LintSettings) -> list[SourceFinding]:
    rules = [one for one in all_rules().values() if settings.enables(one.code, preview=one.preview)]
    try:
        context = LintContext(FileContext(text, path))
        found = [finding for rule in rules for finding in rule.run(context)]
    except SourceError as error:
        return _unreadable(path, error, settings)
    except RecursionError:
        return _unreadable(path, SourceError("nested too deeply to be read", where=f"{path}:1:1"), settings)
    lines = context.file.positions
    kept = [
        finding
        for finding in found
        if not settings.ignores_in(path, finding.code)
        and not allowed_in(text, finding.code)
        and not any(files.allowed_on(lines.line(number), finding.code) for number in {finding.line, finding.end_line})
    ]
    return sorted(kept, key=lambda finding: (finding.line, finding.column, finding.code))


def _unreadable(path: str, error: SourceError, settings: LintSettings) -> list[SourceFinding]:
    if not settings.enables(UNREADABLE) or settings.ignores_in(path, UNREADABLE):
        return []
    fields = {"code": UNREADABLE, "name": "unreadable-source", "severity": Severity.ERROR}
    return [unreadable_source(path, error, message=error.what, **fields)]
