"""Rules about checkpoints and collectives: what is saved and loaded, and calls that every rank must make."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.findings import Safety
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source import facts
from shardwise.source import values as v
from shardwise.source.edits import change
from shardwise.source.syntax import FULLY_SHARD, FileContext, last_name, tested_classes
from shardwise.source.trace import Trace
from shardwise.source.values import BranchTest, DictValue, ObjectRef, ProgramEvent, StateDict, Value, modules, nested

_READERS = frozenset({"torch.load", "safetensors.torch.load_file", "safetensors.torch.load"})
_SAVERS = ("torch.save", "safetensors.torch.save_file", "safetensors.torch.save", "safetensors.torch.save_model")
_LOAD = ("torch.distributed.checkpoint.load", "torch.distributed.checkpoint.load_state_dict")
_OPTIONS = "full_state_dict cpu_offload broadcast_from_rank0 strict ignore_frozen_params flatten_optimizer_state_dict"
_OPTION_NAMES = frozenset(_OPTIONS.split())
_GATHERED = "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))"


@rule(
    "SW223",
    fix="set_model_state_dict(model, state_dict, options=StateDictOptions(full_state_dict=True)), "
    "and set_optimizer_state_dict for the optimizer",
)
def full_checkpoint_into_shards(context: LintContext) -> Iterator[Hit]:
    """A file with full tensors cannot be copied into a sharded model or its optimizer.

    Symptom: `got mixed torch.Tensor and DTensor`, when loading or in the next optimizer step.
    """
    for trace, event in context.events:
        if event.is_call_to(*facts.SETTERS) and not event.is_open:
            options = event.argument(None, "options")
            is_read_as_whole = "options" in event.keywords and (
                facts.option(options, "full_state_dict") is not False
                or facts.option(options, "broadcast_from_rank0") is True  # SW224 reports the missing option
            )
            targets = event.argument(0, "model")
            given = event.argument(None, "model_state_dict", "optim_state_dict")
            given = given or event.argument(1 if event.is_call_to(facts.SET_MODEL) else 2)
        elif event.method == "load_state_dict":
            is_read_as_whole, targets, given = False, event.receiver, event.argument(0, "state_dict")
        else:
            continue
        owners = _with_modules(trace, modules(targets))
        is_sharded = any(trace.is_sharded(owner, event) for owner in owners)
        if is_sharded and not is_read_as_whole and any(_is_whole_file(context.file, one) for one in given):
            yield Hit(event.node, "the checkpoint has whole tensors, the sharded model has DTensors")


def _with_modules(trace: Trace, owners: list[ObjectRef]) -> set[ObjectRef]:
    """Return modules and optimizers, and the modules whose parameters those optimizers update."""
    built = [optimizer for optimizer in trace.optimizers if optimizer.event.result.intersection(owners)]
    return set(owners).union(*(optimizer.owners for optimizer in built))


def _is_whole_file(file: FileContext, value: Value) -> bool:
    """Whether a value is, or is part of, a file read into memory, except a separate file of each rank."""
    read = value.whole if isinstance(value, ObjectRef) else None
    if read is None or not (read.origins & _READERS and isinstance(read.site, ast.Call)):
        return False
    return not _is_own_file(file, read.site.args[:1])


def _is_own_file(file: FileContext, path: list[ast.expr]) -> bool:
    """Whether the path, or a value assigned to a variable in it, contains a rank."""
    names = [one for node in path for one in ast.walk(node) if isinstance(one, ast.Name)]
    parts = [*path, *(value for one in names for value in file.assigned(one))]
    return any("rank" in last_name(one) for part in parts for one in ast.walk(part))


@rule("SW224", safety=Safety.SAFE)
def state_dict_option_misplaced(context: LintContext) -> Iterator[Hit]:
    """State-dict functions take their settings in `StateDictOptions`, and broadcasting needs a full state dict.

    Symptom: `TypeError: ... unexpected keyword argument`, or `full_state_dict must be True when broadcast_from_rank0 is
    True`.
    """
    for _, event in context.events_of(*facts.SETTERS, *facts.GETTERS):
        for name in event.keywords.keys() & _OPTION_NAMES:
            message = f"{event.method} has no argument {name}"
            yield Hit(event.keywords[name].node, message, f"options=StateDictOptions({name}=...)")
    for _, event in context.events_of(facts.OPTIONS):
        flag = event.keywords.get("broadcast_from_rank0")
        if flag is None or event.args or event.is_open or "full_state_dict" in event.keywords:
            continue
        if getattr(flag.node, "value", None) is True:
            end = context.file.positions.span(flag.node)[1]
            edits = (change(end, end, ", full_state_dict=True"),)
            yield Hit(event.node, "broadcast_from_rank0 needs full_state_dict=True", "add full_state_dict=True", edits)


@rule("SW225", fix="put get_model_state_dict(model) and get_optimizer_state_dict(model, optimizer) in first")
def load_into_empty_state_dict(context: LintContext) -> Iterator[Hit]:
    """`torch.distributed.checkpoint.load` fills the entries of the dictionary; an empty one stays empty.

    Why: it loads in place, into the given tensors, and reads no others.
    """
    for _, event in context.events_of(*_LOAD):
        has_planner = "planner" in event.keywords or len(event.args) > 3
        for table in event.argument(0, "state_dict") if not has_planner else ():
            if isinstance(table, DictValue) and not table.is_open:
                empty = [one for one in table.entries if one.values and all(map(_is_empty, one.values))]
                name = (repr(empty[0].key) if empty[0].key else "an entry") if empty else "the state dict"
                if empty or not table.entries:
                    yield Hit(event.node, f"{name} is empty, so nothing is loaded into it")


def _is_empty(value: Value) -> bool:
    return isinstance(value, DictValue) and not value.entries and not value.is_open


@rule("SW226", fix="use get_optimizer_state_dict(model, optimizer), then set_optimizer_state_dict")
def fresh_optimizer_loaded(context: LintContext) -> Iterator[Hit]:
    """A new optimizer's `state_dict()` has no state, so `checkpoint.load` restores none.

    Why: the state is created in the first step. `get_optimizer_state_dict` initializes it, `state_dict()` does not.
    Symptom: none; training continues with momentum at zero.
    """
    for trace, event in context.events_of(*_LOAD):
        for table in event.argument(0, "state_dict"):
            for entry in table.entries if isinstance(table, DictValue) else ():
                if any(isinstance(value, StateDict) and _is_fresh(trace, value, event) for value in entry.values):
                    message = "a new optimizer's state_dict() is empty, and load() fills only what is there"
                    yield Hit(entry.node, message)


def _is_fresh(trace: Trace, state: StateDict, event: ProgramEvent) -> bool:
    is_new = _is_plain(state) and any(state.owner in optimizer.event.result for optimizer in trace.optimizers)
    steps = [one for one in trace.events if one.method == "step" and state.owner in one.receiver]
    return is_new and not any(trace.precedes(one, event) for one in steps)


def _is_plain(state: StateDict) -> bool:
    """Whether it is the result of `model.state_dict()`."""
    return isinstance(state.call.func, ast.Attribute) and state.call.func.attr == "state_dict"


@rule("SW221")
def shards_saved_as_model(context: LintContext) -> Iterator[Hit]:
    """A sharded model's state dict has this rank's shards, not the full model.

    Why: FSDP1's `state_dict()` all-gathered the parameters; FSDP2's does not. The file has only a part of each tensor,
    which is noticed only when it is loaded.
    """
    for trace, event in context.events_of(*_SAVERS):
        assert isinstance(event.node, ast.Call), "a call of a function"
        path = [*event.node.args[1:], *(one.value for one in event.node.keywords if one.arg != "obj")]
        if _is_own_file(context.file, path):
            continue  # a separate file of each rank is intended
        values = list(nested(event.argument(0, "obj")))
        chosen = {one.owner for one in values if isinstance(one, StateDict) and one.is_full}
        for saved in values:
            if isinstance(saved, ObjectRef) and saved in event.argument(0, "obj") and trace.is_sharded(saved, event):
                message = "a sharded model is saved as an object: the file holds this rank's shards"
                yield Hit(event.node, message, f"save a gathered state dict: {_GATHERED}")
            elif (
                isinstance(saved, StateDict)
                and _is_of_shards(trace, saved, event)
                and not context.asks_kind(saved.call)
                and (_is_plain(saved) or saved.owner not in chosen)  # the program selects the full one
            ):
                message = f"the saved state dict of line {saved.call.lineno} has only this rank's shards"
                fix = f"gather first: {_GATHERED} on every rank, then save on rank 0; "
                yield Hit(event.node, message, fix + "or use torch.distributed.checkpoint.save")


def _is_of_shards(trace: Trace, state: StateDict, event: ProgramEvent) -> bool:
    """Whether it is the state dict of a sharded module, or of its optimizer, without all-gathering."""
    owners = _with_modules(trace, [state.owner]) if _is_plain(state) or state.is_full is False else ()
    return any(trace.holds_shards(owner, event) is not None for owner in owners)


_CHECKPOINT = "torch.distributed.checkpoint"
_ALWAYS_COLLECTIVE = (f"{_CHECKPOINT}.save", f"{_CHECKPOINT}.load", f"{_CHECKPOINT}.async_save", FULLY_SHARD)
_CLIP = "torch.nn.utils.clip_grad_norm_"
_OURS = re.compile(
    r"^shardwise\.((save|load)_(weights|full)|full_params|iter_full_tensors|shard|materialize|clip_grad_norm_|parity"
    r"|token_mean|mean_over_ranks)$"
)
_CHECKPOINTER, _ITS_COLLECTIVES = "shardwise.Checkpointer", frozenset({"save", "load", "latest", "prepare"})
# Position of the group argument: with a group, the ranks in the branch may be all that take part.
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


@rule("SW222", fix="call it on every rank and keep only the writing under the test")
def collective_on_some_ranks(context: LintContext) -> Iterator[Hit]:
    """A call that all ranks must make is under `if rank == 0`.

    Why: collectives, full state dicts, full tensors, checkpoints and the forward of a sharded model communicate; a rank
    that is alone in one waits for the others until the watchdog ends the run.
    """
    for trace, event in context.events:
        what = _collective(context.file, trace, event) if not event.is_store else ""
        test = _parting_test(context.file, event) if what else None
        if test is not None and not _others_do_it_too(context.file, trace, event):
            message = f"{what} needs every rank, but the test on line {test.lineno} lets only some through"
            yield Hit(event.node, message)


def _collective(file: FileContext, trace: Trace, event: ProgramEvent) -> str:
    """Return the name of a collective call; empty if the call does not need every rank."""
    name = event.method
    if event.is_call_to(*_ALWAYS_COLLECTIVE):
        return "" if event.keywords.keys() & {"no_dist", "process_group"} else f"{name}()"
    if event.is_call_to(*facts.GETTERS, *facts.SETTERS):
        return f"{name}()" if _gathers(trace, event) else ""
    if any(map(_OURS.match, event.origins)):
        return f"{name}()"
    for origin in event.origins & _GROUP_POSITION.keys():
        has_group = "group" in event.keywords or len(event.args) > _GROUP_POSITION[origin] or event.is_open
        return "" if has_group else f"{origin.rpartition('.')[2]}()"
    if name in _ITS_COLLECTIVES and any(_CHECKPOINTER in one.origins for one in modules(event.receiver)):
        return f"Checkpointer.{name}()"
    if name == "full_tensor" and not event.args:
        # Under `isinstance(p, DTensor)`, only if the parameter's model is known to be sharded.
        owners = [value.owner for value in event.receiver if isinstance(value, v.Param | StateDict)]
        is_sharded = any(trace.holds_shards(owner, event) is not None for owner in owners)
        is_tested = any("DTensor" in tested_classes(file, guard.test) for guard in event.guards)
        return "full_tensor()" if is_sharded or not is_tested else ""
    if event.is_call_to(_CLIP):
        owners = v.owners_of_params(event.argument(0, "parameters"))
        return f"{name}() of sharded parameters" if any(trace.holds_shards(o, event) for o in owners) else ""
    if not event.origins and any(trace.is_sharded(module, event) for module in modules(event.called)):
        return "the forward of a sharded model"
    return ""


def _gathers(trace: Trace, event: ProgramEvent) -> bool:
    if "options" not in event.keywords:
        return False
    options = event.argument(None, "options")
    full, broadcast = (facts.option(options, name) for name in ("full_state_dict", "broadcast_from_rank0"))
    if full or broadcast:
        return True
    owners = modules(event.argument(0, "model"))
    return full is None and any(trace.holds_shards(owner, event) is not None for owner in owners)


def _others_do_it_too(file: FileContext, trace: Trace, event: ProgramEvent) -> bool:
    """Whether the other ranks make the same call in the other branch, or under the opposite test."""
    guards = [(guard, side) for guard in event.guards if (side := _side(file, guard)) is not None]
    others = [one for one in trace.events if one is not event and one.method == event.method and not one.is_store]
    return any(
        v.contradict(twin, guard) or _side(file, twin) is (not side)
        for other in others
        for twin in other.guards
        for guard, side in guards
    )


def _side(file: FileContext, guard: BranchTest) -> bool | None:
    """True if only the first rank passes the test, False if all others do, None for any other test."""
    asked = facts.asks_for_rank_zero(file, guard.test)
    return None if asked is None else asked is guard.taken


def _parting_test(file: FileContext, event: ProgramEvent) -> ast.expr | None:
    """Return the test or decorator that excludes ranks from an event; None if there is none."""
    for guard in event.guards:
        if isinstance(guard.test, ast.expr) and facts.asks_for_rank_zero(file, guard.test) is not None:
            return guard.test
    functions = [file.enclosing_function(node) for node in (event.node, *event.chain)]
    decorators = [one for function in functions if function is not None for one in function.decorator_list]
    return next(filter(facts.is_rank_zero_decorator, decorators), None)
