"""Text to tokens and back: bytes, or a `tokenizer.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import ConfigError, EnvironmentProblem

_FILE = "tokenizer.json"
# Where the file beside it does not say which token ends a document: the names that are in use.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|eot_id|>", "<|im_end|>", "[EOS]")


class Tokenizer(Protocol):
    """What turns text into token ids."""

    @property
    def vocab_size(self) -> int:
        """All ids are below it."""
        ...

    @property
    def end_id(self) -> int | None:
        """The token that ends a document, if there is one."""
        ...

    @property
    def fingerprint(self) -> str:
        """Two tokenizers with the same one make the same tokens."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens with which a document of this text begins; its end is not marked."""
        ...

    def encode_all(self, texts: Sequence[str], *, starts: bool = True) -> Iterable[Sequence[int]]:
        """Many at once. Not `starts`: the texts go on where others ended, so nothing marks their beginning."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text again; what ids cannot be text is shown as a replacement character or left out."""
        ...


class Bytes:
    """Each byte of UTF-8 is a token, and 256 ends a document."""

    vocab_size = 257
    end_id = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        """The bytes."""
        return list(text.encode())

    def encode_all(self, texts: Sequence[str], *, starts: bool = True) -> Iterable[Sequence[int]]:
        """The bytes of each."""
        return (text.encode(errors="surrogatepass") for text in texts)

    def decode(self, ids: Iterable[int]) -> str:
        """Text, with a replacement character for what is not UTF-8; ends of documents are left out."""
        return bytes(token for token in ids if 0 <= token < 256).decode(errors="replace")


class TokenizerFile:
    """A `tokenizer.json` of the tokenizers library.

    Args:
        path: The file, or the folder that holds it.

    Raises:
        ConfigError: It is missing or cannot be read.
        EnvironmentProblem: The library is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        file = file / _FILE if file.is_dir() else file
        content = _read(file)
        self._tokenizer = _parse(content, file)
        # A file may ask for both; they would cut documents without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.end_id = _end_id(file.parent, vocab)
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """The tokens, those that mark a beginning included."""
        return self._without_end(self._tokenizer.encode(text).ids)

    def encode_all(self, texts: Sequence[str], *, starts: bool = True) -> Iterable[Sequence[int]]:
        """The tokens of each; the library works on all cores at once."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=starts)
        return (self._without_end(encoding.ids) for encoding in encodings)

    def decode(self, ids: Iterable[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode([token for token in ids if 0 <= token < self.vocab_size])

    def _without_end(self, ids: list[int]) -> list[int]:
        """Some files end each text themselves; where a document ends is not theirs to say."""
        return ids[:-1] if ids and ids[-1] == self.end_id else ids


def open_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a `tokenizer.json`, or the folder of one.

    Ranks:
        Local.
    """
    return Bytes() if name == "bytes" else TokenizerFile(name)


def check_vocabulary(tokenizer: Tokenizer, name: str, vocab_size: int | None) -> None:
    """Raise unless the model has a row for every token.

    Raises:
        ConfigError: The tokenizer knows more tokens than the model.
    """
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer {name!r} makes {tokenizer.vocab_size} tokens, the model knows {vocab_size}",
            where="data.tokenizer, model",
            why="every token id needs a row in the model's embedding",
            fix=f"name the model's own tokenizer, or set model_options.vocab_size = {tokenizer.vocab_size}",
        )


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the tokenizer {file}: {(error.strerror or type(error).__name__).lower()}",
            where="data.tokenizer",
            why=f"it is `bytes`, or a {_FILE}, or the folder that holds one",
            fix="set data.tokenizer = bytes, or name an existing file",
        ) from None


def _parse(content: bytes, file: Path) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise EnvironmentProblem(
            "tokenizers is not installed",
            where=f"data.tokenizer = {file}",
            why=f"a {_FILE} is read by that library",
            fix="pip install tokenizers, or set data.tokenizer = bytes",
        ) from None
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(
            f"{file} is not a tokenizer: {error}",
            where="data.tokenizer",
            why="it is read by the tokenizers library",
            fix=f"name a {_FILE} as saved by `tokenizer.save_pretrained`",
        ) from None


def _end_id(folder: Path, vocab: dict[str, int]) -> int | None:
    """As the folder's tokenizer_config.json says, else by the usual names."""
    try:
        token = json.loads((folder / "tokenizer_config.json").read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        token = None
    if isinstance(token, dict):  # older files describe it
        token = token.get("content")
    names = [token, *_END_NAMES] if isinstance(token, str) else list(_END_NAMES)
    return next((vocab[name] for name in names if name in vocab), None)
