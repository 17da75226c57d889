"""Activation checkpointing: recompute blocks in backward instead of keeping what they computed in forward."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.config.schema import ShardConfig
from shardwise.errors import ConfigError, ShardError
from shardwise.planning.plan import Plan
from shardwise.sharding.blocks import ReplacedForward, find_blocks, put_back, replacements
from shardwise.sharding.caches import Caches
from shardwise.sharding.written_buffers import WrittenBuffers, is_known_to_write

M = TypeVar("M", bound=nn.Module)
Mode = Literal["full", "selective", "none"]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_POLICIES = ("full", "selective", "every_n", "none")
# Matrix products, attention and convolutions: nearly all of a block's arithmetic, and few of its saved bytes.
_COSTLY = (
    "mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm", "_grouped_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip


def checkpoint_activations(
    model: M,
    policy: Literal["full", "selective", "every_n", "none"] | Callable[[str, nn.Module], Any] = "full",
    *,
    every: int = 2,
    saved_ops: Collection[Any] = (),
    preserve_rng: bool = True,
    config: ShardConfig | Plan | None = None,
) -> M:
    """Make the model's blocks recompute in backward what they would have kept, in place; return the model.

    Call it before `compile_blocks` and `shard`. Only `forward` of each block is replaced: names of
    parameters, classes and hooks stay, and FSDP2 gathers a block once for its recomputation and its backward.
    Random numbers are drawn again alike, and buffers that a block writes (batch statistics) are written once.
    Caches of keys and values are left out while gradients are recorded, as transformers does. A second call
    replaces what the first one chose.

    Args:
        model: Not sharded yet.
        policy: `full` recomputes every block and keeps its inputs only; `selective` keeps the results of
            matrix products, attention and convolutions, and recomputes the rest; `every_n` recomputes one
            block in `every`; `none` undoes it. Or a function of name and module that returns one of `full`,
            `selective` and `none`, or a bool.
        every: For `every_n`.
        saved_ops: For `selective`: the operators (`torch.ops.aten.mm.default`) whose results are kept, in
            place of the default ones.
        preserve_rng: False saves a little time in models that draw no random numbers.
        config: The one that will be given to `shard()`, where it names the blocks; or its plan.

    Raises:
        ConfigError: An unknown policy, or `every` below 1.
        ShardError: The model is sharded or compiled already, or has no blocks.

    Ranks:
        Local. Choose alike on every rank.
    """
    _check_arguments(policy, every)
    blocks = find_blocks(model, config, action="checkpoint_activations")
    # All answers first: a policy that raises leaves the model as it was.
    modes = [_mode(policy, every, index, *block) for index, block in enumerate(blocks.items())]
    change_activations(blocks, modes, saved_ops=saved_ops, preserve_rng=preserve_rng)
    return model


def change_activations(
    blocks: Mapping[str, nn.Module],
    modes: Iterable[Mode],
    *,
    saved_ops: Collection[Any] = (),
    preserve_rng: bool = True,
    offload: bool = False,
) -> None:
    """Make each block recompute as its mode says, in place of what it did before.

    Args:
        blocks: FQN to module.
        modes: One for each block.
        saved_ops: As in `checkpoint_activations`.
        preserve_rng: As in `checkpoint_activations`.
        offload: Keep in CPU memory what is kept for backward.

    Raises:
        ShardError: A block is compiled already.

    Ranks:
        Local.
    """
    _refuse_compiled(blocks)
    for module, mode in zip(blocks.values(), modes, strict=True):
        for replaced in list(replacements(module)):
            put_back(module, replaced)
        if mode != "none":
            ops = (frozenset(saved_ops) or _costly_ops()) if mode == "selective" else frozenset()
            module.forward = CheckpointedForward(module, ops, preserve_rng=preserve_rng)
        if offload:
            module.forward = OffloadedForward(module)


class CheckpointedForward(ReplacedForward):
    """A block's forward that is run again in backward.

    Args:
        module: The block.
        saved_ops: Operators whose results are kept; none: everything is recomputed.
        preserve_rng: Draw the same random numbers again.
    """

    def __init__(self, module: nn.Module, saved_ops: frozenset[Any], *, preserve_rng: bool) -> None:
        super().__init__(module.forward)
        self.options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng}
        if saved_ops:
            # torch.compile follows exactly this form.
            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_keep, saved_ops))
        self.caches = Caches(module, self.__wrapped__)
        self.buffers = WrittenBuffers(module)
        self.compiles_inside = is_known_to_write(module)  # a compiler does not follow the care taken of them

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; what it computes inside is not kept."""
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        args, kwargs = self.caches.leave_out(args, kwargs)
        options: dict[str, Any] = self.options
        if not torch.compiler.is_compiling() and self.buffers:
            options = options | {"context_fn": self._contexts}
        return checkpoint(self.__wrapped__, *args, **options, **kwargs)

    def _contexts(self) -> Contexts:
        """What surrounds the first run, and what the recomputation."""
        run = self.buffers.run()
        if "context_fn" not in self.options:
            return run.first(), run.again()
        first, again = self.options["context_fn"]()
        return _both(run.first(), first), _both(run.again(), again)


class OffloadedForward(ReplacedForward):
    """A block's forward that keeps in CPU memory what it keeps for backward; parameters stay where they are.

    Args:
        module: The block.
    """

    compiles_inside = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.forward)
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        to_cpu = save_on_cpu(pin_memory=torch.accelerator.is_available())

        def pack(tensor: torch.Tensor) -> Any:
            storage = tensor.untyped_storage().data_ptr()
            # Now and not before: a group inside the block is unsharded on its way.
            unsharded = (p for p in self.module.parameters() if not isinstance(p, DTensor))
            is_parameter = any(storage == parameter.untyped_storage().data_ptr() for parameter in unsharded)
            return tensor if is_parameter else to_cpu.pack_hook(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else to_cpu.unpack_hook(packed)

        with saved_tensors_hooks(pack, unpack):
            return self.__wrapped__(*args, **kwargs)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _keep(saved_ops: frozenset[Any], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in saved_ops else CheckpointPolicy.PREFER_RECOMPUTE


def _costly_ops() -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name, None) for name in _COSTLY]  # not every torch has every one
    return frozenset(packet.default for packet in packets if packet is not None)


def _mode(policy: Any, every: int, index: int, name: str, module: nn.Module) -> Mode:
    if policy == "every_n":
        return "full" if index % every == 0 else "none"
    if not callable(policy):
        return policy
    answer = policy(name, module)
    if answer is None or isinstance(answer, bool):
        return "full" if answer else "none"
    if answer in ("full", "selective", "none"):
        return answer
    raise ConfigError(
        f"the policy answers {answer!r} for {name!r}",
        where=f"policy({name!r}, {type(module).__name__})",
        why="a block is recomputed in full, selectively or not at all",
        fix='return True, False, "full", "selective" or "none"',
    )


def _check_arguments(policy: Any, every: int) -> None:
    if not callable(policy) and policy not in _POLICIES:
        raise ConfigError(
            f"the policy is {policy!r}",
            where="checkpoint_activations: policy",
            why=f"the known ones are {', '.join(_POLICIES)}",
            fix="choose one of them, or pass a function of name and module",
        )
    if every < 1:
        raise ConfigError(
            f"every is {every}",
            where="checkpoint_activations: every",
            why="one block in so many is recomputed",
            fix="set every = 1 or more",
        )


def _refuse_compiled(blocks: Mapping[str, nn.Module]) -> None:
    for name, module in blocks.items():
        if any(replaced.is_compiled for replaced in replacements(module)):
            raise ShardError(
                f"checkpoint_activations comes too late: {name!r} is already compiled",
                where=name,
                why="the compiler must see what is recomputed: checkpoint_activations, compile_blocks, shard",
                fix="call checkpoint_activations(model) before compile_blocks(model)",
            )
