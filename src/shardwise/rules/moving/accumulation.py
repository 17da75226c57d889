"""`model.no_sync()`: FSDP2 has a switch on the model, which a context turns off and on again."""

from __future__ import annotations

import ast
import re

from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.sharded import Holds

CODE = "SW121"
_OTHERS = re.compile(r"^self$|^cls$|accelerator|fabric|plugin|strategy", re.IGNORECASE)


def rewrite_no_sync(draft: Draft, program: Program) -> None:
    """Rewrite `model.no_sync()` and `model.no_sync` passed on uncalled."""
    context, sharded = draft.context, program.sharded(draft.context)
    moved: set[str] = set()
    for node in draft.nodes():
        if not (isinstance(node, ast.Attribute) and node.attr == "no_sync" and isinstance(node.ctx, ast.Load)):
            continue
        if sharded.holds(node.value) is Holds.NEVER and not _may_be_wrapped(draft, node.value):
            continue
        parent, model = context.parents[node], context.source(node.value)
        if isinstance(parent, ast.Call) and parent.func is node and (parent.args or parent.keywords):
            continue  # of a library that is handed the model
        helper = draft.helper("_no_sync")
        if isinstance(parent, ast.Call) and parent.func is node:
            draft.replace(parent, f"{helper}({model})")
        else:
            draft.name("functools")
            draft.replace(node, f"functools.partial({helper}, {model})")
        draft.taken.update((node, parent))
        moved.add(model)
        draft.rewritten(
            CODE, node, "no_sync became a context that switches the reduction of gradients off and on again"
        )
    _rewrite_questions(draft, moved)


def _rewrite_questions(draft: Draft, moved: set[str]) -> None:
    """`hasattr(model, "no_sync")`, where that is asked before: FSDP2's models have none and can do it."""
    context = draft.context
    for call in draft.calls():
        if not (isinstance(call.func, ast.Name) and call.func.id == "hasattr" and len(call.args) == 2):
            continue
        model = context.source(call.args[0])
        if model in moved and isinstance(call.args[1], ast.Constant) and call.args[1].value == "no_sync":
            draft.replace(call, f"({context.source(call)} or isinstance({model}, {draft.name('FSDPModule')}))")
            draft.rewritten(CODE, call, "the question for no_sync is also answered for FSDP2's models")


def _may_be_wrapped(draft: Draft, node: ast.expr) -> bool:
    """A model from elsewhere, in a file that has to do with FSDP: the carried function takes any that has `no_sync`."""
    context = draft.context
    if "torch.distributed.fsdp" not in context.text or not isinstance(node, ast.Name | ast.Attribute):
        return False
    last = context.source(node).rpartition(".")[2]
    return _OTHERS.search(last) is None and not context.origins(node)
