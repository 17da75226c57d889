"""See that backward gathers a group's parameters again, whatever shape its outputs have."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise import compat


def gather_before_backward(module: nn.Module, output: Any, since: int) -> None:
    """Gather the group of `module` again before anything that made `output` runs backward.

    FSDP2 hooks the output tensors it finds. An in-place operation on a returned view replaces the hooked tensor in the
    graph, and tensors inside plain objects, or before torch 2.13 dataclasses, are not found at all; backward would
    then run on freed parameters. For a view the hook sits on the operation that made its base.

    Args:
        module: A module of the group.
        output: Whatever it returned.
        since: Autograd's sequence number when the module was entered. A view of something older is an input passed
            through: its base was not made by this group, and runs backward long after it.
    """

    def gather(*_: Any) -> None:
        compat.pre_backward(module)

    for tensor in differentiable(output):
        base = compat.base_of_view(tensor)
        maker = None if base is None else base.grad_fn
        if maker is not None and compat.sequence_number_of(maker) >= since:
            maker.register_prehook(gather)
        else:
            tensor.register_hook(gather)


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
