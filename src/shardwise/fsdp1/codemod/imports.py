"""Imports of a rewritten file."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from pathlib import PurePath

from shardwise.errors import SourceError
from shardwise.findings import Edit
from shardwise.fsdp1.codemod.draft import FileDraft
from shardwise.fsdp1.codemod.emitted import assemble, emitted_in, is_ours, name_in, names_used, origins
from shardwise.fsdp1.codemod.program import Program
from shardwise.source.edits import apply, change
from shardwise.source.syntax import FileContext, Function

_OURS = (
    "torch.distributed.fsdp",
    "torch.distributed.algorithms._checkpoint",
    "torch.distributed.checkpoint.optimizer",
    "functools",
)
_WRITTEN_WITH = ("functools", "torch.distributed.fsdp")
"""Modules without effects of their own, imported as such for FSDP1's settings."""
_IMPORTS = ast.Import | ast.ImportFrom


def finish(draft: FileDraft) -> str:
    """The rewritten text with everything it needs and nothing it no longer uses.

    Raises:
        SourceError: Two edits overlap, or the file uses a name of emitted code for something else.
    """
    text = apply(draft.context.text, draft.edits)
    after = FileContext(text, draft.context.path)
    there, helpers = emitted_in(after), assemble(draft.helpers, draft.features)
    named = {name: name_in(after, name) for name, _ in helpers}
    pieces = [piece for name, piece in helpers if named[name] not in there]
    missing, renamed = _missing(after, draft.names.union(*map(names_used, pieces)))
    if clash := sorted(draft.names & renamed.keys()):
        raise SourceError(
            f"{clash[0]} means something else in this file",
            where=after.path,
            why="emitted code uses the name as torch does",
            fix="rename it",
        )
    block = "\n\n\n".join(pieces)
    for old, new in {**renamed, **named}.items():
        block = re.sub(rf"\b{old}\b", new, block)
    edits = _removals(draft.context, after, block, keep=imported_elsewhere(draft.program, draft.context).keys())
    statements = _statements(missing, renamed)
    if statements or block:
        new_names = {renamed.get(name, name) for name in missing}.union(named.values())
        edits.append(_insertion(after, statements, block, edits, new_names))
    text = apply(text, edits)
    return re.sub(r"\r?\n", draft.newline, text) if _has_one_line_end(draft.context.text) else text


def _has_one_line_end(text: str) -> bool:
    return text.count("\r\n") in (0, text.count("\n"))


def imported_elsewhere(program: Program, context: FileContext) -> dict[str, str]:
    """The names that other files of the program take from a file, and where they do."""
    path = PurePath(context.path)
    stem = re.escape(path.parent.name if path.stem == "__init__" else path.stem)
    imports = re.compile(rf"^[ \t]*(from|import)\b[^\n]*\b{stem}\b|^[ \t]*from \.+ import", re.MULTILINE)
    found: dict[str, str] = {}
    for other in program.files(imports.search):
        for node in other.parents if other is not context else ():
            taken: list[tuple[str, str]] = []
            if isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                names = [alias.name for alias in node.names]
                every = context.scopes[context.tree].names if names == ["*"] else names
                taken = [(module, name) for name in every]
            elif isinstance(node, ast.Attribute):
                taken = [(origin.rpartition(".")[0], node.attr) for origin in other.origins(node, raw=True)]
            for module, name in taken:
                if module.strip(".") and program.find_module(other, module) is context:
                    found.setdefault(name, f"{other.path}:{getattr(node, 'lineno', 1)}")
    return found


def _missing(after: FileContext, wanted: set[str]) -> tuple[list[str], dict[str, str]]:
    """Names to import, and those that must have another name because the file uses theirs for something else."""
    scope, parents = after.scopes[after.tree], after.parents
    missing, renamed = [], {}
    for name in sorted(wanted):
        bindings = scope.names.get(name, [])
        ours = [binding.node for binding in bindings if is_ours(name, binding.origin)]
        if any(isinstance(parents.get(parents.get(node, node)), ast.Module) for node in ours):
            continue  # imported at the top of the file, whatever happens
        if bindings and not ours:
            renamed[name] = f"fsdp2_{name}"
        missing.append(name)
    return missing, renamed


def _statements(missing: list[str], renamed: dict[str, str]) -> list[str]:
    lines, grouped = [], dict[str, list[str]]()
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


def _insertion(
    after: FileContext, statements: list[str], block: str, removals: list[Edit], new_names: set[str]
) -> Edit:
    """The new statements behind the file's imports, else behind its docstring or its first comments."""
    text, body = after.text, after.tree.body
    last, head = _last_import(after.tree, new_names), ""
    if last is None and body and ast.get_docstring(after.tree, clean=False) is not None:
        last, head = body[0], "\n"
    if last is not None:
        place = after.positions.line_end(after.positions.span(last)[1])
    else:
        comments = re.match(r"(?:[ \t]*#[^\n]*\n|[ \t]*\r?\n)*", text)  # `#!`, coding, licence
        place = comments.end() if comments else 0
    place = next((edit.end for edit in removals if edit.start < place <= edit.end), place)
    whole = head + "".join(f"{line}\n" for line in statements)
    if block:
        blank = re.compile(r"(?:[ \t]*\r?\n)*").match(text, place)
        whole += f"\n\n{block}\n" + "\n" * max(0, 2 - (blank.group().count("\n") if blank else 0))
    if place and text[place - 1] not in "\r\n":
        whole = "\n" + whole
    newline = "\r\n" if "\r\n" in text else "\n"
    return change(place, place, whole.replace("\n", newline))


def _last_import(tree: ast.Module, new_names: set[str]) -> ast.stmt | None:
    """The last of the imports at the top of a file: not behind functions, nor behind the first use of a new name."""
    last = None
    for statement in tree.body:
        is_main_guard = isinstance(statement, ast.If) and any(
            isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
        )
        if any(isinstance(node, ast.Name) and node.id in new_names for node in ast.walk(statement)):
            break
        if is_main_guard or isinstance(statement, Function | ast.ClassDef | ast.For | ast.While | ast.With):
            break
        inner = [one for one in ast.walk(statement) if isinstance(one, ast.stmt)]
        allowed = _IMPORTS | ast.Assign | ast.Pass | ast.If | ast.Expr | ast.Raise | ast.Try
        has_imports = any(isinstance(one, _IMPORTS) for one in inner) and all(isinstance(one, allowed) for one in inner)
        if isinstance(statement, _IMPORTS | ast.Try | ast.If) and has_imports:
            last = statement
    return last


def _removals(before: FileContext, after: FileContext, helpers_text: str, keep: Collection[str]) -> list[Edit]:
    """Imports that were used before and are not now, of FSDP1 and of what its settings are written with."""
    if after.path.endswith("__init__.py"):
        return []
    unused = _used(before.tree) - _used(after.tree) - set(keep) - set(re.findall(r"\b\w+\b", helpers_text))
    for statement in after.tree.body:
        if isinstance(statement, ast.Assign) and any(getattr(one, "id", "") == "__all__" for one in statement.targets):
            unused -= {str(one.value) for one in ast.walk(statement.value) if isinstance(one, ast.Constant)}
    edits: list[Edit] = []
    for node in after.parents:
        if isinstance(node, ast.ImportFrom):
            may_go = not node.level and (node.module or "").startswith(_OURS)
        else:
            may_go = isinstance(node, ast.Import) and all(alias.name in _WRITTEN_WITH for alias in node.names)
        if may_go and isinstance(node, _IMPORTS):
            edits += _without(after, node, [alias for alias in node.names if (alias.asname or alias.name) in unused])
    return edits


def _used(tree: ast.Module) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):  # annotations in quotes may name a class
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        for one in ast.walk(annotation) if isinstance(annotation, ast.AST) else ():
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                names |= set(re.findall(r"\w+", one.value))
    return names


def _without(after: FileContext, node: ast.Import | ast.ImportFrom, gone: list[ast.alias]) -> list[Edit]:
    text, span = after.text, after.positions.span
    start, end = span(node)
    if gone and len(gone) == len(node.names):
        line_start, behind = after.positions.starts[node.lineno - 1], after.positions.line_end(end)
        is_only = len(after.block(node)) == 1
        if not is_only and not text[line_start:start].strip() and not text[end:behind].strip():
            return [change(line_start, behind, "")]
        return [change(start, end, "pass")] if is_only else []
    edits: list[Edit] = []
    for alias in gone:
        begin, behind = span(alias)
        comma = re.compile(r"[ \t]*,[ \t]*").match(text, behind)
        if comma:
            line_start = text.rfind("\n", 0, begin) + 1
            line = re.compile(r"[ \t]*(?:#[^\r\n]*)?\r?\n").match(text, comma.end())
            is_alone = not text[line_start:begin].strip() and line_start > start
            edits.append(change(line_start, line.end(), "") if is_alone and line else change(begin, comma.end(), ""))
        else:  # the last of all: what is gone before it goes with it
            kept_end = max(span(one)[1] for one in node.names if one not in gone)
            if "#" in text[kept_end:behind]:
                return []  # comments between the names: leave the line to a person
            edits = [edit for edit in edits if edit.start < kept_end]
            edits.append(change(kept_end, behind, ""))
    return edits
