"""Rewrite a file with every rule, or skip it with a reason."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable
from dataclasses import replace

from shardwise.errors import SourceError
from shardwise.findings import Severity, SourceFinding, Status
from shardwise.fsdp1.codemod import constructors
from shardwise.fsdp1.codemod.draft import KEEP_FSDP1_API, Blocked, FileDraft
from shardwise.fsdp1.codemod.flow import wraps_models
from shardwise.fsdp1.codemod.framework_files import framework_findings
from shardwise.fsdp1.codemod.imports import finish
from shardwise.fsdp1.codemod.leftovers import report_handed_out, report_leftovers
from shardwise.fsdp1.codemod.model_calls import (
    report_numbers,
    rewrite_after_forward,
    rewrite_backends,
    rewrite_clipping,
    rewrite_forward_calls,
    rewrite_full_params,
    rewrite_inner_modules,
    rewrite_no_sync,
    rewrite_scalers,
)
from shardwise.fsdp1.codemod.order import move_optimizers, rewrite_order
from shardwise.fsdp1.codemod.program import Program, once
from shardwise.fsdp1.codemod.state_dicts import rewrite_state_dicts
from shardwise.fsdp1.codemod.type_checks import rewrite_type_checks, tells_apart
from shardwise.fsdp1.codemod.writing import rewrite_constructors, rewrite_enable_wrap
from shardwise.source.edits import apply
from shardwise.source.syntax import FSDP1, FileContext

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
    stays = skipped_everywhere(program)
    return f"{stays} is left alone, and so are all others" if stays else ""


@once
def _framework_skipped(program: Program) -> str:
    """The place where a framework is told to wrap models by FSDP1, if a person must decide about that."""
    found = (one for context in program.files(_FRAMEWORK.search) for one in framework_findings(context))
    undecided = (one for one in found if one.status is Status.NEEDS_DECISION)
    return next((f"the framework's setting at {one.path}:{one.line}" for one in undecided), "")


@once
def skipped_everywhere(program: Program) -> str:
    """The place of an FSDP(...) call, if the program has some and none of them can be rewritten; else empty."""
    places = []
    for context in program.files(_NAMED.search):
        draft = FileDraft(context, program, "torch")
        rewrite_constructors(draft)
        calls = [note for note in draft.notes if note.code == constructors.CODE]
        if any(note.status is Status.REWRITTEN for note in calls):
            return ""
        places += [f"FSDP(...) at {note.path}:{note.line}" for note in calls]
    return places[0] if places else ""


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
    draft = FileDraft(context, program, target)
    own = context.classes.get(FSDP1.rpartition(".")[2])
    if own is not None and not program.inherits(context, own):
        message = "the file holds a copy of FSDP1 itself, and is left alone"
        draft.undecided("SW102", own, message, "use torch's fully_shard where this class is used, and remove the copy")
        return context.text, draft.notes
    for rules in (_RULES, ()):
        draft = FileDraft(context, program, target)
        rewrite_constructors(draft)
        for rule in (rewrite_order, move_optimizers):  # belong to a rewritten constructor, whatever the file keeps
            _apply_rule(rule, draft, "")
        keeps = _why_skipped(draft)
        for rule in rules:
            _apply_rule(rule, draft, keeps)
        report_leftovers(draft)
        if not keeps:
            report_handed_out(draft)
            report_numbers(draft)
            _report_wrapped_elsewhere(draft)
        _apply_rule(_rewrite_frameworks, draft, "")
        notes = sorted(draft.notes, key=lambda note: (note.line, note.code))
        if not draft.edits:
            return context.text, notes
        try:
            _keep_comments(draft)
            text = finish(draft)
            ast.parse(text)
        except (SourceError, SyntaxError):
            continue  # with fewer rules
        return text, notes
    return context.text, [undone(note, "the rewritten file would not parse") for note in notes]


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
