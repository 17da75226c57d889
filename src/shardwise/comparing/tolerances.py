"""How close is equal: the tolerance a plan's dtypes call for, with the reason. No communication."""

from dataclasses import dataclass

from shardwise.planning.plan import Group, Plan

ORDER_REASON = (
    "{dtype}; ranks add up in another order than one process; tenfold after the first step, gradients on the scale "
    "of at least a tenth of the model's largest"
)
STORAGE_REASON = "{dtype} storage; a sum taken in another order rounds to the neighbouring value"
COMPUTE_REASON = "{dtype} compute against one process in storage precision; every product is rounded"
# Relative to a tensor's largest value. A 16-bit storage dtype is off by a few units in the last place, 16-bit
# compute by the accumulated rounding of a whole forward and backward.
STORAGE = {"bfloat16": 0.02, "float16": 0.005}
COMPUTE = {"bfloat16": 0.1, "float16": 0.02}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed difference relative to a tensor's largest value, and why it cannot be smaller."""

    relative: float
    reason: str
    low_precision: bool = False
    """The sharded run computes in fewer bits than one process."""
    growth: float = 1.0
    """Factor from the second step on: an adaptive optimizer magnifies rounding."""

    def at(self, step: int) -> float:
        """What is allowed in a step, counted from 1."""
        return self.relative * (self.growth if step > 1 else 1.0)


def tolerance_for(plan: Plan, asked: float | None = None) -> Tolerance:
    """The tolerance that the plan's coarsest dtype calls for, unless the user asked for one."""
    storage = {parameter.dtype for parameter in plan.parameters}
    narrowed = {group.param_dtype for group in plan.groups if _narrows(group)}
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


def _narrows(group: Group) -> bool:
    return group.param_dtype in COMPUTE and any(dtype != group.param_dtype for dtype in group.storage_dtypes)
