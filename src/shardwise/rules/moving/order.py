"""Activation checkpointing must come before sharding under FSDP2; with FSDP1 it often came after."""

from __future__ import annotations

import ast
import re

from shardwise.rules.moving import constructors
from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.edits import change
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.type_checks import with_types_changed
from shardwise.rules.moving.values import is_simple
from shardwise.rules.scopes import Function
from shardwise.rules.source import FileContext

CODE = "SW125"
_APPLIES = re.compile(r"^(apply|enable|setup|add)_\w*checkpoint\w*$|^apply_(\w+_)?ac$")
_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_APPLY = {
    f"{_WRAPPERS}.{name}" for name in ("apply_activation_checkpointing", "apply_activation_checkpointing_wrapper")
}
_MAX_HOPS = 3
_TRAINS = {"backward", "step", "zero_grad", "load_state_dict"}
"""Methods that a function which only prepares a model does not call."""


def rewrite_order(draft: Draft, program: Program) -> None:
    """Move recomputation before sharding where nothing stands in between."""
    context = draft.context
    wraps = [call for call, is_partial in constructors.find(context, program) if not is_partial]
    for wrap in wraps:
        if wrap not in draft.taken:
            continue
        home = context.enclosing_function(wrap)
        for call in draft.calls():
            if context.enclosing_function(call) is not home or call is wrap:
                continue
            if call.lineno > wrap.lineno and _recomputes(draft, program, call, wrap):
                _move_up(draft, program, call, wrap)
            elif call.lineno > wrap.lineno and _looks_like_it(draft, program, call, wrap):
                _leave(draft, call)


def model_names(draft: Draft, wrap: ast.Call) -> set[str]:
    """The names by which the wrapped model is known."""
    context = draft.context
    module = module_of(wrap)
    names = {context.source(module)} if module is not None else set()
    statement = context.statement(wrap)
    if isinstance(statement, ast.Assign):
        names |= {context.source(target) for target in statement.targets}
    return names


def module_of(wrap: ast.Call) -> ast.expr | None:
    """The module that a constructor call is given."""
    return wrap.args[0] if wrap.args else next((k.value for k in wrap.keywords if k.arg == "module"), None)


def _recomputes(draft: Draft, program: Program, call: ast.Call, wrap: ast.Call) -> bool:
    """Whether a call applies activation checkpointing to the wrapped model, itself or through a function."""
    context, names = draft.context, model_names(draft, wrap)
    if not any(context.source(one) in names for one in _given(call)):
        return False
    if context.is_any(call.func, _APPLY):
        return True
    return any(
        other.is_any(inner.func, _APPLY)
        for other, function in _reached(program, context, call, names)
        for inner in ast.walk(function)
        if isinstance(inner, ast.Call)
    )


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _reached(
    program: Program, context: FileContext, call: ast.Call, names: set[str], hops: int = 0
) -> list[tuple[FileContext, ast.AST]]:
    """The function of the program that is handed one of `names`, and those that this one hands it on to."""
    found = program.function(context, call.func) if hops < _MAX_HOPS else None
    if found is None:
        return []
    other, function = found
    handed = _parameters(context, call, function, names)
    reached: list[tuple[FileContext, ast.AST]] = [found]
    for inner in ast.walk(function):
        if isinstance(inner, ast.Call) and any(other.source(one) in handed for one in _given(inner)):
            reached += _reached(program, other, inner, handed, hops + 1)
    return reached


def _parameters(context: FileContext, call: ast.Call, function: Function, names: set[str]) -> set[str]:
    """The parameters of a function by which it gets one of `names`."""
    positional = [one.arg for one in function.args.args if one.arg != "self"]
    given = zip(positional, call.args, strict=False)
    handed = {parameter for parameter, value in given if context.source(value) in names}
    return handed | {one.arg for one in call.keywords if one.arg and context.source(one.value) in names}


def _only_prepares(program: Program, context: FileContext, call: ast.Call, names: set[str]) -> bool:
    """Whether a call does nothing that has to come after sharding."""
    return not any(
        isinstance(node, ast.Attribute) and node.attr in _TRAINS
        for _, function in _reached(program, context, call, names)
        for node in ast.walk(function)
    )


def _move_up(draft: Draft, program: Program, call: ast.Call, wrap: ast.Call) -> None:
    """Put the statement in front of the one that shards, if both are in one block and nothing between minds."""
    context = draft.context
    target = context.statement(wrap)
    moved = _block_member(draft, call, target)
    prepares = _only_prepares(program, context, call, model_names(draft, wrap))
    if moved is None or not _can_move(draft, moved, target, wrap) or not prepares:
        _leave(draft, call)
        return
    text, end = context.text, context.positions.span(moved)[1]
    line_start = context.positions.starts[moved.lineno - 1]
    behind = re.compile(r"[^\r\n]*(\r\n|\r|\n|$)").match(text, end)
    stop = behind.end() if behind else end
    lead = _comments_above(text, line_start, draft.indent(moved))
    place = context.positions.starts[target.lineno - 1]
    piece = with_types_changed(draft, program, moved, lead, stop)
    given = module_of(wrap)
    new_name = context.source(target.targets[0]) if isinstance(target, ast.Assign) else ""
    old_name = context.source(given) if given is not None else ""
    if given is not None and new_name and not is_simple(given):
        # The model is built in the call itself: it gets its name first.
        draft.replace(given, new_name)
        piece = f"{draft.indent(target)}{new_name} = {old_name}{draft.newline}{piece}"
    elif new_name and old_name and new_name != old_name:
        piece = re.sub(rf"(?<![\w.]){re.escape(new_name)}(?!\w)", old_name, piece)
    draft.edits = [change(place, place, piece), change(lead, stop, ""), *draft.edits]
    draft.features.add("ac")
    draft.taken.update(ast.walk(moved))
    draft.rewritten(CODE, call, "activation checkpointing moved before sharding: recomputed inside, sharded outside")


def _leave(draft: Draft, call: ast.Call) -> None:
    draft.undecided(
        CODE,
        call,
        "activation checkpointing is applied after sharding: FSDP2 would recompute around its gathering",
        "apply it before the model is sharded, and shard the wrapped blocks",
    )


def _looks_like_it(draft: Draft, program: Program, call: ast.Call, wrap: ast.Call) -> bool:
    """A function with a name that says what it does to the model, of a file not given or in a way not known."""
    context = draft.context
    name = context.source(call.func).rpartition(".")[2]
    found = program.function(context, call.func)
    if not _APPLIES.search(name) or (found is not None and "checkpoint_wrapper" not in found[0].source(found[1])):
        return False
    return any(context.source(one) in model_names(draft, wrap) for one in _given(call))


def _comments_above(text: str, line_start: int, indent: str) -> int:
    """The start of the comment lines right above, which belong to a statement."""
    while line_start:
        previous = text.rfind("\n", 0, line_start - 1) + 1
        line = text[previous:line_start]
        if not line.strip().startswith("#") or not line.startswith(indent):
            return line_start
        line_start = previous
    return line_start


def _block_member(draft: Draft, node: ast.AST, target: ast.stmt) -> ast.stmt | None:
    """The statement around `node` that stands in the same block as `target`; alone in its `if`, or none."""
    context = draft.context
    block = context.parents[target]
    current = context.statement(node)
    while context.parents.get(current) is not block:
        parent = context.parents.get(current)
        if not isinstance(parent, ast.If) or parent.orelse:
            return None
        current = parent
    siblings = next((body for body in bodies(block) if target in body), [])
    return current if current in siblings else None


def bodies(node: ast.AST) -> list[list[ast.stmt]]:
    """The blocks of statements that a node has."""
    return [body for name in ("body", "orelse", "finalbody") if isinstance(body := getattr(node, name, None), list)]


def _can_move(draft: Draft, moved: ast.stmt, target: ast.stmt, wrap: ast.Call) -> bool:
    """Whether nothing between the two gives a name that the moved statement reads, and nothing in it is rewritten."""
    context = draft.context
    if not draft.starts_line(moved) or not draft.starts_line(target) or moved in draft.taken:
        return False
    siblings = next(body for body in bodies(context.parents[target]) if target in body)
    between = siblings[siblings.index(target) + 1 : siblings.index(moved)]
    read = {node.id for node in ast.walk(moved) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    given = {
        node.id
        for statement in between
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    given |= {node.name for statement in between for node in ast.walk(statement) if isinstance(node, Function)}
    given |= {
        (alias.asname or alias.name).split(".")[0]
        for statement in between
        for node in ast.walk(statement)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    start, end = context.positions.span(moved)
    touched = any(start <= edit.start and edit.end <= end for edit in draft.edits)
    touched |= "_fsdp_wrapped_module" in context.text[start:end]  # reaches into wrappers that are gone
    return not read & given and not touched
