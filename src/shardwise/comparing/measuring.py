"""The distance between two tensors, on the scale of the larger values in them. No communication."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# A gradient below this part of the model's largest is judged on the scale of the large one: where
# contributions cancel (a key bias under softmax), what is left is the rounding error of large numbers.
GRADIENT_FLOOR = 0.1
# An adaptive step is at most a few times the typical update; see `step_slack`.
SLACK_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class Gap:
    """The worst element of a comparison."""

    relative: float
    """Largest difference over the tensor's scale; infinite when only one side has a value."""
    excess: float
    """Largest difference over what is allowed there; above 1 is a difference."""
    sharded: float | None
    reference: float | None
    furthest: float = math.inf
    """Largest absolute difference."""

    @property
    def within(self) -> bool:
        """Whether the tolerance allows it."""
        return self.excess <= 1


def measure(
    sharded: Tensor | None,
    reference: Tensor | None,
    allowed: float,
    *,
    floor: float = 0.0,
    slack: Tensor | None = None,
) -> Gap:
    """Compare two tensors on the scale of the reference's largest value.

    Args:
        sharded: From the sharded run, whole; None when there is none.
        reference: From one process; None when there is none.
        allowed: Relative tolerance; integers and booleans must be equal.
        floor: The scale is at least this.
        slack: Absolute difference allowed in each element on top.
    """
    if sharded is None or reference is None:
        far = 0.0 if sharded is reference else math.inf
        return Gap(far, far, _at_largest(sharded), _at_largest(reference), far)
    if sharded.shape != reference.shape:
        return Gap(math.inf, math.inf, _at_largest(sharded), _at_largest(reference))
    if reference.numel() == 0:
        return Gap(0.0, 0.0, 0.0, 0.0, 0.0)
    ours, theirs = _flat(sharded), _flat(reference)
    difference = _distance(ours, theirs)
    scale = max(largest(reference), floor)
    exact = not (reference.is_floating_point() or reference.is_complex())
    limit = torch.full_like(difference, 0.0 if exact else allowed * scale)
    if slack is not None:
        limit = limit + slack
    excess = torch.where(difference == 0, 0.0, difference / limit)
    worst = int(excess.argmax())
    furthest = float(difference.max())
    relative = furthest / scale if scale else (0.0 if furthest == 0 else math.inf)
    return Gap(relative, float(excess[worst]), float(ours[worst]), float(theirs[worst]), furthest)


def step_slack(sharded: Tensor, reference: Tensor, largest_update: float) -> Tensor:
    """How far one optimizer step may drive each entry apart, given both gradients.

    An adaptive optimizer divides a gradient by its own size, so a relative error of r in a gradient becomes
    about r times the update; where a gradient is nothing but rounding noise, its very sign is arbitrary.
    """
    ours, theirs = _flat(sharded), _flat(reference)
    relative = ((ours - theirs).abs() / theirs.abs()).nan_to_num(0.0, 1.0).clamp(max=1.0)
    return SLACK_FACTOR * largest_update * relative


def largest(tensor: Tensor | None) -> float:
    """The largest finite magnitude; 0 when there is none."""
    if tensor is None:
        return 0.0
    flat = _flat(tensor).abs()
    finite = flat[flat.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def largest_change(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """The largest update of any parameter in a step."""
    return max((largest(after[name].detach() - before[name]) for name in after), default=0.0)


def _distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """Absolute difference; NaN or infinity is equal in the same place on both sides, else infinitely far."""
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return torch.where(same, 0.0, (ours - theirs).abs().nan_to_num(math.inf, math.inf))


def _at_largest(tensor: Tensor | None) -> float | None:
    if tensor is None:
        return None
    flat = _flat(tensor)
    return float(flat[flat.abs().argmax()]) if flat.numel() else 0.0


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().reshape(-1)
    if tensor.is_complex():
        return torch.view_as_real(tensor.to(torch.complex128)).reshape(-1)
    return tensor.to(torch.float64)
