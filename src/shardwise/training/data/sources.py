"""From the names in a config to files: this Python's own library, paths, globs and folders."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwise.errors import ConfigError
from shardwise.training.data.problems import Problems
from shardwise.training.data.records import is_dataset

Format = Literal["text", "jsonl", "tokens", "dataset", "callable"]
_CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_BY_SUFFIX: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".bin": "tokens"}
_SUFFIXES = {"jsonl": (".jsonl", ".ndjson"), "tokens": (".bin",)}
_EDGE_BYTES = 1 << 16

# Not the library's own prose and code: tests, tables of characters, generated files, what others installed.
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data", "ensurepip", "config"}
_LEFT_OUT |= {"site-packages", "dist-packages", "__pycache__", "__phello__"}
_LEFT_OUT |= {"locale.py", "entities.py", "sitecustomize.py", "usercustomize.py"}


@dataclass(frozen=True, slots=True)
class Source:
    """Files of one format, in the order in which they are read."""

    format: Format
    files: tuple[Path, ...]
    callable: str = ""
    """`module:callable`, where that is the source."""

    @property
    def digest(self) -> str:
        """Of the sizes, first and last bytes of the files: tells other data without reading it all."""
        digest = hashlib.sha256(self.callable.encode())
        for file in self.files:
            for part in [file] if file.is_file() else sorted(file.glob("*.arrow")):
                digest.update(_edges(part))
        return digest.hexdigest()[:16]


def find_sources(source: str | tuple[str, ...], format: str, *, where: str = "data.source") -> list[Source]:
    """What each name stands for; neighbours of one format are put together.

    Args:
        source: As in `DataConfig.source`.
        format: As in `DataConfig.format`.
        where: The setting, for errors.

    Raises:
        ConfigError: With every name that stands for nothing.

    Ranks:
        Local. The order depends on names only, so it is the same on every machine.
    """
    names = (source,) if isinstance(source, str) else source
    problems = Problems(
        "{num} name(s) in " + where + " stand for no data",
        why="a name is `python`, a file, a folder, a glob or `module:callable`",
        fix=f"mend the paths, which are taken from the folder {Path.cwd()}",
    )
    found: list[Source] = []
    for name in names:
        matches = _find(name, format)
        if not matches:
            problems.add(_nothing(name))
        for match in matches:
            if found and found[-1].format == match.format != "callable":
                found[-1] = Source(match.format, found[-1].files + match.files)
            else:
                found.append(match)
    if not names:
        problems.add("an empty list")
    problems.raise_any()
    _refuse_mixed(found, where)
    return found


def standard_library_files() -> list[Path]:
    """The modules of this Python's standard library, without tests, tables and generated files.

    The order is that of hashes of their names, so that any stretch of it is like any other.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith("config-")]
        own = (name for name in names if name.endswith(".py") and name not in _LEFT_OUT)
        files += [Path(parent, name) for name in own if not name.startswith("_sysconfigdata")]
    return sorted(files, key=lambda file: hashlib.sha256(file.relative_to(folder).as_posix().encode()).digest())


def _find(name: str, format: str) -> list[Source]:
    if name == "python" and format in ("auto", "text"):
        files = tuple(standard_library_files())
        return [Source("text", files)] if files else []
    path = Path(name).expanduser()
    if format == "callable" or (format == "auto" and _CALLABLE.fullmatch(name) and not path.exists()):
        return [Source("callable", (), name)]
    if path.is_dir():
        if format in ("auto", "dataset") and is_dataset(path):
            return [Source("dataset", (path,))]
        paths = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path))
        suffixes = _SUFFIXES.get(format)
        paths = [file for file in paths if not suffixes or file.suffix in suffixes]
    elif path.exists():
        paths = [path]
    else:
        paths = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        paths = [match for match in paths if match.is_file() or is_dataset(match)]
    return [Source(_format_of(file, format), (file,)) for file in paths]


def _format_of(file: Path, format: str) -> Format:
    if format != "auto":
        return format  # pyrefly: ignore[bad-return]  # of the names that the config allows
    return "dataset" if file.is_dir() else _BY_SUFFIX.get(file.suffix, "text")


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _nothing(name: str) -> str:
    path = Path(name)
    if name == "python":
        return "python: this Python has its standard library without sources"
    if path.is_dir():
        return f"{name}: the folder holds no files of the format"
    return f"{name}: no file matches" if glob.has_magic(name) else f"{name}: there is no such file"


def _refuse_mixed(found: list[Source], where: str) -> None:
    formats = sorted({source.format for source in found})
    alone = [format for format in formats if format in ("tokens", "callable")]
    if (alone and len(formats) > 1) or sum(source.format == "callable" for source in found) > 1:
        raise ConfigError(
            f"{where} mixes {' and '.join(formats)}" if len(formats) > 1 else f"{where} names several callables",
            where=where,
            why="tokens and callables are a source of their own; text, JSONL and datasets can be mixed",
            fix="name one kind, or set data.format if a name misleads",
        )


def _edges(file: Path) -> bytes:
    with file.open("rb") as opened:
        size = file.stat().st_size
        head = opened.read(_EDGE_BYTES)
        opened.seek(max(0, size - _EDGE_BYTES))
        return hashlib.sha256(b"%d\0" % size + head + opened.read()).digest()
