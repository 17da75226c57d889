"""Small files of data, and batches of them, for the tests of `shardwise.training.data`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from shardwise.config.run import DataConfig
from shardwise.training.data import Loader, open_data


def write_lines(path: Path, records: Iterable[Any]) -> str:
    """A JSONL file; strings are written as they are."""
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def write_tokens(path: Path, ids: Iterable[int], dtype: torch.dtype = torch.uint16) -> str:
    """A file of token ids."""
    tensor = torch.tensor(list(ids)).to(dtype)
    path.write_bytes(bytes(tensor.view(torch.uint8).tolist()) if len(tensor) else b"")
    return str(path)


def open_some(
    config: DataConfig,
    *,
    batch_size: int = 4,
    rank: int = 0,
    num_ranks: int = 1,
    seed: int = 0,
    vocab_size: int | None = None,
) -> Loader:
    """`open_data` with the usual arguments."""
    return open_data(
        config,
        batch_size=batch_size,
        rank=rank,
        num_ranks=num_ranks,
        seed=seed,
        vocab_size=vocab_size,
        device="cpu",
    )


def numbered(folder: Path, num_samples: int, *, length: int = 4, **settings: Any) -> DataConfig:
    """Data whose sample i begins with token i * length, so that samples are known by their first token."""
    source = write_tokens(folder / "numbered.bin", range(num_samples * length + 1), torch.int32)
    return DataConfig(source=source, token_dtype="int32", sequence_length=length, **settings)


def samples_in(batch: dict[str, torch.Tensor], length: int = 4) -> list[int]:
    """The numbers of the samples of `numbered` data."""
    return (batch["input_ids"][:, 0] // length).tolist()


def save_tokenizer(
    folder: Path, texts: Iterable[str], *, vocab_size: int = 300, end: str | None = "</s>", **more: Any
) -> str:
    """A trained byte-level BPE, written as transformers would: a `tokenizer.json` and its config."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", *([end] if end else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    for name, value in more.items():
        setattr(tokenizer, name, value)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)
