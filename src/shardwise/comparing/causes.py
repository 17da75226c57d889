"""From the shape of a difference to what usually causes it. Rules of thumb, most telling first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from shardwise.comparing.verdict import Deviation

SCALE_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What is known on the rank that saw the difference, besides the difference."""

    deviations: Sequence[Deviation]
    """Everything of the same quantity that differs in the same step, first by forward order first."""
    num_compared: int
    """How many tensors of that quantity were compared."""
    world_size: int
    tied: frozenset[str]
    """Names of parameters that have several."""
    low_precision: bool
    """Whether the sharded run computes in fewer bits than one process."""
    usual_mistake: bool = False
    """A gradient equals this rank's own, not averaged; a parameter is what it was before the step."""


def likely_cause(evidence: Evidence) -> str:
    """What to look at first."""
    first = evidence.deviations[0]
    match first.quantity:
        case "weight":
            return (
                "the two models started from different weights: build_model() draws from something "
                "other than torch's and Python's generators, or sharding changed a value"
            )
        case "tie":
            return "two names of one tensor became two tensors when the model was sharded: the tie is broken"
        case "loss":
            cause = _of_loss(first)
        case "gradient":
            cause = _of_gradient(first, evidence)
        case "parameter":
            cause = _of_parameter(evidence)
        case _:
            cause = "a buffer is each rank's own: it was synchronised, cast, or updated more or less often"
    if evidence.low_precision and math.isfinite(first.relative) and first.relative < 0.5:
        rounding = "possibly nothing but rounding: the sharded run computes in 16 bits (pass tolerance=...)"
        return f"{rounding}; else {cause}"
    return cause


def _of_loss(first: Deviation) -> str:
    if first.step == 1:
        return (
            "the weights are equal, so the forward itself differs: a buffer that was not carried "
            "over, random numbers drawn in another order, inputs or outputs cast, or code that "
            "depends on the rank"
        )
    return (
        "gradients and parameters agreed until now, so this forward used other values than the "
        "optimizer wrote: a gathered copy that outlived optimizer.step(), or state kept on the module"
        " outside its buffers"
    )


def _of_gradient(first: Deviation, evidence: Evidence) -> str:
    if first.sharded is None:
        return (
            "the gradient never reached the shard: the module's parameters were used without calling "
            "the module, so FSDP2's hooks did not run (name the method in entry_points), or the graph"
            " was cut"
        )
    if first.reference is None:
        return (
            "one process has no gradient here, the sharded run has one: zeros were reduced for a "
            'parameter nobody used, which weight decay then shrinks (unused_parameters="skip" keeps '
            "them at None)"
        )
    if evidence.usual_mistake and evidence.world_size > 1:
        return "it is this rank's own gradient, not averaged over ranks: the parameter was left out of sharding"
    if (ratio := _common_ratio(evidence.deviations)) is not None and evidence.world_size > 1:
        return _of_ratio(ratio, evidence.world_size)
    if {deviation.name for deviation in evidence.deviations} <= evidence.tied:
        return "only parameters with several names differ: a use of a tied weight missed the shared gradient"
    if len(evidence.deviations) < evidence.num_compared:
        return (
            "some gradients agree: the ones that do not belong to modules that ran another number of "
            "times, were freed and gathered in between, or were changed in place"
        )
    return "every gradient differs: ranks saw other batches than one process, or the backward differs"


def _of_ratio(ratio: float, world_size: int) -> str:
    if abs(ratio / world_size - 1) < SCALE_TOLERANCE:
        return f"gradients are {world_size} times too large: summed over ranks instead of averaged"
    if abs(ratio * world_size - 1) < SCALE_TOLERANCE:
        return f"gradients are {world_size} times too small: divided by the number of ranks twice"
    return f"gradients are {ratio:.4g} times those of one process: a wrong divisor (micro-steps, tokens)"


def _of_parameter(evidence: Evidence) -> str:
    if evidence.usual_mistake:
        return (
            "gradients agree but the optimizer did not change it: the optimizer holds other tensors "
            "than the model (built before sharding, or while the model stood gathered)"
        )
    return (
        "gradients agree and the update does not: an optimizer that looks at whole tensors (norms, "
        "factored or orthogonalised updates) saw only this rank's shard"
    )


def _common_ratio(deviations: Sequence[Deviation]) -> float | None:
    """The factor that all deviations share, if they share one."""
    ratios = [d.sharded / d.reference for d in deviations if d.sharded is not None and d.reference]
    if not ratios or len(ratios) < len(deviations):
        return None
    middle = median(ratios)
    shared = math.isfinite(middle) and middle > 0 and abs(middle - 1) > SCALE_TOLERANCE
    close = all(abs(ratio - middle) <= SCALE_TOLERANCE * abs(middle) for ratio in ratios)
    return middle if shared and close else None
