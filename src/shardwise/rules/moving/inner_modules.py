"""`model.module`: FSDP2 has no wrapper to reach into; the model is the module."""

from __future__ import annotations

import ast

from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.sharded import Holds
from shardwise.rules.names import FSDP1
from shardwise.rules.source import FileContext

CODE = "SW126"
_NAMES = ("module", "_fsdp_wrapped_module")


def rewrite_inner_modules(draft: Draft, program: Program) -> None:
    """Take `.module` off wrapped models."""
    context, sharded = draft.context, program.sharded(draft.context)
    for node in draft.nodes():
        if not (isinstance(node, ast.Attribute) and node.attr in _NAMES) or node in draft.taken:
            continue
        if any(one in draft.taken for one in context.ancestors(node) if isinstance(one, ast.Call)):
            continue
        holds = sharded.holds(node.value)
        if node.attr == "_fsdp_wrapped_module":  # nothing else has it, and nothing will
            holds = Holds.ALWAYS if not _is_guarded(context, node, program) else Holds.NEVER
        if holds is Holds.NEVER or (holds is Holds.SOMETIMES and _is_guarded(context, node, program)):
            continue
        model = context.source(node.value)
        if holds is Holds.ALWAYS:
            draft.edit(context.positions.span(node.value)[1], context.positions.span(node)[1], "")
            draft.taken.add(node)
            draft.rewritten(CODE, node, f".{node.attr} is gone: the sharded model is the module itself")
        elif isinstance(node.ctx, ast.Load):
            draft.replace(node, f'({model}.module if hasattr({model}, "module") else {model})')
            draft.rewritten(CODE, node, ".module is taken where there is one: DDP has it, FSDP2 does not")


def _is_guarded(context: FileContext, node: ast.Attribute, program: Program) -> bool:
    """Whether code around asks first: by hasattr or by the type of another wrapper, not by FSDP1's own."""
    for parent in context.ancestors(node):
        if isinstance(parent, ast.If | ast.IfExp | ast.While) and any(
            isinstance(one, ast.Call)
            and isinstance(one.func, ast.Name)
            and one.func.id in ("hasattr", "isinstance", "getattr")
            and not _names_fsdp(context, one, program)
            for one in ast.walk(parent.test)
        ):
            return True
    return False


def _names_fsdp(context: FileContext, call: ast.Call, program: Program) -> bool:
    kinds = [one for given in call.args[1:] for one in ast.walk(given) if isinstance(one, ast.Name | ast.Attribute)]
    return any(program.is_any(context, one, {FSDP1}) for one in kinds)
