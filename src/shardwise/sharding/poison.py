"""Prove that a tensor was written: poison it first, look for poison afterwards. Also takes fingerprints."""

from collections.abc import Iterator

import torch

# Never the value of a truth value; as a 2, 4 or 8 byte integer, one that no table or mask holds.
_POISON_BYTE = 0xA5
# Bounds the temporary memory of the checks.
_CHUNK_BYTES = 32 * 2**20


def poison(tensor: torch.Tensor) -> None:
    """Fill with what no initialiser writes: NaN, or a byte pattern where there is no NaN.

    Args:
        tensor: Contiguous, unless its dtype has NaN.

    Ranks:
        Local.
    """
    with torch.no_grad():
        if _has_nan(tensor.dtype):
            tensor.fill_(float("nan"))
        else:
            _bytes(tensor).fill_(_POISON_BYTE)


def is_poisoned(tensor: torch.Tensor) -> bool:
    """Whether poison is left, in any element; for 8-bit integers, in all of them.

    A single 8-bit integer equal to the poison may well be meant, so only an untouched tensor counts.

    Ranks:
        Local.
    """
    if tensor.numel() == 0:
        return False
    with torch.no_grad():
        if _has_nan(tensor.dtype):
            return any(bool(chunk.isnan().any()) for chunk in _chunks(tensor))
        left = (chunk == _POISON_BYTE for chunk in _chunks(_bytes(tensor.contiguous())))
        if tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool:
            return all(bool(chunk.all()) for chunk in left)
        return any(bool(chunk.view(-1, tensor.dtype.itemsize).all(dim=1).any()) for chunk in left)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-d int64 tensor that changes with the tensor's bits; equal tensors on all ranks give equal ones.

    Ranks:
        Local.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    with torch.no_grad():
        for position, chunk in enumerate(_chunks(_bytes(tensor.detach().contiguous()))):
            if chunk.storage_offset() % 8:
                chunk = chunk.clone()  # eight bytes are read as one number, which must be aligned
            words = chunk[: chunk.numel() // 8 * 8].view(torch.int64)
            total += (position + 1) * (words.sum() + chunk[words.numel() * 8 :].sum(dtype=torch.int64))
    return total


def _has_nan(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point and dtype.itemsize > 1) or dtype.is_complex


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of a contiguous tensor as a flat view of bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.detach().reshape(-1)
    yield from flat.split(max(_CHUNK_BYTES // flat.element_size(), 1))
