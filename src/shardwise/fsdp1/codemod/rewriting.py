"""Rewrite a file with every rule, or skip it with a reason; and its imports."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import PurePath

from shardwise.errors import SourceError
from shardwise.findings import Edit, Severity, SourceFinding, Status
from shardwise.fsdp1.codemod import constructors
from shardwise.fsdp1.codemod.draft import (
    IMPORTED_AS,
    KEEP_FSDP1_API,
    Blocked,
    FileDraft,
    assemble,
    emitted_in,
    is_ours,
    name_in,
    names_used,
    origins,
)
from shardwise.fsdp1.codemod.flow import flow_of, wraps_models
from shardwise.fsdp1.codemod.framework_files import framework_findings
from shardwise.fsdp1.codemod.leftovers import (
    report_exact_types,
    report_handed_out,
    report_leftovers,
    rewrite_type_checks,
    tells_apart,
)
from shardwise.fsdp1.codemod.model_calls import (
    rewrite_after_forward,
    rewrite_clipping,
    rewrite_forward_calls,
    rewrite_full_params,
    rewrite_inner_modules,
    rewrite_no_sync,
    rewrite_scalers,
)
from shardwise.fsdp1.codemod.order import move_optimizers, report_reentrant, rewrite_order
from shardwise.fsdp1.codemod.parameters import report_numbers
from shardwise.fsdp1.codemod.program import Program, once
from shardwise.fsdp1.codemod.state_dicts import rewrite_state_dicts
from shardwise.fsdp1.codemod.writing import constructed, rewrite_backends, rewrite_constructors, rewrite_enable_wrap
from shardwise.source.edits import apply, change, without_names
from shardwise.source.syntax import FSDP1, FileContext, Function

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
    missing, renamed = _missing(after, draft.names.union(*map(names_used, pieces)) - draft.renamed)
    if clash := sorted(draft.names & renamed.keys()):
        raise SourceError(
            f"{clash[0]} means something else in this file",
            where=after.path,
            why="emitted code uses the name as torch does",
            fix="rename it",
        )
    missing = sorted({*missing, *draft.renamed})
    renamed |= {name: f"{IMPORTED_AS}{name}" for name in draft.renamed}
    block = "\n\n\n".join(pieces)
    for old, new in {**renamed, **named}.items():
        block = re.sub(rf"\b{old}\b", new, block)
    edits = _removals(
        draft.program.texts[draft.context.path],
        after,
        block,
        keep=imported_elsewhere(draft.program, draft.context).keys(),
    )
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
    stem = path.parent.name if path.stem == "__init__" else path.stem
    found: dict[str, str] = {}
    for other in filter(None, map(program.parsed, program.importers(stem, "."))):
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
            renamed[name] = f"{IMPORTED_AS}{name}"
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


def _removals(before: str, after: FileContext, helpers_text: str, keep: Collection[str]) -> list[Edit]:
    """Imports that were used before and are not now, of FSDP1 and of what its settings are written with."""
    if after.path.endswith("__init__.py"):
        return []
    unused = _used(ast.parse(before)) - _used(after.tree) - set(keep) - set(re.findall(r"\b\w+\b", helpers_text))
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
            edits += without_names(
                after, node, [alias for alias in node.names if (alias.asname or alias.name) in unused]
            )
    return edits


def _used(tree: ast.Module) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):  # annotations in quotes may name a class
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        for one in ast.walk(annotation) if isinstance(annotation, ast.AST) else ():
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                names |= set(re.findall(r"\w+", one.value))
    return names


_NAMED = re.compile(r"FSDP|FullyShardedDataParallel")
_FRAMEWORK = re.compile(r"FSDPStrategy|FullyShardedDataParallelPlugin|fsdp_config|TrainingArguments")
_ON_MODELS = ("SW120", "SW121", "SW123", "SW124", "SW126")


def _why_skipped(draft: FileDraft) -> str:
    """Why the file's models may still be FSDP1's, so that their methods must stay; empty if they are not."""
    program = draft.program
    calls = [note for note in draft.notes if note.code == constructors.CODE]
    if left := [note.line for note in calls if note.status is Status.NEEDS_DECISION]:
        return f"the FSDP(...) call on line {left[0]} is left alone"
    if (line := tells_apart(draft)) is not None:
        return f"line {line} tells FSDP2's models, which these are now, from FSDP1's"
    if calls:
        return ""
    if not _wraps(program) and (framework := _framework_skipped(program)):
        return f"{framework} is left alone, and its models stay FSDP1's"
    left = left_alone(program)
    stays = any(left.values()) and [left[one] for one in flow_of(program).fed_by(draft.context.path, left)]
    return f"{stays[0]} is left alone, and so are all others that give models to it" if stays and all(stays) else ""


@once
def _framework_skipped(program: Program) -> str:
    """The place where a framework is told to wrap models by FSDP1, if a person must decide about that."""
    found = (one for context in program.files(_FRAMEWORK.search) for one in framework_findings(context))
    undecided = (one for one in found if one.status is Status.NEEDS_DECISION)
    return next((f"the framework's setting at {one.path}:{one.line}" for one in undecided), "")


@once
def left_alone(program: Program) -> dict[str, str]:
    """The files that have FSDP(...) calls: the place of the first where none can be rewritten, else empty."""
    found = {}
    for path, draft in constructed(program).items():
        calls = [note for note in draft.notes if note.code == constructors.CODE]
        moves = any(note.status is Status.REWRITTEN for note in calls)
        found[path] = f"FSDP(...) at {path}:{calls[0].line}" if calls and not moves else ""
    return found


@once
def _wraps(program: Program) -> bool:
    """Whether the program has an FSDP(...) call, or `fully_shard`."""
    if any("fully_shard(" in text or "sw.shard(" in text for text in program.texts.values()):
        return True
    return wraps_models(program)


def _report_wrapped_elsewhere(draft: FileDraft) -> None:
    """Say that models come from code that was not given, where that decides whether the rewrite is right."""
    fresh = any(note.status is Status.REWRITTEN and note.code in _ON_MODELS for note in draft.notes)
    if fresh and not _wraps(draft.program):
        draft.reported(
            "SW133",
            draft.context.tree,
            "no file given wraps a model: this is right if who wraps it moves to FSDP2 as well",
            "run migrate on the whole project; for a framework, switch its config to FSDP2",
        )


def _rewrite_frameworks(draft: FileDraft) -> None:
    for finding in framework_findings(draft.context):
        draft.edits += finding.edits
        draft.notes.append(finding)


Rule = Callable[[FileDraft], None]
_RULES: tuple[Rule, ...] = (
    rewrite_enable_wrap,
    rewrite_state_dicts,
    rewrite_clipping,
    rewrite_no_sync,
    rewrite_scalers,
    rewrite_type_checks,
    rewrite_full_params,
    rewrite_forward_calls,
    rewrite_inner_modules,
    rewrite_after_forward,
    rewrite_backends,
)
"""After the constructors, each on what the ones before have left."""


def rewrite(context: FileContext, program: Program, target: str) -> tuple[str, list[SourceFinding]]:
    """Rewrite one file.

    A rule whose edits collide with earlier ones is not applied, and says so.

    Args:
        context: The file.
        program: All files given, this one among them.
        target: `torch` or `shardwise`.
    """
    draft, original = FileDraft(context, program, target), program.texts[context.path]
    own = context.classes.get(FSDP1.rpartition(".")[2])
    if own is not None and not program.inherits(context, own):
        message = "the file holds a copy of FSDP1 itself, and is left alone"
        draft.undecided("SW102", own, message, "use torch's fully_shard where this class is used, and remove the copy")
        return original, draft.notes
    for rules in (_RULES, ()):
        draft = FileDraft(context, program, target)
        rewrite_constructors(draft)
        for rule in (rewrite_order, move_optimizers):  # belong to a rewritten constructor, whatever the file keeps
            _apply_rule(rule, draft, "")
        keeps = _why_skipped(draft)
        for rule in rules:
            _apply_rule(rule, draft, keeps)
        report_leftovers(draft)
        own = [note.status for note in draft.notes if note.code == constructors.CODE]
        if not keeps or (own and set(own) == {Status.REWRITTEN}):  # its models are FSDP2's, whatever else stays
            report_handed_out(draft)
            report_numbers(draft)
            report_exact_types(draft)
            report_reentrant(draft)
            _report_wrapped_elsewhere(draft)
        _apply_rule(_rewrite_frameworks, draft, "")
        notes = sorted(draft.notes, key=lambda note: (note.line, note.code))
        if not draft.edits:
            return original, notes
        try:
            _keep_comments(draft)
            text = finish(draft)
            tree = ast.parse(text)
        except (SourceError, SyntaxError):
            continue  # with fewer rules
        is_early = _imports_torch(tree) and _imports_late(context)
        if is_early and not draft.sharded.constructors:
            why = "the file imports torch only when it is needed; rewritten, it would do so at once"
            return original, [undone(note, why) for note in notes]
        if is_early:
            message = "the file imports torch at once now: it raises where torch is not installed"
            draft.reported("SW137", context.tree, message, "nothing, if it always is; else move the new code to a file")
        return text, sorted(draft.notes, key=lambda note: (note.line, note.code))
    return original, [undone(note, "the rewritten file would not parse") for note in notes]


def _imports_torch(tree: ast.Module) -> bool:
    names = [alias.name for one in tree.body if isinstance(one, ast.Import) for alias in one.names]
    names += [one.module or "" for one in tree.body if isinstance(one, ast.ImportFrom) and not one.level]
    return any(name.split(".")[0] == "torch" for name in names)


def _imports_late(context: FileContext) -> bool:
    """Whether torch is there only inside of functions or of `try`, as in programs that also run without it."""
    return not _imports_torch(context.tree) and any("torch" in one.names for one in context.scopes.values())


def _apply_rule(rule: Rule, draft: FileDraft, keeps: str) -> None:
    """Apply a rule; where it collides with earlier edits, or FSDP1 stays, only say what was to be done."""
    earlier, why = draft.snapshot(), keeps
    try:
        rule(draft)
        apply(draft.context.text, draft.edits)
    except (SourceError, Blocked):
        why = why or "another rewrite touches the same lines"
    if why:
        fresh = draft.notes[len(earlier["notes"]) :]
        draft.restore(earlier | {"taken": draft.taken})
        draft.notes += [undone(note, why) for note in fresh]


def _keep_comments(draft: FileDraft) -> None:
    """Put the comments of replaced code, where the new code has no place for them, in front of its statement."""
    context = draft.context
    tokens = tokenize.generate_tokens(io.StringIO(context.text, newline="").readline)
    starts = context.positions.starts
    comments = [(starts[one.start[0] - 1] + one.start[1], one.string) for one in tokens if one.type == tokenize.COMMENT]
    written = "".join(edit.text for edit in draft.edits)
    statements = [node for node in context.parents if isinstance(node, ast.stmt) and draft.starts_line(node)]
    for edit in list(draft.edits):
        lost = [text for offset, text in comments if edit.start <= offset < edit.end and text not in written]
        around = [one for one in statements if draft.span(one)[0] <= edit.start < draft.span(one)[1]]
        if lost and around:
            earlier = draft.snapshot()
            draft.insert_before(max(around, key=lambda one: one.lineno), lost)
            try:
                apply(context.text, draft.edits)
            except SourceError:
                draft.restore(earlier)


def undone(note: SourceFinding, why: str) -> SourceFinding:
    """A finding about code that was to be rewritten and is left alone after all."""
    if note.status is not Status.REWRITTEN:
        return note
    return replace(
        note,
        status=Status.NEEDS_DECISION,
        severity=Severity.WARNING,
        message=f"left alone, because {why}",
        fix=f"rewrite it by hand, both together; or {KEEP_FSDP1_API}",
    )
