"""What programs compute from parameters by hand: with FSDP1 from this rank's part, with FSDP2 from the whole."""

from __future__ import annotations

import ast

from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.sharded import Holds
from shardwise.rules.names import FSDP1
from shardwise.rules.source import FileContext

CODE = "SW135"
_LISTS = ("parameters", "named_parameters")
_COUNTS = ("numel", "nelement")
_REDUCTIONS = {f"torch.distributed.{name}" for name in ("all_reduce", "reduce", "all_gather", "reduce_scatter")}
_LOOPS = ast.For | ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


def report_numbers(draft: Draft, program: Program) -> None:
    """Note loops over a sharded model's parameters that count their elements or take norms of their gradients."""
    _report_reductions(draft, program)
    sharded = program.sharded(draft.context)
    for loop in draft.nodes():
        if not isinstance(loop, _LOOPS):
            continue
        iterated = [loop.iter] if isinstance(loop, ast.For) else [one.iter for one in loop.generators]
        models = [one.func.value for one in iterated if _lists_parameters(one)]  # pyrefly: ignore
        if not any(sharded.holds(one) is Holds.ALWAYS for one in models):
            continue
        if any(isinstance(one, ast.Attribute) and one.attr in _COUNTS for one in ast.walk(loop)):
            draft.reported(
                CODE,
                loop,
                "numel() of a sharded parameter counts the whole of it now; with FSDP1 it counted this rank's part",
                "do not multiply the sum by the number of ranks, nor add it up over them",
            )
        if any(_is_norm(one) for one in ast.walk(loop)):
            draft.reported(
                CODE,
                loop,
                "the norm of a sharded gradient is over all ranks now, and a DTensor",
                "take .full_tensor() of it, and do not add it up over ranks again",
            )


def _report_reductions(draft: Draft, program: Program) -> None:
    """Note branches for FSDP1's models that add something up over ranks."""
    context = draft.context
    for branch in draft.nodes():
        if not isinstance(branch, ast.If) or not any(
            _checks_fsdp(context, one, program) for one in ast.walk(branch.test)
        ):
            continue
        calls = [one for statement in branch.body for one in ast.walk(statement) if isinstance(one, ast.Call)]
        added = [one for one in calls if context.is_any(one.func, _REDUCTIONS)]
        if added:
            draft.reported(
                CODE,
                added[0],
                "what FSDP1's models had in parts is added up over ranks here; numbers from DTensors are of the whole",
                "leave the reduction out if it is of sizes or norms of parameters and gradients",
            )


def _checks_fsdp(context: FileContext, node: ast.AST, program: Program) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"):
        return False
    kinds = [one for given in node.args[1:] for one in ast.walk(given) if isinstance(one, ast.Name | ast.Attribute)]
    return any(program.is_any(context, one, {FSDP1}) for one in kinds)


def _lists_parameters(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LISTS


def _is_norm(node: ast.AST) -> bool:
    """`p.grad.norm()`, `torch.norm(p.grad)` and the like."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "norm" in node.func.attr):
        return False
    return any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(node))
