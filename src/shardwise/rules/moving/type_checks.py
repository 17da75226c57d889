"""`isinstance(model, FSDP)`, annotations and `FSDP.fsdp_modules`: under FSDP2 a sharded module is an `FSDPModule`."""

from __future__ import annotations

import ast
import re

from shardwise.rules.moving.both_kinds import names_both
from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.leftovers import INTERNAL
from shardwise.rules.moving.program import Program
from shardwise.rules.names import FSDP1
from shardwise.rules.source import FileContext

CODE = "SW123"
_BECAME = "the class became FSDPModule, which every sharded module is"


def rewrite_type_checks(draft: Draft, program: Program) -> None:
    """Rewrite every use of the class as a type."""
    context = draft.context
    for call in draft.calls():
        if context.origins(call.func) == {f"{FSDP1}.fsdp_modules"} and call not in draft.taken:
            _modules(draft, call)
    for node in draft.nodes():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            _quoted(draft, program, node)
        if not isinstance(node, ast.Name | ast.Attribute) or node in draft.taken:
            continue
        if is_type_use(context, node) and program.origins(context, node) == {FSDP1}:
            if names_both(context, node, program):
                draft.taken.add(node)
                continue
            draft.replace(node, draft.name("FSDPModule"))
            draft.rewritten(CODE, node, _BECAME)


def with_types_changed(draft: Draft, program: Program, statement: ast.stmt, start: int, stop: int) -> str:
    """The text from `start` to `stop`, which holds a statement that is moved, with its uses of the class rewritten."""
    context = draft.context
    piece = context.text[start:stop]
    uses = [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.Name | ast.Attribute)
        and is_type_use(context, node)
        and program.origins(context, node) == {FSDP1}
    ]
    for node in sorted(uses, key=lambda one: context.positions.span(one), reverse=True):
        first, last = context.positions.span(node)
        piece = piece[: first - start] + draft.name("FSDPModule") + piece[last - start :]
        draft.rewritten(CODE, node, _BECAME)
    return piece


def is_type_use(context: FileContext, node: ast.expr) -> bool:
    """The second argument of isinstance, alone or in a tuple; an annotation; `type(x) is FSDP`."""
    child: ast.AST = node
    for parent in context.ancestors(node):
        match parent:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, second]):
                return second is child
            case ast.Tuple() | ast.BinOp(op=ast.BitOr()) | ast.Subscript() | ast.List():
                child = parent
            case ast.arg() | ast.AnnAssign():
                return parent.annotation is child
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return parent.returns is child
            case ast.Compare(left=ast.Call(func=ast.Name(id="type"))):
                return True
            case ast.MatchClass():
                return parent.cls is child
            case _:
                return False
    return False


def _modules(draft: Draft, call: ast.Call) -> None:
    """`FSDP.fsdp_modules(m, root_only=...)`."""
    if len(call.args) != 1 or call.keywords:
        draft.undecided(
            CODE,
            call,
            "fsdp_modules(..., root_only=...) has no counterpart",
            "[m for m in model.modules() if isinstance(m, FSDPModule)], and keep the roots",
        )
        draft.taken.update(ast.walk(call.func))
        return
    if _reaches_inside(draft, call):
        draft.undecided(
            CODE,
            call,
            "fsdp_modules is left alone: the loop over it works on what only FSDP1's models have",
            "leave the loop out for FSDP2's models, or write it anew for them",
        )
        draft.taken.update(ast.walk(call.func))
        return
    model = draft.context.source(call.args[0])
    name = draft.name("FSDPModule")
    draft.replace(call, f"[module for module in {model}.modules() if isinstance(module, {name})]")
    draft.taken.update(ast.walk(call))
    draft.rewritten(CODE, call, "fsdp_modules became a walk over the modules")


def _reaches_inside(draft: Draft, call: ast.Call) -> bool:
    """Whether a call is what a loop goes over, which reaches into FSDP1's internals."""
    loop = draft.context.parents[call]
    if not (isinstance(loop, ast.For) and loop.iter is call and isinstance(loop.target, ast.Name)):
        return False
    used = [one for one in ast.walk(loop) if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)]
    return any(one.attr in INTERNAL and one.value.id == loop.target.id for one in used)  # pyrefly: ignore


def _quoted(draft: Draft, program: Program, node: ast.Constant) -> None:
    """An annotation in quotes."""
    context, value = draft.context, node.value
    if not isinstance(value, str) or not re.fullmatch(r"[\w.\[\], |]+", value) or not is_type_use(context, node):
        return
    scope = context.scopes[context.tree]
    for word in set(re.findall(r"\b\w+\b", value)):
        origins = {one.origin for one in scope.names.get(word, [])}
        if origins and all(one.endswith(".FullyShardedDataParallel") and one.startswith("torch.") for one in origins):
            text = context.source(node)
            draft.replace(node, re.sub(rf"\b{word}\b", draft.name("FSDPModule"), text))
            draft.rewritten(CODE, node, _BECAME)
            return
