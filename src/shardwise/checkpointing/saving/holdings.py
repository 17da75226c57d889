"""What this rank holds of a run's state: each tensor's boxes, and whether others hold the same."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpointing.contents import ITEM_BYTES, Box
from shardwise.checkpointing.saving.sharing import HeldBox
from shardwise.checkpointing.state.run import Leaf
from shardwise.checkpointing.state.slices import dtype_name, parts_of
from shardwise.errors import CheckpointError
from shardwise.sharding.layout import local_tensor

RNG = "rng."
Kind = Literal["box", "plain", "own"]


@dataclass(frozen=True, slots=True)
class Holding:
    """A box of a tensor in this rank's memory."""

    leaf: Leaf
    held: HeldBox
    memory: torch.Tensor
    kind: Kind
    """`box`: of a DTensor, equal on all ranks that hold it. `plain`: whole on each rank, which may differ. `own`: of
    this rank alone."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A box whose values no longer change: copied, or in memory that nobody touches until it is written."""

    held: HeldBox
    kind: Kind
    offset: int = 0
    """Where the copy lies in the arena."""
    memory: torch.Tensor | None = None
    """The run's own memory, where there is no copy."""


class Holdings:
    """This rank's boxes, remembered from save to save: which tensors there are hardly ever changes."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[weakref.ref[torch.Tensor], tuple[HeldBox, ...]]] = {}
        self._num_changes = 0

    def of(self, leaves: Iterable[Leaf]) -> list[Holding]:
        """This rank's boxes of all leaves, in their order.

        Raises:
            CheckpointError: A tensor is not made of plain bytes.

        Ranks:
            Local.
        """
        return [holding for leaf in leaves for holding in self._known_holding(leaf) or self._look_at(leaf)]

    def mark(self, holdings: Iterable[Holding]) -> tuple[int, int]:
        """Another one when the boxes among them are not those of the last time; only this process understands it."""
        return self._num_changes, hash(tuple(holding.held.name for holding in holdings))

    def _known_holding(self, leaf: Leaf) -> tuple[Holding] | None:
        known = self._known.get(leaf.name)
        if known is None or known[0]() is not leaf.tensor or len(known[1]) != 1:
            return None
        held, memory = known[1][0], local_tensor(leaf.tensor)
        return (Holding(leaf, held, memory, "box"),) if memory.shape == held.box.sizes else None

    def _look_at(self, leaf: Leaf) -> list[Holding]:
        holdings = _holdings(leaf)
        if isinstance(leaf.tensor, DTensor):
            held = tuple(holding.held for holding in holdings)
            if leaf.name not in self._known or self._known[leaf.name][1] != held:
                self._num_changes += 1
            self._known[leaf.name] = (weakref.ref(leaf.tensor), held)
        return holdings


def _holdings(leaf: Leaf) -> list[Holding]:
    _refuse_odd(leaf)
    shape, dtype = tuple(leaf.tensor.shape), dtype_name(leaf.tensor.dtype)
    whole = Box.whole(shape)
    if not isinstance(leaf.tensor, DTensor):
        kind = "own" if leaf.name.startswith(RNG) else "plain"
        return [Holding(leaf, HeldBox(leaf.name, dtype, shape, whole), leaf.tensor.detach(), kind)]
    if whole.numel == 0:  # no rank has a part of it, yet it must be in the checkpoint
        empty = torch.empty(shape, dtype=leaf.tensor.dtype, device="cpu")
        return [Holding(leaf, HeldBox(leaf.name, dtype, shape, whole), empty, "box")]
    return [
        Holding(leaf, HeldBox(leaf.name, dtype, shape, part.box), part.memory, "box") for part in parts_of(leaf.tensor)
    ]


def _refuse_odd(leaf: Leaf) -> None:
    local = local_tensor(leaf.tensor)
    plain_types = (torch.Tensor, nn.Parameter, nn.Buffer)
    if type(local) in plain_types and local.layout is torch.strided and dtype_name(local.dtype) in ITEM_BYTES:
        return
    raise CheckpointError(
        f"a {type(local).__name__} of {local.dtype}, {str(local.layout).removeprefix('torch.')} cannot be stored",
        where=leaf.name,
        why="a checkpoint holds tensors as plain bytes: dense, of a dtype that files know",
        fix="leave it out, or store what it is made of in a state_dict() of your own",
    )
