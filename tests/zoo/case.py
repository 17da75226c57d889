"""One model of the zoo, and the makers of random batches that many of them share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config.schema import ShardConfig


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its batches, its loss, and what is special about it."""

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[..., Any]
    loss: Callable[..., Tensor] | None = None
    config: ShardConfig = field(default_factory=ShardConfig)
    runs_again: tuple[str, ...] = ()
    """FQN patterns of modules that the model itself runs several times in a pass, so that their group is
    gathered several times too."""
    blocks: tuple[str, ...] = ()
    """FQN patterns of the blocks, where `largest_unit` would look too deep (blocks made of small blocks)."""
    together: tuple[str, ...] = ()
    """FQN patterns of modules that count as one block: code outside reads their weights."""
    kept: tuple[str, ...] = ()
    """FQN patterns of modules whose group may stay gathered through the pass: the data of a rank decide
    whether they run, so that they can only be gathered where all ranks meet."""
    min_groups: int = 2
    slow: bool = False
    """Only in `make test-full`."""
    four_ranks: bool = False
    """Also on four ranks."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(seed: int, *, vocab: int = 96, batch: int = 2, length: int = 8) -> Tensor:
    """Random token ids; 0 to 3 are left to special tokens."""
    return torch.randint(4, vocab, (batch, length), generator=generator(seed))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def token_batch(vocab: int = 96, batch: int = 2, length: int = 8) -> Callable[[int], dict[str, Tensor]]:
    """Ids with themselves as labels: causal and masked language models take both."""

    def make(seed: int) -> dict[str, Tensor]:
        ids = tokens(seed, vocab=vocab, batch=batch, length=length)
        return {"input_ids": ids, "labels": ids.clone()}

    return make


def pixel_batch(
    size: int = 16, channels: int = 3, batch: int = 2, labels: int | None = 4
) -> Callable[[int], dict[str, Tensor]]:
    """Random images, with class labels unless told otherwise."""

    def make(seed: int) -> dict[str, Tensor]:
        made = {"pixel_values": normal(seed, batch, channels, size, size)}
        if labels is not None:
            made["labels"] = torch.randint(0, labels, (batch,), generator=generator(seed + 1))
        return made

    return make


def features(*shape: int) -> Callable[[int], Tensor]:
    """One random tensor of this shape."""
    return lambda seed: normal(seed, *shape)
