"""The newest torch that a project allows, and what of the emitted code that torch lacks. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardwise.source.syntax import FileContext

Version = tuple[int, int]
_FILES = ("requirements*.txt", "constraints*.txt", "requirements/*.txt", "pyproject.toml", "setup.cfg", "setup.py")
_FILES += ("environment*.yml", "environment*.yaml")
_NAME = r"(?<![\w.-])(?:py)?torch(?![\w-])[\"']?"
_EXACT = re.compile(rf"{_NAME}\s*(?:={{1,3}}|~=)\s*[\"'{{]*(?:version\s*=\s*[\"'])?[~=]*\s*(\d+)\.(\d+)")
_BELOW = re.compile(rf"{_NAME}[^\n\"'#;]*?<(=?)\s*(\d+)\.(\d+)")
_SINCE: dict[str, Version] = {
    f"torch.distributed.fsdp.{name}": (2, 6)
    for name in ("fully_shard", "FSDPModule", "MixedPrecisionPolicy", "CPUOffloadPolicy", "OffloadPolicy")
} | {"torch.distributed.tensor.DTensor": (2, 5), "torch.accelerator": (2, 6)}
"""The first torch that has each public name which emitted code uses."""


def newest_torch(text: str) -> Version | None:
    """The newest torch that a file of requirements allows; None where it sets no limit."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*#(?!\s*(dependencies|[\"']))", line)]
    found = [(int(one[1]), int(one[2])) for line in lines for one in _EXACT.finditer(line)]
    for inclusive, major, minor in (one.groups() for line in lines for one in _BELOW.finditer(line)):
        last = int(minor) if inclusive else int(minor) - 1
        found += [(int(major), last)] if last >= 0 else []  # `<3.0` limits nothing here
    return min(found, default=None)


def project_torch(paths: Iterable[str | Path]) -> tuple[Version, str] | None:
    """The newest torch that the files around these paths allow, and the file that says so."""
    found = [
        (version, str(file))
        for file in dict.fromkeys(one for path in paths for one in _requirements(Path(path).absolute()))
        if (version := newest_torch(file.read_text(encoding="utf-8", errors="replace"))) is not None
    ]
    return min(found, default=None)


def _requirements(path: Path) -> Iterator[Path]:
    """The files of requirements in a folder and those above it, as far as the project goes."""
    for folder in (path, *path.parents)[:6]:
        if folder.is_dir():
            yield from (file for pattern in _FILES for file in sorted(folder.glob(pattern)) if file.is_file())
            if any((folder / name).exists() for name in (".git", "pyproject.toml", "setup.py")):
                return


def lacking(before: FileContext, after: FileContext, version: Version) -> list[str]:
    """The names that only the rewritten file uses and this torch lacks, each with the first torch that has it."""
    fresh = _used(after) - _used(before)
    return [
        f"{name} ({major}.{minor})"
        for name, (major, minor) in _SINCE.items()
        if name in fresh and (major, minor) > version
    ]


def _used(file: FileContext) -> set[str]:
    imported = {one.origin for names in file.scopes[file.tree].names.values() for one in names if one.origin}
    return imported | {name for name in _SINCE if name == "torch.accelerator" and f"{name}." in file.text}
