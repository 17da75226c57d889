"""Bytes of tensors as memoryviews, without importing torch, and copies of them that hold no lock."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

_MIN_UNLOCKED = 64 << 10  # below, taking the lock again costs more than the copy


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


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy without holding the interpreter's lock, so that other threads go on meanwhile."""
    if len(source) < _MIN_UNLOCKED:
        target[:] = source
        return
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes do not fit {len(target)}")
    with _address(target) as to, _address(source) as start:
        ctypes.memmove(to, start, len(source))


class _Buffer(ctypes.Structure):
    """`Py_buffer` of the buffer protocol; only where it starts is of interest."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("owner", ctypes.py_object),
        ("length", ctypes.c_ssize_t),
        ("item_bytes", ctypes.c_ssize_t),
        ("is_readonly", ctypes.c_int),
        ("num_dims", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


@contextlib.contextmanager
def _address(view: memoryview) -> Iterator[int]:
    """Where the view's bytes lie; they stay there while the context is open."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        yield buffer.start
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def give_back_freed() -> None:
    """Let the allocator return what was freed to the system; it keeps blocks of some MiB, and more with each round.

    For loops that allocate and free large buffers: the process would seem to need memory that nobody uses.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc; others have no such habit
    if trim is not None:
        trim(0)
