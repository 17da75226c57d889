"""Documents that come one by one: lines of JSON, rows of a dataset, items of an object of the user's."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from shardwise.config.run import DataConfig
from shardwise.errors import ConfigError, EnvironmentProblem
from shardwise.training.data.json_lines import JsonLines, parse_line
from shardwise.training.data.problems import Problems


@dataclass(frozen=True, slots=True)
class Document:
    """One text, of which the prompt is read and the rest is learnt."""

    prompt: str
    text: str


class Records(Protocol):
    """Anything with a length and items; an item is a text or a mapping with one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Documents:
    """Several records in a row, read as documents.

    Args:
        parts: What they are made of, each with the name to give in errors.
        config: Says which fields hold text.
    """

    def __init__(self, parts: Sequence[tuple[str, Records]], config: DataConfig) -> None:
        self._parts = parts
        self._offsets = [0, *accumulate(len(records) for _, records in parts)]
        self._config = config

    def __len__(self) -> int:
        return self._offsets[-1]

    def __getitem__(self, index: int) -> Document:
        """The document.

        Raises:
            ConfigError: It is unreadable or lacks the fields; the place is named.
        """
        try:
            return self.read(index)
        except ValueError as error:
            problems = unreadable()
            problems.add(f"{self.place(index)}: {error}")
            problems.raise_any()
            raise AssertionError("a problem that is none") from error

    def read(self, index: int) -> Document:
        """The document; a ValueError says in a few words what is wrong with it."""
        part, within = self._locate(index)
        return to_document(self._parts[part][1][within], self._config)

    def read_all(self, problems: Problems) -> Iterator[Document]:
        """All of them in order; those that cannot be read are left out and told to `problems`."""
        index = 0
        for _, records in self._parts:
            for read in _readers(records):
                try:
                    document = to_document(read(), self._config)
                except ValueError as error:
                    problems.add(f"{self.place(index)}: {error}" if problems.wanted else "")
                else:
                    yield document
                index += 1

    def place(self, index: int) -> str:
        """Where the record lies, for errors."""
        part, within = self._locate(index)
        name, records = self._parts[part]
        return records.place(within) if isinstance(records, JsonLines) else f"{name}[{within}]"

    def _locate(self, index: int) -> tuple[int, int]:
        part = bisect_right(self._offsets, index) - 1
        return part, index - self._offsets[part]


def unreadable() -> Problems:
    """For records that cannot be read as documents."""
    return Problems(
        "{num} record(s) of the data cannot be read",
        why="each line of JSONL is one JSON object; text stands in data.text_field, or in data.prompt_field and "
        "data.response_field",
        fix="mend or remove these lines, or set the names of the fields",
    )


def check_documents(documents: Documents, indices: Sequence[int] | range) -> None:
    """Raise unless all of these can be read.

    Raises:
        ConfigError: With the places of those that cannot.
    """
    problems = unreadable()
    for index in indices:
        try:
            documents.read(index)
        except ValueError as error:
            problems.add(f"{documents.place(index)}: {error}" if problems.wanted else "")
    problems.raise_any()


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


def open_dataset(folder: Path) -> Records:
    """A folder written by `Dataset.save_to_disk`.

    Raises:
        ConfigError: It holds several splits.
        EnvironmentProblem: The library is not installed.
    """
    try:
        import datasets  # pyrefly: ignore[missing-import]
    except ModuleNotFoundError:
        raise EnvironmentProblem(
            "datasets is not installed",
            where=str(folder),
            why="the folder was written by that library",
            fix="pip install datasets, or export the data as JSONL",
        ) from None
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


def _readers(records: Records) -> Iterator[Callable[[], Any]]:
    """For each record in order, what reads it."""
    if isinstance(records, JsonLines):
        return (partial(parse_line, line) for line in records.lines())
    return (partial(records.__getitem__, index) for index in range(len(records)))


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
