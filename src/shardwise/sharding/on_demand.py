"""While an initialiser runs, stand whole tensors in for the sharded ones it touches beyond its own module."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwise import compat
from shardwise.sharding.inventory import Entry

# Attributes whose value is a tensor made of the parameter's values; all others are metadata.
_VALUE_ATTRIBUTES = {"data", "T", "mT", "H", "mH", "real", "imag"}
_METADATA_METHODS = {
    "dim", "ndimension", "size", "stride", "numel", "nelement", "element_size", "is_floating_point",
    "is_complex", "is_contiguous",
    "storage_offset", "get_device", "requires_grad_", "is_pinned", "__hash__", "__len__",
    "__repr__", "__format__", "register_hook",
}  # fmt: skip
# Overwrites all of its first argument: there is no need to gather it first.
_OVERWRITING = {
    "normal_", "uniform_", "constant_", "zeros_", "ones_", "eye_", "dirac_", "orthogonal_", "sparse_",
    "zero_", "fill_", "copy_",
    "exponential_", "bernoulli_", "trunc_normal_", "xavier_uniform_", "xavier_normal_",
    "kaiming_uniform_", "kaiming_normal_",
}  # fmt: skip
# Looks at nothing but shape, dtype and device of its first argument.
_SHAPE_ONLY = {
    "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "full_like", "new_zeros", "new_ones",
    "new_empty", "new_full", "new_tensor",
}  # fmt: skip


class FullOnDemand(TorchFunctionMode):
    """Hands torch functions a whole plain tensor wherever they are given one of `entries`.

    So a parent's initialiser (MultiheadAttention's, a model's `_init_weights` on itself) sees its
    descendants as in a single process, draws the same numbers on any number of ranks, and costs one whole
    tensor at a time.

    Args:
        entries: All tensors of the model.
        keep: What to do with a whole tensor that may have been written; not called for protected ones.
        is_protected: Writes to such an entry are dropped.
        device: Where whole tensors are made.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        keep: Callable[[Entry, torch.Tensor], None],
        is_protected: Callable[[Entry], bool],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._entry_of = {id(entry.tensor): entry for entry in entries}
        self._keep, self._is_protected, self._device = keep, is_protected, device
        self._open: dict[Entry, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` with whole tensors in place of sharded ones."""
        kwargs = kwargs or {}
        if _is_about_metadata(func):
            return func(*args, **kwargs)
        used = list(self._entries_in((args, kwargs)))
        if used:
            self._close_unused(used)
            target = args[0] if args else kwargs.get("tensor", kwargs.get("self"))
            args, kwargs = self._in_full((args, kwargs), func.__name__, target)
        return func(*args, **kwargs)

    def close(self) -> None:
        """Keep what was written and let the whole tensors go.

        Ranks:
            Local, unless `keep` communicates.
        """
        for entry in list(self._open):
            self._close(entry)

    def _entry(self, value: Any) -> Entry | None:
        entry = self._entry_of.get(id(value))
        if entry is None or entry.tensor is not value:
            return None
        return entry if isinstance(value, DTensor) or self._is_protected(entry) else None

    def _entries_in(self, value: Any) -> Iterator[Entry]:
        if isinstance(value, torch.Tensor):
            if (entry := self._entry(value)) is not None:
                yield entry
        elif type(value) in (tuple, list):
            for item in value:
                yield from self._entries_in(item)
        elif type(value) is dict:
            for item in value.values():
                yield from self._entries_in(item)

    def _in_full(self, value: Any, function: str, target: Any) -> Any:
        if isinstance(value, torch.Tensor):
            entry = self._entry(value)
            return value if entry is None else self._stand_in(entry, function if value is target else "")
        if type(value) in (tuple, list):
            return type(value)(self._in_full(item, function, target) for item in value)
        if type(value) is dict:
            return {key: self._in_full(item, function, target) for key, item in value.items()}
        return value

    def _stand_in(self, entry: Entry, function: str) -> torch.Tensor:
        if entry in self._open:
            return self._open[entry]
        if function not in _OVERWRITING | _SHAPE_ONLY:
            self._open[entry] = entry.gather(self._device)
            return self._open[entry]
        full = torch.empty(entry.tensor.shape, dtype=entry.tensor.dtype, device=self._device)
        if function in _OVERWRITING:
            self._open[entry] = full
        return full

    def _close_unused(self, used: list[Entry]) -> None:
        """Let go of whole tensors that nobody can write to any more, so that only a few exist at a time."""
        for entry in [entry for entry in self._open if entry not in used]:
            # Two references are ours: the dict's and the one of the call.
            if not compat.is_aliased(self._open[entry]) and sys.getrefcount(self._open[entry]) <= 2:
                self._close(entry)

    def _close(self, entry: Entry) -> None:
        full = self._open.pop(entry)
        if not self._is_protected(entry):
            self._keep(entry, full)


def _is_about_metadata(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(func.__self__, "__name__", "") not in _VALUE_ATTRIBUTES
    return name in _METADATA_METHODS
