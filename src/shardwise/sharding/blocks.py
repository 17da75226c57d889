"""Activation checkpointing and torch.compile, applied block by block."""

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise import compat
from shardwise.config.schema import ShardConfig
from shardwise.errors import ConfigError, ShardError, import_optional
from shardwise.models.random_state import random_state, set_random_state
from shardwise.planning.groups import outermost_blocks
from shardwise.planning.plan import Plan
from shardwise.planning.planner import plan
from shardwise.sharding.activation_offload import HostActivations

# Values of cache arguments. A recomputed layer would append its keys and values a second time.
_INSTEAD = {"past_key_values": None, "past_key_value": None, "layer_past": None, "use_cache": False}


def without_cache(names: list[str], layer: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Remove the cache from the arguments of a block; training does not use it, and transformers removes it too.

    Args:
        names: Names of the block's positional arguments.
        layer: The block's number in the cache.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Raises:
        ShardError: The cache already has keys for this block (prefix tuning), which would be lost.
    """

    def instead(name: str, value: Any) -> Any:
        if name not in _INSTEAD or value is None:
            return value
        length = getattr(value, "get_seq_length", None)
        if length is not None and length(layer) > 0:
            raise ShardError(
                f"{name} already holds {length(layer)} positions",
                where=f"layer {layer}",
                why="a layer that is recomputed in backward would append to the cache twice",
                fix='checkpoint_activations(model, "none") where a filled cache is trained with',
            )
        return _INSTEAD[name]

    if not any(name in _INSTEAD for name in (*names, *kwargs)):
        return args, kwargs
    named = zip(names, args, strict=False)
    args = (*(instead(name, value) for name, value in named), *args[len(names) :])
    return args, {name: instead(name, value) for name, value in kwargs.items()}


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def is_known_to_write(module: nn.Module) -> bool:
    """Whether the module contains a batch norm or a parametrization with buffers, such as a spectral norm."""
    return any(
        isinstance(inner, _BATCH_NORMS)
        or (isinstance(inner, ParametrizationList) and next(inner.buffers(), None) is not None)
        for inner in module.modules()
    )


class WrittenBuffers:
    """Buffers that a block writes, found in its first run in training and in evaluation mode.

    Args:
        module: The block.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._places = [(inner, name) for inner in module.modules() for name in inner._buffers]
        self._written: dict[bool, list[tuple[nn.Module, str]]] = {}

    def __bool__(self) -> bool:
        return bool(self._written.get(self.module.training, self._places))

    def contexts(self) -> Contexts:
        """Return contexts of a run and of its recomputation, which uses the buffer values from before the run."""
        training = self.module.training
        before: dict[tuple[nn.Module, str], tuple[torch.Tensor, int, torch.Tensor]] = {}
        for module, name in self._written.get(training, self._places):
            if (buffer := module._buffers.get(name)) is not None:
                before[module, name] = (buffer, buffer._version, buffer.detach().clone())

        @contextmanager
        def first() -> Iterator[None]:
            yield
            if training not in self._written:  # later runs copy only the buffers written
                for (module, name), (buffer, version, value) in list(before.items()):
                    now = module._buffers.get(name)
                    # Batch norm writes without a new version number.
                    if now is buffer and now._version == version and torch.equal(now, value):
                        del before[module, name]
                self._written[training] = list(before)

        @contextmanager
        def again() -> Iterator[None]:
            now = {(module, name): module._buffers[name] for module, name in before}
            for (module, name), (_, _, value) in before.items():
                module._buffers[name] = value.clone()
            try:
                yield
            finally:
                for (module, name), buffer in now.items():
                    module._buffers[name] = buffer

        return first(), again()


def refuse_sharded(model: nn.Module, action: str) -> None:
    """Raise if the model, or a part of it, is already sharded, before `action` changes it."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ShardError(
                f"{action} comes too late: {repr(name) if name else 'the model'} is already sharded",
                where=name or type(model).__name__,
                why="the order is add_lora, checkpoint_activations, compile_blocks, shard: FSDP is outermost",
                fix=f"call {action}(model) before shard(model)",
            )


def find_blocks(model: nn.Module, config: ShardConfig | Plan | None, *, action: str) -> dict[str, nn.Module]:
    """Return the outermost composite modules below the root that are groups of `plan(model, config)`.

    Args:
        model: Unsharded model.
        config: The config for `shard()`, or its plan; None finds the blocks automatically.
        action: Name of the calling operation for messages, such as "checkpoint_activations".

    Returns:
        The modules by FQN, in the model's order.

    Raises:
        ShardError: The model is sharded already, or has no such blocks.
    """
    refuse_sharded(model, action)
    found = config if isinstance(config, Plan) else plan(model, config)
    outermost = outermost_blocks(model, found.groups)
    if not outermost:
        raise ShardError(
            f"{type(model).__name__} has no blocks",
            where=f"{action}({type(model).__name__})",
            why="it applies to groups of the plan with several modules, and this model has none",
            fix=f'{action}(..., config=ShardConfig(block_patterns=("name.of.blocks.*",)))',
        )
    return outermost


class ReplacedForward:
    """Replaces `forward` on a module's instance, so that names, classes and hooks do not change.

    It is an object, not a closure, so that a deep copy of the model uses the weights of the copy.

    Args:
        forward: The previous forward, a bound method or another replacement.
    """

    is_compiled = False
    """Whether its function is compiled."""
    compiles_inside = False
    """Whether to compile the wrapped forward instead of the replacement itself."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        # With `__wrapped__`, signatures and the plan's source analysis find the real code.
        functools.update_wrapper(self, forward, updated=())
        self.__wrapped__ = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        return self.__wrapped__(*args, **kwargs)


def replacements(module: nn.Module) -> Iterator[ReplacedForward]:
    """Return the replacements of the module's forward, outermost first."""
    forward = vars(module).get("forward")
    while isinstance(forward, ReplacedForward):
        yield forward
        forward = forward.__wrapped__


def replace_innermost(module: nn.Module, make: Callable[[Callable[..., Any]], ReplacedForward]) -> None:
    """Replace the module's own forward, inside of recomputation and compilation."""
    chain = list(replacements(module))
    if chain:
        chain[-1].__wrapped__ = make(chain[-1].__wrapped__)
    else:
        module.forward = make(module.forward)


M = TypeVar("M", bound=nn.Module)
Mode = Literal["full", "selective", "offload", "regions", "none"]

_POLICIES = ("full", "selective", "offload", "every_n", "regions", "none")
# Matrix products, attention and convolutions: nearly all of a block's arithmetic, but few of its saved bytes.
_COSTLY = (
    "mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm", "_grouped_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip
_COSTLY_OPS = frozenset(getattr(torch.ops.aten, name).default for name in _COSTLY if hasattr(torch.ops.aten, name))


def checkpoint_activations(
    model: M,
    policy: Literal["full", "selective", "offload", "every_n", "regions", "none"]
    | float
    | Callable[[str, nn.Module], Any] = "full",
    *,
    every: int = 2,
    saved_ops: Collection[Any] = (),
    preserve_rng: bool = True,
    config: ShardConfig | Plan | None = None,
) -> M:
    """Apply activation checkpointing to the model's blocks, in place; return the model.

    Call it before `compile_blocks` and `shard`. Only `forward` of each block is replaced: names of
    parameters, classes and hooks do not change, and FSDP2 unshards a block once for its recomputation and backward.
    Recomputation draws the same random numbers, and writes buffers such as batch statistics only once. Key-value
    caches are disabled while gradients are recorded, as in transformers. A second call replaces the choices of
    the first.

    Args:
        model: Unsharded model.
        policy: `full` recomputes every block and saves only its inputs; `selective` saves the results of
            matrix products, attention and convolutions, and recomputes the rest; `offload` does the same, and
            every other block saves them in host memory; `every_n` recomputes one block in `every`; `regions`
            recomputes everything outside `torch_remat.region(..., recompute=False)`; `none` disables
            checkpointing. A number from 0 to 1 is a memory budget for blocks compiled by a later
            `compile_blocks`: the share of activations to save, selected to minimize recomputation. A function
            of name and module returns one of these, or a bool.
        every: Interval of `every_n`.
        saved_ops: For `selective`: operators whose results are saved instead of the default ones, such as
            `torch.ops.aten.mm.default`.
        preserve_rng: False saves a little time in models without random numbers.
        config: The config for `shard()`, if it names the blocks, or its plan.

    Raises:
        ConfigError: The policy is unknown, or `every` is below 1.
        EnvironmentProblem: `regions` requires torch_remat, which is not installed.
        ShardError: The model is sharded or compiled already, or has no blocks.

    Ranks:
        Local. Choose the same on every rank.
    """
    where = "checkpoint_activations: "
    if not callable(policy) and not _is_budget(policy) and policy not in _POLICIES:
        raise ConfigError(
            f"the policy is {policy!r}",
            where=where + "policy",
            why=f"the known ones are {', '.join(_POLICIES)}, and numbers from 0 to 1",
            fix="choose one of them, or pass a function of name and module",
        )
    if every < 1:
        why = "every N-th block is recomputed"
        raise ConfigError(f"every is {every}", where=where + "every", why=why, fix="set every = 1 or more")
    blocks = find_blocks(model, config, action="checkpoint_activations")
    # All policy calls come first, so that the model does not change if one raises.
    modes = [_mode(policy, every, index, len(blocks), *block) for index, block in enumerate(blocks.items())]
    change_activations(blocks, modes, saved_ops=saved_ops, preserve_rng=preserve_rng)
    return model


def change_activations(
    blocks: Mapping[str, nn.Module],
    modes: Iterable[Mode | float],
    *,
    saved_ops: Collection[Any] = (),
    preserve_rng: bool = True,
    offload: bool = False,
) -> None:
    """Set the mode of each block, replacing its previous one.

    Args:
        blocks: Blocks by FQN.
        modes: Mode of each block.
        saved_ops: As in `checkpoint_activations`.
        preserve_rng: As in `checkpoint_activations`.
        offload: Save the activations of every block in host memory.

    Raises:
        ShardError: A block is compiled already.
    """
    for name, module in blocks.items():
        if any(replaced.is_compiled for replaced in replacements(module)):
            raise ShardError(
                f"checkpoint_activations comes too late: {name!r} is already compiled",
                where=name,
                why="the compiler must see the recomputation: checkpoint_activations, compile_blocks, shard",
                fix="call checkpoint_activations(model) before compile_blocks(model)",
            )
    activations = HostActivations()
    for module, mode in zip(blocks.values(), modes, strict=True):
        for replaced in list(replacements(module)):  # set by an earlier call
            module.forward = replaced.__wrapped__
            if getattr(module.forward, "__func__", None) is type(module).forward:
                del module.forward
        if isinstance(mode, float):
            module.forward = BudgetedForward(module.forward, mode)
        elif mode != "none":
            module.forward = CheckpointedForward(module, mode, saved_ops, preserve_rng=preserve_rng)
        if offload or mode == "offload":
            module.forward = OffloadedForward(module, activations)


def refuse_budget(activations: str | float, *, compiles: bool) -> None:
    """Raise if a memory budget is set without compilation.

    Raises:
        ConfigError: A memory budget is set, but blocks are not compiled.
    """
    if isinstance(activations, float) and not compiles:
        raise ConfigError(
            f"activations is {activations:g}, and blocks are not compiled",
            where="shard.activations, shard.compile",
            why="torch's compiler chooses the operations whose results fit into a memory budget",
            fix="set shard.compile = true, or shard.activations = selective",
        )


class AdaptiveActivations:
    """Activation checkpointing that saves fewer activations after running out of memory.

    Initially all activations are saved on the device. `keep_less` first recomputes cheap operations, then also offloads
    a growing share of the rest to host memory, and finally recomputes a growing share of whole blocks.

    Args:
        model: Unsharded and uncompiled model.
        plan: Its plan, which names the blocks.

    Raises:
        ShardError: The model has no blocks.
    """

    _LEVELS: tuple[tuple[Mode, float], ...] = (
        ("none", 1.0), ("selective", 1.0), ("offload", 1 / 2), ("offload", 5 / 8), ("offload", 3 / 4),
        ("full", 1 / 2), ("full", 3 / 4), ("full", 1.0),
    )  # fmt: skip
    """Modes, and the share of blocks in each; other blocks recompute cheap operations."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        blocks = find_blocks(model, plan, action="checkpoint_activations")
        change_activations(blocks, ["offload"] * len(blocks))
        chains = [list(replacements(module)) for module in blocks.values()]
        self._forwards = [(each, chain[-1]) for chain in chains if isinstance(each := chain[0], OffloadedForward)]
        self.reset()

    def keep_less(self, *, recompute_blocks: bool) -> Mode | None:
        """Save fewer activations from the next call on.

        Args:
            recompute_blocks: Whether whole blocks may be recomputed.

        Returns:
            The new mode; None if there is no further level.
        """
        level = self._level + 1
        if level == len(self._LEVELS) or (self._LEVELS[level][0] == "full" and not recompute_blocks):
            return None
        self.reset(level)
        return self._LEVELS[level][0]

    def reset(self, level: int = 0) -> None:
        """Go back to saving everything on the device, or to another level."""
        self._level = level
        mode, share = self._LEVELS[level]
        for index, (offloaded, checkpointed) in enumerate(self._forwards):
            is_chosen = _is_chosen(index, len(self._forwards), share)
            offloaded.is_enabled = mode == "offload" and is_chosen
            assert isinstance(checkpointed, CheckpointedForward)
            checkpointed.set_mode(mode if is_chosen else "selective")


def _is_chosen(index: int, num_blocks: int, share: float = 1 / 2) -> bool:
    """Whether a block belongs to an evenly spread share; the last block never does, because backward starts with it."""
    behind = num_blocks - 1 - index
    return int((behind + 1) * share) > int(behind * share)


class CheckpointedForward(ReplacedForward):
    """A block's forward that is recomputed in backward.

    Args:
        module: The block.
        mode: Mode of recomputation.
        saved_ops: For `selective`: operators whose results are saved instead of the default ones.
        preserve_rng: Draw the same random numbers again.
    """

    def __init__(self, module: nn.Module, mode: Mode, saved_ops: Collection[Any] = (), *, preserve_rng: bool) -> None:
        super().__init__(module.forward)
        self.preserve_rng, self.saved_ops = preserve_rng, frozenset(saved_ops)
        self.set_mode(mode)
        self.names = list(inspect.signature(self.__wrapped__).parameters)
        indices = (getattr(inner, "layer_idx", None) for inner in module.modules())
        self.layer = next((index for index in indices if isinstance(index, int)), 0)
        self.buffers = WrittenBuffers(module)
        self.compiles_inside = is_known_to_write(module)  # the compiler does not support buffers restored by us

    def set_mode(self, mode: Mode) -> None:
        """Set the mode from the next call on."""
        self.mode = mode
        self.options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.preserve_rng}
        self.regions = None
        if mode == "regions":
            self.regions = import_optional(
                "torch_remat",
                where="activations",
                why="it recomputes a block except its marked regions",
                fix='pip install "shardwise[remat]", or choose selective',
            )
        if mode in ("selective", "offload"):
            # torch.compile supports only this form.
            kept = partial(_keep, self.saved_ops or _COSTLY_OPS)
            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; save only the activations that the mode selects."""
        # Without compilation, `selective` saves results out of reach of the hooks that offload.
        is_kept = self.mode == "none" or (self.mode == "offload" and not torch.compiler.is_compiling())
        if is_kept or not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        args, kwargs = without_cache(self.names, self.layer, args, kwargs)
        if self.regions is not None and not self.compiles_inside:
            hooks = (_RandomNumbers(),) if self.preserve_rng and not torch.compiler.is_compiling() else ()
            return self.regions.checkpoint(recompute_state_hooks=hooks)(self.__wrapped__)(*args, **kwargs)
        options: dict[str, Any] = self.options
        if not torch.compiler.is_compiling() and self.buffers:
            options = options | {"context_fn": self._contexts}
        return checkpoint(self.__wrapped__, *args, **options, **kwargs)

    def _contexts(self) -> Contexts:
        """Return the contexts of the first run and of the recomputation."""
        around_first, around_again = self.buffers.contexts()
        if "context_fn" not in self.options:
            return around_first, around_again
        first, again = self.options["context_fn"]()
        return _both(around_first, first), _both(around_again, again)


class _RandomNumbers:
    """Reproduces random numbers in a recomputation that skips regions."""

    snapshot, restore = staticmethod(random_state), staticmethod(set_random_state)


class BudgetedForward(ReplacedForward):
    """A block's forward, compiled to save a part of its activations.

    Args:
        forward: The previous forward.
        budget: Share of saved activations, from 0 (full recomputation) to 1 (the compiler's default).
    """

    compiles_inside = True

    def __init__(self, forward: Callable[..., Any], budget: float) -> None:
        super().__init__(forward)
        self.budget = budget

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; if this call compiles it, apply the budget."""
        refuse_budget(self.budget, compiles=getattr(self.__wrapped__, "is_compiled", False))
        with compat.memory_budget(self.budget):
            return self.__wrapped__(*args, **kwargs)


class OffloadedForward(ReplacedForward):
    """A block's forward that saves its activations, but not its parameters, in host memory.

    Args:
        module: The block.
        activations: Offloaded activations of the model.
    """

    compiles_inside = True

    def __init__(self, module: nn.Module, activations: HostActivations) -> None:
        super().__init__(module.forward)
        self.module, self.activations, self.is_enabled = module, activations, True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        if not self.is_enabled or not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        with self.activations.call(self.module).hooks():
            return self.__wrapped__(*args, **kwargs)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _keep(saved_ops: frozenset[Any], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in saved_ops else CheckpointPolicy.PREFER_RECOMPUTE


def _is_budget(policy: Any) -> bool:
    return isinstance(policy, float | int) and not isinstance(policy, bool) and 0 <= policy <= 1


def _mode(policy: Any, every: int, index: int, num_blocks: int, name: str, module: nn.Module) -> Mode | float:
    if _is_budget(policy):
        return float(policy)
    if policy == "every_n":
        return "full" if index % every == 0 else "none"
    if policy == "offload":
        return "offload" if _is_chosen(index, num_blocks) else "selective"
    if not callable(policy):
        return policy
    answer = policy(name, module)
    if answer is None or isinstance(answer, bool):
        return "full" if answer else "none"
    if _is_budget(answer) or answer in ("full", "selective", "offload", "regions", "none"):
        return float(answer) if _is_budget(answer) else answer
    raise ConfigError(
        f"the policy answers {answer!r} for {name!r}",
        where=f"policy({name!r}, {type(module).__name__})",
        why="a block is recomputed in full, selectively (and kept in host memory), but for regions, or not at all",
        fix='return True, False, "full", "selective", "offload", "regions", "none" or a budget from 0 to 1',
    )


def compile_blocks(model: M, *, config: ShardConfig | Plan | None = None, **compile_options: Any) -> M:
    """Compile the forward of each repeated block, in place; return the model.

    Call it after `checkpoint_activations` and before `shard`. Compilation happens at a block's first call.
    Parameter names and state dict keys do not change, and FSDP2's hooks run outside the compiled code. A
    second call replaces the options of the first.

    Args:
        model: Unsharded model.
        config: The config for `shard()`, if it names the blocks, or its plan.
        **compile_options: Options of `torch.compile`: `backend`, `mode`, `dynamic`, `fullgraph`, ...

    Raises:
        ShardError: The model is sharded already, or has no blocks.

    Ranks:
        Local. Choose the same on every rank.
    """
    # This debugging backend draws other random numbers in a compiled recomputation.
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


def compile_inside_recomputation(module: nn.Module) -> None:
    """Recompute the compiled forward of a block instead of compiling its recomputation.

    torch 2.13 fails to compile the recomputation of DTensors: it treats their mesh as a saved tensor.
    """
    compiled, recomputed, *_ = (*replacements(module), None, None)
    is_compiled = isinstance(compiled, CompiledForward)
    if is_compiled and isinstance(recomputed, CheckpointedForward) and recomputed.mode == "full":
        compiled.__wrapped__, recomputed.__wrapped__ = recomputed.__wrapped__, compiled
        module.forward = recomputed


class CompiledForward(ReplacedForward):
    """A block's forward, compiled at its first call.

    Args:
        forward: The forward to compile.
        options: Options of `torch.compile`.
    """

    is_compiled = True

    def __init__(self, forward: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(forward)
        self.set_options(options)

    def set_options(self, options: dict[str, Any]) -> None:
        """Set the options from the next call on."""
        self.options = options
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled block."""
        if self._compiled is None:
            self._compiled = torch.compile(self.__wrapped__, **self.options)
        return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledForward":
        # The compiled function uses the original's weights: the copy compiles its own.
        return CompiledForward(copy.deepcopy(self.__wrapped__, memo), self.options)
