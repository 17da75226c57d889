"""FSDP's class as a value that is only ever called: a function with FSDP's parameters stands in for it."""

from __future__ import annotations

import ast

from shardwise.rules.moving.constructors import CODE, Blocked
from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.writing import ALL_FEATURES
from shardwise.rules.names import FSDP1
from shardwise.rules.scopes import Binding

ENABLE_CODE = "SW103"
_WRAP = {"torch.distributed.fsdp.wrap.wrap"}
_ENABLE = {"torch.distributed.fsdp.wrap.enable_wrap"}


def rewrite_chosen_class(draft: Draft, program: Program, call: ast.Call) -> None:
    """`wrapper = FSDP if sharded else DDP` and `wrapper(model, ...)`: the choice changes, the call stays.

    Raises:
        Blocked: The name gets its value in another way.
    """
    context = draft.context
    bindings = context.bindings(call.func) if isinstance(call.func, ast.Name) else [Binding(call.func, value=call.func)]
    found = [node for binding in bindings for node in _classes(draft, program, binding)]
    others = [binding for binding in bindings if binding.origin]
    if not found or others or not _is_only_called(draft, call):
        raise Blocked("the class is chosen at run time", "call fully_shard in the branch that means FSDP")
    for node in found:
        if node not in draft.taken:
            draft.replace(node, draft.helper("_shard_as_told", *ALL_FEATURES))
    draft.taken.add(call)
    draft.rewritten(CODE, call, "where FSDP is chosen, a function now shards with fully_shard and returns the module")


def _classes(draft: Draft, program: Program, binding: Binding) -> list[ast.expr]:
    """The mentions of the class in what a name is given, if it is chosen between values there."""
    if not isinstance(binding.value, ast.IfExp | ast.Name | ast.Attribute):
        return []
    nodes = ast.walk(binding.value)
    mentions = [node for node in nodes if isinstance(node, ast.Name | ast.Attribute)]
    return [node for node in mentions if program.origins(draft.context, node) == {FSDP1}]


def _is_only_called(draft: Draft, call: ast.Call) -> bool:
    """Whether the name of the chosen class serves for nothing but calls."""
    context = draft.context
    if not isinstance(call.func, ast.Name):
        return True
    home = context.scope(call.func).find(call.func.id)
    for node in context.parents:
        if isinstance(node, ast.Name) and node.id == call.func.id and isinstance(node.ctx, ast.Load):
            parent = context.parents[node]
            same = context.scope(node).find(node.id)
            is_called = isinstance(parent, ast.Call) and parent.func is node
            if home and same and same[0] is home[0] and not is_called:
                return False
    return True


def rewrite_enable_wrap(draft: Draft, program: Program) -> None:
    """`enable_wrap(wrapper_cls=FSDP, ...)` takes any function: `wrap` keeps working, on FSDP2."""
    context = draft.context
    for call in draft.calls():
        if not context.is_any(call.func, _ENABLE):
            continue
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        wrapper = given.get("wrapper_cls")
        if wrapper is None or program.origins(context, wrapper) != {FSDP1}:
            continue
        if "mixed_precision" in given or None in given:
            continue  # which inputs FSDP1 casts depends on which module is the root in the end
        draft.replace(wrapper, draft.helper("_shard_as_told", *ALL_FEATURES))
        draft.taken.add(call)
        draft.taken.update(one for one in draft.calls() if context.is_any(one.func, _WRAP))
        draft.rewritten(ENABLE_CODE, call, "wrap now calls a function that shards with fully_shard")
