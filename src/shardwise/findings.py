"""Finding: what lint, migrate, check and verify return. No torch, no I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Severity(enum.StrEnum):
    """How much a finding matters."""

    ERROR = "error"
    """The run fails or trains wrongly."""
    WARNING = "warning"
    """It runs, but seldom as meant."""
    NOTE = "note"
    """Good to know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing, and what to do about it."""

    code: str
    """`SWnnn`; never reused for something else."""
    message: str
    """One sentence, naming the offending thing."""
    where: str = ""
    """`file:line`, a module's name, a config path or a rank."""
    severity: Severity = Severity.WARNING
    """How much it matters."""
    fix: str = ""
    """The smallest change that makes it go away."""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        fix = f" (fix: {self.fix})" if self.fix else ""
        return f"{place}{self.severity.value} {self.code}: {self.message}{fix}"


def worst(findings: list[Finding]) -> Severity | None:
    """The gravest severity among them; None when there are none."""
    order = list(Severity)
    return min((finding.severity for finding in findings), key=order.index, default=None)
