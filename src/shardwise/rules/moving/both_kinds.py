"""Files that know FSDP1 and FSDP2 and tell them apart: models that were FSDP1's take the other branch now."""

from __future__ import annotations

import ast
import re
from pathlib import PurePath

from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.support import is_ours
from shardwise.rules.names import FSDP1
from shardwise.rules.source import FileContext

_SAYS = re.compile(r"fsdp_?v?[12]|fsdp_?version", re.IGNORECASE)
_FOLDER = re.compile(r"fsdp_?v?2", re.IGNORECASE)
_NOTHING = re.compile(r"^fsdp2_[A-Z]|^FSDP1$")  # as `imports` calls a class of ours; as some call FSDP1's class


def tells_apart(draft: Draft, program: Program) -> int | None:
    """The line on which a file tells FSDP1 from FSDP2, by a name or by a check of both types; None if it does not."""
    context = draft.context
    if any(_FOLDER.search(part) for part in PurePath(context.path).parts[-2:]):
        return 1
    if not _SAYS.search(context.text) and "FSDPModule" not in context.text:
        return None
    lines = [line for node in draft.nodes() for line in _named(node)]
    lines += _checked(draft, program)
    return min(lines, default=None)


def names_both(context: FileContext, node: ast.expr, program: Program) -> bool:
    """Whether FSDP1's class stands beside FSDP2's, so that either will do: `(FSDP, FSDPModule)`."""
    parent = context.parents[node]
    if isinstance(parent, ast.Tuple | ast.List):
        return any(_is_fsdp2(context, one, program) for one in parent.elts)
    if isinstance(parent, ast.BinOp):
        return any(_is_fsdp2(context, one, program) for one in ast.walk(parent) if isinstance(one, ast.expr))
    return False


def _named(node: ast.AST) -> list[int]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            pass
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            pass
        case ast.ImportFrom(names=aliases):
            name = " ".join(one.name for one in aliases)
        case _:
            return []
    return [node.lineno] if _SAYS.search(name) and not _NOTHING.match(name) else []  # pyrefly: ignore


def _checked(draft: Draft, program: Program) -> list[int]:
    """Lines of checks for FSDP2's class, in a file that also checks for FSDP1's alone."""
    context, first, second = draft.context, False, []
    for call in draft.calls():
        if not (isinstance(call.func, ast.Name) and call.func.id == "isinstance" and len(call.args) == 2):
            continue
        kinds = [one for one in ast.walk(call.args[1]) if isinstance(one, ast.Name | ast.Attribute)]
        has_new = any(_is_fsdp2(context, one, program) for one in kinds)
        first |= not has_new and any(program.is_any(context, one, {FSDP1}) for one in kinds)
        second += [call.lineno] if has_new else []
    return second if first else []


def _is_fsdp2(context: FileContext, node: ast.expr, program: Program) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and any(
        is_ours("FSDPModule", origin) for origin in program.origins(context, node)
    )
