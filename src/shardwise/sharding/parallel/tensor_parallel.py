"""Tensor parallelism: ranks of the tensor axis have parts of each matrix and share the matrix products of one batch.

Inputs and outputs of split modules are plain tensors. Between a layer split by its outputs and one split by its inputs,
these are parts of the features; with sequence parallelism, they are parts of the sequence between modules of a block.
All decisions are made in `planning.tensor`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel, parallelize_module
from torch.overrides import TorchFunctionMode

from shardwise import compat
from shardwise.distributed.agreement import raise_on_all_ranks
from shardwise.distributed.mesh import tensor_mesh
from shardwise.errors import ShardError
from shardwise.models.modes import trial_forward
from shardwise.models.nested_tensors import find_tensors
from shardwise.planning.plan import ParallelModule
from shardwise.planning.tensor import STYLES, VERIFY, tensor_splits
from shardwise.planning.tracing import innermost_module
from shardwise.sharding.blocks import ReplacedForward, compile_inside_recomputation, replace_innermost
from shardwise.sharding.inventory import fingerprint
from shardwise.sharding.parallel.context_parallel import context_of
from shardwise.sharding.parallel.expert_parallel import SelectingForward, divide_parameters

_STATE = "_shardwise_tensor"  # in the module's own dict
_SEQUENCE_DIM = 1


class TensorParallel:
    """Tensor-parallel state of one model, with the form of tensors between its modules.

    Args:
        model: The model.
        mesh: All ranks of the model.
        axis: The tensor axis.
        verify: Compare the first forward with one on full tensors.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, axis: DeviceMesh, *, verify: bool) -> None:
        self.model, self.mesh, self.axis = model, mesh, axis
        self.num_ranks = axis.size()
        self.is_whole = False
        """Whether tensors between modules are full, which is correct for any code in between."""
        self.on_parts = False
        """Whether hidden states between the modules of a block are parts of the sequence."""
        self.numbers: list[tuple[nn.Module, str, int]] = []
        """Attributes with the number of this rank's heads, and their values for all heads."""
        self.run: ForwardRecord | None = None
        """Record of a forward that is compared with another."""
        self.to_verify = {False, True} if verify else set()
        """Grad modes in which to verify the next forward."""
        self.checks_all_inputs = False
        """Whether to compare inputs between ranks in every forward, instead of decreasingly often."""
        self.num_forwards = 0
        self.digest: Tensor | None = None
        """Digest of the inputs of the last forward."""

    def swap_numbers(self) -> None:
        """Swap the number of all heads and of this rank's heads in the attributes of modules."""
        for place, (module, name, number) in enumerate(self.numbers):
            self.numbers[place] = (module, name, getattr(module, name))
            setattr(module, name, number)

    def dtensor(self, tensor: Tensor, placement: Placement) -> DTensor:
        """Return a DTensor with a plain tensor as this rank's part."""
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self.axis, [placement], run_check=False)

    def change(self, tensor: Tensor, given: Placement, wanted: Placement) -> Tensor:
        """Redistribute a plain tensor from one placement to another; backward redistributes its gradient back.

        Ranks:
            Collective over the tensor axis.
        """
        return self.dtensor(tensor, given).redistribute(placements=[wanted]).to_local()

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Compare the inputs of a forward between the ranks, and verify the first forward.

        Raises:
            ShardError: The ranks of a tensor group have different inputs, or the code does not support parts.

        Ranks:
            Collective over the tensor axis in some of the first forwards, then in one of 64.
        """
        if self.run is not None or compat.are_collectives_local():
            return
        self.num_forwards += 1
        self.digest = digest_of((args, kwargs), self.axis)
        is_due = self.checks_all_inputs or self.num_forwards % 64 == 0 or self.num_forwards in (1, 2, 4, 8, 16, 32)
        if is_due and (error := different_inputs(self)) is not None:
            raise error
        context = context_of(self.model)
        if torch.is_grad_enabled() in self.to_verify and (context is None or not context.must_verify):
            verify(self, module, args, kwargs)
            self.to_verify -= {False, torch.is_grad_enabled()}


def apply_tensor_parallel(model: nn.Module, planned: Iterable[ParallelModule], mesh: DeviceMesh) -> None:
    """Split the planned modules.

    Args:
        model: Unsharded model with plain parameters, equal on all ranks, or with parameters split by the user.
        planned: Tensor-parallel modules of its plan.
        mesh: All ranks of the model.

    Ranks:
        Local. Forwards communicate over the tensor axis.
    """
    entries = {entry.fqn: entry for entry in planned if entry.how}
    divided = (parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
    axis = tensor_mesh(mesh) or next(divided)
    verify = "" in entries and VERIFY in entries[""].how.split(", ")
    state = model.__dict__[_STATE] = TensorParallel(model, mesh, axis, verify=verify)
    modules = {name: model.get_submodule(name) for name in entries}
    styles: dict[str, ParallelStyle] = {}
    for name, entry in entries.items():
        how = entry.how.split(", ")
        if how[0] == "experts":
            divide_parameters(modules[name], axis)
            modules[name].forward = SelectingForward(modules[name], axis)  # pyrefly: ignore[bad-assignment]
        elif how[0] in STYLES:
            styles[name] = Divided(state, entry, modules[name])
        for key, number in (each.split("=") for each in how if "=" in each):
            state.numbers.append((modules[name], key, int(number)))
        if "local sizes" in how:
            replace_innermost(modules[name], functools.partial(LocalForward, state))
        if "loss_parallel" in how:
            _take_divided_logits()
    parallelize_module(model, axis, styles, src_data_rank=None)
    state.swap_numbers()
    for module in model.modules():
        compile_inside_recomputation(module)
    for name, entry in entries.items():
        _hand_over_parts(modules[name], entry.how.split(", "), state)


def hook_tensor_parallel(model: nn.Module, roots: Iterable[nn.Module]) -> None:
    """Check the inputs of each forward of a tensor-parallel model; call it after sharding, so that it runs first."""
    if (state := tensor_of(model)) is not None:
        for root in roots:
            root.register_forward_pre_hook(state.enter, prepend=True, with_kwargs=True)


def tensor_of(model: nn.Module) -> TensorParallel | None:
    """Return the tensor-parallel state of a model, if any."""
    return model.__dict__.get(_STATE)


class Divided(ParallelStyle):
    """Parallel style of a module with its own parameters: placements of parameters, inputs and outputs.

    Args:
        state: Tensor-parallel state of the model.
        entry: The plan's entry of the module.
        module: The module.
    """

    def __init__(self, state: TensorParallel, entry: ParallelModule, module: nn.Module) -> None:
        self.state, (self.style, *more) = state, entry.how.split(", ")
        self.to_sequence, self.keeps_dtensor = "to sequence" in more, "loss_parallel" in more
        splits = tensor_splits([entry], {entry.fqn: module}, state.num_ranks)
        self.dims = {name.rpartition(".")[2]: dim for name, ((_, dim, _),) in splits.items()}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard the module's parameters along the tensor axis. Local: all ranks have the same values."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = Shard(self.dims[name]) if name in self.dims else Replicate()
            # No communication: all ranks have the same values.
            divided = distribute_tensor(parameter.detach(), device_mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
        module.register_forward_pre_hook(self.take)
        module.register_forward_hook(self.give)
        return module

    def take(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the input as a DTensor with the placement that the product needs.

        Ranks:
            Collective over the tensor axis.
        """
        given, wanted = self._input_layouts(args[0].ndim - 1)
        if self.state.run is not None and self.style == "rowwise" and given == wanted:
            self.state.run.takers.append((module, args[0].grad_fn))
        taken = self.state.dtensor(args[0], given)
        return (taken if taken.placements == (wanted,) else taken.redistribute(placements=[wanted]), *args[1:])

    def give(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return the output as a plain tensor with the placement that later code expects.

        Ranks:
            Collective over the tensor axis.
        """
        if not isinstance(output, DTensor):  # a loss's replacement of the logits
            return output
        wanted = self._output_layout(output)
        if output.placements != (wanted,):
            output = output.redistribute(placements=[wanted])
        given = output if self.keeps_dtensor and not self.state.is_whole else output.to_local()
        if self.state.run is not None and self.style == "colwise":
            self.state.run.makers.append(given.grad_fn)
        elif self.state.run is not None and self.style.startswith("rowwise"):
            whole = output.redistribute(placements=[Replicate()]).to_local()
            self.state.run.note_output(self.state.run.names[module], whole)
        return given

    def _input_layouts(self, last: int) -> tuple[Placement, Placement]:
        """Return the placement of the input and the one that the product needs."""
        if self.style == "sequence":
            return (Shard(_SEQUENCE_DIM) if self.state.on_parts else Replicate(),) * 2
        if self.style == "replicate":  # heads are independent, like rows of a batch
            return (Replicate() if self.state.is_whole else Shard(0),) * 2
        if self.style.startswith("rowwise"):
            comes_whole = self.state.is_whole or self.style == "rowwise_split_input"
            return Replicate() if comes_whole else Shard(last), Shard(last)
        return Replicate(), Replicate()

    def _output_layout(self, output: DTensor) -> Placement:
        if self.style in ("sequence", "replicate"):
            return output.placements[0]
        if self.style == "colwise" and not self.state.is_whole:
            return Shard(output.ndim - 1)
        return Shard(_SEQUENCE_DIM) if self.to_sequence and self.state.on_parts else Replicate()


class LocalForward(ReplacedForward):
    """Forward of a module that reshapes parts of features by the full sizes; see `LocalSizes`."""

    def __init__(self, state: TensorParallel, forward: Callable[..., Any]) -> None:
        super().__init__(forward)
        self.state = state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self.state.is_whole:
            return self.__wrapped__(*args, **kwargs)
        with LocalSizes(self.state.num_ranks):
            return self.__wrapped__(*args, **kwargs)


class LocalSizes(TorchFunctionMode):
    """Allows code to reshape a part of the features by the full sizes.

    For `x.view(batch, length, num_heads, width // num_heads)` and back: if the sizes are for a tensor `num_ranks` times
    as large, the first size that differs from the tensor's own is divided. Otherwise this would be an error.

    Args:
        num_ranks: Number of ranks of the tensor axis.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks = num_ranks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, with adapted sizes if it reshapes."""
        if func in (Tensor.view, Tensor.reshape, torch.reshape) and len(args) > 1:
            tensor, *sizes = args
            sizes = list(sizes[0]) if isinstance(sizes[0], tuple | list) else sizes
            if all(isinstance(size, int | torch.SymInt) for size in sizes):
                args = (tensor, self._local(sizes, tensor.shape))
        elif func is Tensor.unflatten and len(args) == 3:
            tensor, dim, sizes = args[0], args[1] % args[0].ndim, list(args[2])
            local = self._local(sizes, tensor.shape[dim : dim + 1])
            # A compiler cannot trace unflatten under a mode.
            return tensor.reshape([*tensor.shape[:dim], *local, *tensor.shape[dim + 1 :]])
        return func(*args, **(kwargs or {}))

    def _local(self, sizes: list[Any], shape: torch.Size) -> list[Any]:
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(sizes, shape, strict=False)))
        if -1 not in sizes and math.prod(sizes) == math.prod(shape) * self.num_ranks and same < len(sizes):
            sizes[same] = sizes[same] // self.num_ranks
        return sizes


def _hand_over_parts(module: nn.Module, how: list[str], state: TensorParallel) -> None:
    """Split and gather sequences in the first argument and the first output of a module."""
    part, whole = Shard(_SEQUENCE_DIM), Replicate()

    def begin(tensor: Tensor) -> Tensor:
        # A length that is not divisible is not split, as in token-by-token generation.
        is_even, context = tensor.shape[_SEQUENCE_DIM] % state.num_ranks == 0, context_of(state.model)
        state.on_parts = is_even and not state.is_whole and not (context is not None and context.is_verifying)
        return split(tensor)

    def split(tensor: Tensor) -> Tensor:
        return state.change(tensor, whole, part) if state.on_parts else tensor

    def join(tensor: Tensor) -> Tensor:
        return state.change(tensor, part, whole) if state.on_parts else tensor

    def before(change: Callable[[Tensor], Tensor], _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        return args, {**kwargs, name: change(kwargs[name])}

    def after(change: Callable[[Tensor], Tensor], _module: nn.Module, _args: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    for name, change in (("whole sequence", join), ("split sequence", begin)):
        if name in how:
            module.register_forward_pre_hook(functools.partial(before, change), prepend=True, with_kwargs=True)
    for name, change in (("split output", split), ("join sequence", join)):
        if name in how:
            module.register_forward_hook(functools.partial(after, change))


@functools.cache
def _take_divided_logits() -> None:
    """Enable cross-entropy of split logits, in forward and backward, for the rest of the process."""
    ExitStack().enter_context(loss_parallel())


class ForwardRecord:
    """Record of one forward: outputs of split layers, and autograd nodes of parts of features.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.samples: list[tuple[str, Tensor]] = []
        """Module names, with some elements of the full output."""
        self.takers: list[tuple[nn.Module, Any]] = []
        """Layers with a part of the features as input, and the autograd node of the input."""
        self.makers: list[Any] = []
        """Autograd nodes of layers with a part of the features as output."""

    def note_output(self, name: str, tensor: Tensor) -> None:
        """Record some elements of a module's output."""
        flat = tensor.detach().flatten()
        self.samples.append((name, flat[:: max(1, flat.numel() // _SAMPLES)]))

    def undivided_input(self) -> tuple[str, str] | None:
        """Return a layer, and a parameter that its part of the features depends on without a split layer in between.

        Each rank would have a part of that parameter's gradient, without a sum over the ranks.
        """
        for module, last in self.takers:
            pending, seen = [(last, 0)], {(maker, 0) for maker in (None, *self.makers)}
            while pending:
                if (step := pending.pop()) in seen:
                    continue
                seen.add(step)
                node, output = step
                parameter = getattr(node, "variable", None)
                if parameter is not None and not isinstance(parameter, DTensor):
                    return self.names[module], f"a parameter of shape {list(parameter.shape)}"
                pending += [edge for edge in compat.edges_before(node, output) if edge[0] is not None]
        return None


_SAMPLES = 4096
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


def verify(state: TensorParallel, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Run the model on full tensors and then on parts, and compare the outputs of split layers.

    Args:
        state: Tensor-parallel state of the model.
        module: The model, or the called network in it.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Raises:
        ShardError: The code between split layers does not support parts, or a gradient would be wrong; on all ranks.

    Ranks:
        Collective. Two forwards.
    """
    runs, error, records = [], None, torch.is_grad_enabled()
    try:
        for state.is_whole in (True, False):
            state.swap_numbers()
            runs.append(run := ForwardRecord(state.model))
            state.run = run
            with trial_forward(module), torch.set_grad_enabled(records and not state.is_whole):
                output = module(*args, **kwargs)
            for tensor in find_tensors(output):
                is_plain = tensor.is_floating_point() and not isinstance(tensor, DTensor)
                if is_plain and 0 not in tensor.stride():  # not an expanded scalar in place of logits
                    run.note_output("the model", tensor)
        error = _difference(*runs)
    except RuntimeError as failure:
        if state.is_whole:
            raise
        name = innermost_module(failure.__traceback__, module)
        error = _wrong(name or "the model", f"it fails: {str(failure).splitlines()[0]}")
    finally:
        if state.is_whole:  # it failed while attributes had the number of all heads
            state.swap_numbers()
        state.run, state.is_whole = None, False
    raise_on_all_ranks(error, group=state.mesh)


def _difference(whole: ForwardRecord, parts: ForwardRecord) -> ShardError | None:
    for (name, expected), (_, found) in zip(whole.samples, parts.samples, strict=False):
        if expected.shape != found.shape or not _is_close(expected, found):
            return _wrong(name, "its output differs from the undivided module's")
    if (found := parts.undivided_input()) is not None:
        return _wrong(found[0], f"its input depends on {found[1]} that is not divided, whose gradient would be wrong")
    return None


def _is_close(expected: Tensor, found: Tensor) -> bool:
    """Whether all elements are close; non-finite elements must be equal."""
    limit = _TOLERANCE.get(expected.dtype, 5e-2) * expected.nan_to_num(0.0, 0.0, 0.0).abs().amax()
    return torch.allclose(found, expected, rtol=0.0, atol=float(limit), equal_nan=True)


def _wrong(name: str, why: str) -> ShardError:
    return ShardError(
        f"{name} does not work with tensor parallelism",
        where=name,
        why=f"{why}. Between a layer that is divided by its outputs and one that is divided by its inputs, code must "
        "work on each feature, or each head, by itself",
        fix='let the layers hand over whole tensors, as in TensorConfig(plan={"*.up": "colwise_gather_output", '
        '"*.down": "rowwise_split_input"}), or leave them as they are: "off"',
    )


def digest_of(inputs: Any, axis: DeviceMesh) -> Tensor:
    """Return a hash of the tensors of a call, on the device of the mesh."""
    tensors = [tensor for tensor in find_tensors(inputs) if type(tensor) is Tensor]
    digest = torch.tensor(hash(tuple(tuple(tensor.shape) for tensor in tensors)), device=axis.device_type)
    for place, tensor in enumerate(tensors, start=1):
        digest += place * fingerprint(tensor).to(digest.device)
    return digest


def different_inputs(state: TensorParallel) -> ShardError | None:
    """Return an error if the inputs of the last forward differ between the ranks of a tensor group.

    Ranks:
        Collective over the tensor axis: one blocking all-reduce of four numbers.
    """
    if state.digest is None:
        return None
    draws = any(isinstance(module, nn.Dropout) and module.p and module.training for module in state.model.modules())
    device = state.digest.device
    random = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    numbers = torch.stack([state.digest, fingerprint(random).to(device) if draws else torch.zeros_like(state.digest)])
    extremes = torch.cat([numbers, ~numbers])  # ~n decreases with n, so that one MAX gives both extremes
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=state.axis.get_group())
    largest, smallest = extremes[:2].tolist(), (~extremes[2:]).tolist()
    if largest == smallest:
        return None
    what = "inputs" if largest[0] != smallest[0] else "random states, and the model has dropout"
    return ShardError(
        f"the ranks of a tensor group have different {what}",
        where="mesh.tensor",
        why="ranks along the tensor axis share the matrix products of one batch: what each computes of another batch "
        "would be added up, without an error",
        fix="give each rank the samples of data_parallel_rank(mesh), from shardwise.distributed.mesh, and seed it with "
        "that number, as shardwise train does",
    )
