"""Which state-dict calls a wrapped model can reach, and on which ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.errors import SourceError
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.state_settings import model_argument
from shardwise.rules.moving.values import fsdp_name
from shardwise.rules.source import FileContext

_SETTER = "FullyShardedDataParallel.set_state_dict_type"
_RANK_ZERO = re.compile(
    r"rank\w*(\(\))?\s*==\s*0|not\s+[\w.]*rank\b|is_main|main_process|is_master|master_process|is_rank_?0"
)


def under_rank_zero(context: FileContext, call: ast.Call) -> bool:
    """Whether only rank 0 comes to a call."""
    for inner, outer in _chain(context, call):
        if isinstance(outer, ast.If) and any(inner is one for one in outer.body):
            test = ast.unparse(outer.test)
            if _RANK_ZERO.search(test) and " or " not in test and " and " not in test:
                return True
    return False


def rules_out(context: FileContext, call: ast.Call) -> bool:
    """Whether a wrapped model cannot come to a call: it is in the other branch of a test for FSDP, or behind it."""
    for inner, outer in _chain(context, call):
        if isinstance(outer, ast.If | ast.IfExp) and _asks_for_fsdp(outer.test) is not None:
            orelse = outer.orelse if isinstance(outer, ast.If) else [outer.orelse]
            if any(inner is one for one in orelse) is _asks_for_fsdp(outer.test) and inner is not outer.test:
                return True
        for body in (getattr(outer, "body", None), getattr(outer, "orelse", None)):
            if isinstance(body, list) and any(inner is one for one in body):
                before = body[: next(index for index, one in enumerate(body) if one is inner)]
                if any(_leaves_for_fsdp(one) for one in before):
                    return True
    return False


def _asks_for_fsdp(test: ast.expr) -> bool | None:
    """True for `isinstance(m, FSDP)`, `args.fsdp`, `mode == "fsdp"`; False for their negation; None for other tests."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _asks_for_fsdp(test.operand)
        return None if inner is None else not inner
    text = ast.unparse(test).lower()
    if "fsdp" not in text or isinstance(test, ast.BoolOp):
        return None
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq | ast.IsNot | ast.NotIn):
        return "none" in text or "false" in text
    return not (isinstance(test, ast.Compare) and ("none" in text or "false" in text))


def _leaves_for_fsdp(statement: ast.stmt) -> bool:
    """`if isinstance(m, FSDP): ...; return`: what follows is for other models."""
    if not isinstance(statement, ast.If) or _asks_for_fsdp(statement.test) is not True or statement.orelse:
        return False
    return isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def sets_types_globally(program: Program) -> bool:
    """Whether some file sets a state-dict type in one function for calls in another."""
    return program.remember("sets_types_globally", _sets_types_globally)


def _sets_types_globally(program: Program) -> bool:
    for path, text in program.texts.items():
        if ".set_state_dict_type" not in text:
            continue
        try:
            context = program.file(path)
        except SourceError:
            continue
        for call in context.calls:
            if fsdp_name(context, call.func) == _SETTER and not _used_nearby(context, call):
                return True
    return False


def _used_nearby(context: FileContext, call: ast.Call) -> bool:
    model, function = model_argument(call), context.enclosing_function(call)
    text = ast.unparse(model) if model is not None else ""
    for one in context.calls:
        if one.lineno > call.lineno and context.enclosing_function(one) is function:
            if isinstance(one.func, ast.Attribute) and one.func.attr in ("state_dict", "load_state_dict"):
                if ast.unparse(one.func.value) == text:
                    return True
            elif "optim_state_dict" in (fsdp_name(context, one.func) or ""):
                return True
    return False


def _chain(context: FileContext, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    for parent in context.ancestors(node):
        yield node, parent
        node = parent
