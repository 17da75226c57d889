"""Bytes in memory: views of tensors, buffers, checksums by block, and progress."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import xxhash

from shardwise.progress import Progress
from shardwise.units import format_bytes, format_seconds


def bytes_of(memory: Any) -> memoryview:
    """The bytes of a contiguous CPU tensor, or of anything that has the buffer protocol.

    The view keeps the tensor alive and is writable. numpy is no way to get it: it knows no bfloat16, and torch
    may be built without it.
    """
    if not hasattr(memory, "data_ptr"):
        return memoryview(memory).cast("B")
    if memory.device.type != "cpu" or not memory.is_contiguous() or memory.is_conj() or memory.is_neg():
        raise ValueError(f"not a contiguous CPU tensor: {memory.device}, strides {memory.stride()}")
    num_bytes = memory.numel() * memory.element_size()
    if num_bytes == 0:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * num_bytes).from_address(memory.data_ptr())
    array.keep_alive = memory
    return memoryview(array).cast("B")


def trim_malloc() -> None:
    """Let the allocator return what was freed to the system; it keeps blocks of some MiB, and more with each round.

    For loops that allocate and free large buffers: the process would seem to need memory that nobody uses.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc; others have no such habit
    if trim is not None:
        trim(0)


BLOCK_BYTES = 1 << 20
"""Bytes under one checksum: small enough that a shard's ragged ends cost little, large enough for a short manifest."""


def checksum(data: bytes | bytearray | memoryview) -> int:
    """The checksum of one run of bytes."""
    return xxhash.xxh3_64_intdigest(data)


def checksum_of_parts(parts: Iterable[bytes | bytearray | memoryview]) -> int:
    """The checksum of bytes that lie in several places, as if they lay one after another."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def to_hex(checksums: Iterable[int]) -> str:
    """Sixteen hexadecimal digits for each checksum, one after another."""
    return "".join(f"{each:016x}" for each in checksums)


def from_hex(text: str) -> tuple[int, ...]:
    """The checksums that `to_hex` wrote.

    Raises:
        ValueError: The text is not that.
    """
    if len(text) % 16 or not set(text) <= set("0123456789abcdef"):
        raise ValueError("checksums are 16 lower-case hexadecimal digits each")
    return tuple(int(text[start : start + 16], 16) for start in range(0, len(text), 16))


@contextlib.contextmanager
def counting(progress: Progress | None, total: int, label: str) -> Iterator[Callable[[int], None]]:
    """A function to call with every number of bytes that is done; one thread at a time.

    Args:
        progress: Whom to tell; None: nobody.
        total: All bytes there will be; 0 where nobody knows.
        label: What is done, as in "loading".
    """
    if progress is None:
        yield lambda num_bytes: None
        return
    start, done = time.monotonic(), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        rate = done / max(time.monotonic() - start, 1e-9)
        of_total = f" of {format_bytes(total)}" if total else ""
        progress.advance(num_bytes, f"{format_bytes(done)}{of_total}, {format_bytes(rate)}/s")

    progress.start(total, label)
    try:
        yield count
    except BaseException:
        progress.finish()
        raise
    seconds = max(time.monotonic() - start, 1e-9)
    progress.finish(
        f"{label}: {format_bytes(done)} in {format_seconds(seconds)}, {format_bytes(done / seconds)}/s" if done else ""
    )
