"""Imports of a rewritten file."""

from __future__ import annotations

import ast
import re

from shardwise.errors import SourceError
from shardwise.findings import Edit
from shardwise.fsdp1.codemod.emitted import assemble, is_ours, names_used, origins
from shardwise.source.edits import apply, change
from shardwise.source.syntax import FileContext

_FSDP = "torch.distributed.fsdp"
_OURS = (_FSDP, "torch.distributed.algorithms._checkpoint", "torch.distributed.checkpoint.optimizer")


def finish(before: FileContext, text: str, names: set[str], helpers: set[str], features: set[str]) -> str:
    """The rewritten text with everything it needs and nothing it no longer uses.

    Args:
        before: The file as it was.
        text: The file with all edits made.
        names: Those that emitted code uses and must be imported.
        helpers: Functions to emit.
        features: Their optional parameters that are needed.

    Raises:
        SourceError: The file uses one of the names for something else.
    """
    after = FileContext(text, before.path)
    newline = "\r\n" if "\r\n" in text else "\n"
    there = after.scopes[after.tree].names
    emitted = [(name, piece) for name, piece in assemble(helpers, features) if name not in there]
    wanted = set(names)
    for _, piece in emitted:
        wanted |= set(names_used(piece))
    missing, renamed = _missing(after, wanted)
    if clash := sorted(names & renamed.keys()):
        raise SourceError(
            f"{clash[0]} means something else in this file",
            where=before.path,
            why="emitted code uses the name as torch does",
            fix="rename it",
        )
    block = "\n\n\n".join(piece for _, piece in emitted)
    for old, new in renamed.items():
        block = re.sub(rf"\b{old}\b", new, block)
    edits = _removals(before, after, block)
    edits += _insertion(after, _statements(missing, renamed), block, newline, edits)
    return apply(text, edits)


def _missing(after: FileContext, wanted: set[str]) -> tuple[list[str], dict[str, str]]:
    """Names to import, and those that must have another name because the file uses theirs for something else."""
    scope = after.scopes[after.tree]
    missing, renamed = [], {}
    for name in sorted(wanted):
        bindings = scope.names.get(name, [])
        ours = [binding for binding in bindings if is_ours(name, binding.origin)]
        if any(_is_plain_import(after, binding.node) for binding in ours):
            continue
        if bindings and not ours:
            renamed[name] = f"fsdp2_{name}"
        missing.append(name)
    return missing, renamed


def _is_plain_import(after: FileContext, node: ast.AST) -> bool:
    """Whether an import always happens, at the top of the file."""
    return isinstance(after.parents.get(after.parents.get(node, node)), ast.Module)


def _statements(missing: list[str], renamed: dict[str, str]) -> list[str]:
    lines = []
    grouped: dict[str, list[str]] = {}
    for name in missing:
        origin, used = origins()[name], renamed.get(name, name)
        module, _, last = origin.rpartition(".")
        if last == name and module:
            grouped.setdefault(module, []).append(name if used == name else f"{name} as {used}")
        else:
            lines.append(f"import {origin}" if used == origin else f"import {origin} as {used}")
    for module, names in sorted(grouped.items()):
        line = f"from {module} import {', '.join(names)}"
        if len(line) > 100:
            line = f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
        lines.append(line)
    return lines


def _insertion(after: FileContext, statements: list[str], block: str, newline: str, removals: list[Edit]) -> list[Edit]:
    if not statements and not block:
        return []
    statement = _last_import(after.tree)
    text = after.text
    lines = "\n".join(statements)
    if statement is None:
        place, head = 0, ""
        if after.tree.body and ast.get_docstring(after.tree, clean=False) is not None:
            place = after.positions.line_end(after.positions.span(after.tree.body[0])[1])
            head = "\n"
        else:
            place = _after_comments(text)
    else:
        place = after.positions.line_end(after.positions.span(statement)[1])
        head = ""
    removed = next((edit for edit in removals if edit.start < place <= edit.end), None)
    if removed is not None:
        place = removed.end
    whole = head + (lines + "\n" if lines else "")
    if block:
        whole += "\n\n" + block + "\n"
        rest = text[place:]
        blank = re.match(r"(?:[ \t]*\r?\n)*", rest)
        have = blank.group().count("\n") if blank else 0
        whole += "\n" * max(0, 2 - have)
    if place and text[place - 1] not in "\r\n":
        whole = "\n" + whole
    return [change(place, place, whole.replace("\n", newline))]


def _after_comments(text: str) -> int:
    """Behind the comments at the top of a file: `#!`, coding, licence."""
    match = re.match(r"(?:[ \t]*#[^\n]*\n|[ \t]*\r?\n)*", text)
    return match.end() if match else 0


def _last_import(tree: ast.Module) -> ast.stmt | None:
    """The last of the imports at the top of a file; those further down, behind functions, do not count."""
    last = None
    for statement in tree.body:
        if isinstance(
            statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.For | ast.While | ast.With
        ):
            break
        if isinstance(statement, ast.If) and _is_main_guard(statement):
            break
        if isinstance(statement, ast.Import | ast.ImportFrom) or (
            isinstance(statement, ast.Try | ast.If) and _imports_only(statement)
        ):
            last = statement
    return last


def _is_main_guard(statement: ast.If) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test))


def _imports_only(statement: ast.stmt) -> bool:
    inner = [one for one in ast.walk(statement) if isinstance(one, ast.stmt) and one is not statement]
    allowed = ast.Import | ast.ImportFrom | ast.Assign | ast.Pass | ast.If | ast.Expr | ast.Raise | ast.Try
    return any(isinstance(one, ast.Import | ast.ImportFrom) for one in inner) and all(
        isinstance(one, allowed) for one in inner
    )


def _removals(before: FileContext, after: FileContext, helpers_text: str) -> list[Edit]:
    """Imports of FSDP1 names that were used before and are not now."""
    if after.path.endswith("__init__.py"):
        return []
    was, now = _used(before.tree), _used(after.tree) | set(re.findall(r"\b\w+\b", helpers_text))
    exported = _exported(after.tree)
    edits: list[Edit] = []
    for node in after.parents:
        if not isinstance(node, ast.ImportFrom) or node.level or not (node.module or "").startswith(_OURS):
            continue
        gone = [
            alias
            for alias in node.names
            if (bound := alias.asname or alias.name) in was and bound not in now and bound not in exported
        ]
        if gone:
            edits += _without(after, node, gone)
    return edits


def _used(tree: ast.Module) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    # Annotations in quotes, and doctest-like strings, may name a class.
    for node in ast.walk(tree):
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        if isinstance(annotation, ast.AST):
            for one in ast.walk(annotation):
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    names |= set(re.findall(r"\w+", one.value))
    return names


def _exported(tree: ast.Module) -> set[str]:
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in statement.targets
        ):
            return {str(one.value) for one in ast.walk(statement.value) if isinstance(one, ast.Constant)}
    return set()


def _without(after: FileContext, node: ast.ImportFrom, gone: list[ast.alias]) -> list[Edit]:
    text = after.text
    start, end = after.positions.span(node)
    if len(gone) == len(node.names):
        line_start = after.positions.starts[node.lineno - 1]
        alone = text[line_start:start].strip() == ""
        behind = after.positions.line_end(end)
        body = after.block(node)
        if alone and len(body) > 1 and text[end:behind].strip() == "":
            return [change(line_start, behind, "")]
        return [change(start, end, "pass")] if len(body) == 1 else []
    edits = []
    kept = [alias for alias in node.names if alias not in gone]
    for alias in gone:
        begin, finish = after.positions.span(alias)
        comma = re.compile(r"[ \t]*,[ \t]*").match(text, finish)
        if comma:
            line_start = text.rfind("\n", 0, begin) + 1
            line = re.compile(r"[ \t]*(?:#[^\r\n]*)?\r?\n").match(text, comma.end())
            if text[line_start:begin].strip() == "" and line and line_start > start:
                edits.append(change(line_start, line.end(), ""))
            else:
                edits.append(change(begin, comma.end(), ""))
        else:
            previous = max(
                (one for one in kept if one.lineno <= alias.lineno), key=lambda one: after.positions.span(one)[1]
            )
            earlier = [one for one in gone if after.positions.span(one)[0] > after.positions.span(previous)[1]]
            if alias is not earlier[-1] or "#" in text[after.positions.span(previous)[1] : finish]:
                return []  # comments between the names: leave the line to a person
            edits = [edit for edit in edits if edit.start < after.positions.span(previous)[0]]
            edits.append(change(after.positions.span(previous)[1], finish, ""))
    return edits
