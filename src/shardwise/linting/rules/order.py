"""Rules about when things happen: optimizers before sharding, forwards before the root's, gradients cleared late."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardwise.findings import Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source import facts
from shardwise.source.usage import Module, Optimizer, Shard, Usage, modules
from shardwise.source.values import Constant, Param, ProgramEvent

# `group["params"] = ...`: the program gives its optimizers new parameters itself.
_REPOINTS = re.compile(r"""\[["']params["']\]\s*=[^=]""")


@rule("SW201", "optimizer-before-shard", severity=Severity.ERROR)
def optimizer_before_shard(reading: LintContext) -> Iterator[Hit]:
    """An optimizer built before `fully_shard` updates tensors that the model no longer uses.

    Why: sharding replaces each parameter by a DTensor; the optimizer keeps the old ones.
    Symptom: the loss stays flat and no error is raised.
    """
    if _REPOINTS.search(reading.file.text):
        return
    for usage in reading.usages:
        for optimizer in usage.optimizers:
            shard = _sharded_after(usage, optimizer)
            if shard is not None:
                yield Hit(
                    node=optimizer.event.node,
                    message=f"the optimizer is built before the model is sharded (line {shard.event.node.lineno}); "
                    "it keeps the old parameters and its steps change nothing",
                    fix="build the optimizer after the last fully_shard call",
                )


def _sharded_after(usage: Usage, optimizer: Optimizer) -> Shard | None:
    for shard in usage.shards:
        if not usage.trace.precedes(optimizer.event, shard.event):
            continue
        if shard.is_automatic and (
            shard.event.keywords.keys() & {"optimizers", "optimizer"} or len(shard.event.args) > 1
        ):
            continue  # shardwise points them at the new parameters
        if any(usage.trace.are_related(owner, shard.subject) for owner in optimizer.owners):
            return None if _is_rebuilt(usage, optimizer, shard) else shard
    return None


def _is_rebuilt(usage: Usage, optimizer: Optimizer, shard: Shard) -> bool:
    """Another optimizer for the same parameters follows: the first one had another purpose."""
    return any(
        usage.trace.precedes(shard.event, other.event) and other.owners & optimizer.owners for other in usage.optimizers
    )


@rule("SW216", "optimizer-after-forward", severity=Severity.ERROR)
def optimizer_after_forward(reading: LintContext) -> Iterator[Hit]:
    """An optimizer built after a forward without backward holds the root's gathered parameters.

    Why: the root group stays gathered after forward until backward ends; `model.parameters()` then gives plain
    tensors, which are thrown away at the next reshard. No error is raised, the root's parameters never train.
    """
    for usage in reading.usages:
        for optimizer in usage.optimizers:
            for event, module in usage.entered:
                if (
                    module in optimizer.owners
                    and _is_without_grad(event)
                    and usage.is_sharded_by_hand(module, event)
                    and usage.trace.precedes(event, optimizer.event)
                    and not _is_resharded(usage, module, event, optimizer.event)
                ):
                    yield Hit(
                        node=optimizer.event.node,
                        message=f"the forward on line {event.node.lineno} left the root group gathered; "
                        "the optimizer gets tensors that are thrown away at the next reshard",
                        fix="build the optimizer before that forward, or call model.reshard() after it",
                    )
                    break


def _is_without_grad(event: ProgramEvent) -> bool:
    return any(context.is_call_to(*facts.NO_GRAD) for context in event.contexts)


def _is_resharded(usage: Usage, module: object, after: ProgramEvent, before: ProgramEvent) -> bool:
    given = [shard.event.keywords.get("reshard_after_forward") for shard in usage.shards if shard.subject == module]
    if any(one is not None and not one.values & {Constant(False), Constant(None)} for one in given):
        return True
    between = usage.events[after.order : before.order]
    return any(event.method in ("reshard", "backward") for event in between)


@rule("SW217", "submodule-before-root", severity=Severity.ERROR)
def submodule_before_root(reading: LintContext) -> Iterator[Hit]:
    """Calling a sharded submodule before its root makes the submodule a root of its own.

    Why: the first module that is called sets up FSDP for everything inside it.
    Symptom: `FSDP state has already been lazily initialized for layers.0`.
    """
    for usage in reading.usages:
        roots = {shard.subject for shard in usage.shards if not shard.is_automatic}
        for later, root in usage.entered:
            if root not in roots:
                continue
            for early, inner in usage.entered:
                if (
                    inner in roots
                    and usage.trace.is_part_of(inner, root)
                    and early.chain == later.chain
                    and usage.trace.precedes(early, later)
                    and usage.is_sharded(root, early)
                    and not any(module == root and usage.trace.precedes(e, early) for e, module in usage.entered)
                    and _shares_loop(early, later)
                ):
                    yield Hit(
                        node=early.node,
                        message=f"this submodule is called before its sharded root (line {later.node.lineno})",
                        fix="call the root module first, or shard this one without a root around it",
                    )


def _shares_loop(early: ProgramEvent, later: ProgramEvent) -> bool:
    return early.loop is None or early.loop is later.loop


@rule("SW240", "zero-grad-after-forward", severity=Severity.ERROR)
def zero_grad_after_forward(reading: LintContext) -> Iterator[Hit]:
    """`model.zero_grad()` between forward and backward does not clear the gradients of the root's parameters.

    Why: the root group stays unsharded after forward. What is registered then are temporary parameters; the sharded
    ones, which the optimizer steps, keep their gradients, and these add up from step to step. No error is raised.
    """
    for usage, event in reading.events:
        for module in _cleared(reading, event):
            last = max(
                (e.order for e, m in usage.forwards if m == module and usage.trace.precedes(e, event)), default=None
            )
            if last is None or not usage.is_sharded_by_hand(module, event):
                continue
            forward, is_trained = (
                usage.events[last],
                any(e.method == "backward" for e in usage.events[event.order :]),
            )
            if is_trained and not _is_resharded(usage, module, forward, event):
                yield Hit(
                    node=event.node,
                    message=f"since the forward on line {forward.node.lineno} the root's unsharded parameters are "
                    "registered; the gradients of its shards stay and add up",
                    fix="clear gradients before the forward, or with optimizer.zero_grad()",
                )


def _cleared(reading: LintContext, event: ProgramEvent) -> list[Module]:
    """The modules whose gradients an event clears: `model.zero_grad()`, or `p.grad = None` for its parameters."""
    if event.method == "zero_grad" and not event.is_store:
        return modules(event.receiver)
    value = getattr(reading.file.statement(event.node), "value", event.node)
    if event.method == "grad" and event.is_store and getattr(value, "value", value) is None:
        return [value.owner for value in event.receiver if isinstance(value, Param)]
    return []
