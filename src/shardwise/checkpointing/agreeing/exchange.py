"""What the ranks tell each other in a save: whether they hold the same, and what went wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from shardwise.checkpointing.agreeing.channel import Channel, as_shardwise_error
from shardwise.checkpointing.saving.sharing import HeldTensor, share_tensors, share_values
from shardwise.errors import ShardwiseError


def digest(held: Mapping[str, Any]) -> int:
    """A number that differs when plain tensors, or encoded values, differ."""
    texts = {name: repr(value) if isinstance(value, HeldTensor) else value for name, value in held.items()}
    return xxhash.xxh3_64_intdigest(json.dumps(texts, sort_keys=True).encode())


def names_to_write(channel: Channel, plain: dict[str, HeldTensor], digests: Sequence[int]) -> dict[str, str]:
    """The plain tensors that this rank writes, and under which names.

    Args:
        channel: The ranks.
        plain: This rank's.
        digests: Of every rank's; where they are equal nothing is sent.

    Ranks:
        Collective.
    """
    tables = [plain] * channel.size if len(set(digests)) == 1 else channel.all_gather(plain)
    return share_tensors(tables)[channel.rank]


def all_values(channel: Channel, values: dict[str, Any], digests: Sequence[int]) -> dict[str, Any]:
    """On rank 0 everything to be stored that is no tensor; nothing on the others.

    Args:
        channel: The ranks.
        values: This rank's, encoded.
        digests: Of every rank's; where they are equal nothing is sent.

    Ranks:
        Collective.
    """
    tables = [values] if len(set(digests)) == 1 else channel.gather(values)
    return share_values(tables) if channel.rank == 0 else {}


def portable(error: BaseException | None) -> ShardwiseError | None:
    """An error that can be sent to other ranks."""
    return None if error is None else as_shardwise_error(error)


def first_error(errors: Sequence[ShardwiseError | None]) -> ShardwiseError | None:
    """The first rank's error, under its number where there are several ranks."""
    for rank, error in enumerate(errors):
        if error is not None:
            what = f"rank {rank}: {error.what}" if len(errors) > 1 else error.what
            return type(error)(what, where=error.where, why=error.why, fix=error.fix)
    return None
