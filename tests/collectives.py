"""Record every collective of a stretch of code: its kind, its bytes, and which FSDP group it served."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import compat

_KINDS = {
    "all_gather": "all_gather", "allgather": "all_gather", "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce", "allreduce": "all_reduce", "broadcast": "broadcast",
    "all_to_all": "all_to_all", "alltoall": "all_to_all", "scatter": "scatter",
    "gather": "gather", "barrier": "barrier", "send": "send",
}  # fmt: skip


@dataclass(frozen=True)
class Collective:
    """One call into the process group."""

    kind: str
    num_bytes: int
    """Of all tensors given to it, in and out."""
    served: str
    """FQN of the first parameter of the FSDP group it was called for; empty for any other."""
    in_backward: bool


@dataclass
class Trace:
    """What was recorded, in order."""

    collectives: list[Collective] = field(default_factory=list)

    def count(self, kind: str, *, served: Collection[str] | None = None, in_backward: bool | None = None) -> int:
        """How many of a kind, for the group of these parameters if given, in forward or backward if given."""
        return sum(
            each.kind == kind and (served is None or each.served in served) and in_backward in (None, each.in_backward)
            for each in self.collectives
        )

    def shape(self) -> list[tuple[str, int, bool]]:
        """Kind, bytes and phase of each, to compare with a model whose parameters have other names."""
        return [(each.kind, each.num_bytes, each.in_backward) for each in self.collectives]


@contextmanager
def count_collectives(model: nn.Module) -> Iterator[Trace]:
    """Record while open. Works on every FSDP2 model; ends with everything as it was."""
    trace = Trace()
    recorder = _Recorder(trace)
    names = {id(p): name for name, p in model.named_parameters()}
    wrapped: list[tuple[Any, str, Any]] = []
    for group in compat.param_groups(model):
        first = next(compat.sharded_parameters(group), None)
        for attribute in ("_all_gather_comm", "_reduce_scatter_comm"):
            comm = getattr(group, attribute)
            wrapped.append((group, attribute, comm))
            setattr(group, attribute, _Named(comm, names.get(id(first), ""), recorder))
    try:
        with recorder:
            yield trace
    finally:
        for group, attribute, comm in wrapped:
            setattr(group, attribute, comm)


class _Named:
    """A group's own communication, which says on whose behalf it communicates."""

    def __init__(self, comm: Any, name: str, recorder: "_Recorder") -> None:
        self._comm, self._name, self._recorder = comm, name, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._recorder.served = self._name
        try:
            return self._comm(*args, **kwargs)
        finally:
            self._recorder.served = ""


class _Recorder(TorchDispatchMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace, self.served = trace, ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            name = func._schema.name.split("::")[1].lstrip("_")
            kind = next((kind for prefix, kind in _KINDS.items() if name.startswith(prefix)), None)
            if kind is not None:
                num_bytes = sum(tensor.nbytes for tensor in _tensors((args, kwargs or {})))
                in_backward = torch._C._current_graph_task_id() != -1
                self.trace.collectives.append(Collective(kind, num_bytes, self.served, in_backward))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
