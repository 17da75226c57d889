"""Checkpoints that are saved or loaded in a way that FSDP2 does not support."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.findings import Edit, Safety, Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source import facts
from shardwise.source.syntax import FULLY_SHARD
from shardwise.source.usage import Usage, asks_for_rank_zero, modules, parting_test, tested_classes
from shardwise.source.values import (
    BranchTest,
    DictValue,
    ObjectRef,
    Param,
    PartRef,
    ProgramEvent,
    StateDict,
    Value,
    Values,
    owners_of_params,
    state_dicts_in,
)

_READERS = frozenset({"torch.load", "safetensors.torch.load_file", "safetensors.torch.load"})
_SETTERS = (facts.SET_MODEL, facts.SET_OPTIM, facts.SET_BOTH)
_GETTERS = (facts.GET_MODEL, facts.GET_OPTIM, facts.GET_BOTH)
_LOAD = ("torch.distributed.checkpoint.load", "torch.distributed.checkpoint.load_state_dict")
_OPTION_NAMES = frozenset(
    {
        "full_state_dict",
        "cpu_offload",
        "broadcast_from_rank0",
        "strict",
        "ignore_frozen_params",
        "flatten_optimizer_state_dict",
    }
)


@rule("SW223", "full-checkpoint-into-shards", severity=Severity.ERROR)
def full_checkpoint_into_shards(reading: LintContext) -> Iterator[Hit]:
    """A file with whole tensors cannot be copied into a sharded model or its optimizer.

    Symptom: `got mixed torch.Tensor and DTensor`, when loading or at the next optimizer step.
    """
    for usage, event in reading.events:
        if event.is_call_to(*_SETTERS) and not event.is_open:
            options = event.keywords.get("options")
            whole = options is not None and (
                facts.option(options.values, "full_state_dict") is not False
                or facts.option(options.values, "broadcast_from_rank0") is True  # SW224 tells what is missing
            )
            targets, given = event.argument(0, "model"), _state_given(event)
        elif event.method == "load_state_dict":
            whole, targets, given = False, event.receiver, event.argument(0, "state_dict")
        else:
            continue
        if not whole and any(map(_is_whole_file, given)) and _is_for_shards(usage, targets, event):
            yield Hit(
                node=event.node,
                message="the checkpoint has whole tensors, the sharded model has DTensors",
                fix="set_model_state_dict(model, state_dict, options=StateDictOptions(full_state_dict=True)), "
                "and set_optimizer_state_dict for the optimizer",
            )


def _state_given(event: ProgramEvent) -> Values:
    position = 1 if event.is_call_to(facts.SET_MODEL) else 2
    for name in ("model_state_dict", "optim_state_dict"):
        if name in event.keywords:
            return event.keywords[name].values
    return event.argument(position)


def _is_whole_file(value: Value) -> bool:
    """Whether a value is, or comes out of, a file read into memory; not one that each rank has for itself."""
    thing = value.owner if isinstance(value, PartRef) else value
    if not (isinstance(thing, ObjectRef) and thing.origins & _READERS and isinstance(thing.site, ast.Call)):
        return False
    names = (getattr(n, "id", "") + getattr(n, "attr", "") for arg in thing.site.args[:1] for n in ast.walk(arg))
    return not any("rank" in name for name in names)


def _is_for_shards(usage: Usage, targets: Values, event: ProgramEvent) -> bool:
    owners = set(modules(targets))
    for optimizer in usage.optimizers:
        if targets & optimizer.event.result:
            owners |= optimizer.owners
    return any(usage.is_sharded(owner, event) for owner in owners)


@rule("SW224", "state-dict-option-misplaced", severity=Severity.ERROR, safety=Safety.SAFE)
def state_dict_option_misplaced(reading: LintContext) -> Iterator[Hit]:
    """State-dict functions take their settings in `StateDictOptions`, and broadcasting needs a full state dict.

    Symptom: `TypeError: ... unexpected keyword argument`, or `full_state_dict must be True when broadcast_from_rank0 is
    True`.
    """
    for _, event in reading.events_of(*_SETTERS, *_GETTERS):
        for name in event.keywords.keys() & _OPTION_NAMES:
            argument = event.keywords[name]
            yield Hit(
                node=argument.node,
                message=f"{event.method} has no argument {name}",
                fix=f"options=StateDictOptions({name}=...)",
            )
    for _, event in reading.events_of(facts.OPTIONS):
        flag = event.keywords.get("broadcast_from_rank0")
        if flag is None or event.args or event.is_open or "full_state_dict" in event.keywords:
            continue
        if getattr(flag.node, "value", None) is True:
            end = reading.file.positions.span(flag.node)[1]
            yield Hit(
                node=event.node,
                message="broadcast_from_rank0 needs full_state_dict=True",
                fix="add full_state_dict=True",
                edits=(Edit(start=end, end=end, text=", full_state_dict=True"),),
            )


@rule("SW225", "load-into-empty-state-dict", severity=Severity.ERROR)
def load_into_empty_state_dict(reading: LintContext) -> Iterator[Hit]:
    """`torch.distributed.checkpoint.load` fills what is in the dictionary; an empty one gets nothing.

    Why: it loads in place, into the tensors it is given, and asks the checkpoint for no others.
    """
    for _, event in reading.events_of(*_LOAD):
        if "planner" in event.keywords or len(event.args) > 3:
            continue
        for table in event.argument(0, "state_dict"):
            if isinstance(table, DictValue) and not table.is_open and (name := _empty_entry(table)) is not None:
                yield Hit(
                    node=event.node,
                    message=f"{name} is empty, so nothing is loaded into it",
                    fix="put get_model_state_dict(model) and get_optimizer_state_dict(model, optimizer) in first",
                )


def _empty_entry(table: DictValue) -> str | None:
    if not table.entries:
        return "the state dict"
    for entry in table.entries:
        if entry.values and all(
            isinstance(one, DictValue) and not one.entries and not one.is_open for one in entry.values
        ):
            return f"{entry.key!r}" if entry.key else "an entry"
    return None


@rule("SW226", "fresh-optimizer-loaded", severity=Severity.ERROR)
def fresh_optimizer_loaded(reading: LintContext) -> Iterator[Hit]:
    """A new optimizer's `state_dict()` has no state, so `checkpoint.load` restores none.

    Why: the state is made at the first step. `get_optimizer_state_dict` makes it before, `state_dict()` does not.
    Symptom: none; training goes on with momentum at zero.
    """
    for usage, event in reading.events_of(*_LOAD):
        for table in event.argument(0, "state_dict"):
            for entry in table.entries if isinstance(table, DictValue) else ():
                if any(_is_fresh(usage, value, event) for value in entry.values):
                    yield Hit(
                        node=entry.node,
                        message="a new optimizer's state_dict() is empty, and load() fills only what is there",
                        fix="use get_optimizer_state_dict(model, optimizer), then set_optimizer_state_dict",
                    )


def _is_fresh(usage: Usage, value: Value, event: ProgramEvent) -> bool:
    if not (isinstance(value, StateDict) and getattr(value.call.func, "attr", "") == "state_dict"):
        return False
    optimizer = next((one for one in usage.optimizers if value.owner in one.event.result), None)
    return optimizer is not None and not any(
        one.method == "step" and value.owner in one.receiver and usage.trace.precedes(one, event)
        for one in usage.events
    )


_SAVERS = ("torch.save", "safetensors.torch.save_file", "safetensors.torch.save", "safetensors.torch.save_model")
_CHECKPOINT = "torch.distributed.checkpoint"
_ALWAYS_COLLECTIVE = (f"{_CHECKPOINT}.save", f"{_CHECKPOINT}.load", f"{_CHECKPOINT}.async_save", FULLY_SHARD)
_STATE_DICTS = (facts.GET_MODEL, facts.GET_OPTIM, facts.GET_BOTH, facts.SET_MODEL, facts.SET_OPTIM, facts.SET_BOTH)
_CLIP = "torch.nn.utils.clip_grad_norm_"
_OURS = re.compile(
    r"^shardwise\.((save|load)_(weights|full)|full_params|iter_full_tensors|shard|materialize|clip_grad_norm_|parity"
    r"|token_mean|mean_over_ranks)$"
)
_CHECKPOINTER, _ITS_COLLECTIVES = "shardwise.Checkpointer", frozenset({"save", "load", "latest", "prepare"})
# Where each takes its group: with one, the ranks that come here may be all that it needs.
_GROUP_POSITION = {
    f"torch.distributed.{name}": position
    for position, names in {
        0: "barrier monitored_barrier",
        2: "all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all broadcast broadcast_object_list",
        3: "reduce reduce_scatter reduce_scatter_tensor gather gather_object scatter scatter_object_list",
        4: "all_to_all_single",
    }.items()
    for name in names.split()
}


@rule("SW221", "shards-saved-as-model", severity=Severity.ERROR)
def shards_saved_as_model(reading: LintContext) -> Iterator[Hit]:
    """A sharded model's state dict holds this rank's shards, not the model.

    Why: FSDP1's `state_dict()` gathered; FSDP2's does not. The file has a fraction of each tensor, and nothing says so
    until someone loads it.
    """
    for usage, event in reading.events_of(*_SAVERS):
        if _mentions_rank(event):
            continue  # every rank writes a file of its own, and knows it
        whole = [one for one in modules(event.argument(0, "obj")) if usage.is_sharded(one, event)]
        if whole:
            yield Hit(
                node=event.node,
                message="a sharded model is saved as an object: the file holds this rank's shards",
                fix="save a gathered state dict: get_model_state_dict(model, options=StateDictOptions("
                "full_state_dict=True, cpu_offload=True))",
            )
        saved = state_dicts_in(event.argument(0, "obj"))
        found = next((one for one in saved if _is_of_shards(usage, one, event)), None)
        if found is not None:
            yield Hit(
                node=event.node,
                message=f"what is saved here are this rank's shards (state dict of line {found.call.lineno})",
                fix="gather first: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
                "cpu_offload=True)) on every rank, then save on rank 0; or use torch.distributed.checkpoint.save",
            )


def _mentions_rank(event: ProgramEvent) -> bool:
    call = event.node
    path = call.args[1:] + [k.value for k in call.keywords if k.arg != "obj"] if isinstance(call, ast.Call) else []
    return any(
        "rank" in (getattr(node, "id", "") + getattr(node, "attr", "")) for arg in path for node in ast.walk(arg)
    )


def _is_of_shards(usage: Usage, state: StateDict, event: ProgramEvent) -> bool:
    """Whether a state dict was taken of a sharded module, or of its optimizer, without gathering."""
    plain = isinstance(state.call.func, ast.Attribute) and state.call.func.attr == "state_dict"
    if not (plain or state.is_full is False):
        return False
    owners = {state.owner}
    for optimizer in usage.optimizers:
        if state.owner in optimizer.event.result:
            owners |= optimizer.owners
    return any(usage.holds_shards(owner, event) is not None for owner in owners)


@rule("SW222", "collective-on-some-ranks", severity=Severity.ERROR)
def collective_on_some_ranks(reading: LintContext) -> Iterator[Hit]:
    """A call that all ranks must make together stands under `if rank == 0`.

    Why: collectives, gathered state dicts, full tensors, checkpoints and the forward of a sharded model communicate;
    the rank that is alone in one waits for the others until the watchdog ends the run.
    """
    for usage, event in reading.events:
        what = _collective(reading, usage, event)
        test = parting_test(reading.file, event) if what else None
        if test is not None and not _others_do_it_too(reading, usage, event):
            yield Hit(
                node=event.node,
                message=f"{what} needs every rank, but the test on line {test.lineno} lets only some through",
                fix="call it on every rank and keep only the writing under the test",
            )


def _collective(reading: LintContext, usage: Usage, event: ProgramEvent) -> str:
    """What a call does that needs every rank; empty where it needs none."""
    if event.is_store or not isinstance(event.node, ast.Call):
        return ""
    name = event.method
    if event.is_call_to(*_ALWAYS_COLLECTIVE):
        alone = event.keywords.keys() & {"no_dist", "process_group"}
        return "" if alone else f"{name}()"
    if event.is_call_to(*_STATE_DICTS):
        return f"{name}()" if _gathers(usage, event) else ""
    if any(_OURS.match(origin) for origin in event.origins):
        return f"{name}()"
    for origin in event.origins & _GROUP_POSITION.keys():
        has_group = "group" in event.keywords or len(event.args) > _GROUP_POSITION[origin] or event.is_open
        return "" if has_group else f"{origin.rpartition('.')[2]}()"
    if name in _ITS_COLLECTIVES and any(_CHECKPOINTER in getattr(one, "origins", ()) for one in event.receiver):
        return f"Checkpointer.{name}()"
    if name == "full_tensor" and not event.args:
        return "full_tensor()" if _is_surely_sharded(reading, usage, event) else ""
    if event.is_call_to(_CLIP):
        owners = owners_of_params(event.argument(0, "parameters"))
        return f"{name}() of sharded parameters" if any(usage.holds_shards(o, event) for o in owners) else ""
    if not event.origins and any(usage.is_sharded(module, event) for module in modules(event.called)):
        return "the forward of a sharded model"
    return ""


def _is_surely_sharded(reading: LintContext, usage: Usage, event: ProgramEvent) -> bool:
    """Not under `isinstance(p, DTensor)`, unless the parameter's model is known to be sharded."""
    owners = [value.owner for value in event.receiver if isinstance(value, Param | StateDict)]
    if any(usage.holds_shards(owner, event) is not None for owner in owners):
        return True
    return not any("DTensor" in tested_classes(reading.file, guard.test) for guard in event.guards)


def _gathers(usage: Usage, event: ProgramEvent) -> bool:
    options = event.keywords.get("options")
    if options is None:
        return False
    if facts.option(options.values, "full_state_dict") or facts.option(options.values, "broadcast_from_rank0"):
        return True
    owners = [value for value in event.argument(0, "model") if isinstance(value, ObjectRef | PartRef)]
    unknown = facts.option(options.values, "full_state_dict") is None
    return unknown and any(usage.holds_shards(owner, event) is not None for owner in owners)


def _others_do_it_too(reading: LintContext, usage: Usage, event: ProgramEvent) -> bool:
    """Whether the ranks that the test keeps out make the same call in the other branch, or under the opposite test."""
    for other in usage.events:
        if other is event or other.method != event.method or other.is_store:
            continue
        for guard in event.guards:
            if (side := _side(reading, guard)) is None:
                continue
            if any(_is_other_branch(twin, guard) or _side(reading, twin) is (not side) for twin in other.guards):
                return True
    return False


def _side(reading: LintContext, guard: BranchTest) -> bool | None:
    """True where only the first rank passes, False where all but it do, None where the test is no such."""
    asked = asks_for_rank_zero(reading.file, guard.test) if isinstance(guard.test, ast.expr) else None
    return None if asked is None else asked is guard.taken


def _is_other_branch(one: BranchTest, other: BranchTest) -> bool:
    if one.branch[0] is other.branch[0]:
        return one.branch[1] != other.branch[1]
    return one.key == other.key and one.taken != other.taken
