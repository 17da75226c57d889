"""Rules about loading: whole tensors into shards, options in the wrong place, and loads that load nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.findings import Edit, Safety, Severity
from shardwise.rules.program import facts
from shardwise.rules.program.events import Event
from shardwise.rules.program.usage import Usage, modules
from shardwise.rules.program.values import Part, StateDict, Table, Thing, Value, Values
from shardwise.rules.registry import Hit, Reading, rule

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
def full_checkpoint_into_shards(reading: Reading) -> Iterator[Hit]:
    """A file with whole tensors cannot be copied into a sharded model or its optimizer.

    Symptom: `got mixed torch.Tensor and DTensor`, when loading or at the next optimizer step.
    """
    for usage in reading.usages:
        for event in usage.events:
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


def _state_given(event: Event) -> Values:
    position = 1 if event.is_call_to(facts.SET_MODEL) else 2
    for name in ("model_state_dict", "optim_state_dict"):
        if name in event.keywords:
            return event.keywords[name].values
    return event.argument(position)


def _is_whole_file(value: Value) -> bool:
    """Whether a value is, or comes out of, a file read into memory; not one that each rank has for itself."""
    thing = value.owner if isinstance(value, Part) else value
    if not (isinstance(thing, Thing) and thing.origins & _READERS and isinstance(thing.site, ast.Call)):
        return False
    names = (getattr(n, "id", "") + getattr(n, "attr", "") for arg in thing.site.args[:1] for n in ast.walk(arg))
    return not any("rank" in name for name in names)


def _is_for_shards(usage: Usage, targets: Values, event: Event) -> bool:
    owners = set(modules(targets))
    for optimizer in usage.optimizers:
        if targets & optimizer.event.result:
            owners |= optimizer.owners
    return any(usage.is_sharded(owner, event) for owner in owners)


@rule("SW224", "state-dict-option-misplaced", severity=Severity.ERROR, safety=Safety.SAFE)
def state_dict_option_misplaced(reading: Reading) -> Iterator[Hit]:
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
def load_into_empty_state_dict(reading: Reading) -> Iterator[Hit]:
    """`torch.distributed.checkpoint.load` fills what is in the dictionary; an empty one gets nothing.

    Why: it loads in place, into the tensors it is given, and asks the checkpoint for no others.
    """
    for _, event in reading.events_of(*_LOAD):
        if "planner" in event.keywords or len(event.args) > 3:
            continue
        for table in event.argument(0, "state_dict"):
            if isinstance(table, Table) and not table.is_open and (name := _empty_entry(table)) is not None:
                yield Hit(
                    node=event.node,
                    message=f"{name} is empty, so nothing is loaded into it",
                    fix="put get_model_state_dict(model) and get_optimizer_state_dict(model, optimizer) in first",
                )


def _empty_entry(table: Table) -> str | None:
    if not table.entries:
        return "the state dict"
    for entry in table.entries:
        if entry.values and all(isinstance(one, Table) and not one.entries and not one.is_open for one in entry.values):
            return f"{entry.key!r}" if entry.key else "an entry"
    return None


@rule("SW226", "fresh-optimizer-loaded", severity=Severity.ERROR)
def fresh_optimizer_loaded(reading: Reading) -> Iterator[Hit]:
    """A new optimizer's `state_dict()` has no state, so `checkpoint.load` restores none.

    Why: the state is made at the first step. `get_optimizer_state_dict` makes it before, `state_dict()` does not.
    Symptom: none; training goes on with momentum at zero.
    """
    for usage, event in reading.events_of(*_LOAD):
        for table in event.argument(0, "state_dict"):
            for entry in table.entries if isinstance(table, Table) else ():
                if any(_is_fresh(usage, value, event) for value in entry.values):
                    yield Hit(
                        node=entry.node,
                        message="a new optimizer's state_dict() is empty, and load() fills only what is there",
                        fix="use get_optimizer_state_dict(model, optimizer), then set_optimizer_state_dict",
                    )


def _is_fresh(usage: Usage, value: Value, event: Event) -> bool:
    if not (isinstance(value, StateDict) and getattr(value.call.func, "attr", "") == "state_dict"):
        return False
    optimizer = next((one for one in usage.optimizers if value.owner in one.event.result), None)
    return optimizer is not None and not any(
        one.method == "step" and value.owner in one.receiver and usage.trace.precedes(one, event)
        for one in usage.events
    )
