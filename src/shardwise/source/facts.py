"""What a call means for models, parameters and state dicts."""

from __future__ import annotations

import ast

from shardwise.source import values as v
from shardwise.source.syntax import FULLY_SHARD
from shardwise.source.values import Constant, ObjectRef, ProgramEvent, StateDict, TupleValue, Values, modules

_STATE_DICT = "torch.distributed.checkpoint.state_dict"
RETURNS_FIRST = (
    FULLY_SHARD,
    "torch.compile",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "shardwise.shard",
    "shardwise.prepare_fully_shard",
    "shardwise.materialize",
    "shardwise.compile_blocks",
    "shardwise.checkpoint_activations",
)
"""Functions that give back their first argument, changed or wrapped, with the same parameters."""
GET_MODEL, GET_OPTIM = f"{_STATE_DICT}.get_model_state_dict", f"{_STATE_DICT}.get_optimizer_state_dict"
GET_BOTH, SET_BOTH = f"{_STATE_DICT}.get_state_dict", f"{_STATE_DICT}.set_state_dict"
SET_MODEL, SET_OPTIM = f"{_STATE_DICT}.set_model_state_dict", f"{_STATE_DICT}.set_optimizer_state_dict"
OPTIONS = f"{_STATE_DICT}.StateDictOptions"
GETTERS = (GET_MODEL, GET_OPTIM, GET_BOTH)
SETTERS = (SET_MODEL, SET_OPTIM, SET_BOTH)
LISTS = frozenset({"torch.nn.ModuleList", "torch.nn.ModuleDict"})
"""Containers without a forward."""
NO_GRAD = ("torch.no_grad", "torch.inference_mode")
_EMPTY_WEIGHTS = ("accelerate.init_empty_weights", "accelerate.big_modeling.init_empty_weights")


def makes_meta(event: ProgramEvent) -> bool:
    """Whether a `with` over this call makes new tensors without storage."""
    if event.is_call_to("torch.device"):
        return Constant("meta") in event.argument(0, "device", "type")
    return event.is_call_to(*_EMPTY_WEIGHTS)


def is_device(value: object, name: str) -> bool:
    """Whether a value is `"cuda"` or `torch.device("cuda")`, with an index or not, for a name such as `cuda`."""
    if isinstance(value, ObjectRef) and "torch.device" in value.origins:
        return is_device_text(next(iter(getattr(value.site, "args", [])), None), name)
    return isinstance(value, Constant) and str(value.value).startswith(name)


def is_device_text(node: ast.AST | None, name: str) -> bool:
    """Whether a literal or f-string is the text of this device."""
    node = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    return isinstance(node, ast.Constant) and str(node.value).startswith(name)


def state_dict_of(event: ProgramEvent) -> Values:
    """What `get_model_state_dict` and its siblings return; of both, a pair."""
    assert isinstance(event.node, ast.Call), "a call of a function"
    if "options" not in event.keywords:
        is_full = None if event.is_open else False
    else:
        is_full = option(event.argument(None, "options"), "full_state_dict")
    states = frozenset(StateDict(owner, event.node, is_full) for owner in modules(event.argument(0, "model")))
    return frozenset({TupleValue((states, states))}) if event.is_call_to(GET_BOTH) else states


def option(options: Values, name: str) -> bool | None:
    """A flag of `StateDictOptions(...)`; None where it is computed, False where it is left out."""
    found: set[bool | None] = set()
    for value in options:
        call = value.site if isinstance(value, ObjectRef) and OPTIONS in value.origins else None
        keywords = {keyword.arg: keyword.value for keyword in getattr(call, "keywords", [])}
        if call is None or None in keywords or getattr(call, "args", None):
            return None
        found.add(getattr(keywords[name], "value", None) if name in keywords else False)
    return found.pop() if len(found) == 1 else None


def refers_to(values: Values, *names: str) -> bool:
    """Whether one of the values is an imported name of these."""
    return any(isinstance(value, v.ImportedName) and not value.origins.isdisjoint(names) for value in values)
