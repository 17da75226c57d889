"""Rules about models built on the meta device: who gives their parameters and buffers values?"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.findings import Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source import facts
from shardwise.source.syntax import FULLY_SHARD
from shardwise.source.usage import Module, Usage
from shardwise.source.values import ObjectRef, Param, Params, PartRef, ProgramEvent, StateDict, Value, state_dicts_in

_READING_METHODS = (
    "parameters named_parameters buffers named_buffers modules named_modules children named_children state_dict"
)
_SETTING_METHODS = (
    "train eval to cuda cpu half float bfloat16 requires_grad_ zero_grad compile set_requires_gradient_sync "
    "set_is_last_backward set_reshard_after_backward set_modules_to_forward_prefetch set_modules_to_backward_prefetch"
)
_OTHER_METHODS = "to_empty forward reshard unshard backward step append extend items values keys"
_HARMLESS_METHODS = frozenset(f"{_READING_METHODS} {_SETTING_METHODS} {_OTHER_METHODS}".split())
_BUILTINS = (
    "print len isinstance type list tuple set enumerate zip sum any all id repr str range filter sorted reversed map "
    "getattr hasattr next iter max min"
)
_HARMLESS_CALLS = frozenset(_BUILTINS.split())
_HARMLESS_ORIGINS = re.compile(
    r"^(torch\.(optim|compile|nn\.utils|save|distributed\.(fsdp|barrier|algorithms))|logging|wandb|tqdm"
    r"|torch\.distributed\.checkpoint\.(save|async_save|state_dict\.get_))"
)
_RESUMING = re.compile(r"resum|restore|from_checkpoint|from_ckpt|load_checkpoint|load_ckpt|checkpoint_path|ckpt_path")
_TRANSFORMERS = re.compile(r"transformers\.\w+(ForCausalLM\.from_config|ForCausalLM$|LM\.from_config)")
_LOADS = frozenset({"load_state_dict"})
_LOADERS = frozenset({facts.SET_MODEL, facts.SET_BOTH, "torch.distributed.checkpoint.load"})


@rule("SW209", "meta-without-init", severity=Severity.ERROR)
def meta_without_init(reading: LintContext) -> Iterator[Hit]:
    """A model built on the meta device trains on whatever was in memory.

    Why: `to_empty` allocates and writes nothing. Something has to initialise the parameters, or load them, afterwards.
    Symptom: losses of NaN or nonsense; without `to_empty`, an error at the first forward.
    """
    for usage in reading.usages:
        for model in _sharded_on_meta(usage):
            emptied = [event for event in usage.events if event.method == "to_empty" and model in event.receiver]
            made = model.site
            assert isinstance(made, ast.Call), "only calls make things on meta"
            # Before that there was nothing to write to.
            after = emptied[-1].order if emptied else _first_shard(usage, model).order
            until = min((event.order for event, module in usage.forwards if module == model), default=len(usage.events))
            writers = [event for event in usage.events if _may_write(usage, event, model, after)]
            writers = [event for event in writers if event.order < until or event.root is not usage.events[after].root]
            if not _is_trained(usage, model) or not all(_is_for_resuming(event) for event in writers):
                continue
            yield Hit(
                node=emptied[-1].node if emptied else made,
                message="to_empty leaves the parameters uninitialised, and nothing initialises or loads them after it"
                + (" when nothing is resumed" if writers else "")
                if emptied
                else "the model is on the meta device and nothing gives its parameters memory or values",
                fix="call the model's initialiser after to_empty, or load a checkpoint with set_model_state_dict",
            )


def _is_for_resuming(event: ProgramEvent) -> bool:
    """Whether an event happens only when a checkpoint is resumed: a fresh run comes by without it."""
    return any(guard.taken and _RESUMING.search(guard.key) for guard in event.guards)


def _sharded_on_meta(usage: Usage) -> set[ObjectRef]:
    """Models made on meta that are given to `fully_shard`, themselves or by their parts."""
    found: set[ObjectRef] = set()
    for shard in usage.shards:
        if shard.event.is_call_to(FULLY_SHARD):
            owner = shard.subject.owner if isinstance(shard.subject, PartRef) else shard.subject
            holders = usage.trace.owners.get(owner, ())
            if owner.on_meta and not any(getattr(holder, "on_meta", False) for holder in holders):
                found.add(owner)
    return found


def _first_shard(usage: Usage, model: Module) -> ProgramEvent:
    return next(shard.event for shard in usage.shards if usage.trace.are_related(shard.subject, model))


def _is_trained(usage: Usage, model: Module) -> bool:
    has_optimizer = any(model in optimizer.owners for optimizer in usage.optimizers)
    return has_optimizer or any(module == model for _, module in usage.entered)


def _may_write(usage: Usage, event: ProgramEvent, model: Module, after: int) -> bool:
    """Whether an event may give the model values: anything with the model in it that is not known to be harmless."""
    if event.order <= after and event.root is usage.events[after].root:
        return False
    if event.is_inlined or any(event is optimizer.event for optimizer in usage.optimizers):
        return False
    if event.is_store:  # `trainer.model = model` writes to the trainer
        return any(_belongs(usage, value, model) for value in event.receiver)
    touched = [*event.receiver, *(value for values in event.args for value in values)]
    touched += [value for argument in event.keywords.values() for value in argument.values]
    touched += list(state_dicts_in(frozenset(touched)))
    if not any(_belongs(usage, value, model) for value in touched):
        return False
    if event.method in _HARMLESS_METHODS and event.receiver:
        return False
    if any(isinstance(value, Param | Params | StateDict) for value in event.receiver):
        return event.method.endswith("_")  # torch's way to say "in place"
    if any(_is_forward(usage, value, model) for value in event.called):
        return False
    names = event.origins or ({event.method} if not event.receiver else set())
    if event.receiver and any(_belongs(usage, value, model) for value in event.receiver) and not event.origins:
        return True
    return not any(_HARMLESS_ORIGINS.match(name) or name in _HARMLESS_CALLS for name in names)


def _is_forward(usage: Usage, called: Value, model: Module) -> bool:
    """The model itself or a module of it is called; `model.name()` is a module only where it is known to be one."""
    if called == model or any(shard.subject == called for shard in usage.shards):
        return True
    return isinstance(called, ObjectRef) and _belongs(usage, called, model)


def _belongs(usage: Usage, value: Value, model: Module) -> bool:
    if isinstance(value, Params | Param | StateDict):
        value = value.owner
    return isinstance(value, ObjectRef | PartRef) and (value == model or usage.trace.is_part_of(value, model))


@rule("SW210", "buffers-lost-by-to-empty", severity=Severity.ERROR)
def buffers_lost_by_to_empty(reading: LintContext) -> Iterator[Hit]:
    """Non-persistent buffers are garbage after `to_empty`, and no checkpoint brings them back.

    Why: a state dict does not contain them. Rotary tables and masks have to be computed again after `to_empty`.
    Symptom: NaN or bad losses, often on some ranks only.
    """
    for usage, event in reading.events:
        if event.method != "to_empty":
            continue
        for model in event.receiver:
            if not (isinstance(model, ObjectRef) and model.on_meta and _has_lost_buffers(reading, model)):
                continue
            writers = [one for one in usage.events if _may_write(usage, one, model, event.order)]
            if writers and all(_only_loads(one) for one in writers):
                yield Hit(
                    node=event.node,
                    message="non-persistent buffers stay uninitialised: loading a checkpoint skips them",
                    fix="recompute them after to_empty, or call sw.materialize(model) instead",
                )


def _only_loads(event: ProgramEvent) -> bool:
    return event.method in _LOADS or event.is_call_to(*_LOADERS)


def _has_lost_buffers(reading: LintContext, model: ObjectRef) -> bool:
    """Whether the class of a model, or a class of this file that it builds, registers a buffer as not persistent."""
    if model.definition is None:
        return any(map(_TRANSFORMERS.match, model.origins))
    return any(
        isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "register_buffer"
        and any(k.arg == "persistent" and getattr(k.value, "value", None) is False for k in node.keywords)
        for definition in _built_classes(reading, model.definition, set())
        for node in ast.walk(definition)
    )


def _built_classes(reading: LintContext, definition: ast.ClassDef, seen: set[ast.ClassDef]) -> set[ast.ClassDef]:
    if definition not in seen:
        seen.add(definition)
        for node in ast.walk(definition):
            inner = reading.file.definition(node.func) if isinstance(node, ast.Call) else None
            if isinstance(inner, ast.ClassDef):
                _built_classes(reading, inner, seen)
    return seen
