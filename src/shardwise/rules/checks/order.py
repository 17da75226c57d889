"""Rules about when things happen: optimizers before sharding, forwards before the root's."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardwise.findings import Severity
from shardwise.rules.program import facts
from shardwise.rules.program.events import Event
from shardwise.rules.program.usage import Optimizer, Shard, Usage
from shardwise.rules.registry import Hit, Reading, rule

# `group["params"] = ...`: the program gives its optimizers new parameters itself.
_REPOINTS = re.compile(r"""\[["']params["']\]\s*=[^=]""")


@rule("SW201", "optimizer-before-shard", severity=Severity.ERROR)
def optimizer_before_shard(reading: Reading) -> Iterator[Hit]:
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
def optimizer_after_forward(reading: Reading) -> Iterator[Hit]:
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


def _is_without_grad(event: Event) -> bool:
    return any(context.is_call_to(*facts.NO_GRAD) for context in event.contexts)


def _is_resharded(usage: Usage, module: object, after: Event, before: Event) -> bool:
    if any(shard.subject == module and "reshard_after_forward" in shard.event.keywords for shard in usage.shards):
        return True
    between = usage.events[after.order : before.order]
    return any(event.method in ("reshard", "backward") for event in between)


@rule("SW217", "submodule-before-root", severity=Severity.ERROR)
def submodule_before_root(reading: Reading) -> Iterator[Hit]:
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


def _shares_loop(early: Event, later: Event) -> bool:
    return early.loop is None or early.loop is later.loop
