"""Tensor parallelism: ranks along the tensor axis hold parts of each matrix and share the products of one batch.

Each divided module takes and gives plain tensors. Between a layer that is divided by its outputs and one that is divided
by its inputs, these are parts of the features; with sequence parallelism, between the modules of a block, parts of the
sequence. Nothing about a model is decided here: `planning.tensor` has done that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel, parallelize_module
from torch.overrides import TorchFunctionMode

from shardwise.planning.plan import ParallelModule
from shardwise.planning.tensor import STYLES, tensor_splits
from shardwise.sharding.blocks import ReplacedForward, replace_innermost
from shardwise.sharding.expert_parallel import SelectingForward, divide_parameters

_STATE = "_shardwise_tensor"  # in the module's own dict
_SEQUENCE_DIM = 1


class TensorParallel:
    """The tensor axis of one model, and in which form its modules hand each other tensors.

    Args:
        model: Whose modules are divided.
        mesh: The tensor axis.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.model, self.mesh, self.num_ranks = model, mesh, mesh.size()
        self.is_whole = False
        """Modules hand each other whole tensors, which is right whatever the code between them does."""
        self.on_parts = False
        """Hidden states between the modules of a block are parts of the sequence."""

    def change(self, tensor: Tensor, given: Placement, wanted: Placement) -> Tensor:
        """A plain tensor that lies on the ranks in one way, in another; also its gradient."""
        return self.dtensor(tensor, given).redistribute(placements=[wanted]).to_local()

    def dtensor(self, tensor: Tensor, placement: Placement) -> DTensor:
        """A plain tensor as the local part of a DTensor."""
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self.mesh, [placement], run_check=False)


def apply_tensor_parallel(model: nn.Module, planned: Iterable[ParallelModule], mesh: DeviceMesh) -> None:
    """Divide the planned modules.

    Args:
        model: Not sharded; its parameters are plain, and the same on all ranks.
        planned: Of its plan.
        mesh: The tensor axis.

    Ranks:
        Local. Forwards communicate over the axis.
    """
    state = model.__dict__[_STATE] = TensorParallel(model, mesh)
    styles: dict[str, ParallelStyle] = {}
    for entry in planned:
        module, how = model.get_submodule(entry.fqn), entry.how.split(", ")
        if how[0] == "experts":
            divide_parameters(module, mesh)
            module.forward = SelectingForward(module, mesh)  # pyrefly: ignore[bad-assignment]
        elif how[0] in STYLES:
            styles[entry.fqn] = Divided(state, entry, module)
        numbers = dict(each.split("=") for each in how if "=" in each)
        if numbers or "local sizes" in how:
            local = {name: int(number) for name, number in numbers.items()}
            replace_innermost(module, functools.partial(LocalHeads, state, module, local))
        if "loss_parallel" in how:
            _watch_losses()
    parallelize_module(model, mesh, styles, src_data_rank=None)
    for entry in planned:
        _hand_sequences(model.get_submodule(entry.fqn), entry.how.split(", "), state)


def tensor_of(model: nn.Module) -> TensorParallel | None:
    """The tensor axis of a model, if it has one."""
    return model.__dict__.get(_STATE)


class Divided(ParallelStyle):
    """How a module with parameters of its own is divided, and what it takes and gives.

    Args:
        state: The model's.
        entry: What the plan says of the module.
        module: The module.
    """

    def __init__(self, state: TensorParallel, entry: ParallelModule, module: nn.Module) -> None:
        self.state, (self.style, *more) = state, entry.how.split(", ")
        self.to_sequence, self.keeps_parts = "to sequence" in more, "loss_parallel" in more
        splits = tensor_splits([entry], {entry.fqn: module}, state.num_ranks)
        self.dims = {name.rpartition(".")[2]: dim for name, ((_, dim, _),) in splits.items()}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = Shard(self.dims[name]) if name in self.dims else Replicate()
            # No communication: all ranks have the same values.
            divided = distribute_tensor(parameter.detach(), device_mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
        module.register_forward_pre_hook(self.take)
        module.register_forward_hook(self.give)
        return module

    def take(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The input as a DTensor, in the form that the product needs."""
        given, wanted = self._input_layouts(args[0].ndim - 1)
        taken = self.state.dtensor(args[0], given)
        return (taken if taken.placements == (wanted,) else taken.redistribute(placements=[wanted]), *args[1:])

    def give(self, module: nn.Module, args: Any, output: DTensor) -> Tensor:
        """The output as a plain tensor, in the form that the code after it expects."""
        wanted = self._output_layout(output)
        if output.placements != (wanted,):
            output = output.redistribute(placements=[wanted])
        return output if self.keeps_parts and not self.state.is_whole else output.to_local()

    def _input_layouts(self, last: int) -> tuple[Placement, Placement]:
        """In which form the input comes, and in which it is needed."""
        state = self.state
        if self.style == "sequence":
            return (Shard(_SEQUENCE_DIM) if state.on_parts else Replicate(),) * 2
        if self.style == "replicate":  # heads are independent, as rows of a batch are
            return (Replicate() if state.is_whole else Shard(0),) * 2
        if self.style.startswith("rowwise"):
            return Replicate() if state.is_whole or self.style != "rowwise" else Shard(last), Shard(last)
        return Replicate(), Replicate()

    def _output_layout(self, output: DTensor) -> Placement:
        if self.style in ("sequence", "replicate"):
            return output.placements[0]
        if self.style == "colwise" and not self.state.is_whole:
            return Shard(output.ndim - 1)
        return Shard(_SEQUENCE_DIM) if self.to_sequence and self.state.on_parts else Replicate()


class LocalHeads(ReplacedForward):
    """The forward of a module whose code reads the number of heads: it sees that of this rank's.

    Args:
        state: The model's.
        module: The module.
        numbers: Its attributes that are numbers of heads, with those of this rank.
        forward: Its own forward.
    """

    def __init__(
        self, state: TensorParallel, module: nn.Module, numbers: Mapping[str, int], forward: Callable[..., Any]
    ) -> None:
        super().__init__(forward)
        self.state, self.module, self.numbers = state, module, numbers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self.state.is_whole:
            return self.__wrapped__(*args, **kwargs)
        before = {name: getattr(self.module, name) for name in self.numbers}
        try:
            for name, number in self.numbers.items():
                setattr(self.module, name, number)
            with LocalSizes(self.state.num_ranks):
                return self.__wrapped__(*args, **kwargs)
        finally:
            for name, number in before.items():
                setattr(self.module, name, number)


class LocalSizes(TorchFunctionMode):
    """Lets code reshape a part of the features by the sizes of all of them.

    `x.view(batch, length, num_heads, width // num_heads)` and back: where the sizes are those of a tensor that is
    `num_ranks` times as large, the first that is not the tensor's own is divided. Without it that would be an error.

    Args:
        num_ranks: Of the tensor axis.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks = num_ranks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, with changed sizes if it reshapes."""
        if func in (Tensor.view, Tensor.reshape, torch.reshape) and len(args) > 1:
            args = (args[0], *self._local(args[0], args[1:]))
        elif func is Tensor.unflatten and len(args) == 3:
            tensor, dim, sizes = args
            args = (tensor, dim, self._divided(list(sizes), 0, tensor.shape[dim]))
        return func(*args, **(kwargs or {}))

    def _local(self, tensor: Tensor, given: tuple[Any, ...]) -> tuple[Any, ...]:
        sizes = list(given[0]) if isinstance(given[0], tuple | list) else list(given)
        if not all(isinstance(size, int | torch.SymInt) for size in sizes) or -1 in sizes:
            return given
        pairs = enumerate(zip(sizes, tensor.shape, strict=False))
        first = next((place for place, (size, own) in pairs if size != own), min(len(sizes), tensor.ndim) - 1)
        return (self._divided(sizes, first, tensor.numel()),)

    def _divided(self, sizes: list[Any], place: int, numel: Any) -> list[Any]:
        if sizes and math.prod(sizes) == numel * self.num_ranks and sizes[place] % self.num_ranks == 0:
            sizes[place] = sizes[place] // self.num_ranks
        return sizes


def _hand_sequences(module: nn.Module, how: list[str], state: TensorParallel) -> None:
    """Divide and join the sequences that a module takes and gives."""

    def split(tensor: Tensor) -> Tensor:
        # A length that does not divide, as when text is generated, stays whole.
        state.on_parts = not state.is_whole and tensor.shape[_SEQUENCE_DIM] % state.num_ranks == 0
        return state.change(tensor, Replicate(), Shard(_SEQUENCE_DIM)) if state.on_parts else tensor

    def join(tensor: Tensor) -> Tensor:
        return state.change(tensor, Shard(_SEQUENCE_DIM), Replicate()) if state.on_parts else tensor

    def split_again(tensor: Tensor) -> Tensor:
        return state.change(tensor, Replicate(), Shard(_SEQUENCE_DIM)) if state.on_parts else tensor

    def before(change: Callable[[Tensor], Tensor], _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        return args, {**kwargs, name: change(kwargs[name])}

    def after(change: Callable[[Tensor], Tensor], _module: nn.Module, _args: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    for name, change in (("whole sequence", join), ("split sequence", split)):
        if name in how:
            module.register_forward_pre_hook(functools.partial(before, change), prepend=True, with_kwargs=True)
    for name, change in (("split output", split_again), ("join sequence", join)):
        if name in how:
            module.register_forward_hook(functools.partial(after, change))


@functools.cache
def _watch_losses() -> None:
    """Let cross-entropy take divided logits, in forward and backward, from now on; of others nothing changes."""
    ExitStack().enter_context(loss_parallel())
