"""Rules about what must come before what: optimizers, wrappers and parents around `fully_shard`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.findings import Severity
from shardwise.rules.program import facts
from shardwise.rules.program.conditions import class_names, tested_classes
from shardwise.rules.program.events import Event
from shardwise.rules.program.usage import Optimizer, Shard, Usage, modules
from shardwise.rules.registry import Hit, Reading, rule

_APPLY_CHECKPOINTING = (
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing",
    "torch.distributed.fsdp.wrap.apply_activation_checkpointing",
)
_WRAP_CHECKPOINTING = (
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.offload_wrapper",
)


@rule("SW201", "optimizer-before-shard", severity=Severity.ERROR)
def optimizer_before_shard(reading: Reading) -> Iterator[Hit]:
    """An optimizer built before `fully_shard` updates tensors that the model no longer uses.

    Why: sharding replaces each parameter by a DTensor; the optimizer keeps the old ones.
    Symptom: the loss stays flat and no error is raised.
    """
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


@rule("SW203", "parent-before-child", severity=Severity.ERROR)
def parent_before_child(reading: Reading) -> Iterator[Hit]:
    """`fully_shard` on a parent before its child leaves the child nothing to shard.

    Why: each call takes the parameters that no earlier call took; children go first, the root last.
    Symptom: `TypeError: Invariant encountered: value was None when it should not be`.
    """
    for usage in reading.usages:
        for child in usage.shards:
            for parent in usage.shards:
                if usage.trace.is_part_of(child.subject, parent.subject) and _goes_first(usage, parent, child):
                    yield Hit(
                        node=child.event.node,
                        message=f"the module around this one is already sharded (line {parent.event.node.lineno})",
                        fix="shard children first, then the modules around them, the root last",
                    )
                    break
        for shard in usage.shards:
            reason = _parents_come_first(reading, shard)
            if reason:
                yield Hit(
                    node=shard.event.node,
                    message=f"modules() gives parents before their children, {reason}",
                    fix="loop over reversed(list(model.modules())), or over the blocks themselves",
                )


def _goes_first(usage: Usage, parent: Shard, child: Shard) -> bool:
    return usage.trace.precedes(parent.event, child.event) and not parent.is_automatic


def _parents_come_first(reading: Reading, shard: Shard) -> str:
    """Why a loop over `modules()` meets a module that is to be sharded before one inside it; else nothing."""
    loop = shard.event.loop
    path = getattr(shard.subject, "path", ())
    if loop is None or not path or path[-1] != "modules()" or not isinstance(loop, ast.For):
        return ""
    if any(isinstance(node, ast.Call) and getattr(node.func, "id", "") == "reversed" for node in ast.walk(loop.iter)):
        return ""
    inside = [guard for guard in shard.event.guards if loop.lineno <= guard.test.lineno <= (loop.end_lineno or 0)]
    if not inside:
        return "and every one of them is sharded"
    names = {name for guard in inside if guard.taken for name in tested_classes(reading.file, guard.test)}
    if len(inside) != 1 or len(names) < 2:
        return ""
    for outer in names:
        for inner in names - {outer}:
            if _contains(reading, outer, inner):
                return f"and {outer} contains {inner}"
    return ""


def _contains(reading: Reading, outer: str, inner: str) -> bool:
    if (outer, inner) in facts.NESTED:
        return True
    definition = reading.file.classes.get(outer)
    return definition is not None and any(
        isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == inner
        for node in ast.walk(definition)
    )


@rule("SW204", "sharded-twice", severity=Severity.ERROR)
def sharded_twice(reading: Reading) -> Iterator[Hit]:
    """A module can be given to `fully_shard` only once.

    Why: the first call has already replaced its parameters and installed its hooks.
    Symptom: `fully_shard has already been applied to the module`.
    """
    for usage in reading.usages:
        for second in usage.shards:
            for first in usage.shards:
                if (
                    first.subject == second.subject
                    and usage.trace.precedes(first.event, second.event)
                    and _is_one_module(reading, first, second)
                ):
                    yield Hit(
                        node=second.event.node,
                        message=f"this module is already sharded (line {first.event.node.lineno})",
                        fix="remove one of the two calls",
                    )
                    break


def _is_one_module(reading: Reading, first: Shard, second: Shard) -> bool:
    """Not merely two elements of one list: then both loops have to go over the same."""
    if first.event.loop is None and second.event.loop is None:
        return "[]" not in getattr(first.subject, "path", ()) and len(first.together) == len(second.together) == 1
    one, other = first.event.loop, second.event.loop
    if not (isinstance(one, ast.For) and isinstance(other, ast.For)):
        return False
    same = one is other or reading.file.source(one.iter) == reading.file.source(other.iter)
    by_name = all(isinstance(argument, ast.Name) for shard in (first, second) for argument in _first_arguments(shard))
    return same and by_name and not (one is not other and _has_tests_inside(first, second))


def _first_arguments(shard: Shard) -> list[ast.expr]:
    return shard.event.node.args[:1] if isinstance(shard.event.node, ast.Call) else []


def _has_tests_inside(*shards: Shard) -> bool:
    return any(
        shard.event.loop is not None and guard.test.lineno >= shard.event.loop.lineno
        for shard in shards
        for guard in shard.event.guards
    )


@rule("SW206", "checkpointing-after-shard", severity=Severity.ERROR)
def checkpointing_after_shard(reading: Reading) -> Iterator[Hit]:
    """Activation checkpointing applied after `fully_shard` wraps the sharded block from outside.

    Why: FSDP's hooks then run inside the recomputation, so parameters are gathered twice and casts are replayed; the
    block's checkpoint wrapper has to be what is sharded.
    """
    for usage, event in reading.events_of(*_APPLY_CHECKPOINTING, *_WRAP_CHECKPOINTING):
        whole = event.is_call_to(*_APPLY_CHECKPOINTING)
        for module in modules(event.argument(0, "model") or event.argument(0, "module")):
            shard = next((one for one in usage.shards if _is_inside_out(usage, event, module, one, whole)), None)
            if shard is not None:
                yield Hit(
                    node=event.node,
                    message=f"checkpointing wraps blocks that are already sharded (line {shard.event.node.lineno})",
                    fix="apply activation checkpointing first, then shard the wrapped blocks",
                )


def _is_inside_out(usage: Usage, event: Event, module: object, shard: Shard, whole: bool) -> bool:
    if not usage.trace.precedes(shard.event, event):
        return False
    if whole:
        return usage.trace.is_part_of(shard.subject, module) or (shard.is_automatic and shard.subject == module)  # pyrefly: ignore
    return shard.subject == module


@rule("SW207", "block-sharded-inside-checkpoint", severity=Severity.ERROR)
def block_sharded_inside_checkpoint(reading: Reading) -> Iterator[Hit]:
    """Picking blocks by class after checkpointing finds the block inside its wrapper.

    Why: `apply_activation_checkpointing` puts a `CheckpointWrapper` around each block; the class matches what is
    inside, so the wrapper ends up outside of FSDP.
    """
    for usage, event in reading.events_of(*_APPLY_CHECKPOINTING):
        wrapped = _checkpointed_classes(reading, event)
        for shard in usage.shards:
            path = getattr(shard.subject, "path", ())
            if not path or path[-1] != "modules()" or not usage.trace.precedes(event, shard.event):
                continue
            picked = {
                name for guard in shard.event.guards if guard.taken for name in tested_classes(reading.file, guard.test)
            }
            if picked & wrapped and "CheckpointWrapper" not in picked:
                yield Hit(
                    node=shard.event.node,
                    message=f"{', '.join(sorted(picked & wrapped))} is inside a checkpoint wrapper since line "
                    f"{event.node.lineno}; the wrapper is what should be sharded",
                    fix="test isinstance(module, CheckpointWrapper), or loop over the list that holds the blocks",
                )


def _checkpointed_classes(reading: Reading, event: Event) -> set[str]:
    """The classes that a `check_fn` picks, where it is a lambda or function of this file."""
    check = event.keywords.get("check_fn") or event.keywords.get("auto_wrap_policy")
    node = check.node if check is not None else None
    if isinstance(node, ast.Name):
        node = reading.file.definition(node) or next((b.value for b in reading.file.bindings(node) if b.value), None)
    found: set[str] = set()
    for call in ast.walk(node) if node is not None else ():
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "isinstance" and len(call.args) == 2:
            found |= class_names(reading.file, call.args[1])
    return found


@rule("SW208", "compiled-model-sharded", severity=Severity.WARNING)
def compiled_model_sharded(reading: Reading) -> Iterator[Hit]:
    """`torch.compile` of the whole model before `fully_shard` compiles what FSDP then takes apart.

    Why: the graph breaks at every hook, and state-dict keys get an `_orig_mod.` prefix. Compile block by block, or
    call `model.compile()` after sharding.
    """
    for usage, event in reading.events_of("torch.compile"):
        for module in modules(event.argument(0, "model")):
            for shard in usage.shards:
                if (
                    shard.subject == module
                    and usage.trace.precedes(event, shard.event)
                    and any(usage.trace.is_part_of(other.subject, module) for other in usage.shards)
                ):
                    yield Hit(
                        node=event.node,
                        message=f"the whole model is compiled before it is sharded (line {shard.event.node.lineno})",
                        fix="compile each block before sharding it, or call model.compile() after sharding",
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
                    and usage.is_sharded(module, event)
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
                        message=f"this submodule is called before the sharded module around it (line {later.node.lineno})",
                        fix="call the root module first, or shard this one without a root around it",
                    )


def _shares_loop(early: Event, later: Event) -> bool:
    return early.loop is None or early.loop is later.loop
