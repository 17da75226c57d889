"""Meaning of calls for models, parameters and state dicts; tests that hold only on rank 0."""

from __future__ import annotations

import ast
import re

from shardwise.source import values as v
from shardwise.source.syntax import FULLY_SHARD, FileContext, last_name
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
"""Functions that return their first argument, changed or wrapped, with the same parameters."""
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
    """Whether tensors created in a `with` block of this call are on the meta device."""
    if event.is_call_to("torch.device"):
        return Constant("meta") in event.argument(0, "device", "type")
    return event.is_call_to(*_EMPTY_WEIGHTS)


def is_device(value: object, name: str) -> bool:
    """Whether a value is a device such as `"cuda"` or `torch.device("cuda")`, with or without an index."""
    if isinstance(value, ObjectRef) and "torch.device" in value.origins:
        return is_device_text(next(iter(getattr(value.site, "args", [])), None), name)
    return isinstance(value, Constant) and str(value.value).startswith(name)


def is_device_text(node: ast.AST | None, name: str) -> bool:
    """Whether a literal or f-string starts with the name of this device."""
    node = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    return isinstance(node, ast.Constant) and str(node.value).startswith(name)


def state_dict_of(event: ProgramEvent) -> Values:
    """Return the value of `get_model_state_dict` and related functions; a pair for `get_state_dict`."""
    assert isinstance(event.node, ast.Call), "a call of a function"
    if "options" not in event.keywords:
        is_full = None if event.is_open else False
    else:
        is_full = option(event.argument(None, "options"), "full_state_dict")
    states = frozenset(StateDict(owner, event.node, is_full) for owner in modules(event.argument(0, "model")))
    return frozenset({TupleValue((states, states))}) if event.is_call_to(GET_BOTH) else states


def option(options: Values, name: str) -> bool | None:
    """Return a flag of `StateDictOptions(...)`; None if it is computed, False if it is omitted."""
    found: set[bool | None] = set()
    for value in options:
        call = value.site if isinstance(value, ObjectRef) and OPTIONS in value.origins else None
        keywords = {keyword.arg: keyword.value for keyword in getattr(call, "keywords", [])}
        if call is None or None in keywords or getattr(call, "args", None):
            return None
        found.add(getattr(keywords[name], "value", None) if name in keywords else False)
    return found.pop() if len(found) == 1 else None


def refers_to(values: Values, *names: str) -> bool:
    """Whether one of the values is an imported name in `names`."""
    return any(isinstance(value, v.ImportedName) and not value.origins.isdisjoint(names) for value in values)


_RANK = re.compile(r"^_?((global|world|local|node|process)_)?rank$|^(local_)?process_index$", re.IGNORECASE)
_MAIN = re.compile(
    r"^_?(is_)?(global_|local_)?(main|master|rank_?(0|zero)|chief|coordinator)(_process|_rank)?$"
    r"|^is_(rank_zero|global_zero|main_process|local_main_process|world_process_zero|first_rank)$|^should_(save|log)_on_rank_0$"
)
_DECORATORS = re.compile(r"^(rank_zero_only|only_on_rank_zero|on_main_process|main_process_only)$")
_RANK_CALLS = frozenset({"torch.distributed.get_rank", "torch.distributed.get_node_local_rank"})
_RANK_VARIABLES = ("RANK", "LOCAL_RANK")


def asks_for_rank_zero(file: FileContext, test: ast.AST, hops: int = 4) -> bool | None:
    """True if a test holds only on one rank, False if on all others, None for any other test."""
    if _is_rank(file, test, hops):
        return False  # `if rank:` holds on all ranks except 0
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = asks_for_rank_zero(file, operand, hops)
            return None if inner is None else not inner
        case ast.Compare(left=left, ops=[operation], comparators=[right]) if _is_rank(file, left, hops):
            return _compares_to_zero(operation, right)
        case ast.Compare(left=left, ops=[operation], comparators=[ast.Constant(value=0) as right]) if _is_number(left):
            return _compares_to_zero(operation, right)
        case ast.Compare(left=ast.Constant() as left, ops=[ast.Eq() | ast.NotEq() as operation], comparators=[right]):
            return _compares_to_zero(operation, left) if _is_rank(file, right, hops) else None
        case ast.NamedExpr(value=value):
            return asks_for_rank_zero(file, value, hops)
        case ast.Name() | ast.Attribute():
            if _MAIN.match(last_name(test)):
                return True
            values = file.assigned(test) if hops and isinstance(test, ast.Name) else []
            if len(values) == 1 and not isinstance(values[0], ast.Name | ast.Constant):
                return asks_for_rank_zero(file, values[0], hops - 1)
        case ast.Call(func=function, args=[]) if _MAIN.match(last_name(function)):
            return True
        case ast.BoolOp(op=operation, values=values):
            asked = {asks_for_rank_zero(file, value, hops) for value in values}
            if isinstance(operation, ast.And) and True in asked:
                return True
            return asked.pop() if len(asked) == 1 else None
    return None


def _is_number(node: ast.expr) -> bool:
    """Whether it is a device index that is compared like a rank: `self.device == 0`, `args.gpu == 0`."""
    return last_name(node) in ("device", "gpu", "device_id", "gpu_id")


def is_rank_zero_decorator(node: ast.expr) -> bool:
    """Whether a decorator runs the function only on rank 0."""
    return _DECORATORS.match(last_name(node)) is not None


def _compares_to_zero(operation: ast.cmpop, right: ast.expr) -> bool | None:
    """Return the meaning of `rank == 0`, `rank in (0, -1)`, `rank > 0` and the like."""
    if isinstance(right, ast.List | ast.Tuple):
        some = [ast.unparse(one) for one in right.elts]
        is_member = isinstance(operation, ast.In | ast.NotIn) and set(some) <= {"0", "-1"}
        return isinstance(operation, ast.In) if is_member else None
    if not isinstance(right, ast.Constant):
        return None
    if isinstance(operation, ast.Eq | ast.Is):
        return True
    if right.value == 0 and isinstance(operation, ast.NotEq | ast.IsNot | ast.Gt):
        return False
    if right.value == 1 and isinstance(operation, ast.Lt | ast.GtE):
        return isinstance(operation, ast.Lt)
    return True if right.value == 0 and isinstance(operation, ast.LtE) else None


def _is_rank(file: FileContext, node: ast.AST, hops: int) -> bool:
    match node:
        case ast.NamedExpr():
            return _is_rank(file, node.value, hops)
        case ast.Name() | ast.Attribute():
            values = file.assigned(node) if hops and isinstance(node, ast.Name) else []
            is_assigned = len(values) == 1 and _is_rank(file, values[0], hops - 1)
            return is_assigned or bool(_RANK.match(last_name(node)))
        case ast.Call(args=[], keywords=[]):  # rank in the world, not in a group
            return file.is_any(node.func, _RANK_CALLS) or getattr(node.func, "attr", "") == "get_rank"
        case ast.Call(func=ast.Name(id="int"), args=[inner]):
            return _is_rank(file, inner, hops)
        case ast.Call(func=ast.Attribute(attr="get" | "getenv"), args=[ast.Constant(value=name), *_]):
            return name in _RANK_VARIABLES
        case ast.Subscript(slice=ast.Constant(value=name)):
            return name in _RANK_VARIABLES
    return False
