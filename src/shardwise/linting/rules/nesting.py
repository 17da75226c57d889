"""The order in which modules are wrapped and sharded."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.findings import Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source import facts
from shardwise.source.usage import Module, Shard, Usage, class_names, modules, tested_classes
from shardwise.source.values import ObjectRef, ProgramEvent

_APPLY_CHECKPOINTING = (
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing",
    "torch.distributed.fsdp.wrap.apply_activation_checkpointing",
)
_WRAP_CHECKPOINTING = ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper",)


@rule("SW206", "checkpointing-after-shard", severity=Severity.ERROR)
def checkpointing_after_shard(reading: LintContext) -> Iterator[Hit]:
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


def _is_inside_out(usage: Usage, event: ProgramEvent, module: Module, shard: Shard, whole: bool) -> bool:
    if not usage.trace.precedes(shard.event, event):
        return False
    if whole:
        return usage.trace.is_part_of(shard.subject, module) or (shard.is_automatic and shard.subject == module)
    return shard.subject == module


@rule("SW207", "block-sharded-inside-checkpoint", severity=Severity.ERROR)
def block_sharded_inside_checkpoint(reading: LintContext) -> Iterator[Hit]:
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


def _checkpointed_classes(reading: LintContext, event: ProgramEvent) -> set[str]:
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
def compiled_model_sharded(reading: LintContext) -> Iterator[Hit]:
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


@rule("SW203", "parent-before-child", severity=Severity.ERROR)
def parent_before_child(reading: LintContext) -> Iterator[Hit]:
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
    if parent.is_automatic or getattr(parent.subject, "origins", frozenset()) & facts.LISTS:
        return False  # shardwise knows the order; a list of modules is refused, and SW205 says so
    return usage.trace.precedes(parent.event, child.event)


def _parents_come_first(reading: LintContext, shard: Shard) -> str:
    """Why a loop over `modules()` meets a module that is to be sharded before one inside it; else nothing."""
    loop = shard.event.loop
    path = getattr(shard.subject, "path", ())
    if loop is None or not path or path[-1] != "modules()" or not isinstance(loop, ast.For):
        return ""
    called = {
        getattr(node.func, "attr", getattr(node.func, "id", ""))
        for node in ast.walk(loop.iter)
        if isinstance(node, ast.Call)
    }
    if "reversed" in called or not called & {"modules", "named_modules"}:
        return ""  # the second: modules chosen before, one cannot see by what
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


def _contains(reading: LintContext, outer: str, inner: str) -> bool:
    if (outer, inner) in facts.NESTED:
        return True
    definition = reading.file.classes.get(outer)
    return definition is not None and any(
        isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == inner
        for node in ast.walk(definition)
    )


@rule("SW204", "sharded-twice", severity=Severity.ERROR)
def sharded_twice(reading: LintContext) -> Iterator[Hit]:
    """A module can be given to `fully_shard` only once.

    Why: the first call has already replaced its parameters and installed its hooks.
    Symptom: `fully_shard has already been applied to the module`.
    """
    for usage, second in reading.shards:
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
        if _is_in_a_loop_of_its_own(second):
            yield Hit(
                node=second.event.node,
                message="every turn of the loop shards the same module",
                fix="shard it once, before the loop",
            )


def _is_in_a_loop_of_its_own(shard: Shard) -> bool:
    """Whether a loop of the same function repeats the call for a module that was made before the loop."""
    loop, subject = shard.event.loop, shard.subject
    (argument, *_) = (*_first_arguments(shard), None)
    if not (isinstance(loop, ast.For) and isinstance(subject, ObjectRef) and isinstance(argument, ast.Name)):
        return False
    inside = list(ast.walk(loop))
    stored = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    ends = any(isinstance(node, ast.Break | ast.Return) for node in inside)
    return shard.event.node in inside and subject.site not in inside and argument.id not in stored and not ends


def _is_one_module(reading: LintContext, first: Shard, second: Shard) -> bool:
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
