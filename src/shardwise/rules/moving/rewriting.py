"""One file of a program, from its text to the rewritten text and the notes. No I/O."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

from shardwise.errors import SourceError
from shardwise.findings import Severity, SourceFinding, Status
from shardwise.rules.moving import constructors, writing
from shardwise.rules.moving.accumulation import rewrite_no_sync
from shardwise.rules.moving.class_values import rewrite_chosen_class, rewrite_enable_wrap
from shardwise.rules.moving.clipping import rewrite_clipping
from shardwise.rules.moving.constructors import Blocked
from shardwise.rules.moving.draft import ROAD1, Draft
from shardwise.rules.moving.edits import apply_edits
from shardwise.rules.moving.frameworks import framework_findings
from shardwise.rules.moving.full_params import rewrite_full_params
from shardwise.rules.moving.imports import finish
from shardwise.rules.moving.inner_modules import rewrite_inner_modules
from shardwise.rules.moving.leftovers import built_anywhere, built_subclasses, report_leftovers, subclasses
from shardwise.rules.moving.offloading import rewrite_backends
from shardwise.rules.moving.optimizer_order import move_optimizers, refuse_early_optimizers
from shardwise.rules.moving.order import rewrite_order
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.scaling import rewrite_scalers
from shardwise.rules.moving.state_dicts import rewrite_state_dicts
from shardwise.rules.moving.type_checks import rewrite_type_checks
from shardwise.rules.source import FileContext

Rule = Callable[[Draft, Program], None]
_WITH_CONSTRUCTORS: tuple[Rule, ...] = (rewrite_order, move_optimizers)
"""What belongs to a rewritten constructor, whatever else the file keeps."""
_RULES: tuple[Rule, ...] = (
    rewrite_enable_wrap,
    rewrite_state_dicts,
    rewrite_clipping,
    rewrite_no_sync,
    rewrite_scalers,
    rewrite_type_checks,
    rewrite_full_params,
    rewrite_inner_modules,
    rewrite_backends,
)
"""After the constructors, each on what the ones before have left."""


def rewrite(context: FileContext, program: Program, target: str) -> tuple[str, list[SourceFinding]]:
    """Rewrite one file.

    A rule that cannot be carried out beside the others is not carried out at all, and says so.

    Args:
        context: The file.
        program: All files given, this one among them.
        target: `torch` or `shardwise`.
    """
    for rules in (_RULES, ()):
        draft = Draft(context, target)
        _rewrite_constructors(draft, program)
        for rule in _WITH_CONSTRUCTORS:
            _carry_out(rule, draft, program, "")
        keeps = _keeps_fsdp1(draft, program)
        for rule in rules:
            _carry_out(rule, draft, program, keeps)
        report_leftovers(draft, program)
        _carry_out(_rewrite_frameworks, draft, program, "")
        notes = sorted(draft.notes, key=lambda note: (note.line, note.code))
        if not draft.edits:
            return context.text, notes
        try:
            text = finish(context, apply_edits(context.text, draft.edits), draft.names, draft.helpers, draft.features)
            ast.parse(text)
        except (SourceError, SyntaxError):
            continue  # with fewer rules
        return text, notes
    return context.text, [_undone(note, "the rewritten file would not parse") for note in notes]


def _rewrite_constructors(draft: Draft, program: Program) -> None:
    inherited = built_subclasses(draft.context, program)
    for call, is_partial in constructors.find(draft.context, program):
        earlier = draft.snapshot()
        try:
            if inherited:
                raise Blocked(f"the file also builds {inherited[0]}, a subclass of FSDP", "move both together")
            if not is_partial and not constructors.is_certain(draft.context, program, call.func):
                rewrite_chosen_class(draft, program, call)
                continue
            wrap = constructors.read(draft, call, is_partial)
            constructors.refuse_internals(wrap)
            refuse_early_optimizers(draft, call)
            writing.rewrite(wrap)
            constructors.refuse_local_names(wrap)
            apply_edits(draft.context.text, draft.edits)
        except Blocked as blocked:
            draft.restore(earlier)
            constructors.leave(draft, call, blocked)
        except SourceError:
            draft.restore(earlier)
            constructors.leave(draft, call, Blocked("another rewrite touches the same lines", "rewrite it by hand"))


def _keeps_fsdp1(draft: Draft, program: Program) -> str:
    """Why the file's models may still be FSDP1's, so that their methods must stay; empty if they are not."""
    left = [note for note in draft.notes if note.code == constructors.CODE and note.status is Status.NEEDS_DECISION]
    if left:
        return f"the FSDP(...) call on line {left[0].line} is left alone"
    found = subclasses(draft.context, program)
    if found:
        return f"{next(iter(found))} is a subclass of FSDP"
    other = "" if any(note.code == constructors.CODE for note in draft.notes) else built_anywhere(program)
    return f"models may be of {other}, a subclass of FSDP that stays" if other else ""


def _carry_out(rule: Rule, draft: Draft, program: Program, keeps: str) -> None:
    """Apply a rule; where it collides with earlier edits, or FSDP1 stays, only say what was to be done."""
    earlier = draft.snapshot()
    rule(draft, program)
    why = keeps
    try:
        apply_edits(draft.context.text, draft.edits)
    except SourceError:
        why = why or "another rewrite touches the same lines"
    if why and len(draft.notes) > len(earlier.notes):
        fresh = draft.notes[len(earlier.notes) :]
        taken = draft.taken
        draft.restore(earlier)
        draft.taken = taken
        draft.notes += [_undone(note, why) for note in fresh]


def _undone(note: SourceFinding, why: str) -> SourceFinding:
    if note.status is not Status.REWRITTEN:
        return note
    return replace(
        note,
        status=Status.NEEDS_DECISION,
        severity=Severity.WARNING,
        message=f"left alone, because {why}",
        fix=f"rewrite it by hand, both together; or {ROAD1}",
    )


def _rewrite_frameworks(draft: Draft, program: Program) -> None:
    for finding in framework_findings(draft.context):
        draft.edits += finding.edits
        draft.notes.append(finding)
