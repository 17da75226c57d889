"""check(): is this live model going to train? Looks, tells, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from shardwise.diagnosing.checks import groups, optimizers, parameters
from shardwise.diagnosing.checks.ranks import across_ranks
from shardwise.diagnosing.checks.subject import look_at
from shardwise.errors import ShardError
from shardwise.findings import Finding, Severity

_LOCAL = (
    groups.not_sharded, groups.root_only, groups.oversized, groups.padding, groups.sync_left_off,
    groups.left_gathered, parameters.unsharded, parameters.replaced, parameters.sixteen_bit, parameters.several_dtypes,
    parameters.on_meta, parameters.ties, optimizers.held_parameters,
)  # fmt: skip


def check(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> list[Finding]:
    """Look for everything that would make training silently wrong, before the first step or whenever in doubt.

    Between steps, not inside one: a group that is gathered for a forward is meant to be.

    Args:
        model: Sharded by shardwise or by hand.
        optimizer: The optimizer, or several, that train it.

    Returns:
        What is wrong, the worst first; empty when all is well.

    Ranks:
        Collective. One exchange of fingerprints; reads every buffer and unsharded parameter once, and shards where
        other ranks hold copies.
    """
    given = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer or ())
    subject = look_at(model, given)
    findings = [finding for look in _LOCAL for finding in look(subject)]
    findings += across_ranks(subject)
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def refuse_errors(findings: Sequence[Finding]) -> None:
    """Raise if any finding is an error; warnings pass.

    Raises:
        ShardError: With every error that was found.

    Ranks:
        Local; the findings of `check` may differ between ranks, so gather them first where that matters.
    """
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        raise ShardError(
            f"{errors[0].message}" + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""),
            where="; ".join(f"{finding.code} {finding.where}" for finding in errors[:8]),
            why="this would fail at the first step, or train wrongly without a word",
            fix=errors[0].fix,
        )
