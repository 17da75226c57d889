"""Which files to lint, lint settings, and `# noqa` comments."""

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
    """Whether a comment on this line suppresses `code`: a bare `noqa`, the code, or a prefix of it."""
    return "noqa" in line.lower() and any(_covers(match, code) for match in _LINE.finditer(line))


def allowed_in(text: str, code: str) -> bool:
    """Whether a line `# shardwise: noqa` or `# shardwise: noqa: CODES` suppresses `code` in the whole file."""
    return "noqa" in text and any(_covers(match, code) for match in _FILE.finditer(text))


def _covers(match: re.Match[str], code: str) -> bool:
    codes = match["codes"]
    return codes is None or any(code.startswith(one.upper()) for one in re.split(r"[,\s]+", codes) if one)


_TABLE = "tool.shardwise.lint"


@dataclass(frozen=True, kw_only=True, slots=True)
class LintSettings:
    """Which rules run on which files."""

    select: tuple[str, ...] = ("SW",)
    """Codes, or prefixes of codes, of the rules to run."""
    ignore: tuple[str, ...] = ()
    """Codes, or prefixes of codes, of the rules not to run."""
    per_file_ignores: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Codes to ignore in files that match a pattern, such as `tests/*`."""
    exclude: tuple[str, ...] = ()
    """Patterns of files and folders to exclude."""
    preview: bool = False
    """Also run preview rules."""
    root: Path = field(default_factory=Path.cwd)
    """Folder of the pyproject.toml, which patterns are relative to."""

    def enables(self, code: str, *, preview: bool = False) -> bool:
        """Whether a rule runs: the longest matching code decides, and `ignore` wins a tie."""
        chosen = max((len(one) for one in self.select if code.startswith(one)), default=-1)
        refused = max((len(one) for one in self.ignore if code.startswith(one)), default=-1)
        if preview and not self.preview and code not in self.select:
            return False
        return chosen > refused

    def ignores_in(self, path: str, code: str) -> bool:
        """Whether a code is ignored in a file."""
        return any(
            matches(path, self.root, pattern) and any(code.startswith(one) for one in codes)
            for pattern, codes in self.per_file_ignores.items()
        )


def matches(path: str, root: Path, pattern: str) -> bool:
    """Whether a pattern matches the path relative to `root`, one of its parent folders, or one of its components."""
    whole = Path(path)
    try:
        relative = (Path.cwd() / whole).relative_to(root)
    except ValueError:
        relative = whole
    parts = relative.parts
    starts = ["/".join(parts[: length + 1]) for length in range(len(parts))]
    return any(fnmatch(candidate, pattern.rstrip("/")) for candidate in (*parts, *starts))


def read_settings(start: Path) -> LintSettings:
    """Return the settings of the nearest pyproject.toml at or above `start` that has any; else the defaults.

    Raises:
        ConfigError: The file cannot be read, or has invalid entries, which are all listed.
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
    """Return the settings with `select` replaced and `ignore` extended by the given codes.

    Raises:
        ConfigError: No rule has one of the codes.
    """
    chosen, refused = (tuple(re.findall(r"[^\s,]+", ",".join(_listed(given)).upper())) for given in (select, ignore))
    check_codes([*chosen, *refused], where="--select, --ignore")
    return replace(settings, select=chosen or settings.select, ignore=(*settings.ignore, *refused))


def _listed(given: Iterable[str] | None) -> Iterable[str]:
    return [given] if isinstance(given, str) else given or ()


def check_codes(codes: Iterable[str], *, where: str) -> None:
    """Raise unless each code is a rule's code or a prefix of one.

    Raises:
        ConfigError: The message lists the unknown codes.
    """
    known = [UNREADABLE, *all_rules()]
    wrong = [code for code in codes if not any(one.startswith(code) for one in known)]
    if wrong:
        raise ConfigError(
            f"no rule has the code {', '.join(wrong)}",
            where=where,
            why=f"codes are {known[0]} to {known[-1]}, or a prefix of one, such as SW2",
            fix=fix_name(wrong[0], known, "shardwise lint --help"),
        )


# No rule applies to a file without any of these.
RELEVANT = re.compile(
    rb"fully_shard|[Ff][Ss][Dd][Pp]|distributed\.checkpoint|distributed import checkpoint"
    rb"|full_tensor|gradient_sync|shardwise"
    rb"|\b(dist|distributed)\.(barrier|all_reduce|all_gather|broadcast|reduce|gather|scatter|all_to_all)"
)


def is_excluded(path: str, settings: LintSettings) -> bool:
    """Whether the settings exclude a file or folder; notebooks are always excluded."""
    return path.endswith(".ipynb") or any(matches(path, settings.root, pattern) for pattern in settings.exclude)
