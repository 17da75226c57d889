"""Find, read, tokenize and pack a data source into samples."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import sys
import sysconfig
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.config.run import DataConfig
from shardwise.errors import ConfigError, import_optional, raise_listed
from shardwise.models.load import find_callable
from shardwise.progress import NoProgress, Progress
from shardwise.training.data import samples as sampling
from shardwise.training.data.samples import (
    Bytes,
    Document,
    Records,
    Rows,
    Samples,
    StreamSamples,
    Tokenizer,
    TokenStream,
    open_tokenizer,
)


def parse_line(line: bytes) -> Any:
    """Parse a line; a ValueError gives the reason if it is invalid."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} (byte {error.start})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def to_document(record: Any, config: DataConfig) -> Document:
    """Return the text of a record; a ValueError gives the reason if it is invalid."""
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
    """Yield the documents of JSONL files, of saved datasets, or of a callable's `items`, in order.

    Unreadable documents are added to `problems`, each with its place.
    """
    for place, record in _lines(source.files) if source.format == "jsonl" else _items(source, items):
        try:
            yield to_document(parse_line(record) if source.format == "jsonl" else record, config)
        except ValueError as error:
            problems.append(f"{place}: {error}")


def _lines(files: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield `file:line`, counted as in an editor, and each line that is not blank."""
    for file in files:
        with file.open("rb") as opened:
            yield from ((f"{file}:{number}", line) for number, line in enumerate(opened, 1) if line.strip())


def _items(source: DataSource, items: Records | None) -> Iterator[tuple[str, Any]]:
    parts = [(source.callable, items)] if items is not None else [(str(f), open_dataset(f)) for f in source.files]
    for name, records in parts:
        yield from ((f"{name}[{index}]", records[index]) for index in range(len(records)))


def open_dataset(folder: Path) -> Records:
    """Open a folder written by `Dataset.save_to_disk`; a ConfigError if it has several splits."""
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
            why="training uses one split",
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
    r"""Replace lone surrogates, which JSON can encode ("\ud83d") but UTF-8 cannot."""
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
    """`module:callable`, if that is the source."""

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
    """Return the files of each source, sorted; adjacent sources of one format are merged."""
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
        "{num} path(s) in " + where + " match no data",
        why="a source is `python`, a file, a folder, a glob or `module:callable`",
        fix=f"fix the paths, which are relative to {Path.cwd()}",
    )
    formats = sorted({source.format for source in found})
    is_alone = {"tokens", "callable"}.intersection(formats)
    if (is_alone and len(formats) > 1) or sum(source.format == "callable" for source in found) > 1:
        raise ConfigError(
            f"{where} mixes {' and '.join(formats)}" if len(formats) > 1 else f"{where} names several callables",
            where=where,
            why="tokens and callables cannot be mixed with other sources; text, JSONL and datasets can",
            fix="use one kind, or set data.format if a name is misleading",
        )
    return found


def standard_library_files() -> list[Path]:
    """The modules of Python's standard library, without tests and tables, in the order of a hash of their names."""
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


_CHUNK_TOKENS = 1 << 24
_CHUNK_DOCUMENTS = 1 << 16


def cut_anywhere(stream: TokenStream, length: int) -> tuple[Rows, int]:
    """Row i is the i-th `length` tokens of the stream; its last label is the first token of the next row.

    Documents continue in the next row; only the last few tokens are dropped.
    """
    num_samples = max(0, (stream.num_tokens - 1) // length)
    return lambda indices: (indices * length, None), num_samples


def whole_documents(stream: TokenStream, length: int) -> tuple[Rows, int]:
    """Pack as many complete documents as fit in each row, in order; a document longer than a row is truncated.

    For prompts with responses: half a response without its prompt is useless. Documents whose prompt fills a row are
    dropped; it is a ConfigError if all are.
    """
    firsts, used = array("q"), array("q")
    room = 0
    assert stream.starts is not None
    assert stream.prompt_lengths is not None
    ends = F.pad(stream.starts[1:], (0, 1), value=stream.num_tokens)
    for start, end, num_prompt in zip(*map(_numbers, (stream.starts, ends, stream.prompt_lengths)), strict=True):
        size = min(end - start, length + 1)
        if num_prompt >= size:
            room = 0  # dropped: it has no labels; rows do not span it
        elif size <= room:
            used[-1] += size
            room -= size
        else:
            firsts.append(start)
            used.append(size)
            # A truncated document continues in the stream.
            room = length + 1 - size if size == end - start else 0
    if not firsts and stream.num_tokens:
        raise no_room(length)
    first, length_used = _tensor(firsts), _tensor(used)
    return lambda indices: (first[indices], length_used[indices]), len(first)


def one_document(stream: TokenStream, length: int) -> tuple[Rows, int]:
    """Each row is one document, truncated or padded; it is a ConfigError if prompts fill all rows."""
    starts = find_starts(stream)
    lengths = (F.pad(starts[1:], (0, 1), value=stream.num_tokens) - starts).clamp(max=length + 1)
    if len(starts) and stream.prompt_lengths is not None and not (stream.prompt_lengths < lengths).any():
        raise no_room(length)
    return lambda indices: (starts[indices], lengths[indices]), len(starts)


def no_room(length: int) -> ConfigError:
    """Return the error for data without any label."""
    return ConfigError(
        f"every document is empty, or its prompt alone fills a sequence of {length} tokens",
        where="data.sequence_length",
        why="a sequence begins with the prompt, and the loss covers only the tokens after it",
        fix="set a longer data.sequence_length, or shorten the prompts",
    )


def find_starts(stream: TokenStream) -> Tensor:
    """Return the starts of documents; reads a stream without an index once."""
    if stream.starts is not None:
        return stream.starts
    if stream.end_id is None:
        raise ConfigError(
            "one document per sequence was requested, but the ends of documents are unknown",
            where="data.pack, data.tokenizer",
            why="in a file of tokens, documents end at the tokenizer's end-of-document token",
            fix="set data.tokenizer to the tokenizer that made the tokens, or data.pack = true",
        )
    parts = [torch.zeros(1, dtype=torch.int64)]
    for first in range(0, stream.num_tokens, _CHUNK_TOKENS):
        ends = (stream.stored_tokens(first, _CHUNK_TOKENS) == stream.end_id).nonzero().flatten()
        parts.append(ends + (first + 1))
    starts = torch.cat(parts)
    return starts[starts < stream.num_tokens]


def _numbers(values: Tensor) -> Iterator[int]:
    """Yield the values as Python integers, converted in chunks to limit memory."""
    return (number for part in values.split(_CHUNK_DOCUMENTS) for number in part.tolist())


def _tensor(values: array[int]) -> Tensor:
    dtype = {"H": torch.uint16, "i": torch.int32, "q": torch.int64}[values.typecode]
    return torch.frombuffer(values, dtype=dtype) if values else torch.zeros(0, dtype=dtype)


_NUM_WINDOWS = 64
_WINDOW_TOKENS = 1 << 16


def open_token_files(
    files: Sequence[Path], dtype_name: str, tokenizer: Tokenizer, vocab_size: int | None
) -> tuple[TokenStream, Tokenizer | None]:
    """Memory-map files of token ids (native byte order) as one stream; also return the tokenizer, if it fits.

    Of large files only some windows are checked here; `StreamSamples` checks each batch. `bytes` is the default
    tokenizer: if the data has larger tokens, its tokenizer and end-of-document token are unknown.
    """
    dtype = getattr(torch, dtype_name)
    sizes = {file: file.stat().st_size for file in files}
    raise_listed(
        [f"{file}: {size} bytes" for file, size in sizes.items() if size % dtype.itemsize],
        "{num} file(s) do not contain whole tokens",
        why=f"a file of tokens holds {dtype.itemsize} byte(s) per token ({dtype_name}) and nothing else",
        fix="set data.token_dtype to the dtype of the files, or write them again",
    )
    segments = [
        torch.from_file(str(file), shared=False, size=size // dtype.itemsize, dtype=dtype)
        for file, size in sizes.items()
        if size
    ]
    stream = TokenStream(segments, starts=None, end_id=tokenizer.end_id)
    most = -1  # largest token of the checked windows, which cover all of a small stream
    where = f"{files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    for first in range(0, stream.num_tokens, max(_WINDOW_TOKENS, stream.num_tokens // _NUM_WINDOWS)):
        window = stream.stored_tokens(first, _WINDOW_TOKENS)
        sampling.check_tokens(window, vocab_size if vocab_size is not None else 1 << 62, where)
        most = max(most, int(window.max()))
    if most < tokenizer.vocab_size:
        return stream, tokenizer
    if isinstance(tokenizer, Bytes):
        return TokenStream(segments, starts=None, end_id=None), None
    raise ConfigError(
        f"the data holds token {most}, the tokenizer makes only 0 to {tokenizer.vocab_size - 1}",
        where="data.tokenizer, " + ", ".join(str(file) for file in files[:3]),
        why="the tokenizer defines the end-of-document token and decodes the model's samples",
        fix="set data.tokenizer to the tokenizer of the data, or check data.token_dtype",
    )


_PIECE_CHARS = 1 << 20
_PIECES_TOGETHER = 8
_NUM_TOGETHER = 512


class Spool:
    """Converts documents to a token stream, of two or four bytes per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens = array("H" if tokenizer.vocab_size <= 1 << 16 else "i")
        self._starts, self._prompt_lengths = array("q"), array("q")

    def add_files(self, files: Sequence[Path], progress: Progress) -> None:
        """Add each file as a document; a ConfigError lists the files that are not text."""
        problems = []
        for file in files:
            try:
                self._add_file(file)
            except ValueError as error:
                problems.append(f"{file}: {error}")
            progress.advance()
        raise_listed(
            problems,
            "{num} file(s) of the data are not text",
            why="other files are read as UTF-8 text",
            fix="name only text files, as in data.source = 'folder/**/*.txt', or set data.format",
        )

    def add_documents(self, documents: Iterator[Document]) -> None:
        """Add the documents whose text, apart from the prompt, is not empty."""
        while batch := list(islice(documents, _NUM_TOGETHER)):
            for prompt, text in sampling.encode_documents(self._tokenizer, batch):
                if text:
                    self._add([prompt, text], len(prompt))

    def stream(self) -> TokenStream:
        """The stream of all added documents."""
        prompt_lengths = _tensor(self._prompt_lengths)
        return TokenStream(
            [_tensor(self._tokens)],
            starts=_tensor(self._starts),
            end_id=self._tokenizer.end_id,
            prompt_lengths=prompt_lengths if bool(prompt_lengths.any()) else None,
        )

    def _add_file(self, file: Path) -> None:
        if file.stat().st_size == 0:
            return
        with file.open("rb") as opened:
            if b"\0" in opened.read(8192):
                raise ValueError("it has zero bytes")
        self._add(self._token_chunks(file), 0)

    def _token_chunks(self, file: Path) -> Iterator[Sequence[int]]:
        """Yield the tokens of a text that may be larger than memory, split at line ends if possible."""
        if isinstance(self._tokenizer, Bytes):  # any encoding
            with file.open("rb") as raw:
                yield from iter(lambda: raw.read(_PIECE_CHARS), b"")
            return
        with file.open(encoding="utf-8", newline="") as opened:
            pieces = iter(lambda: opened.read(_PIECE_CHARS) + opened.readline(_PIECE_CHARS), "")
            yield from self._tokenizer.encode_all(list(islice(pieces, 1)))
            while together := list(islice(pieces, _PIECES_TOGETHER)):
                yield from self._tokenizer.encode_all(together, starts=False)

    def _add(self, parts: Iterable[Sequence[int]], prompt_length: int) -> None:
        """Add a document in chunks, and its end token."""
        self._starts.append(len(self._tokens))
        self._prompt_lengths.append(prompt_length)
        end = [] if self._tokenizer.end_id is None else [[self._tokenizer.end_id]]
        for tokens in chain(parts, end):
            if isinstance(tokens, bytes):  # a codec widens bytes to 16 bits, far faster than a loop
                self._tokens.frombytes(tokens.decode("latin-1").encode(f"utf-16-{sys.byteorder[0]}e"))
            else:
                self._tokens.extend(tokens)


def open_samples(
    config: DataConfig,
    names: str | tuple[str, ...],
    where: str,
    vocab_size: int | None,
    progress: Progress | None = None,
) -> tuple[Samples, Tokenizer | None, dict[str, Any]]:
    """Open the samples of the sources `names`, the value of the setting `where`.

    Also returns the tokenizer of the tokens, if known, and the identity of the data, by setting.
    """
    sources = find_sources(names, config.format, where=where)
    tokenizer = open_tokenizer(config.tokenizer)
    try:
        samples, tokenizer = _make_samples(config, sources, tokenizer, vocab_size, progress or NoProgress())
        digest = "+".join(source.digest for source in sources)
    except OSError as error:
        raise ConfigError(
            f"cannot read {error.filename or 'the data'}: {(error.strerror or str(error)).lower()}",
            where=where,
            why="every rank reads every file of the data",
            fix="check that it exists and is readable on every machine",
        ) from error
    _refuse_empty(samples, config, where)
    fingerprint = {
        "source": digest,
        "tokenizer": tokenizer.fingerprint if tokenizer else None,
        "sequence_length": config.sequence_length,
        "pack": config.pack,
    }
    return samples, tokenizer, fingerprint


def _make_samples(
    config: DataConfig, sources: list[DataSource], tokenizer: Tokenizer, vocab_size: int | None, progress: Progress
) -> tuple[Samples, Tokenizer | None]:
    if sources[0].format == "tokens":
        stream, known = open_token_files(sources[0].files, config.token_dtype, tokenizer, vocab_size)
        return _stream_samples(config, stream, vocab_size), known
    items = _call(sources[0].callable, config) if sources[0].format == "callable" else None
    if items is not None and not _is_document(items, config):
        return sampling.ReadySamples(items, sources[0].callable, vocab_size), None
    sampling.check_vocabulary(tokenizer, config.tokenizer, vocab_size)
    spool, problems = Spool(tokenizer), []
    progress.start(sum(max(1, len(source.files)) for source in sources), "reading the data")
    for source in sources:
        if source.format == "text":
            spool.add_files(source.files, progress)
        else:
            spool.add_documents(read_documents(source, items, config, problems))
            progress.advance(max(1, len(source.files)))
    progress.finish()
    raise_listed(
        problems,
        "{num} record(s) of the data cannot be read",
        why="each line of JSONL is one JSON object; the text is in data.text_field, or in data.prompt_field and "
        "data.response_field",
        fix="fix or remove these lines, or set the names of the fields",
    )
    return _stream_samples(config, spool.stream()), tokenizer


def _stream_samples(config: DataConfig, stream: TokenStream, vocab_size: int | None = None) -> StreamSamples:
    place = one_document if not config.pack else whole_documents if stream.prompt_lengths is not None else cut_anywhere
    rows, num_samples = place(stream, config.sequence_length)
    apart = config.pack and config.keep_apart
    return StreamSamples(stream, rows, num_samples, length=config.sequence_length, apart=apart, vocab_size=vocab_size)


def _call(name: str, config: DataConfig) -> Records:
    """Return the items of the user's callable, which must support `len` and indexing."""
    items = find_callable(name)(config)
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
        raise ConfigError(
            f"{name} returned a {type(items).__name__}, which has no length and items",
            where="data.source",
            why="the samples of all ranks and epochs are numbered, so that a run can resume",
            fix="return a list, a torch Dataset, or another object with __len__ and __getitem__",
        )
    return items


def _is_document(items: Records, config: DataConfig) -> bool:
    """Whether items are texts rather than samples of tensors."""
    if not len(items):
        return True
    first = items[0]
    if isinstance(first, Mapping) and not any(isinstance(value, str) for value in first.values()):
        return False
    try:
        to_document(first, config)
    except ValueError as error:
        raise ConfigError(
            f"the first item is neither text nor a sample: {error}",
            where="data.source",
            why="an item is a text, a mapping with text, or a mapping of tensors",
            fix="set data.text_field, or data.prompt_field and data.response_field, to the names in the items",
        ) from None
    return True


def _refuse_empty(samples: Samples, config: DataConfig, where: str) -> None:
    if samples.num_samples:
        return
    num_tokens = samples.stream.num_tokens if isinstance(samples, StreamSamples) else 0
    if num_tokens > 1:
        raise ConfigError(
            f"the data has {num_tokens} tokens, too few for one sequence of {config.sequence_length}",
            where=f"{where}, data.sequence_length",
            why="a sequence and the label of its last token are consecutive in the data",
            fix=f"use more data, or set data.sequence_length = {num_tokens - 1} or less",
        )
    raise ConfigError(
        "the data is empty",
        where=where,
        why="training needs data",
        fix="set data.source to files with text",
    )
