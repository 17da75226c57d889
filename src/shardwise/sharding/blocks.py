"""A model's repeated blocks, the unit of recomputing and of compiling, and how their `forward` is replaced.

The blocks are those that the plan groups by, so that FSDP2's hooks sit right around what is recomputed or
compiled.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.config.schema import ShardConfig
from shardwise.errors import ShardError
from shardwise.planning.plan import Plan
from shardwise.planning.planner import plan
from shardwise.planning.tree import Tree


def find_blocks(model: nn.Module, config: ShardConfig | Plan | None, *, action: str) -> dict[str, nn.Module]:
    """The outermost modules below the root that are groups of `plan(model, config)` and have parts.

    Args:
        model: Not sharded yet.
        config: The one that will be given to `shard()`, or its plan; None finds the blocks automatically.
        action: What will be done to them, for messages: "checkpoint_activations".

    Returns:
        FQN to module, in the model's order.

    Raises:
        ShardError: The model is sharded already, or has no such blocks.

    Ranks:
        Local.
    """
    _refuse_sharded(model, action)
    found = config if isinstance(config, Plan) else plan(model, config)
    grouped = {name for group in found.groups for name in group.modules if name}
    tree = Tree(model, {id(parameter): key for key, parameter in enumerate(model.parameters())})
    nodes = [node for node in tree.root.walk() if node.fqn in grouped and node.is_composite]
    outermost = [node for node in nodes if not any(other is not node and other.contains(node) for other in nodes)]
    if not outermost:
        raise ShardError(
            f"{type(model).__name__} has no blocks to work on",
            where=f"{action}({type(model).__name__})",
            why="it works on the groups of the plan that hold several modules, and this model has none",
            fix=f'{action}(..., config=ShardConfig(block_patterns=("name.of.blocks.*",)))',
        )
    return {node.fqn: node.module for node in outermost}


class ReplacedForward:
    """Stands in a module's instance for its `forward`, so that names, classes and hooks stay as they are.

    An object and not a closure: a deep copy of the model then runs the copy's weights, not the original's.

    Args:
        forward: What the module had, a bound method or another replacement.
    """

    is_compiled = False
    """Whether what it runs is compiled."""
    compiles_inside = False
    """Whether a compiler should work on what it runs and leave itself alone."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        # `__wrapped__` also leads signatures and the plan's reader to the real code.
        functools.update_wrapper(self, forward, updated=())
        self.__wrapped__ = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        return self.__wrapped__(*args, **kwargs)


def replacements(module: nn.Module) -> Iterator[ReplacedForward]:
    """What stands for the module's forward, outermost first."""
    forward = vars(module).get("forward")
    while isinstance(forward, ReplacedForward):
        yield forward
        forward = forward.__wrapped__


def put_back(module: nn.Module, replaced: ReplacedForward) -> None:
    """Take away the outermost replacement."""
    forward = replaced.__wrapped__
    if getattr(forward, "__func__", None) is type(module).forward:
        del module.forward
    else:
        module.forward = forward


def _refuse_sharded(model: nn.Module, action: str) -> None:
    sharded = next((name for name, module in model.named_modules() if isinstance(module, FSDPModule)), None)
    if sharded is not None:
        raise ShardError(
            f"{action} comes too late: {'the model' if not sharded else repr(sharded)} is already sharded",
            where=sharded or type(model).__name__,
            why="the order is checkpoint_activations, compile_blocks, shard: gathering stays outside of both",
            fix=f"call {action}(model) before shard(model)",
        )
