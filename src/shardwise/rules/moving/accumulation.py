"""`model.no_sync()`: FSDP2 has a switch on the model, which a context turns off and on again."""

from __future__ import annotations

import ast

from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.sharded import Holds

CODE = "SW121"


def rewrite_no_sync(draft: Draft, program: Program) -> None:
    """Rewrite `model.no_sync()` and `model.no_sync` passed on uncalled."""
    context, sharded = draft.context, program.sharded(draft.context)
    for node in draft.nodes():
        if not (isinstance(node, ast.Attribute) and node.attr == "no_sync" and isinstance(node.ctx, ast.Load)):
            continue
        if sharded.holds(node.value) is Holds.NEVER and not _may_be_wrapped(draft, node.value):
            continue
        parent, model = context.parents[node], context.source(node.value)
        helper = draft.helper("_no_sync")
        if isinstance(parent, ast.Call) and parent.func is node and not parent.args and not parent.keywords:
            draft.replace(parent, f"{helper}({model})")
        else:
            draft.name("functools")
            draft.replace(node, f"functools.partial({helper}, {model})")
        draft.taken.update((node, parent))
        draft.rewritten(
            CODE, node, "no_sync became a context that switches the reduction of gradients off and on again"
        )


def _may_be_wrapped(draft: Draft, node: ast.expr) -> bool:
    """A model handed in from elsewhere, in a file that has to do with FSDP."""
    context = draft.context
    if not isinstance(node, ast.Name) or "torch.distributed.fsdp" not in context.text:
        return False
    found = context.bindings(node)
    return node.id.endswith("model") and all(isinstance(one.node, ast.arg) for one in found)
