"""An optimizer built before FSDP(...): under FSDP2 it would update tensors that nobody uses, so it moves behind."""

from __future__ import annotations

import ast
import re

from shardwise.rules.moving import constructors
from shardwise.rules.moving.constructors import Blocked, Wrap
from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.edits import change
from shardwise.rules.moving.order import bodies, model_names
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.values import is_constant
from shardwise.rules.scopes import all_parameters

CODE = "SW128"
_HANDED = {"optimizer", "optimizers", "optim", "opt"}
_OPTIMIZER = re.compile(
    r"^torch\.optim\.(?!lr_scheduler)\w+$|(?:^|\.)(?:AdamW|Adam|SGD|Adafactor|AdamW8bit|Lion|Adagrad|FusedAdam)$"
)


def refuse_early_optimizers(draft: Draft, wrap: Wrap) -> None:
    """Refuse a constructor that comes after its optimizer, where the optimizer cannot be moved.

    Raises:
        Blocked: With the line of the optimizer.
    """
    lines = [one.lineno for one in _early(draft, wrap.call) if _to_move(draft, one, wrap.call) is None]
    lines += [*_handed_out(draft, wrap.call), *_handed_in(wrap)]
    if lines:
        raise Blocked(
            f"the optimizer of line {min(lines)} is built before it, and would update tensors nobody uses",
            "build the optimizer after the model is sharded, or sw.shard(model, optimizers=optimizer)",
        )


def _handed_in(wrap: Wrap) -> list[int]:
    """The line of the function around, if it is given the model and its optimizer, and FSDP1 could keep the two."""
    told, function = wrap.value("use_orig_params"), wrap.context.enclosing_function(wrap.call)
    if told is None or is_constant(told, False) or function is None:
        return []
    parameters = {one.arg for one in all_parameters(function.args)}
    module = wrap.value("module")
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    rebuilt = {node.id for node in names if node.lineno > wrap.call.lineno}
    given = isinstance(module, ast.Name) and module.id in parameters
    return [function.lineno] if given and (parameters & _HANDED) - rebuilt else []


def _handed_out(draft: Draft, wrap: ast.Call) -> list[int]:
    """Lines before the constructor on which a function hands out an optimizer of the model, used behind it."""
    context, names = draft.context, model_names(draft, wrap)
    home = context.enclosing_function(wrap)
    ours = [node for node in context.parents if isinstance(node, ast.Name) and context.enclosing_function(node) is home]
    used = {node.id for node in ours if isinstance(node.ctx, ast.Load) and node.lineno > wrap.lineno}
    bound_later = {node.id for node in ours if isinstance(node.ctx, ast.Store) and node.lineno > wrap.lineno}
    lines = []
    for node in ours:
        statement = context.statement(node)
        is_bound = isinstance(node.ctx, ast.Store) and "optim" in node.id.lower() and node.lineno < wrap.lineno
        if not is_bound or not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            continue
        if node.id not in used or node.id in bound_later or _in_other_branch(draft, statement.value, wrap):
            continue
        if any(_OPTIMIZER.search(origin) for origin in context.origins(statement.value.func)):
            continue  # `_early` has it
        given = {context.source(one) for one in statement.value.args}
        given |= {context.source(keyword.value) for keyword in statement.value.keywords}
        targets = {context.source(one) for target in statement.targets for one in getattr(target, "elts", [])}
        if names & (given | targets):
            lines.append(statement.lineno)
    return lines


def move_optimizers(draft: Draft, program: Program) -> None:
    """Move each optimizer built too early, and what depends on it, behind the constructor."""
    for wrap, is_partial in constructors.find(draft.context, program):
        if is_partial or wrap not in draft.taken:
            continue
        for call in _early(draft, wrap):
            _move(draft, call, wrap)


def _early(draft: Draft, wrap: ast.Call) -> list[ast.Call]:
    """Optimizers of the wrapped model that the same function builds before it wraps."""
    context, names = draft.context, model_names(draft, wrap)
    home = context.enclosing_function(wrap)
    found = []
    for call in context.calls:
        if call.lineno >= wrap.lineno or context.enclosing_function(call) is not home:
            continue
        if not any(_OPTIMIZER.search(origin) for origin in context.origins(call.func)):
            continue
        asked = [node for node in ast.walk(call) if isinstance(node, ast.Attribute)]
        given = {context.source(node.value) for node in asked if node.attr in ("parameters", "named_parameters")}
        if given & names and not _in_other_branch(draft, call, wrap):
            found.append(call)
    return found


def _in_other_branch(draft: Draft, call: ast.Call, wrap: ast.Call) -> bool:
    """Whether the two are in branches of one `if` that exclude each other."""
    around = {id(one): one for one in draft.context.ancestors(call)}
    for parent in draft.context.ancestors(wrap):
        if isinstance(parent, ast.If) and id(parent) in around:
            first = any(call in ast.walk(one) for one in parent.body)
            second = any(wrap in ast.walk(one) for one in parent.body)
            return first != second
    return False


def _to_move(draft: Draft, call: ast.Call, wrap: ast.Call) -> list[ast.stmt] | None:
    """The optimizer's statement and those up to the constructor that need it; None where that is not possible."""
    context = draft.context
    first, target = context.statement(call), context.statement(wrap)
    blocks: list[list[ast.stmt]] = [body for body in bodies(context.parents[target]) if target in body]
    block = blocks[0] if blocks else []
    if first not in block or not isinstance(first, ast.Assign) or not all(map(draft.starts_line, (first, target))):
        return None
    moved: list[ast.stmt] = [first]
    given = _names(first, ast.Store)
    last = block.index(target)
    for statement in block[block.index(first) + 1 : last]:
        if _names(statement, ast.Load) & given:
            if not isinstance(statement, ast.Assign) or not draft.starts_line(statement):
                return None
            moved.append(statement)
            given |= _names(statement, ast.Store)
    stays = [one for one in block[block.index(first) : last] if one not in moved]
    changed = set().union(*(_names(one, ast.Store) for one in stays)) if stays else set()
    read = set().union(*(_names(one, ast.Load) for one in moved))
    return None if _names(target, ast.Load) & given or (changed & read) else moved


def _names(statement: ast.stmt, kind: type[ast.expr_context]) -> set[str]:
    found = (node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, kind))
    return {node.id for node in found}


def _move(draft: Draft, call: ast.Call, wrap: ast.Call) -> None:
    context = draft.context
    statements = _to_move(draft, call, wrap) or []
    text, target = context.text, context.statement(wrap)
    place = _line_end(text, context.positions.span(target)[1])
    for statement in statements:
        start = context.positions.starts[statement.lineno - 1]
        end = _line_end(text, context.positions.span(statement)[1])
        draft.edits += [change(start, end, ""), change(place, place, text[start:end])]
        draft.taken.update(ast.walk(statement))
    draft.rewritten(CODE, call, "the optimizer moved behind the sharding, whose parameters it must update")


def _line_end(text: str, offset: int) -> int:
    match = re.compile(r"[^\r\n]*(\r\n|\r|\n|$)").match(text, offset)
    return match.end() if match else len(text)
