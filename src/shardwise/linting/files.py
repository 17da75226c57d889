"""Which files are linted, with which settings, and what `# noqa` leaves out."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, did_you_mean, fix_name, raise_listed
from shardwise.linting.registry import UNREADABLE, all_rules

_CODES = r"(?P<codes>[A-Z]+[0-9]*(?:[,\s]+[A-Z]+[0-9]+)*)"
_LINE = re.compile(rf"#\s*noqa(?![\w-])(?:\s*:\s*{_CODES})?", re.IGNORECASE)
_FILE = re.compile(rf"^\s*#\s*shardwise\s*:\s*noqa(?:\s*:\s*{_CODES})?", re.IGNORECASE | re.MULTILINE)


def allowed_on(line: str, code: str) -> bool:
    """Whether a comment on this line allows `code`: a bare `noqa`, the code, or the start of it."""
    return "noqa" in line.lower() and any(_covers(match, code) for match in _LINE.finditer(line))


def allowed_in(text: str, code: str) -> bool:
    """Whether a line `# shardwise: noqa` or `# shardwise: noqa: CODES` allows `code` in the whole file."""
    return "noqa" in text and any(_covers(match, code) for match in _FILE.finditer(text))


def _covers(match: re.Match[str], code: str) -> bool:
    codes = match["codes"]
    return codes is None or any(code.startswith(one.upper()) for one in re.split(r"[,\s]+", codes) if one)


_TABLE = "tool.shardwise.lint"


@dataclass(frozen=True, kw_only=True, slots=True)
class LintSettings:
    """Which rules run, and on which files."""

    select: tuple[str, ...] = ("SW",)
    """Codes, or starts of codes, of the rules to run."""
    ignore: tuple[str, ...] = ()
    """Codes, or starts of codes, of the rules not to run."""
    per_file_ignores: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Codes not to report in the files that a pattern matches, as in `tests/*`."""
    exclude: tuple[str, ...] = ()
    """Patterns of files and folders to leave out."""
    preview: bool = False
    """Run new rules too."""
    root: Path = field(default_factory=Path.cwd)
    """Patterns are relative to it: the folder of the pyproject.toml."""

    def enables(self, code: str, *, preview: bool = False) -> bool:
        """Whether a rule runs: the longest code that matches wins, and `ignore` wins a tie."""
        chosen = max((len(one) for one in self.select if code.startswith(one)), default=-1)
        refused = max((len(one) for one in self.ignore if code.startswith(one)), default=-1)
        if preview and not self.preview and code not in self.select:
            return False
        return chosen > refused

    def ignores_in(self, path: str, code: str) -> bool:
        """Whether a code is not to be reported in a file."""
        return any(
            matches(path, self.root, pattern) and any(code.startswith(one) for one in codes)
            for pattern, codes in self.per_file_ignores.items()
        )


def matches(path: str, root: Path, pattern: str) -> bool:
    """Whether a pattern matches a path, relative to `root`, or one of its folders or its name."""
    whole = Path(path)
    try:
        relative = (Path.cwd() / whole).relative_to(root)
    except ValueError:
        relative = whole
    parts = relative.parts
    starts = ["/".join(parts[: length + 1]) for length in range(len(parts))]
    return any(fnmatch(candidate, pattern.rstrip("/")) for candidate in (*parts, *starts))


def read_settings(start: Path) -> LintSettings:
    """The settings of the nearest pyproject.toml at or above `start` that has some; else the defaults.

    Raises:
        ConfigError: It cannot be read, or has wrong entries; all of them are named.
    """
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            table = _table(file)
            if table is not None:
                return _settings(table, file)
    return LintSettings()


def _table(file: Path) -> dict[str, Any] | None:
    try:
        content: Any = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(file)) from None
    for name in _TABLE.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    return content


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_map_of_lists(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_list_of_text, value.values()))


_SHAPES: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("select", "ignore", "exclude"), (_is_list_of_text, "must be a list of strings")),
    "per-file-ignores": (_is_map_of_lists, "must map patterns to lists of codes"),
    "preview": (lambda value: isinstance(value, bool), "must be true or false"),
}


def _settings(table: dict[str, Any], file: Path) -> LintSettings:
    problems: list[str] = []
    for key, value in table.items():
        is_right, shape = _SHAPES.get(key, (None, f"no such setting{did_you_mean(key, _SHAPES)}"))
        if is_right is None or not is_right(value):
            problems.append(f"{file}: {key}: {shape}")
    raise_listed(problems, f"{{num}} problem(s) in [{_TABLE}]")
    values: dict[str, Any] = {key.replace("-", "_"): value for key, value in table.items()}
    values |= {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    settings = LintSettings(**values, root=file.parent)
    check_codes([*settings.select, *settings.ignore], where=f"{file} [{_TABLE}]")
    return settings


def with_codes(settings: LintSettings, select: Iterable[str] | None, ignore: Iterable[str] | None) -> LintSettings:
    """The settings with `--select` in the place of theirs, and `--ignore` added to theirs.

    Raises:
        ConfigError: A code that no rule has.
    """
    chosen, refused = (tuple(re.findall(r"[^\s,]+", ",".join(_listed(given)).upper())) for given in (select, ignore))
    check_codes([*chosen, *refused], where="--select, --ignore")
    return replace(settings, select=chosen or settings.select, ignore=(*settings.ignore, *refused))


def _listed(given: Iterable[str] | None) -> Iterable[str]:
    return [given] if isinstance(given, str) else given or ()


def check_codes(codes: Iterable[str], *, where: str) -> None:
    """Raise unless each is a rule's code or the start of one.

    Raises:
        ConfigError: It names each wrong one.
    """
    known = [UNREADABLE, *all_rules()]
    wrong = [code for code in codes if not any(one.startswith(code) for one in known)]
    if wrong:
        raise ConfigError(
            f"no rule has the code {', '.join(wrong)}",
            where=where,
            why=f"codes are {known[0]} to {known[-1]}, or the start of one, such as SW2",
            fix=fix_name(wrong[0], known, "shardwise lint --help"),
        )


# A file without any of these has nothing a rule could be about.
RELEVANT = re.compile(
    rb"fully_shard|[Ff][Ss][Dd][Pp]|distributed\.checkpoint|distributed import checkpoint"
    rb"|full_tensor|gradient_sync|shardwise"
    rb"|\b(dist|distributed)\.(barrier|all_reduce|all_gather|broadcast|reduce|gather|scatter|all_to_all)"
)


def is_excluded(path: str, settings: LintSettings) -> bool:
    """Whether the settings leave a file or folder out; notebooks are never read."""
    return path.endswith(".ipynb") or any(matches(path, settings.root, pattern) for pattern in settings.exclude)
