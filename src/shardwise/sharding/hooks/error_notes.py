"""Notes on errors in a sharded model: cause, fix and memory in use."""

import traceback
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import compat
from shardwise.explaining import explain
from shardwise.planning.calls import is_within
from shardwise.planning.tracing import innermost_module
from shardwise.sharding.inventory import local_tensor
from shardwise.sharding.registry import sharded_state, users_line
from shardwise.sharding.repointing import optimizers_of
from shardwise.units import format_bytes


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one kind on this rank."""

    what: str
    num_bytes: int
    change: str
    """How to reduce it."""


def memory_breakdown(model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> list[MemoryUse]:
    """Return the memory of this rank by kind, largest first.

    Args:
        model: Sharded by shardwise or by hand.
        optimizers: Optimizers whose state is listed separately.

    Returns:
        On a GPU the list includes all other allocations: activations, communication buffers, temporaries.
    """
    groups = compat.named_groups(model)
    gathered = {name: _bytes(compat.unsharded_parameters(group)) for name, group in groups.items()}
    standing = {name: size for name, size in gathered.items() if size}
    shards = list({id(p): p for group in groups.values() for p in compat.sharded_parameters(group)}.values())
    outside = [p for p in model.parameters() if not isinstance(p, DTensor)]
    gradients = [p.grad for p in [*shards, *outside] if p.grad is not None]
    found = [
        MemoryUse("parameters (shards)", _bytes(shards) + _bytes(outside), "more ranks, or CPU offload"),
        MemoryUse("gradients (shards)", _bytes(gradients), "more ranks"),
        MemoryUse(
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
        found.append(MemoryUse(what, sum(standing.values()), change))
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    found.append(MemoryUse("optimizer state", _bytes(value for value in states if isinstance(value, torch.Tensor)),
                         "more ranks, or 8-bit states"))  # fmt: skip
    if torch.cuda.is_available():
        rest = torch.cuda.memory_allocated() - sum(holding.num_bytes for holding in found)
        found.append(MemoryUse("the rest: activations, communication buffers, temporaries", max(rest, 0),
                             "smaller micro-batches, or checkpoint_activations"))  # fmt: skip
    return sorted((holding for holding in found if holding.num_bytes), key=lambda holding: -holding.num_bytes)


def format_breakdown(found: Iterable[MemoryUse]) -> str:
    """Format one line per kind, with a way to reduce it."""
    return "\n".join(
        f"{format_bytes(h.num_bytes):>10}  {h.what}" + (f" -> {h.change}" if h.change else "") for h in found
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return allocated bytes: a resharded parameter keeps its shape but no storage."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = local_tensor(tensor)
        if not local.is_meta:
            storage = local.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


_MARK = "shardwise:"


def annotate(error: BaseException, model: nn.Module) -> None:
    """Add the note to an exception, once.

    Args:
        error: Raised in a forward, backward or step of `model`; keeps its type and traceback.
        model: Sharded by shardwise or by hand.
    """
    if any(note.startswith(_MARK) for note in getattr(error, "__notes__", ())):
        return
    rows = []
    module = innermost_module(error.__traceback__, model)
    if module is not None:
        rows.append(f"in {module or 'the root module'}{_group_of(model, module)}")
    if caller := users_line(traceback.extract_tb(error.__traceback__)):
        rows.append(f"from {caller}")
    failure = explain(error).failure
    if failure is not None:
        rows.append(f"{failure.code} {failure.name}: {_flat(failure.what)}")
        rows.append(f"why: {_flat(failure.why)}")
        rows.append(f"fix: {_flat(failure.fix)}")
        if failure.with_shardwise:
            rows.append(f"with shardwise: {_flat(failure.with_shardwise)}")
    if isinstance(error, torch.OutOfMemoryError):
        phase = "backward" if compat.in_backward() else "forward or step"
        rows.append(f"in {phase}, this rank holds:\n{format_breakdown(memory_breakdown(model, optimizers_of(model)))}")
    if rows:
        error.add_note("\n  ".join([_MARK, *rows]))


def _group_of(model: nn.Module, module: str) -> str:
    state = sharded_state(model)
    if state is None:
        return ""
    inside = [name for group in state.plan.groups for name in group.modules if is_within(module, name)]
    group = max(inside, key=len, default="")
    return f", of group {group or '(root)'}"


def _flat(text: str) -> str:
    return " ".join(text.split())
