"""Records of text from local files and Hugging Face datasets."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.config.run import DataConfig
from shardwise.errors import ConfigError, import_optional, raise_listed


def parse_line(line: bytes) -> Any:
    """The value of a line; a ValueError says briefly why it cannot be read."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} (byte {error.start})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


@dataclass(frozen=True, slots=True)
class Document:
    """One text; the prompt is excluded from the loss."""

    prompt: str
    text: str


Records = Any
"""Anything with a length and items; an item is a text or a mapping with one."""


def refuse_unreadable(problems: Sequence[str]) -> None:
    """Raise if some records cannot be read as documents."""
    raise_listed(
        problems,
        "{num} record(s) of the data cannot be read",
        why="each line of JSONL is one JSON object; text stands in data.text_field, or in data.prompt_field and "
        "data.response_field",
        fix="mend or remove these lines, or set the names of the fields",
    )


def to_document(record: Any, config: DataConfig) -> Document:
    """The text of a record; a ValueError says what is wrong with it."""
    if isinstance(record, str):
        return Document("", _clean(record))
    if not isinstance(record, Mapping):
        raise ValueError(f"a {type(record).__name__}, not an object with fields")
    if config.prompt_field in record and config.response_field in record:
        return Document(*(_clean(_text(record, name)) for name in (config.prompt_field, config.response_field)))
    if config.text_field in record:
        return Document("", _clean(_text(record, config.text_field)))
    fields = ", ".join(map(str, record)) or "none"
    wanted = f"{config.text_field!r}, nor {config.prompt_field!r} with {config.response_field!r}"
    raise ValueError(f"no field {wanted}; its fields: {fields}")


def read_documents(
    source: DataSource, items: Records | None, config: DataConfig, problems: list[str]
) -> Iterator[Document]:
    """The documents of JSONL files, of saved datasets, or of what a callable returned (`items`), in order.

    Those that cannot be read are added to `problems`, each with its place.
    """
    for place, record in _lines(source.files) if source.format == "jsonl" else _items(source, items):
        try:
            yield to_document(parse_line(record) if source.format == "jsonl" else record, config)
        except ValueError as error:
            problems.append(f"{place}: {error}")


def _lines(files: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """`file:line`, as an editor counts, and every line that is not blank."""
    for file in files:
        with file.open("rb") as opened:
            yield from ((f"{file}:{number}", line) for number, line in enumerate(opened, 1) if line.strip())


def _items(source: DataSource, items: Records | None) -> Iterator[tuple[str, Any]]:
    parts = [(source.callable, items)] if items is not None else [(str(f), open_dataset(f)) for f in source.files]
    for name, records in parts:
        yield from ((f"{name}[{index}]", records[index]) for index in range(len(records)))


def open_dataset(folder: Path) -> Records:
    """A folder written by `Dataset.save_to_disk`; a ConfigError says that it holds several splits."""
    datasets = import_optional(
        "datasets",
        where=str(folder),
        why="the folder was written by that library",
        fix="pip install datasets, or export the data as JSONL",
    )
    found = datasets.load_from_disk(str(folder))
    if isinstance(found, datasets.DatasetDict):
        names = [str(name) for name in found]
        raise ConfigError(
            f"{folder} holds several splits: {', '.join(names)}",
            where="data.source",
            why="one of them is trained on",
            fix=f"set data.source = {folder / names[0]}",
        )
    return found


def is_dataset(folder: Path) -> bool:
    """Whether `datasets` wrote this folder."""
    return (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists()


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise ValueError(f"field {name!r} holds a {type(value).__name__}, not a string")
    return value


def _clean(text: str) -> str:
    r"""JSON can spell half of a surrogate pair ("\ud83d"), which no UTF-8 can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


Format = Literal["text", "jsonl", "tokens", "dataset", "callable"]
_CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_BY_SUFFIX: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".bin": "tokens"}
_SUFFIXES = {"jsonl": (".jsonl", ".ndjson"), "tokens": (".bin",)}
_EDGE_BYTES = 1 << 16

# Tests, character tables, generated files and installed packages.
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data", "ensurepip", "config"}
_LEFT_OUT |= {"site-packages", "dist-packages", "__pycache__", "__phello__"}
_LEFT_OUT |= {"locale.py", "entities.py", "sitecustomize.py", "usercustomize.py"}


@dataclass(frozen=True, slots=True)
class DataSource:
    """Files of one format, in the order in which they are read."""

    format: Format
    files: tuple[Path, ...]
    callable: str = ""
    """`module:callable`, where that is the source."""

    @property
    def digest(self) -> str:
        """Hash of the sizes, first and last bytes of the files, which identifies the data without reading all of it."""
        digest = hashlib.sha256(self.callable.encode())
        for file in self.files:
            for part in [file] if file.is_file() else sorted(file.glob("*.arrow")):
                with part.open("rb") as opened:
                    size = part.stat().st_size
                    head = opened.read(_EDGE_BYTES)
                    opened.seek(max(0, size - _EDGE_BYTES))
                    digest.update(hashlib.sha256(b"%d\0" % size + head + opened.read()).digest())
        return digest.hexdigest()[:16]


def find_sources(source: str | tuple[str, ...], format: str, *, where: str = "data.source") -> list[DataSource]:
    """The files behind each name, sorted; adjacent sources of one format are merged.

    Raises:
        ConfigError: With every name that matches nothing.
    """
    names = (source,) if isinstance(source, str) else source
    problems = [] if names else ["an empty list"]
    found: list[DataSource] = []
    for name in names:
        matches = _find(name, format)
        if not matches:
            reason = "no file matches" if glob.has_magic(name) else "there is no such file"
            reason = "the folder holds no files of the format" if Path(name).is_dir() else reason
            reason = "this Python has its standard library without sources" if name == "python" else reason
            problems.append(f"{name}: {reason}")
        for match in matches:
            if found and found[-1].format == match.format != "callable":
                found[-1] = DataSource(match.format, found[-1].files + match.files)
            else:
                found.append(match)
    raise_listed(
        problems,
        "{num} name(s) in " + where + " stand for no data",
        why="a name is `python`, a file, a folder, a glob or `module:callable`",
        fix=f"mend the paths, which are taken from the folder {Path.cwd()}",
    )
    formats = sorted({source.format for source in found})
    is_alone = {"tokens", "callable"}.intersection(formats)
    if (is_alone and len(formats) > 1) or sum(source.format == "callable" for source in found) > 1:
        raise ConfigError(
            f"{where} mixes {' and '.join(formats)}" if len(formats) > 1 else f"{where} names several callables",
            where=where,
            why="tokens and callables are a source of their own; text, JSONL and datasets can be mixed",
            fix="name one kind, or set data.format if a name misleads",
        )
    return found


def standard_library_files() -> list[Path]:
    """The modules of this Python's standard library, without tests, tables and generated files.

    They are ordered by a hash of their names, so that every part of the data is alike.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith("config-")]
        own = (name for name in names if name.endswith(".py") and name not in _LEFT_OUT)
        files += [Path(parent, name) for name in own if not name.startswith("_sysconfigdata")]
    return sorted(files, key=lambda file: hashlib.sha256(file.relative_to(folder).as_posix().encode()).digest())


def _find(name: str, format: str) -> list[DataSource]:
    if name == "python" and format in ("auto", "text"):
        files = tuple(standard_library_files())
        return [DataSource("text", files)] if files else []
    path = Path(name).expanduser()
    if format == "callable" or (format == "auto" and _CALLABLE.fullmatch(name) and not path.exists()):
        return [DataSource("callable", (), name)]
    if path.is_dir():
        if format in ("auto", "dataset") and is_dataset(path):
            return [DataSource("dataset", (path,))]
        paths = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path))
        suffixes = _SUFFIXES.get(format)
        paths = [file for file in paths if not suffixes or file.suffix in suffixes]
    elif path.exists():
        paths = [path]
    else:
        paths = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        paths = [match for match in paths if match.is_file() or is_dataset(match)]
    found = []
    for file in paths:
        by_name = "dataset" if file.is_dir() else _BY_SUFFIX.get(file.suffix, "text")
        found.append(DataSource(by_name if format == "auto" else format, (file,)))  # pyrefly: ignore[bad-argument-type]
    return found


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)
