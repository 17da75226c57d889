"""Models that cannot be planned for: sharded before, without a forward, or with parameters of unknown kinds."""

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardwise.errors import PlanError


def refuse_sharded(model: nn.Module) -> None:
    """Raise when the model, a part of it, or a model around it has been sharded before.

    Raises:
        PlanError: With which module, and whether the order was top-down.
    """
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if "" in sharded:
        raise PlanError(
            f"the model ({type(model).__name__}) is already sharded",
            why="sharding replaces every parameter; a second time there is nothing left to replace",
            fix="call shard() once, on the unsharded model",
        )
    if sharded:
        raise PlanError(
            f"{sharded[0]!r} is already sharded" + (f", and {len(sharded) - 1} more modules" if sharded[1:] else ""),
            where=sharded[0],
            why="shard() decides all groups of a model at once, children first",
            fix="pass the unsharded model and name the groups with block_patterns or block_classes",
        )
    spread = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if spread is not None:
        raise PlanError(
            f"{spread!r} is a DTensor already, though its module is not a group",
            where=spread,
            why="a model around this one was sharded first: groups are made children first, never top-down",
            fix="shard the outermost model only; it makes groups of its parts",
        )


def refuse_uncallable(module: nn.Module) -> None:
    """Refuse a root that cannot be called at all."""
    if type(module).forward is nn.Module.forward and isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise PlanError(
            f"the model is a {type(module).__name__}, which has no forward",
            why="FSDP2 gathers parameters when a module is called, and a container is never called",
            fix="shard its elements, or put it into a module with a forward",
        )


def refuse_unsupported(model: nn.Module) -> None:
    """Raise for parameters that FSDP2 cannot shard and nothing here can make shardable.

    Raises:
        PlanError: A lazy module without shapes yet, or a layer that makes sparse gradients.
    """
    for name, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if any(is_lazy(parameter) for parameter in own):
            raise PlanError(
                f"{name or 'the model'} ({type(module).__name__}) has parameters without a shape yet",
                where=name,
                why="a lazy module learns its shapes in its first forward, and a plan needs them",
                fix="run one batch through the model before sharding, or give the sizes to the constructor",
            )
        trained = any(parameter.requires_grad for parameter in own)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and trained:
            raise PlanError(
                f"{name or 'the model'} ({type(module).__name__}) makes sparse gradients",
                where=name,
                why="FSDP2 reduces gradients in one dense buffer",
                fix=f"build it with sparse=False, or freeze it: {name}.requires_grad_(False)",
            )
