"""See that backward gathers a group's parameters again, whatever shape its outputs have."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from shardwise import compat


def leave_hooked(module: nn.Module, args: Any, output: Any) -> Any:
    """Run FSDP2's post-forward of `module`, and hook the outputs that it would lose.

    FSDP2 hooks the output tensors it finds. An in-place operation on a returned view replaces the hooked tensor in the
    graph, and tensors inside plain objects are not found at all; backward would then run on freed parameters.
    """
    missed = [*_views(output), *_hidden(output)] if torch.is_grad_enabled() else []
    with _quiet_about_views() if missed else nullcontext():
        left = compat.leave_forward(module, args, output)
    gather_before_backward(module, missed)
    return left


def gather_before_backward(module: nn.Module, tensors: list[torch.Tensor]) -> None:
    """Gather the group of `module` before the operations that made `tensors` run backward."""

    def gather(gradients: Any) -> None:
        compat.pre_backward(module)

    for tensor in tensors:
        base = compat.base_of_view(tensor)
        node = (tensor if base is None else base).grad_fn
        if node is not None:
            node.register_prehook(gather)


def differentiable(output: Any) -> list[torch.Tensor]:
    """Every tensor in an output that backward can start from, also in plain objects."""
    if not torch.is_grad_enabled():
        return []
    return [tensor for tensor in (*find_tensors(output), *_hidden(output)) if tensor.requires_grad]


def find_tensors(output: Any) -> Iterator[torch.Tensor]:
    """Tensors in the containers that FSDP2 looks into."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from find_tensors(value)
    elif isinstance(output, list | tuple | set):
        for value in output:
            yield from find_tensors(value)
    elif hasattr(output, "__dataclass_fields__") and not isinstance(output, type):
        for name in output.__dataclass_fields__:
            yield from find_tensors(getattr(output, name, None))


def _views(output: Any) -> Iterator[torch.Tensor]:
    for tensor in find_tensors(output):
        if tensor.requires_grad and compat.base_of_view(tensor) is not None:
            yield tensor


def _hidden(output: Any, find: Callable[[Any], Iterator[torch.Tensor]] = find_tensors) -> Iterator[torch.Tensor]:
    """Tensors held by plain objects, which FSDP2 does not look into."""
    if output is None or isinstance(output, torch.Tensor | nn.Module | str | bytes | int | float | type):
        return
    if isinstance(output, dict):
        for value in output.values():
            yield from _hidden(value)
    elif isinstance(output, list | tuple | set):
        for value in output:
            yield from _hidden(value)
    elif not hasattr(output, "__dataclass_fields__"):
        for value in list(getattr(output, "__dict__", {}).values()):
            yield from (tensor for tensor in find(value) if tensor.requires_grad)


@contextmanager
def _quiet_about_views() -> Iterator[None]:
    """FSDP2 warns of the very thing that is taken care of here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        yield


