"""Criteria of parity: differences, tolerances, likely causes, and the verdict."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from shardwise.planning.plan import Plan

Quantity = Literal["weight", "tie", "loss", "gradient", "parameter", "buffer"]
# The order of events in a step: the first difference is the one to report.
ORDER: tuple[Quantity, ...] = ("weight", "tie", "loss", "gradient", "parameter", "buffer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """Deviation of one number or tensor of the sharded run from one process."""

    quantity: Quantity
    name: str
    """FQN of the parameter or buffer; empty for the loss."""
    step: int
    """Counted from 1; 0 is before the first step."""
    rank: int
    """The rank that found it."""
    sharded: float | None
    """Value at the worst element; None if there is no gradient."""
    reference: float | None
    relative: float
    """Largest difference over the tensor's scale; infinite when only one side has a value."""
    within: bool
    """Whether the tolerance allows it."""

    def __str__(self) -> str:
        subject = f"{self.quantity} of {self.name}" if self.name else self.quantity
        return f"{self.relative:.1e} ({subject}, step {self.step}, rank {self.rank})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first difference, its module, and its likely cause."""

    deviation: Deviation
    module: str
    """FQN and class of the module that owns it."""
    num_others: int
    """Number of other deviations of this quantity in the same step."""
    cause: str

    def __str__(self) -> str:
        seen = self.deviation
        subject = f"{seen.quantity} of `{seen.name}`" if seen.name else seen.quantity
        when = f"at step {seen.step}" if seen.step else "before the first step"
        others = f", and {self.num_others} more like it" if self.num_others else ""
        lines = [
            f"{subject} differs {when} on rank {seen.rank}{others}",
            f"sharded {_value(seen.sharded)}, one process {_value(seen.reference)}",
        ]
        if self.module:
            lines.append(f"module {self.module}")
        return "\n".join([*lines, f"likely cause: {self.cause}"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Whether a sharded run equals one process, and how closely. The same on every rank."""

    equal: bool
    steps: int
    world_size: int
    losses: tuple[float, ...]
    """Mean over ranks of the sharded run's loss, step by step."""
    reference_losses: tuple[float, ...]
    """Mean over ranks of the losses in one process, step by step."""
    tolerance: float
    """Allowed difference, relative to a tensor's largest value."""
    tolerance_reason: str
    worst: tuple[Deviation, ...]
    """The largest deviation of each quantity, whether allowed or not."""
    first_difference: Difference | None
    plan: str
    """One line about how the model was sharded."""

    def worst_of(self, quantity: Quantity) -> Deviation | None:
        """The largest deviation of one quantity; None if it was not compared.

        Ranks:
            Local.
        """
        return next((deviation for deviation in self.worst if deviation.quantity == quantity), None)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, for JSON; infinity and NaN become None.

        Ranks:
            Local.
        """
        return _for_json(asdict(self))

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "DIFFERENT"
        lines = [f"parity: {verdict} after {self.steps} steps on {self.world_size} ranks"]
        if self.first_difference is not None:
            lines += ["  " + line for line in str(self.first_difference).splitlines()]
        lines.append("  loss       " + "  ".join(f"{loss:.6g}" for loss in self.losses))
        if not self.equal:
            lines.append("  one process " + "  ".join(f"{loss:.6g}" for loss in self.reference_losses))
        lines += [f"  worst {deviation.quantity:<10} {deviation}" for deviation in self.worst]
        lines.append(f"  tolerance  {self.tolerance:.0e}: {self.tolerance_reason}")
        return "\n".join([*lines, f"  plan       {self.plan}"])


def _for_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _for_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _value(value: float | None) -> str:
    return "none" if value is None else f"{value:.8g}"


SCALE_TOLERANCE = 0.02


_CAUSES = {
    "weight": "the two models started from different weights: build_model() draws from something other than torch's "
    "and Python's generators, or sharding changed a value",
    "tie": "two names of one tensor became two tensors when the model was sharded: the tie is broken",
    "first loss": "the weights are equal, so the forward itself differs: a buffer that was not carried over, random "
    "numbers drawn in another order, inputs or outputs cast, or code that depends on the rank",
    "loss": "gradients and parameters agreed until now, so this forward used other values than the optimizer wrote: a "
    "gathered copy that outlived optimizer.step(), or state kept on the module outside its buffers",
    "untouched": "gradients agree but the optimizer did not change it: the optimizer holds other tensors than the "
    "model (built before sharding, or while the model was unsharded)",
    "parameter": "gradients agree and the update does not: an optimizer that looks at whole tensors (norms, factored "
    "or orthogonalized updates) saw only this rank's shard",
    "buffer": "a buffer is each rank's own: it was synchronized, cast, or updated more or less often",
}


def likely_cause(
    deviations: Sequence[Deviation],
    *,
    num_compared: int,
    world_size: int,
    tied: frozenset[str],
    low_precision: bool,
    usual_mistake: bool = False,
) -> str:
    """Return the likely cause of the deviations of one quantity in one step, in the order of forward.

    `usual_mistake`: the gradient equals this rank's own before averaging; the parameter did not change in the step.
    """
    first = deviations[0]
    if first.quantity == "gradient":
        cause = _cause_in_gradient(deviations, num_compared, world_size, tied, is_local=usual_mistake)
    elif first.quantity == "loss" and first.step == 1:
        cause = _CAUSES["first loss"]
    elif first.quantity == "parameter" and usual_mistake:
        cause = _CAUSES["untouched"]
    else:
        cause = _CAUSES[first.quantity]
    is_slight = math.isfinite(first.relative) and first.relative < 0.5 and first.quantity not in ("weight", "tie")
    if low_precision and is_slight:
        rounding = "possibly nothing but rounding: the sharded run computes in 16 bits (pass tolerance=...)"
        return f"{rounding}; else {cause}"
    return cause


def _cause_in_gradient(
    deviations: Sequence[Deviation], num_compared: int, world_size: int, tied: frozenset[str], *, is_local: bool
) -> str:
    first = deviations[0]
    if first.sharded is None:
        return (
            "the gradient never reached the shard: the module's parameters were used without calling the module, so "
            "FSDP2's hooks did not run (name the method in entry_points), or the graph was cut"
        )
    if first.reference is None:
        return (
            "one process has no gradient here, the sharded run has one: zeros were reduced for a parameter no "
            'rank used, which weight decay then shrinks (unused_parameters="skip" keeps them at None)'
        )
    if is_local and world_size > 1:
        return "it is this rank's own gradient, not averaged over ranks: the parameter was left out of sharding"
    ratio = _common_ratio(deviations)
    if ratio is not None and world_size > 1:
        if abs(ratio / world_size - 1) < SCALE_TOLERANCE:
            return f"gradients are {world_size} times too large: summed over ranks instead of averaged"
        if abs(ratio * world_size - 1) < SCALE_TOLERANCE:
            return f"gradients are {world_size} times too small: divided by the number of ranks twice"
        return f"gradients are {ratio:.4g} times those of one process: a wrong divisor (micro-steps, tokens)"
    if {deviation.name for deviation in deviations} <= tied:
        return "only parameters with several names differ: a use of a tied weight missed the shared gradient"
    if len(deviations) < num_compared:
        return (
            "some gradients agree: the ones that do not belong to modules that ran another number of times, were "
            "freed and gathered in between, or were changed in place"
        )
    return "every gradient differs: ranks saw other batches than one process, or the backward differs"


def _common_ratio(deviations: Sequence[Deviation]) -> float | None:
    """Return the common factor of all deviations, if any."""
    ratios = [d.sharded / d.reference for d in deviations if d.sharded is not None and d.reference]
    if not ratios or len(ratios) < len(deviations):
        return None
    middle = median(ratios)
    shared = math.isfinite(middle) and middle > 0 and abs(middle - 1) > SCALE_TOLERANCE
    close = all(abs(ratio - middle) <= SCALE_TOLERANCE * abs(middle) for ratio in ratios)
    return middle if shared and close else None


# Tensors whose gradients are below this fraction of the model's largest are compared on that scale: where
# contributions cancel (a key bias under softmax), the remainder is the rounding error of large numbers.
GRADIENT_FLOOR = 0.1
# An adaptive step is at most a few times the typical update; see `step_slack`.
SLACK_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class Gap:
    """The worst element of a comparison."""

    relative: float
    """Largest difference over the tensor's scale; infinite when only one side has a value."""
    excess: float
    """Largest ratio of difference to allowed difference; above 1 is not allowed."""
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
    """Compare two tensors on the scale of the reference's largest value, or of `floor` if that is larger.

    Integers and booleans must be equal; `slack` is an additional absolute difference allowed in each element.
    """
    if sharded is None or reference is None:
        far = 0.0 if sharded is reference else math.inf
        return Gap(far, far, _at_largest(sharded), _at_largest(reference), far)
    if sharded.shape != reference.shape:
        return Gap(math.inf, math.inf, _at_largest(sharded), _at_largest(reference))
    if reference.numel() == 0:
        return Gap(0.0, 0.0, 0.0, 0.0, 0.0)
    ours, theirs = _flat(sharded), _flat(reference)
    # NaN or infinity is equal at the same place on both sides, else an infinite difference.
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    difference = torch.where(same, 0.0, (ours - theirs).abs().nan_to_num(math.inf, math.inf))
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
    """Return the allowed difference of each element after one optimizer step, given both gradients.

    An adaptive optimizer divides a gradient by its own size, so a relative error of r in a gradient becomes
    about r times the update; if a gradient is only rounding noise, even its sign is arbitrary.
    """
    ours, theirs = _flat(sharded), _flat(reference)
    relative = ((ours - theirs).abs() / theirs.abs()).nan_to_num(0.0, 1.0).clamp(max=1.0)
    return SLACK_FACTOR * largest_update * relative


def largest(tensor: Tensor | None) -> float:
    """The largest finite magnitude; 0 if there is none."""
    if tensor is None:
        return 0.0
    flat = _flat(tensor).abs()
    finite = flat[flat.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


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


ORDER_REASON = (
    "{dtype}; ranks add up in another order than one process; tenfold after the first step, gradients on the scale "
    "of at least a tenth of the model's largest"
)
STORAGE_REASON = "{dtype} storage; a sum taken in another order rounds to the neighboring value"
COMPUTE_REASON = "{dtype} compute against one process in storage precision; every product is rounded"
# Relative to a tensor's largest value: with 16-bit storage a few units in the last place, with 16-bit compute the
# accumulated rounding of a forward and backward.
STORAGE = {"bfloat16": 0.02, "float16": 0.005}
COMPUTE = {"bfloat16": 0.1, "float16": 0.02}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed difference relative to a tensor's largest value, and why it cannot be smaller."""

    relative: float
    reason: str
    low_precision: bool = False
    """Whether the sharded run computes in fewer bits than one process."""
    growth: float = 1.0
    """Factor from the second step on: an adaptive optimizer magnifies rounding."""

    def at(self, step: int) -> float:
        """Return the tolerance of a step, counted from 1."""
        return self.relative * (self.growth if step > 1 else 1.0)


def tolerance_for(plan: Plan, asked: float | None = None) -> Tolerance:
    """Return the tolerance for the plan's lowest-precision dtype, unless set by the user."""
    storage = {parameter.dtype for parameter in plan.parameters}
    narrowed = {group.param_dtype for group in plan.groups if set(group.storage_dtypes) - {group.param_dtype}}
    narrowed &= COMPUTE.keys()
    if asked is not None:
        return Tolerance(asked, "as asked", low_precision=bool(narrowed))
    for dtype, relative in COMPUTE.items():
        if dtype in narrowed:
            return Tolerance(relative, COMPUTE_REASON.format(dtype=dtype), low_precision=True)
    for dtype, relative in STORAGE.items():
        if dtype in storage:
            return Tolerance(relative, STORAGE_REASON.format(dtype=dtype))
    if storage and storage <= {"float64", "complex128"}:
        return Tolerance(1e-10, ORDER_REASON.format(dtype="float64"), growth=10.0)
    return Tolerance(1e-5, ORDER_REASON.format(dtype="float32"), growth=10.0)
