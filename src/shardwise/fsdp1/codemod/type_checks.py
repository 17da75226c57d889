"""FSDP1's class as a type: isinstance, annotations, and files that tell FSDP1 from FSDP2."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePath

from shardwise.fsdp1.codemod.draft import FileDraft
from shardwise.fsdp1.codemod.emitted import is_ours
from shardwise.fsdp1.codemod.leftovers import INTERNAL
from shardwise.source.syntax import FSDP1, FileContext, checked_types

CODE = "SW123"
_SAYS = re.compile(r"fsdp_?v?[12]|fsdp_?version", re.IGNORECASE)
_SAYS_NEW = re.compile(r"fsdp_?v?2|fsdp_?version", re.IGNORECASE)
_FOLDER = re.compile(r"fsdp_?v?2", re.IGNORECASE)
_OURS = re.compile(r"^_?fsdp2_|^_fully_shard_like_fsdp1$")
_BECAME = "the class became FSDPModule, which every sharded module is"


def tells_apart(draft: FileDraft) -> int | None:
    """The line on which a file tells FSDP1 from FSDP2, by a name or by a check of both types; None if it does not."""
    context = draft.context
    is_named = any(_FOLDER.search(part) for part in PurePath(context.path).parts[-2:])
    if is_named and not draft.sharded.constructors:
        return 1
    if not _SAYS.search(context.text) and "FSDPModule" not in context.text:
        return None
    # Where models are wrapped, a name with a 1 is no other kind.
    says = _SAYS_NEW if draft.sharded.constructors else _SAYS
    named = [(_names_in(node), node) for node in draft.nodes()]
    lines = [node.lineno for name, node in named if says.search(name) and not _OURS.match(name)]  # pyrefly: ignore
    for_new = [call for call in draft.calls() if any(_is_fsdp2(draft, one) for one in checked_types(call))]
    if any(draft.program.checks_fsdp(context, call) for call in draft.calls() if call not in for_new):
        lines += [call.lineno for call in for_new]
    return min(lines, default=None)


def _names_in(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.ImportFrom(names=aliases):
            return " ".join(one.name for one in aliases)
    return ""


def _is_fsdp2(draft: FileDraft, node: ast.AST) -> bool:
    return any(is_ours("FSDPModule", one) for one in draft.program.origins(draft.context, node))


def rewrite_type_checks(draft: FileDraft) -> None:
    """Rewrite every use of the class as a type."""
    for call in draft.calls():
        if draft.context.origins(call.func) == {f"{FSDP1}.fsdp_modules"} and call not in draft.taken:
            _rewrite_modules(draft, call)
    for node in draft.nodes():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            _rewrite_quoted(draft, node, node.value)
        elif node not in draft.taken and _is_fsdp1_type(draft, node):
            # `(FSDP, FSDPModule)`: either will do.
            parent = draft.context.parents[node]
            beside = list(ast.walk(parent)) if isinstance(parent, ast.Tuple | ast.List | ast.BinOp) else []
            if any(_is_fsdp2(draft, one) for one in beside):
                draft.taken.add(node)
            else:
                draft.replace(node, draft.name("FSDPModule"))  # pyrefly: ignore
                draft.rewritten(CODE, node, _BECAME)


def _is_fsdp1_type(draft: FileDraft, node: ast.AST) -> bool:
    is_name = isinstance(node, ast.Name | ast.Attribute) and _is_type_use(draft.context, node)
    return is_name and draft.program.origins(draft.context, node) == {FSDP1}


def with_types_changed(draft: FileDraft, statement: ast.stmt, start: int, stop: int) -> str:
    """The text from `start` to `stop`, which holds a statement that is moved, with its uses of the class rewritten."""
    piece = draft.context.text[start:stop]
    uses = [(draft.span(node), node) for node in ast.walk(statement) if _is_fsdp1_type(draft, node)]  # pyrefly: ignore
    for (first, last), node in sorted(uses, key=lambda one: one[0], reverse=True):
        piece = piece[: first - start] + draft.name("FSDPModule") + piece[last - start :]
        draft.rewritten(CODE, node, _BECAME)
    return piece


def _is_type_use(context: FileContext, node: ast.expr) -> bool:
    """The second argument of isinstance, alone or in a tuple; an annotation; `type(x) is FSDP`."""
    child: ast.AST = node
    for parent in context.ancestors(node):
        match parent:
            case ast.Tuple() | ast.BinOp(op=ast.BitOr()) | ast.Subscript() | ast.List():
                child = parent
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, second]):
                return second is child
            case ast.Compare(left=ast.Call(func=ast.Name(id="type"))):
                return True
            case ast.arg() | ast.AnnAssign() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.MatchClass():
                return child in (getattr(parent, name, None) for name in ("annotation", "returns", "cls"))
            case _:
                return False
    return False


def _rewrite_modules(draft: FileDraft, call: ast.Call) -> None:
    """`FSDP.fsdp_modules(m, root_only=...)`."""
    draft.taken.update(ast.walk(call.func))
    if len(call.args) != 1 or call.keywords:
        message = "fsdp_modules(..., root_only=...) has no counterpart"
        fix = "[m for m in model.modules() if isinstance(m, FSDPModule)], and keep the roots"
        draft.undecided(CODE, call, message, fix)
    elif any(one in INTERNAL for one in _used_of_each(draft, call)):
        message = "fsdp_modules is left alone: the loop over it works on what only FSDP1's models have"
        draft.undecided(CODE, call, message, "leave the loop out for FSDP2's models, or write it again for them")
    else:
        model, name = draft.source(call.args[0]), draft.name("FSDPModule")
        draft.replace(call, f"[module for module in {model}.modules() if isinstance(module, {name})]")
        draft.taken.update(ast.walk(call))
        draft.rewritten(CODE, call, "fsdp_modules became a walk over the modules")


def _used_of_each(draft: FileDraft, call: ast.Call) -> Iterator[str]:
    """The attributes of its variable that a loop over the call uses."""
    match draft.context.parents[call]:
        case ast.For(target=ast.Name(id=name), iter=iterated) as loop if iterated is call:
            for node in ast.walk(loop):
                match node:
                    case ast.Attribute(value=ast.Name(id=owner), attr=used) if owner == name:
                        if used != "_fsdp_wrapped_module":  # which is the module itself now
                            yield used


def _rewrite_quoted(draft: FileDraft, node: ast.Constant, value: str) -> None:
    """An annotation in quotes."""
    if not re.fullmatch(r"[\w.\[\], |]+", value) or not _is_type_use(draft.context, node):
        return
    names = draft.context.scopes[draft.context.tree].names
    for word in set(re.findall(r"\b\w+\b", value)):
        origins = {one.origin for one in names.get(word, [])}
        if origins and all(one.endswith(".FullyShardedDataParallel") and one.startswith("torch.") for one in origins):
            draft.replace(node, re.sub(rf"\b{word}\b", draft.name("FSDPModule"), draft.source(node)))
            draft.rewritten(CODE, node, _BECAME)
            return
