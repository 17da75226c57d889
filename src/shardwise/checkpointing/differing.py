"""How two checkpoints differ, in names, shapes, dtypes and values, whatever their formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpointing.contents import Contents, StoredTensor
from shardwise.checkpointing.copying import boxes_of
from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.reading.requests import read_box
from shardwise.checkpointing.state.sections import with_our_names
from shardwise.progress import NoProgress, Progress

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """One tensor that both checkpoints have, and that is not the same in both."""

    name: str
    what: str
    """`shape`, `dtype` or `values`."""
    a: str
    b: str
    largest: float | None = None
    """The largest absolute difference of any element; nan where only one of the two is nan."""
    num_elements: int = 0
    """How many elements differ."""

    def __str__(self) -> str:
        if self.what != "values":
            return f"{self.name}: {self.what} {self.a} against {self.b}"
        return f"{self.name}: {self.num_elements:,} elements differ, by at most {self.largest:.6g} ({self.a}, {self.b})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How two checkpoints differ."""

    a: str
    b: str
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    values: tuple[str, ...]
    """Names of small values that are not equal."""
    num_equal: int
    """Tensors that are the same, bit by bit."""

    @property
    def is_empty(self) -> bool:
        """Whether the two hold the same."""
        return not (self.only_in_a or self.only_in_b or self.tensors or self.values)

    @property
    def largest(self) -> TensorDifference | None:
        """The tensor with the largest difference of an element."""
        found = [tensor for tensor in self.tensors if tensor.largest is not None]
        return max(found, key=lambda tensor: (tensor.largest != tensor.largest, tensor.largest), default=None)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "a": self.a,
            "b": self.b,
            "equal": self.is_empty,
            "only_in_a": list(self.only_in_a),
            "only_in_b": list(self.only_in_b),
            "tensors": [
                {name: getattr(tensor, name) for name in TensorDifference.__slots__} for tensor in self.tensors
            ],
            "values": list(self.values),
            "num_equal": self.num_equal,
        }

    def __str__(self) -> str:
        lines = [f"{self.num_equal} tensors are equal, {len(self.tensors)} differ"]
        lines += [f"only in {self.a}: {name}" for name in self.only_in_a]
        lines += [f"only in {self.b}: {name}" for name in self.only_in_b]
        lines += [str(tensor) for tensor in self.tensors]
        lines += [f"{name}: not the same value" for name in self.values]
        if (largest := self.largest) is not None:
            lines.append(f"largest difference: {largest.largest:.6g} in {largest.name}")
        return "\n".join(lines)


def diff_checkpoints(
    a: str | Path, b: str | Path, *, model: nn.Module | None = None, progress: Progress | None = None
) -> Difference:
    """Compare two checkpoints, of any formats and any numbers of ranks.

    A checkpoint that holds weights alone is compared with the weights of the other.

    Args:
        a: One of them.
        b: The other.
        model: Its definition, where one of them does not name its parameters.
        progress: Is told the bytes as they are compared.

    Ranks:
        Local. At most some 128 MiB of tensors are in memory.
    """
    left, right = (with_our_names(open_checkpoint(path, model=model)) for path in (a, b))
    if _only_weights(left) != _only_weights(right):
        left, right = _weights(left), _weights(right)
    listener = progress or NoProgress()
    shared = [name for name in left.tensors if name in right.tensors]
    listener.start(sum(left.tensors[name].num_bytes for name in shared), "comparing")
    found: list[TensorDifference] = []
    try:
        for name in shared:
            found += _tensor_differences(left, right, name)
            listener.advance(left.tensors[name].num_bytes)
    finally:
        listener.finish()
    return Difference(
        a=str(a),
        b=str(b),
        only_in_a=tuple(name for name in _names(left) if name not in _names(right)),
        only_in_b=tuple(name for name in _names(right) if name not in _names(left)),
        tensors=tuple(found),
        values=tuple(
            name for name, value in left.values.items() if name in right.values and value != right.values[name]
        ),
        num_equal=len(shared) - len({difference.name for difference in found}),
    )


def _names(contents: Contents) -> dict[str, None]:
    return dict.fromkeys((*contents.tensors, *contents.values))


def _only_weights(contents: Contents) -> bool:
    return all(name.startswith("model.") for name in _names(contents))


def _weights(contents: Contents) -> Contents:
    tensors = {name: tensor for name, tensor in contents.tensors.items() if name.startswith("model.")}
    return replace(contents, tensors=tensors, values={})


def _tensor_differences(left: Contents, right: Contents, name: str) -> Iterator[TensorDifference]:
    one, other = left.tensors[name], right.tensors[name]
    if one.shape != other.shape:
        yield TensorDifference(name=name, what="shape", a=str(list(one.shape)), b=str(list(other.shape)))
        return
    if one.dtype != other.dtype:
        yield TensorDifference(name=name, what="dtype", a=one.dtype, b=other.dtype)
    largest, count = _compare(left, right, one, other)
    if count:
        yield TensorDifference(
            name=name, what="values", a=one.dtype, b=other.dtype, largest=largest, num_elements=count
        )


def _compare(left: Contents, right: Contents, one: StoredTensor, other: StoredTensor) -> tuple[float, int]:
    largest, count = 0.0, 0
    for box in boxes_of(one):
        most, differing = _compare_parts(read_box(left, one, box), read_box(right, other, box))
        largest = most if most != most or most > largest else largest
        count += differing
    return largest, count


def _compare_parts(one: torch.Tensor, other: torch.Tensor) -> tuple[float, int]:
    """The largest difference and how many elements differ; bits decide where the dtype is the same."""
    import torch

    if one.dtype == other.dtype and torch.equal(_bits(one), _bits(other)):
        return 0.0, 0
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    differs = (a != b) & ~(a.isnan() & b.isnan())
    count = int(differs.sum())
    if not count:
        return 0.0, 0
    distances = (a - b).abs()[differs]
    return (float("nan") if bool(distances.isnan().any()) else float(distances.max())), count


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.reshape(-1).contiguous().view(torch.uint8)
