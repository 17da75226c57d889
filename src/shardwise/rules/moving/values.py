"""What an expression of the program amounts to, as far as reading tells: constants, single assignments, torch names."""

from __future__ import annotations

import ast

from shardwise.rules.source import FileContext

_FSDP = "torch.distributed.fsdp."
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def is_none(node: ast.expr | None) -> bool:
    """Whether an expression is the literal None, or absent."""
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Whether an expression is this literal."""
    return isinstance(node, ast.Constant) and node.value is value


def fsdp_name(context: FileContext, node: ast.AST | None) -> str | None:
    """`MixedPrecision` for whatever spelling of `torch.distributed.fsdp.MixedPrecision`; None for other things."""
    found = context.origins(node)
    if len(found) != 1:
        return None
    (origin,) = found
    return origin.removeprefix(_FSDP) if origin.startswith(_FSDP) else None


def called_fsdp_name(context: FileContext, node: ast.AST | None) -> str | None:
    """The FSDP name that an expression calls."""
    return fsdp_name(context, node.func) if isinstance(node, ast.Call) else None


def single_value(context: FileContext, node: ast.expr) -> ast.expr:
    """The expression a name stands for, where it is given its value once and in the same function or the module.

    Anything else stands for itself.
    """
    for _ in range(4):
        if not isinstance(node, ast.Name):
            return node
        bindings = context.bindings(node)
        if len(bindings) != 1 or bindings[0].value is None or _in_branch_or_loop(context, bindings[0].node, node):
            return node
        node = bindings[0].value
    return node


def _in_branch_or_loop(context: FileContext, bound: ast.AST, used: ast.AST) -> bool:
    """Whether the assignment may not have happened, or happened with other values, when the name is used."""
    around_use = set(context.ancestors(used))
    for parent in context.ancestors(bound):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module | ast.Lambda | ast.ClassDef):
            return False
        if isinstance(parent, ast.For | ast.While | ast.If | ast.Try) and parent not in around_use:
            return not isinstance(parent, ast.If)  # bound under an `if` alone: bound so, or an error anyway
    return False


def strategy(context: FileContext, node: ast.expr | None) -> str | None:
    """The name of the ShardingStrategy that an expression is; None where it is only known at run time."""
    if is_none(node):
        return "FULL_SHARD"
    assert node is not None
    node = single_value(context, node)
    if isinstance(node, ast.Constant) and node.value is None:
        return "FULL_SHARD"
    if not isinstance(node, ast.Attribute):
        return None
    name = fsdp_name(context, node)
    if name is None or not name.startswith("ShardingStrategy."):
        return None
    member = name.removeprefix("ShardingStrategy.")
    return member if member in STRATEGIES else None


def is_simple(node: ast.expr) -> bool:
    """Whether an expression may be written twice: it does nothing, and is short."""
    if isinstance(node, ast.Name | ast.Constant):
        return True
    return isinstance(node, ast.Attribute) and is_simple(node.value)
