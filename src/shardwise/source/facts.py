"""What a call means for models, parameters and state dicts."""

from __future__ import annotations

import ast

from shardwise.source.syntax import FULLY_SHARD
from shardwise.source.values import (
    Constant,
    ImportedName,
    ObjectRef,
    PartRef,
    ProgramEvent,
    StateDict,
    TupleValue,
    Values,
)

_STATE_DICT = "torch.distributed.checkpoint.state_dict"
SHARDWISE_SHARD = frozenset({"shardwise.shard", "shardwise.prepare_fully_shard"})
RETURNS_FIRST = frozenset(
    {
        FULLY_SHARD,
        "torch.compile",
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
        "shardwise.shard",
        "shardwise.prepare_fully_shard",
        "shardwise.materialize",
        "shardwise.compile_blocks",
        "shardwise.checkpoint_activations",
    }
)
"""Functions that give back their first argument, changed or wrapped, with the same parameters."""
GET_MODEL, GET_OPTIM = f"{_STATE_DICT}.get_model_state_dict", f"{_STATE_DICT}.get_optimizer_state_dict"
GET_BOTH, SET_BOTH = f"{_STATE_DICT}.get_state_dict", f"{_STATE_DICT}.set_state_dict"
SET_MODEL, SET_OPTIM = f"{_STATE_DICT}.set_model_state_dict", f"{_STATE_DICT}.set_optimizer_state_dict"
OPTIONS = f"{_STATE_DICT}.StateDictOptions"
GETTERS = frozenset({GET_MODEL, GET_OPTIM, GET_BOTH})
CONTAINERS = frozenset({"torch.nn.ModuleList", "torch.nn.ModuleDict", "torch.nn.Sequential"})
LISTS = CONTAINERS - {"torch.nn.Sequential"}
"""Containers without a forward."""
NO_GRAD = frozenset({"torch.no_grad", "torch.inference_mode"})
_EMPTY_WEIGHTS = frozenset({"accelerate.init_empty_weights", "accelerate.big_modeling.init_empty_weights"})
NESTED = frozenset(
    {
        ("TransformerEncoder", "TransformerEncoderLayer"),
        ("TransformerDecoder", "TransformerDecoderLayer"),
        ("Transformer", "TransformerEncoder"),
        ("Transformer", "TransformerDecoder"),
        ("Transformer", "TransformerEncoderLayer"),
        ("Transformer", "TransformerDecoderLayer"),
    }
)
"""Torch's own modules that contain others: (outer, inner)."""


def is_container(event: ProgramEvent) -> bool:
    """Whether a call makes a list, dictionary or sequence of modules."""
    return not event.origins.isdisjoint(CONTAINERS)


def makes_meta(event: ProgramEvent) -> bool:
    """Whether a `with` over this call makes new tensors without storage."""
    if event.is_call_to("torch.device"):
        return Constant("meta") in event.argument(0, "device") or Constant("meta") in event.argument(0, "type")
    return event.is_call_to(*_EMPTY_WEIGHTS)


def is_on_meta(event: ProgramEvent) -> bool:
    """Whether a call itself asks for the meta device."""
    given = event.keywords.get("device")
    return given is not None and any(is_meta_device(value) for value in given.values)


def is_meta_device(value: object) -> bool:
    """Whether a value is `"meta"` or `torch.device("meta")`."""
    if isinstance(value, Constant):
        return value.value == "meta"
    if isinstance(value, ObjectRef) and "torch.device" in value.origins:
        args = getattr(value.site, "args", [])
        return bool(args) and getattr(args[0], "value", None) == "meta"
    return False


def state_dict_of(event: ProgramEvent) -> Values:
    """What `get_model_state_dict` and its siblings return; of both, a pair."""
    assert isinstance(event.node, ast.Call), "a call of a function"
    owners = [one for one in event.argument(0, "model") if isinstance(one, ObjectRef | PartRef)]
    states = frozenset(StateDict(owner, event.node, asks_for_full(event)) for owner in owners)
    return frozenset({TupleValue((states, states))}) if event.is_call_to(GET_BOTH) else states


def asks_for_full(event: ProgramEvent) -> bool | None:
    """Whether a state-dict call's options gather: True, False, or None where they are computed."""
    options = event.keywords.get("options")
    if options is None:
        return None if event.is_open else False
    return option(options.values, "full_state_dict")


def option(options: Values, name: str) -> bool | None:
    """A flag of `StateDictOptions(...)`; None where it is computed, False where it is left out."""
    found: set[bool | None] = set()
    for value in options:
        call = value.site if isinstance(value, ObjectRef) and OPTIONS in value.origins else None
        if call is None:
            return None
        keywords = {keyword.arg: keyword.value for keyword in getattr(call, "keywords", [])}
        given = keywords.get(name)
        if None in keywords or getattr(call, "args", None):
            return None
        found.add(False if given is None else getattr(given, "value", None))
    return found.pop() if len(found) == 1 else None


def refers_to(values: Values, *names: str) -> bool:
    """Whether one of the values is an imported name of these."""
    return any(isinstance(value, ImportedName) and not value.origins.isdisjoint(names) for value in values)
