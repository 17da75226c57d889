"""The torch versions that a project allows, and the names they lack. No torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from shardwise.source.syntax import FileContext

Version = tuple[int, int]
_FILES = ("requirements*.txt", "constraints*.txt", "requirements/*.txt", "pyproject.toml", "setup.cfg", "setup.py")
_FILES += ("environment*.yml", "environment*.yaml")
_NAME = r"(?<![\w.-])(?:py)?torch(?![\w-])[\"']?"
_EXACT = re.compile(rf"{_NAME}\s*(?:={{1,3}}|~=)\s*[\"'{{]*(?:version\s*=\s*[\"'])?[~=]*\s*(\d+)\.(\d+)")
_BELOW = re.compile(rf"{_NAME}[^\n\"'#;]*?<(=?)\s*(\d+)\.(\d+)")
_ABOVE = re.compile(rf"{_NAME}[^\n\"'#;]*?>=?\s*(\d+)\.(\d+)")
_SINCE: dict[str, Version] = {
    f"torch.distributed.fsdp.{name}": (2, 6)
    for name in ("fully_shard", "FSDPModule", "MixedPrecisionPolicy", "CPUOffloadPolicy", "OffloadPolicy")
} | {"torch.distributed.tensor.DTensor": (2, 5), "torch.accelerator": (2, 6), "torch.nn.utils.get_total_norm": (2, 6)}
"""First torch version of each public name in emitted code."""
PUBLIC_FSDP2: Version = (2, 6)
GONE = {
    "torch._six": "inf is torch.inf, string_classes is str",
    "torch.distributed.fsdp.wrap.default_auto_wrap_policy": "size_based_auto_wrap_policy",
    "torch.distributed.fsdp.wrap.ParamExecOrderWrapPolicy": "ModuleWrapPolicy",
    "torch.distributed.fsdp.flat_param": "the DTensors that model.parameters() gives",
    "torch.distributed.fsdp.flatten_params_wrapper": "the DTensors that model.parameters() gives",
}
"""Names that no torch version with FSDP2 has, and their replacements."""


def _lines(text: str) -> list[str]:
    """Return the lines of a requirements file, without comments except those of inline script metadata."""
    return [line for line in text.splitlines() if not re.match(r"\s*#(?!\s*(dependencies|[\"']))", line)]


def oldest_torch(text: str) -> Version | None:
    """Return the oldest torch that a requirements file allows; None if it sets no limit."""
    found = [one for line in _lines(text) for kind in (_EXACT, _ABOVE) for one in kind.finditer(line)]
    return min(((int(one[1]), int(one[2])) for one in found), default=None)


def newest_torch(text: str) -> Version | None:
    """Return the newest torch that a requirements file allows; None if it sets no limit."""
    lines = _lines(text)
    found = [(int(one[1]), int(one[2])) for line in lines for one in _EXACT.finditer(line)]
    for inclusive, major, minor in (one.groups() for line in lines for one in _BELOW.finditer(line)):
        last = int(minor) if inclusive else int(minor) - 1
        found += [(int(major), last)] if last >= 0 else []  # `<3.0` is no limit here
    return min(found, default=None)


def project_torch(
    paths: Iterable[str | Path], read: Callable[[str], Version | None] = newest_torch
) -> tuple[Version, str] | None:
    """Return the newest torch (with another `read`, the oldest) that files near these paths allow, and the file."""
    found = [
        (version, str(file))
        for file in dict.fromkeys(one for path in paths for one in _requirements(Path(path).absolute()))
        if (version := read(file.read_text(encoding="utf-8", errors="replace"))) is not None
    ]
    return min(found, default=None)


def _requirements(path: Path) -> Iterator[Path]:
    """Yield the requirements files in a folder and in its parents, up to the project's root."""
    for folder in (path, *path.parents)[:6]:
        if folder.is_dir():
            yield from (file for pattern in _FILES for file in sorted(folder.glob(pattern)) if file.is_file())
            if any((folder / name).exists() for name in (".git", "pyproject.toml", "setup.py")):
                return


def lacking(before: FileContext, after: FileContext, version: Version) -> list[str]:
    """Return names that only the rewritten file uses and this torch lacks, each with its first torch version."""
    fresh = _used(after) - _used(before)
    return [
        f"{name} ({major}.{minor})"
        for name, (major, minor) in _SINCE.items()
        if name in fresh and (major, minor) > version
    ]


def gone(file: FileContext) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield imports of names that no torch with FSDP2 has: node, name and replacement."""
    for bindings in file.scopes[file.tree].names.values():
        for one in bindings:
            for name, instead in GONE.items():
                if f"{one.origin}.".startswith(f"{name}."):
                    yield file.parents.get(one.node, one.node), name, instead


def _used(file: FileContext) -> set[str]:
    imported = {one.origin for names in file.scopes[file.tree].names.values() for one in names if one.origin}
    return imported | {name for name in _SINCE if name == "torch.accelerator" and f"{name}." in file.text}
