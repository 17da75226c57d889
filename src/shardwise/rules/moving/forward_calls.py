"""`model.forward(...)`: FSDP1's own forward gathered parameters, FSDP2 does so around a call of the module."""

from __future__ import annotations

import ast

from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.sharded import Holds, Sharded

CODE = "SW136"


def rewrite_forward_calls(draft: Draft, program: Program) -> None:
    """Call the model itself; for a part of it, say what happens."""
    context, sharded = draft.context, program.sharded(draft.context)
    for call in draft.calls():
        func = call.func
        if call in draft.taken or not (isinstance(func, ast.Attribute) and func.attr == "forward"):
            continue
        if sharded.holds(func.value) is Holds.ALWAYS:
            draft.edit(context.positions.span(func.value)[1], context.positions.span(func)[1], "")
            draft.taken.add(call)
            draft.rewritten(CODE, call, "the model is called itself: .forward() goes past FSDP2's gathering")
        elif _is_part(sharded, func.value):
            draft.undecided(
                CODE,
                call,
                "the forward of a part of the sharded model is called: it goes past FSDP2's gathering",
                "call the part itself; if it is no unit of its own, model.unshard() before",
            )


def _is_part(sharded: Sharded, node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
        if isinstance(node, ast.Name | ast.Attribute) and sharded.holds(node) is Holds.ALWAYS:
            return True
    return False
