"""What a comparison found: `Parity`, its worst deviations, and the first difference with its likely cause."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

Quantity = Literal["weight", "tie", "loss", "gradient", "parameter", "buffer"]
# The order in which things happen in a step: the first to differ is the one to look at.
ORDER: tuple[Quantity, ...] = ("weight", "tie", "loss", "gradient", "parameter", "buffer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """How far one number or tensor of the sharded run is from one process."""

    quantity: Quantity
    name: str
    """FQN of the parameter or buffer; empty for the loss."""
    step: int
    """Counted from 1; 0 is before the first step."""
    rank: int
    """The rank that saw it."""
    sharded: float | None
    """Value at the worst element; None when there is no gradient."""
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
    """The first thing that differs, where it lives, and what usually causes it."""

    deviation: Deviation
    module: str
    """FQN and class of the module that owns it."""
    num_others: int
    """How many more of the same quantity differ in the same step."""
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
    """The same of one process."""
    tolerance: float
    """Allowed difference, relative to a tensor's largest value."""
    tolerance_reason: str
    worst: tuple[Deviation, ...]
    """The largest deviation of each quantity, whether allowed or not."""
    first_difference: Difference | None
    plan: str
    """One line about how the model was sharded."""

    def worst_of(self, quantity: Quantity) -> Deviation | None:
        """The largest deviation of one quantity; None when nothing of the kind was compared."""
        return next((deviation for deviation in self.worst if deviation.quantity == quantity), None)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON, which knows neither infinity nor NaN: those become None."""
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
