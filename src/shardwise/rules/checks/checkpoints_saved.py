"""Rules about saving: shards taken for the model, and collectives that not every rank reaches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.findings import Severity
from shardwise.rules.names import FULLY_SHARD
from shardwise.rules.program import facts
from shardwise.rules.program.conditions import asks_for_rank_zero, parting_test, tested_classes
from shardwise.rules.program.events import Event, Guard
from shardwise.rules.program.usage import Usage, modules
from shardwise.rules.program.values import Param, Part, StateDict, Thing, owners_of_params, state_dicts_in
from shardwise.rules.registry import Hit, Reading, rule

_SAVERS = ("torch.save", "safetensors.torch.save_file", "safetensors.torch.save", "safetensors.torch.save_model")
_CHECKPOINT = "torch.distributed.checkpoint"
_ALWAYS_COLLECTIVE = (f"{_CHECKPOINT}.save", f"{_CHECKPOINT}.load", f"{_CHECKPOINT}.async_save", FULLY_SHARD)
_STATE_DICTS = (facts.GET_MODEL, facts.GET_OPTIM, facts.GET_BOTH, facts.SET_MODEL, facts.SET_OPTIM, facts.SET_BOTH)
_CLIP = "torch.nn.utils.clip_grad_norm_"
_OURS = re.compile(r"^shardwise\.(save_weights|load_weights|full_params|iter_full_tensors|shard|clip_grad_norm_)$")


@rule("SW221", "shards-saved-as-model", severity=Severity.ERROR)
def shards_saved_as_model(reading: Reading) -> Iterator[Hit]:
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


def _mentions_rank(event: Event) -> bool:
    call = event.node
    path = call.args[1:] + [k.value for k in call.keywords if k.arg != "obj"] if isinstance(call, ast.Call) else []
    return any(
        "rank" in (getattr(node, "id", "") + getattr(node, "attr", "")) for arg in path for node in ast.walk(arg)
    )


def _is_of_shards(usage: Usage, state: StateDict, event: Event) -> bool:
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
def collective_on_some_ranks(reading: Reading) -> Iterator[Hit]:
    """A call that all ranks must make together stands under `if rank == 0`.

    Why: gathering a state dict, a full tensor or a forward of a sharded model communicates; the rank that is alone in
    it waits for the others until the watchdog ends the run.
    """
    for usage in reading.usages:
        for event in usage.events:
            what = _collective(reading, usage, event)
            test = parting_test(reading.file, event) if what else None
            if test is not None and not _others_do_it_too(reading, usage, event):
                yield Hit(
                    node=event.node,
                    message=f"{what} needs every rank, but the test on line {test.lineno} lets only some through",
                    fix="call it on every rank and keep only the writing under the test",
                )


def _collective(reading: Reading, usage: Usage, event: Event) -> str:
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
    if name == "full_tensor" and not event.args:
        return "full_tensor()" if _is_surely_sharded(reading, usage, event) else ""
    if event.is_call_to(_CLIP):
        owners = owners_of_params(event.argument(0, "parameters"))
        return f"{name}() of sharded parameters" if any(usage.holds_shards(o, event) for o in owners) else ""
    if not event.origins and any(usage.is_sharded(module, event) for module in modules(event.called)):
        return "the forward of a sharded model"
    return ""


def _is_surely_sharded(reading: Reading, usage: Usage, event: Event) -> bool:
    """Not under `isinstance(p, DTensor)`, unless the parameter's model is known to be sharded."""
    owners = [value.owner for value in event.receiver if isinstance(value, Param | StateDict)]
    if any(usage.holds_shards(owner, event) is not None for owner in owners):
        return True
    return not any("DTensor" in tested_classes(reading.file, guard.test) for guard in event.guards)


def _gathers(usage: Usage, event: Event) -> bool:
    options = event.keywords.get("options")
    if options is None:
        return False
    if facts.option(options.values, "full_state_dict") or facts.option(options.values, "broadcast_from_rank0"):
        return True
    owners = [value for value in event.argument(0, "model") if isinstance(value, Thing | Part)]
    unknown = facts.option(options.values, "full_state_dict") is None
    return unknown and any(usage.holds_shards(owner, event) is not None for owner in owners)


def _others_do_it_too(reading: Reading, usage: Usage, event: Event) -> bool:
    """Whether the ranks that the test keeps out make the same call in the other branch."""
    for other in usage.events:
        if other is event or other.method != event.method or other.is_store:
            continue
        for guard in event.guards:
            if not isinstance(guard.test, ast.expr) or asks_for_rank_zero(reading.file, guard.test) is None:
                continue
            if any(_is_other_branch(twin, guard) for twin in other.guards):
                return True
    return False


def _is_other_branch(one: Guard, other: Guard) -> bool:
    if one.branch[0] is other.branch[0]:
        return one.branch[1] != other.branch[1]
    return one.key == other.key and one.taken != other.taken
