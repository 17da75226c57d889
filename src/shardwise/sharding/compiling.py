"""Compile each repeated block on its own: one compilation serves all of them, and gathering stays outside."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.config.schema import ShardConfig
from shardwise.planning.plan import Plan
from shardwise.sharding.blocks import ReplacedForward, find_blocks, replacements

M = TypeVar("M", bound=nn.Module)


def compile_blocks(model: M, *, config: ShardConfig | Plan | None = None, **compile_options: Any) -> M:
    """Compile the forward of each repeated block, in place; return the model.

    Call it after `checkpoint_activations` and before `shard`. Compilation happens at a block's first call.
    Names of parameters and keys of the state dict stay, and FSDP2's hooks run outside the compiled code. A
    second call replaces the options of the first.

    Args:
        model: Not sharded yet.
        config: The one that will be given to `shard()`, where it names the blocks; or its plan.
        **compile_options: Of `torch.compile`: `backend`, `mode`, `dynamic`, `fullgraph`, ...

    Raises:
        ShardError: The model is sharded already, or has no blocks.

    Ranks:
        Local. Choose alike on every rank.
    """
    # This backend, for debugging, runs a recomputation that it has compiled with other random numbers.
    inside = compile_options.get("backend") == "eager"
    for module in find_blocks(model, config, action="compile_blocks").values():
        chain = list(replacements(module))
        compiled = next((replaced for replaced in chain if isinstance(replaced, CompiledForward)), None)
        if compiled is not None:
            compiled.set_options(compile_options)
        elif chain and (inside or chain[0].compiles_inside):
            chain[0].__wrapped__ = CompiledForward(chain[0].__wrapped__, compile_options)
        else:
            module.forward = CompiledForward(module.forward, compile_options)
    return model


class CompiledForward(ReplacedForward):
    """A block's forward, compiled at its first call.

    Args:
        forward: What to compile.
        options: Of `torch.compile`.
    """

    is_compiled = True

    def __init__(self, forward: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(forward)
        self.set_options(options)

    def set_options(self, options: dict[str, Any]) -> None:
        """Compile with these from the next call on."""
        self.options = options
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled block."""
        if self._compiled is None:
            self._compiled = torch.compile(self.__wrapped__, **self.options)
        return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledForward":
        # The compiled function is bound to the original's weights: the copy compiles its own.
        return CompiledForward(copy.deepcopy(self.__wrapped__, memo), self.options)
