"""FSDP1's class as a type, and what else of FSDP1 is left over once the rules have rewritten what they can."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePath

from shardwise.findings import Status
from shardwise.fsdp1.codemod.draft import KEEP_FSDP1_API, FileDraft, is_ours
from shardwise.fsdp1.codemod.flow import METHODS, STATIC, Holds
from shardwise.fsdp1.codemod.program import ENABLE_WRAP, WRAP, is_none, is_private
from shardwise.source.syntax import FSDP1, FileContext, Function, checked_types, given_to, last_name

TYPE_CODE = "SW123"
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
                draft.rewritten(TYPE_CODE, node, _BECAME)


_LAYER = re.compile(r"^(Linear|Conv\dd|\w*Norm(\dd)?|Embedding|Dropout)$")
"""Names of classes that are no units."""


def report_exact_types(draft: FileDraft) -> None:
    """Note where the exact class of a sharded model's module is asked for, which `fully_shard` changes."""
    for node in draft.nodes():
        match node:
            case ast.Compare(left=ast.Constant(), ops=[ast.In() | ast.NotIn()]):
                continue  # a part of the name is there still
            case ast.Compare(left=left, comparators=comparators):
                sides = [left, *comparators]
            case _:
                continue
        asked = [owner for owner in map(_whose_type, sides) if owner is not None]
        others = [one for side in sides if _whose_type(side) is None for one in getattr(side, "elts", [side])]
        named = [str(one.value) if isinstance(one, ast.Constant) else last_name(one) for one in others]
        is_told = all(map(_LAYER.match, named)) or not draft.taken.isdisjoint(others)
        if not is_told and any(map(draft.sharded.holds_part, asked)):
            message = (
                "fully_shard makes the class of each module it shards a subclass: its name and type are others now"
            )
            draft.reported(TYPE_CODE, node, message, "isinstance(module, Block); or find the modules before sharding")


def _whose_type(node: ast.expr) -> ast.expr | None:
    """`m` of `type(m)`, `m.__class__`, and the names of these."""
    match node:
        case ast.Attribute(attr="__name__" | "__qualname__", value=inner):
            return _whose_type(inner)
        case ast.Attribute(attr="__class__", value=owner) | ast.Call(func=ast.Name(id="type"), args=[owner]):
            return owner
    return None


def _is_fsdp1_type(draft: FileDraft, node: ast.AST) -> bool:
    is_name = isinstance(node, ast.Name | ast.Attribute) and _is_type_use(draft.context, node)
    return is_name and draft.program.origins(draft.context, node) == {FSDP1}


def with_types_changed(draft: FileDraft, statement: ast.stmt, start: int, stop: int) -> str:
    """The text from `start` to `stop`, which holds a statement that is moved, with its uses of the class rewritten."""
    piece = draft.context.text[start:stop]
    uses = [(draft.span(node), node) for node in ast.walk(statement) if _is_fsdp1_type(draft, node)]  # pyrefly: ignore
    for (first, last), node in sorted(uses, key=lambda one: one[0], reverse=True):
        piece = piece[: first - start] + draft.name("FSDPModule") + piece[last - start :]
        draft.rewritten(TYPE_CODE, node, _BECAME)
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
        draft.undecided(TYPE_CODE, call, message, fix)
    elif any(one in INTERNAL for one in _used_of_each(draft, call)):
        message = "fsdp_modules is left alone: the loop over it works on what only FSDP1's models have"
        draft.undecided(TYPE_CODE, call, message, "leave the loop out for FSDP2's models, or write it again for them")
    else:
        model, name = draft.source(call.args[0]), draft.name("FSDPModule")
        draft.replace(call, f"[module for module in {model}.modules() if isinstance(module, {name})]")
        draft.taken.update(ast.walk(call))
        draft.rewritten(TYPE_CODE, call, "fsdp_modules became a walk over the modules")


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
            draft.rewritten(TYPE_CODE, node, _BECAME)
            return


FLAT = {"flat_param", "_flat_param", "_all_handles", "_is_flat_param", "_shard_param_infos"}
"""What nothing but FSDP1's flat parameters has."""
_SURE = {
    *FLAT,
    "_mp_param",
    "_mp_shard",
    "_full_param_padded",
    "_gradient_postdivide_factor",
    "_gradient_predivide_factor",
}
INTERNAL = {*_SURE, "_handle", "_handles", "_fsdp_wrapped_module", "_is_root", "_has_params", "_unshard_params"}
_ATTRIBUTES = {"process_group", "sharding_strategy", "compute_device", "training_state", "check_is_root", "_lazy_init"}
_ATTRIBUTES |= {"mixed_precision", "cpu_offload", "backward_prefetch", "limit_all_gathers"}
_SAVES = re.compile(r"save|checkpoint|ckpt|state_dict|resume")
_HOOKS = {"register_comm_hook", "register_params_comm_hook", "set_comm_hook"}
_OF_MODELS = (
    (
        INTERNAL,
        "SW127",
        ".{} is a part of FSDP1's flat parameters, which FSDP2 does not have",
        "work on the DTensors that model.parameters() gives",
    ),
    (
        _ATTRIBUTES,
        "SW127",
        ".{} is an attribute of FSDP1's wrapper, which FSDP2 does not have",
        "take it from the mesh or the settings that the model is sharded with",
    ),
    (
        frozenset(STATIC),
        "SW131",
        "FSDP.{} works on FSDP1's models only",
        "replace it by what it is used for",
    ),
    (
        _HOOKS,
        "SW130",
        "{} has no direct counterpart in FSDP2",
        "set_all_reduce_hook, or a custom communication class",
    ),
)
"""Attributes of FSDP1's models: code, message and fix."""
_PRIVATE = re.compile(r"torch\.distributed\.fsdp\._(?!fully_shard)")


def report_leftovers(draft: FileDraft) -> None:
    """Note every use of FSDP1 that is still there."""
    _report_classes(draft)
    _report_calls(draft)
    _report_internals(draft)


def _report_classes(draft: FileDraft) -> None:
    for node in draft.nodes():
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load) or node in draft.taken:
            continue
        parent = draft.context.parents[node]
        is_static = isinstance(parent, ast.Attribute) and parent.attr in STATIC
        if not draft.program.is_fsdp(draft.context, node) and not (
            is_static and draft.program.subclass(draft.context, node)
        ):
            continue
        if isinstance(parent, ast.Attribute) and parent.attr.startswith("__"):
            continue
        if isinstance(parent, ast.Compare) and is_none(parent.comparators[0]):
            continue  # whether it could be imported
        if isinstance(parent, ast.Attribute):
            if parent not in draft.taken and not any(_has_note(draft, one) for one in draft.context.ancestors(node)):
                message = f"FSDP.{parent.attr} works on FSDP1's models only"
                _leave(draft, "SW131", node, message, "replace it by what it is used for")
        elif not isinstance(parent, ast.Call) or (
            node in parent.args and parent not in draft.taken and not _has_note(draft, parent)
        ):
            message = "FSDP's class is used as a value here: passed on, stored or chosen at run time"
            _leave(draft, "SW102", node, message, "pass a function that calls fully_shard and returns the module")


def _leave(draft: FileDraft, code: str, node: ast.AST, message: str, fix: str) -> None:
    draft.undecided(code, node, message, f"{fix}; or {KEEP_FSDP1_API}")


def _has_note(draft: FileDraft, node: ast.AST) -> bool:
    lines = {note.line for note in draft.notes if note.status is not Status.REPORTED}
    return isinstance(node, ast.stmt | ast.expr) and node.lineno in lines


def _report_calls(draft: FileDraft) -> None:
    wraps = {WRAP, ENABLE_WRAP, "torch.distributed.fsdp.wrap.auto_wrap"}
    for call in draft.calls():
        if call in draft.taken:
            continue
        match call.func:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name) if name in METHODS:
                own = draft.context.enclosing_class(call)
                if own is not None and draft.program.inherits(draft.context, own):
                    message = f"super().{name} is FSDP1's, which {own.name} no longer inherits from"
                    _leave(draft, "SW102", call, message, "do what it did with the sharded model, or leave it out")
        if draft.context.is_any(call.func, wraps):
            message = "enable_wrap and wrap make FSDP1 units while the model is built"
            fix = "build the model first, then call fully_shard on the same modules, inner first"
            _leave(draft, "SW103", call, message, fix)


def _report_internals(draft: FileDraft) -> None:
    context = draft.context
    for node in draft.nodes():
        private = ""
        if isinstance(node, ast.ImportFrom) and _PRIVATE.match(node.module or ""):
            private = node.module or ""
        elif isinstance(node, ast.Import):
            private = next((one.name for one in node.names if _PRIVATE.match(one.name)), "")
        elif isinstance(node, ast.Call) and is_private(context, node.func):
            private = draft.source(node.func)
        if private:
            fix = "remove what uses it, or write it again on DTensor"
            _leave(draft, "SW127", node, f"{private} is private to FSDP1", fix)
        if _decides_by_flat_names(context, node):
            message = (
                "parameters have names of their own now, none has flat_param: what is chosen by it comes out otherwise"
            )
            _leave(draft, "SW127", node, message, "choose by the modules' names, as where no FSDP was used")
        for names, code, message, fix in _OF_MODELS:
            if not isinstance(node, ast.Attribute) or node.attr not in names or node in draft.taken:
                continue
            if node.attr == "_fsdp_wrapped_module" and _is_asked_for(context, node):
                continue  # and not there
            if node.attr in _SURE or draft.sharded.holds_part(node.value):
                _leave(draft, code, node, message.format(node.attr), fix)


def _is_asked_for(context: FileContext, node: ast.Attribute) -> bool:
    """Whether a test around an attribute asks by name whether the object has it."""
    tests = [one.test for one in context.ancestors(node) if isinstance(one, ast.If | ast.IfExp | ast.While)]
    return any(getattr(one, "value", None) == node.attr for test in tests for one in ast.walk(test))


def _decides_by_flat_names(context: FileContext, node: ast.AST) -> bool:
    """Whether a test on a name asks for `flat_param`, as FSDP1's parameters are called."""
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and "flat_param" in node.value):
        return False
    parent = context.parents[node]
    return isinstance(parent, ast.Compare) or last_name(getattr(parent, "func", None)) in ("startswith", "endswith")


def report_handed_out(draft: FileDraft) -> None:
    """Note each call that hands a wrapped model to a function made for FSDP1, by what it does or is called."""
    context = draft.context
    for call in draft.calls():
        name = context.source(call.func).rpartition(".")[2]
        if draft.sharded.is_handed_away(call):
            message = f"{name} is not known here; it is given a sharded model, or a function that makes one"
            fix = "let it take state dicts with get_model_state_dict and StateDictOptions(full_state_dict=True)"
            draft.reported("SW132", call, message, fix)
        is_fsdps = "fsdp" in name.lower()
        if call in draft.taken or not (is_fsdps or _SAVES.search(name)) or draft.holds(call.func):
            continue
        models = [one for one in given_to(call) if isinstance(one, ast.Name | ast.Attribute)]
        raw = context.origins(call.func, raw=True)
        is_torchs = any(one.startswith(("torch.", "shardwise.")) for one in raw)
        if not is_fsdps:
            if not is_torchs and any(_is_foreign(draft, one) for one in raw) and any(map(draft.holds, models)):
                message = f"{name} is of a file not given: it would find shards in the state dict of the sharded model"
                fix = "see whether it takes FSDP2's models; or give it a state dict of get_model_state_dict"
                draft.reported("SW132", call, message, fix)
            continue
        if is_torchs or not any(draft.holds(one) is Holds.ALWAYS for one in models):
            continue
        found = draft.program.function(context, call.func)
        if not (_knows_internals(*found) if found else any(_is_foreign(draft, one) for one in raw)):
            continue  # rewritten where it is
        why = "works on FSDP1's internals" if found is not None else "is of a file not given, and named after FSDP"
        fix = "see whether it takes FSDP2's models, or leave the call out"
        _leave(draft, "SW132", call, f"{name} is handed the sharded model; it {why}", fix)


def _is_foreign(draft: FileDraft, origin: str) -> bool:
    """Whether a name is imported from a module that is not among the files given."""
    parts = origin.split(".")
    modules = [".".join(parts[:end]) for end in range(1, len(parts))]
    return bool(parts[0]) and not any(draft.program.find_module(draft.context, one) for one in modules)


def _knows_internals(context: FileContext, function: Function) -> bool:
    return any(
        getattr(node, "attr", "") in FLAT or is_private(context, node)
        for node in ast.walk(function)
        if isinstance(node, ast.Name | ast.Attribute)
    )
