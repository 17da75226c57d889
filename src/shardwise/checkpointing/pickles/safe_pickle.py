"""Read pickles as data: a small machine that can build plain values and records, and can call nothing. No torch.

A pickle is a program for a stack machine, and Python's own machine imports and calls whatever the program
names. This one has no import and no call: a name must stand in the caller's table, and what the table holds is
ours (a function that makes a record of the arguments, or a bare `Symbol`). It also bounds what a small file can
make us allocate, and refuses keys whose hash could take for ever.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from shardwise.checkpointing.pickles.pickle_machine import Damaged, Record, Refused, Symbol, run_pickle
from shardwise.errors import CheckpointError

MAX_PICKLE_BYTES = 256 << 20


def record(name: str) -> Symbol:
    """A table entry for a class: its objects become `Record`s."""
    return Symbol(name, lambda *args, **kwargs: Record(name, args, kwargs))


def symbols(*names: str) -> dict[str, Symbol]:
    """Table entries for names that may be mentioned but not called, such as dtypes."""
    return {name: Symbol(name) for name in names}


def records(*names: str) -> dict[str, Symbol]:
    """Table entries for classes whose objects are kept as `Record`s."""
    return {name: record(name) for name in names}


def makers(functions: Mapping[str, Callable[..., Any]]) -> dict[str, Symbol]:
    """Table entries for constructors, by qualified name, that we replace by functions of our own."""
    return {name: Symbol(name, make) for name, make in functions.items()}


def load_pickle(
    data: bytes | bytearray | memoryview | BinaryIO,
    *,
    allowed: Mapping[str, Symbol],
    persistent_load: Callable[[Any], Any] | None = None,
    where: str = "",
    max_bytes: int = MAX_PICKLE_BYTES,
) -> Any:
    """Read one pickle without importing or calling anything it names.

    Args:
        data: The pickle, or a file that holds nothing else from here on.
        allowed: Qualified name to what stands for it here; see `symbols`, `records`, `makers`.
        persistent_load: Turns a persistent id (torch's storages) into a value; without it they are refused.
        where: The file, for messages.
        max_bytes: Larger pickles are refused unread.

    Returns:
        Plain values, `Symbol`s, `Record`s and what the table's functions and `persistent_load` returned. Values
        may be shared or cyclic: walk them with a limit.

    Raises:
        CheckpointError: It names something that is not allowed, is damaged, or is too large.

    Ranks:
        Local.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        data = data.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise _damaged(where, f"a pickle of more than {max_bytes} bytes", "no checkpoint needs one so large")
    try:
        return run_pickle(bytes(data), allowed, persistent_load)
    except Refused as refusal:
        raise CheckpointError(
            str(refusal),
            where=where,
            why="a pickle can run any code; only names that checkpoints need are known here, and none is ever called",
            fix="get the file again from a source you trust; if you trust it as it is, load it with torch yourself "
            "and save it anew (save_weights, or safetensors)",
        ) from None
    except (Damaged, IndexError, struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(where, "a pickle that cannot be read", f"{error or type(error).__name__}") from None


def _damaged(where: str, what: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint holds {what}",
        where=where,
        why=why,
        fix="restore the file from a copy, or use another checkpoint",
    )
