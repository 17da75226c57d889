"""What is to be read, into which memory, and what is left to do once it is there. Nothing is changed before that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.checkpointing.contents import Box, StoredTensor
from shardwise.checkpointing.loading.rank_view import RankView
from shardwise.checkpointing.reading.requests import Request
from shardwise.checkpointing.state.nested import LAYOUT, Flat, Path, flatten, put_together, unflatten
from shardwise.checkpointing.state.slices import parts_of
from shardwise.errors import CheckpointError


@dataclass(slots=True)
class Restoring:
    """A load in the making."""

    requests: list[Request] = field(default_factory=list)
    finish: list[Callable[[], None]] = field(default_factory=list)
    """To be called in order, once everything is read."""
    problems: list[str] = field(default_factory=list)
    """Why it cannot be loaded, a line each."""
    notes: list[str] = field(default_factory=list)
    """What the user should know."""

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Ask for this rank's part of a tensor."""
        if isinstance(tensor, DTensor):
            self.requests += [Request(name, part.memory, part.box) for part in parts_of(tensor)]
        else:
            self.requests.append(Request(name, tensor.detach(), Box.whole(tuple(tensor.shape))))


def plan_object(
    restoring: Restoring, view: RankView, key: str, live: Any, put: Callable[[Any], object], *, path: Path | None = None
) -> None:
    """Plan to restore one object from what is stored under `key`.

    Args:
        restoring: Is added to.
        view: The checkpoint.
        key: The flat name under which it stands.
        live: Its state now: tensors in it are read into where they have the stored shape, as DCP does; that is
            how sharded ones keep their layout.
        put: Takes the restored state.
        path: The keys that lead to it, where a key has a dot.
    """
    names = [name for name in view.names_under(f"{key}.") if not name.endswith(f".{LAYOUT}")]
    layout = view.contents.values.get(f"{key}.{LAYOUT}")
    names = [*([key] if key in view.contents.tensors or key in view.contents.values else []), *names]
    if layout is None and not names:
        restoring.problems.append(f"{key}: not in the checkpoint")
        return
    if differing := view.differing_under(f"{key}."):
        restoring.problems.append(
            f"{key}: its state differed between the {view.contents.world_size} ranks that saved it ({differing[0]}); "
            "leave it out of load() to go on without it"
        )
        return
    targets = _targets(view, names, live, path or (key,))
    for name, target in targets.items():
        restoring.read_into(name, target)

    def find(name: str, is_tensor: bool) -> Any:
        return targets[name] if is_tensor else view.contents.values[name]

    def finish() -> None:
        if layout is not None:
            put(unflatten(layout, find))
            return
        depth = len(path or (key,))
        put(put_together({view.path(name)[depth:]: find(name, name in targets) for name in names}))

    restoring.finish.append(finish)


def new_tensor(stored: StoredTensor) -> torch.Tensor:
    """CPU memory for all of a stored tensor."""
    return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="cpu")


def _targets(view: RankView, names: list[str], live: Any, path: Path) -> dict[str, torch.Tensor]:
    try:
        flat = flatten(live, path)[0]
    except CheckpointError:  # what is there now could not be stored; that is no reason not to load
        flat = Flat()
    targets = {}
    for name in names:
        stored = view.contents.tensors.get(name)
        if stored is None:
            continue
        tensor = flat.tensors.get(name)
        targets[name] = tensor if tensor is not None and _takes(tensor, stored) else new_tensor(stored)
    return targets


def _takes(tensor: torch.Tensor, stored: StoredTensor) -> bool:
    """Whether a stored tensor can be read into this one."""
    if tuple(tensor.shape) != stored.shape or tensor.is_meta:
        return False
    return isinstance(tensor, DTensor) or str(tensor.dtype) == f"torch.{stored.dtype}"
