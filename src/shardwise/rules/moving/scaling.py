"""`ShardedGradScaler`: torch's own scaler works on sharded gradients under FSDP2."""

from __future__ import annotations

import ast

from shardwise.rules.moving.arguments import read_arguments
from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.program import Program

CODE = "SW122"
_NAME = "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"


def rewrite_scalers(draft: Draft, program: Program) -> None:
    """Rewrite every use of the class."""
    context = draft.context
    for node in draft.nodes():
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        if node in draft.taken or context.origins(node) != {_NAME} or isinstance(context.parents[node], ast.Attribute):
            continue
        if _is_alias(node, context.parents[node]):
            continue
        draft.name("torch")
        draft.replace(node, "torch.amp.GradScaler")
        parent = context.parents[node]
        if isinstance(parent, ast.Call) and parent.func is node:
            _arguments(draft, parent)
        draft.rewritten(CODE, node, "ShardedGradScaler became torch.amp.GradScaler")


def _is_alias(node: ast.expr, parent: ast.AST) -> bool:
    """A variable that holds a scaler resolves to the class by its assignment only where that is the class itself."""
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and isinstance(parent, ast.Assign)


def _arguments(draft: Draft, call: ast.Call) -> None:
    listed = read_arguments(draft.context, call)
    for argument in listed.arguments:
        if argument.name == "process_group":
            listed.drop(argument)
    first = listed.arguments[0] if listed.arguments else None
    is_number = first is not None and isinstance(first.value, ast.Constant | ast.BinOp)
    if first is not None and not first.name and is_number and not isinstance(getattr(first.value, "value", 0), str):
        listed.rename(first, "init_scale")  # torch's first argument was the scale once
    draft.edits += listed.edits()
