"""Rules about what is put around blocks: activation checkpointing and compilation, before sharding."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.findings import Severity
from shardwise.rules.program.conditions import class_names, tested_classes
from shardwise.rules.program.events import Event
from shardwise.rules.program.usage import Module, Shard, Usage, modules
from shardwise.rules.registry import Hit, Reading, rule

_APPLY_CHECKPOINTING = (
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing",
    "torch.distributed.fsdp.wrap.apply_activation_checkpointing",
)
_WRAP_CHECKPOINTING = ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper",)


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


def _is_inside_out(usage: Usage, event: Event, module: Module, shard: Shard, whole: bool) -> bool:
    if not usage.trace.precedes(shard.event, event):
        return False
    if whole:
        return usage.trace.is_part_of(shard.subject, module) or (shard.is_automatic and shard.subject == module)
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
