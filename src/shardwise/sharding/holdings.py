"""Who holds this rank's memory: shards, gradients, gathered groups, optimizer state, and the rest."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import compat
from shardwise.sharding.layout import local_tensor
from shardwise.units import format_bytes


@dataclass(frozen=True, slots=True)
class Holding:
    """Memory of one kind on this rank."""

    what: str
    num_bytes: int
    change: str
    """What would make it less."""


def holdings(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> list[Holding]:
    """Count what this rank holds, the largest first.

    Args:
        model: Sharded by shardwise or by hand.
        optimizers: Whose state to count; without them it is part of the rest.

    Returns:
        On a GPU the last kind is what else is allocated: activations, buffers of the communication, temporaries.

    Ranks:
        Local.
    """
    groups = compat.named_groups(model)
    gathered = {name: _bytes(compat.unsharded_parameters(group)) for name, group in groups.items()}
    standing = {name: size for name, size in gathered.items() if size}
    shards = list({id(p): p for group in groups.values() for p in compat.sharded_parameters(group)}.values())
    outside = [p for p in model.parameters() if not isinstance(p, DTensor)]
    found = [
        Holding("parameters (shards)", _bytes(shards) + _bytes(outside), "more ranks, or CPU offload"),
        Holding("gradients (shards)", _bytes(p.grad for p in [*shards, *outside] if p.grad is not None), "more ranks"),
        Holding(
            "gradients (unsharded)",
            sum(compat.unsharded_gradient_bytes(group) for group in groups.values()),
            "accumulate(mode='memory'), which reduces in every micro-step",
        ),
    ]
    if standing:
        largest = max(standing, key=standing.__getitem__)
        what = (
            f"gathered parameters of {len(standing)} groups, the largest {largest} ({format_bytes(standing[largest])})"
        )
        change = "reshard_after_forward=True, smaller groups, fewer prefetched"
        found.append(Holding(what, sum(standing.values()), change))
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    found.append(Holding("optimizer state", _bytes(value for value in states if isinstance(value, torch.Tensor)),
                         "more ranks, or 8-bit states"))  # fmt: skip
    if torch.cuda.is_available():
        rest = torch.cuda.memory_allocated() - sum(holding.num_bytes for holding in found)
        found.append(Holding("the rest: activations, communication buffers, temporaries", max(rest, 0),
                             "smaller micro-batches, or checkpoint_activations"))  # fmt: skip
    return sorted((holding for holding in found if holding.num_bytes), key=lambda holding: -holding.num_bytes)


def describe_holdings(found: Iterable[Holding]) -> str:
    """One line a kind, with what would make it less."""
    return "\n".join(
        f"{format_bytes(h.num_bytes):>10}  {h.what}" + (f" -> {h.change}" if h.change else "") for h in found
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that are really allocated: a freed gathered parameter keeps its shape and no storage."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = local_tensor(tensor)
        if not local.is_meta:
            storage = local.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
