"""One file of a program, from its text to the rewritten text and the notes. No I/O."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

from shardwise.errors import SourceError
from shardwise.findings import Severity, SourceFinding, Status
from shardwise.rules.moving.accumulation import rewrite_no_sync
from shardwise.rules.moving.class_values import rewrite_enable_wrap
from shardwise.rules.moving.clipping import rewrite_clipping
from shardwise.rules.moving.constructing import rewrite_constructors
from shardwise.rules.moving.draft import ROAD1, Draft
from shardwise.rules.moving.edits import apply_edits
from shardwise.rules.moving.forward_calls import rewrite_forward_calls
from shardwise.rules.moving.frameworks import framework_findings
from shardwise.rules.moving.full_params import rewrite_full_params
from shardwise.rules.moving.handing_out import report_handed_out
from shardwise.rules.moving.imports import finish
from shardwise.rules.moving.inner_modules import rewrite_inner_modules
from shardwise.rules.moving.leftovers import report_leftovers
from shardwise.rules.moving.offloading import rewrite_backends
from shardwise.rules.moving.optimizer_order import move_optimizers
from shardwise.rules.moving.order import rewrite_order
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.scaling import rewrite_scalers
from shardwise.rules.moving.sharded_numbers import report_numbers
from shardwise.rules.moving.state_dicts import rewrite_state_dicts
from shardwise.rules.moving.staying import copy_of_fsdp1, report_wrapped_elsewhere, why_it_stays
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
    rewrite_forward_calls,
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
    if (copied := copy_of_fsdp1(context, program)) is not None:
        return context.text, [copied]
    for rules in (_RULES, ()):
        draft = Draft(context, target)
        rewrite_constructors(draft, program)
        for rule in _WITH_CONSTRUCTORS:
            _carry_out(rule, draft, program, "")
        keeps = why_it_stays(draft, program)
        for rule in rules:
            _carry_out(rule, draft, program, keeps)
        report_leftovers(draft, program)
        if not keeps:
            report_handed_out(draft, program)
            report_numbers(draft, program)
            report_wrapped_elsewhere(draft, program)
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


def _carry_out(rule: Rule, draft: Draft, program: Program, keeps: str) -> None:
    """Apply a rule; where it collides with earlier edits, or FSDP1 stays, only say what was to be done."""
    earlier = draft.snapshot()
    rule(draft, program)
    why = keeps
    try:
        apply_edits(draft.context.text, draft.edits)
    except SourceError:
        why = why or "another rewrite touches the same lines"
    if why:
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
