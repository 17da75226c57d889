"""Taking a `with` apart: its body moves out by one level, and every other character stays."""

from __future__ import annotations

import ast
import io
import re
import tokenize

from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.edits import change
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.state_calls import Unmovable
from shardwise.rules.moving.values import called_fsdp_name, fsdp_name
from shardwise.rules.source import FileContext

_HEADER_END = re.compile(r"(?:[\s),]|#[^\n]*\n)*:[ \t]*(?P<comment>#[^\r\n]*)?\r?\n")


def dissolve(draft: Draft, block: ast.With, call: ast.Call) -> None:
    """Remove one context from a `with`; if it was the only one, the statement around its body too.

    Raises:
        Unmovable: The body stands on the line of the `with`, or its lines cannot be moved.
    """
    context = draft.context
    others = [item for item in block.items if item.context_expr is not call]
    if any(item.optional_vars is not None for item in block.items if item not in others):
        raise Unmovable(call, "the context is given a name", "take the `as` away")
    start, end = context.positions.span(block)[0], _last(draft, block)
    header = _HEADER_END.match(context.text, end)
    if header is None or not draft.starts_line(block):
        raise Unmovable(call, "the body stands on the same line", "put it on a line of its own")
    if others:
        kept = ", ".join(_item(draft, item) for item in others)
        draft.edits.append(change(start, header.end(), f"with {kept}:{_comment(header)}{draft.newline}"))
        return
    # From the word `with` to the first character of the body: the `with`'s own indentation serves it.
    first = re.compile(r"\s*").match(context.text, header.end())
    body = first.end() if first else header.end()
    remark = f"{header['comment']}{draft.newline}{draft.indent(block)}" if header["comment"] else ""
    draft.edits.append(change(start, body, remark))
    _move_out(draft, block, body)


def remove_statement(draft: Draft, statement: ast.stmt) -> None:
    """Take a statement away with its line; `pass` stays where it was the only one."""
    context = draft.context
    start, end = context.positions.span(statement)
    siblings = _siblings(context.parents.get(statement), statement)
    rest = re.compile(r"[ \t]*(#[^\r\n]*)?(\r?\n|$)").match(context.text, end)
    if len(siblings) < 2 or rest is None or not draft.starts_line(statement):
        draft.edits.append(change(start, end, "pass"))
    elif statement is siblings[-1]:
        draft.edits.append(change(context.positions.starts[statement.lineno - 1], rest.end(), ""))
    else:  # up to what follows: the indentation before the statement serves it
        behind = re.compile(r"\s*").match(context.text, rest.end())
        draft.edits.append(change(start, behind.end() if behind else rest.end(), ""))


def drop_dead_configs(draft: Draft, program: Program) -> None:
    """Remove `policy = FullStateDictConfig(...)` where only settings that are gone now had used it."""
    context = draft.context
    gone = [call for call in draft.taken if isinstance(call, ast.Call) and _is_setting(context, call)]
    inside = {id(node) for call in gone for node in ast.walk(call)}
    for statement in [node for node in context.parents if isinstance(node, ast.Assign)] if gone else []:
        target = statement.targets[0]
        name = called_fsdp_name(context, statement.value) or ""
        if not (name.endswith("StateDictConfig") and isinstance(target, ast.Name) and len(statement.targets) == 1):
            continue
        uses = [one for one in context.parents if isinstance(one, ast.Name) and one.id == target.id]
        is_dead = any(id(one) in inside for one in uses) and all(one is target or id(one) in inside for one in uses)
        is_alone = all(target.id not in text for path, text in program.texts.items() if path != context.path)
        is_emitted = any(re.search(rf"\b{target.id}\b", edit.text) for edit in draft.edits)
        if is_dead and not is_emitted and (is_alone or context.enclosing_function(statement) is not None):
            remove_statement(draft, statement)


def _is_setting(context: FileContext, call: ast.Call) -> bool:
    return (fsdp_name(context, call.func) or "").endswith("state_dict_type")


def _last(draft: Draft, block: ast.With) -> int:
    item = block.items[-1]
    return draft.context.positions.span(item.optional_vars or item.context_expr)[1]


def _item(draft: Draft, item: ast.withitem) -> str:
    text = draft.context.source(item.context_expr)
    return f"{text} as {draft.context.source(item.optional_vars)}" if item.optional_vars is not None else text


def _comment(header: re.Match[str]) -> str:
    return f"  {header['comment']}" if header["comment"] else ""


def _move_out(draft: Draft, block: ast.With, body_start: int) -> None:
    """Take one level of indentation from every line of the body that is not inside a string."""
    context, positions = draft.context, draft.context.positions
    outer, inner = draft.indent(block), draft.indent(block.body[0])
    if not inner.startswith(outer) or inner == outer:
        raise Unmovable(block, "its lines are indented in mixed ways", "indent them alike")
    width, in_string = len(inner) - len(outer), _string_lines(context.text)
    edits = list(draft.edits)
    first = next(number for number, start in enumerate(positions.starts, 1) if start >= body_start)
    for number in range(first, (block.end_lineno or first) + 1):
        line = positions.line(number)
        start = positions.starts[number - 1]
        if number in in_string or not line.strip() or any(one.start < start + len(inner) <= one.end for one in edits):
            continue
        if line[: len(inner)] == inner or (line.lstrip().startswith("#") and line.startswith(outer)):
            have = len(line) - len(line.lstrip(" \t"))
            draft.edits.append(change(start + len(outer), start + len(outer) + min(width, have - len(outer)), ""))


def _string_lines(text: str) -> set[int]:
    """Lines that start inside a string: their white space belongs to it."""
    found: set[int] = set()
    try:
        starts: list[int] = []
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            kind = tokenize.tok_name[token.type]
            if kind == "STRING":
                found.update(range(token.start[0] + 1, token.end[0] + 1))
            elif kind == "FSTRING_START":
                starts.append(token.start[0])
            elif kind == "FSTRING_END" and starts:
                found.update(range(starts.pop() + 1, token.end[0] + 1))
    except (tokenize.TokenError, IndentationError):
        pass
    return found


def _siblings(parent: ast.AST | None, statement: ast.stmt) -> list[ast.stmt]:
    for name in ("body", "orelse", "finalbody", "handlers"):
        body = getattr(parent, name, [])
        if isinstance(body, list) and statement in body:
            return body
    return [statement]
