"""lint(): run the rules over files, in several processes if they are large."""

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

_MAX_PASSES = 10  # a fix can lead to another finding; no file has needed more than three passes
_SUFFIXES = frozenset({".py", ".pyw"})


@dataclass(frozen=True, slots=True)
class Linted:
    """Result of linting one file."""

    path: str
    findings: tuple[SourceFinding, ...]
    """Findings that were not fixed."""
    text: str
    """The text after fixes; empty for files without findings."""
    num_fixed: int = 0


def lint(
    paths: Iterable[str | Path] | str | Path,
    *,
    select: Iterable[str] | None = None,
    ignore: Iterable[str] | None = None,
    preview: bool = False,
    progress: Progress | None = None,
) -> list[SourceFinding]:
    """Find mistakes in files and folders, without changing or running them.

    Settings are read from `[tool.shardwise.lint]` of the nearest pyproject.toml.

    Args:
        paths: Python files, or folders to search for them.
        select: Codes, or prefixes of codes, of the rules to run instead of all.
        ignore: Codes, or prefixes of codes, of the rules not to run.
        preview: Also run preview rules.
        progress: Advanced after each file.

    Returns:
        The findings, sorted by path and line.

    Raises:
        SourceError: A path does not exist.
        ConfigError: A code is unknown, or a setting is invalid.

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
    """Return the settings of the current folder's project, overridden by the arguments."""
    settings = with_codes(read_settings(Path.cwd()), select, ignore)
    return replace(settings, preview=settings.preview or preview)


def lint_files(
    paths: Sequence[str | Path],
    settings: LintSettings,
    *,
    fixes: frozenset[Safety] = frozenset(),
    progress: Progress | None = None,
) -> list[Linted]:
    """Lint files in parallel, applying fixes of the given safeties; files without findings are omitted.

    Raises:
        SourceError: A path does not exist, or a fixed file cannot be written.
    """
    chosen = find_files(paths, _SUFFIXES, partial(is_excluded, settings=settings))
    all_rules()  # imported before the worker processes start, so that each inherits the rules
    work = partial(lint_file, settings=settings, fixes=fixes)
    found = map_files(work, chosen, progress=progress, label="lint")
    return [file for file in found if file is not None]


def lint_file(path: str, settings: LintSettings, fixes: frozenset[Safety] = frozenset()) -> Linted | None:
    """Lint one file, and write it if fixes changed it; return None if there is nothing to report.

    Standard input is never written; the result has its text, with fixes applied.
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
    """Lint a text and apply the given fixes; `path` is for messages and per-file settings."""
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
            break  # do not break a file that was valid
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
