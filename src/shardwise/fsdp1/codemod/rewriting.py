"""Rewrite a file with every rule, or skip it with a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace

from shardwise.errors import SourceError
from shardwise.findings import Severity, SourceFinding, Status
from shardwise.fsdp1.codemod import constructors
from shardwise.fsdp1.codemod.draft import KEEP_FSDP1_API, FileDraft
from shardwise.fsdp1.codemod.framework_files import framework_findings
from shardwise.fsdp1.codemod.imports import finish
from shardwise.fsdp1.codemod.model_calls import (
    report_handed_out,
    report_numbers,
    rewrite_backends,
    rewrite_clipping,
    rewrite_forward_calls,
    rewrite_full_params,
    rewrite_inner_modules,
    rewrite_no_sync,
    rewrite_scalers,
)
from shardwise.fsdp1.codemod.order import move_optimizers, rewrite_order, rewrite_type_checks, tells_apart
from shardwise.fsdp1.codemod.program import Program
from shardwise.fsdp1.codemod.sharded import built_anywhere, report_leftovers, subclasses
from shardwise.fsdp1.codemod.state_dicts import rewrite_state_dicts
from shardwise.fsdp1.codemod.writing import rewrite_constructors, rewrite_enable_wrap
from shardwise.source.edits import apply
from shardwise.source.syntax import FSDP1, FileContext

_NAMED = re.compile(r"FSDP|FullyShardedDataParallel")
_FRAMEWORK = re.compile(r"FSDPStrategy|FullyShardedDataParallelPlugin|fsdp_config|TrainingArguments")
_ON_MODELS = ("SW120", "SW121", "SW123", "SW124", "SW126")


def why_skipped(draft: FileDraft, program: Program) -> str:
    """Why the file's models may still be FSDP1's, so that their methods must stay; empty if they are not."""
    left = [note for note in draft.notes if note.code == constructors.CODE and note.status is Status.NEEDS_DECISION]
    if left:
        return f"the FSDP(...) call on line {left[0].line} is left alone"
    found = subclasses(draft.context, program)
    if found:
        return f"{next(iter(found))} is a subclass of FSDP"
    line = tells_apart(draft, program)
    if line is not None:
        return f"line {line} tells FSDP2's models, which these are now, from FSDP1's"
    if any(note.code == constructors.CODE for note in draft.notes):
        return ""
    other = built_anywhere(program)
    if other:
        return f"models may be of {other}, a subclass of FSDP that stays"
    if not program.remember("wraps", _wraps) and (framework := program.remember("framework_stays", _framework_skipped)):
        return f"{framework} is left alone, and its models stay FSDP1's"
    stays = skipped_everywhere(program)
    return f"{stays} is left alone, and so are all others" if stays else ""


def _framework_skipped(program: Program) -> str:
    """The place where a framework is told to wrap models by FSDP1, if a person must decide about that."""
    for context in program.files(_FRAMEWORK.search):
        for finding in framework_findings(context):
            if finding.status is Status.NEEDS_DECISION:
                return f"the framework's setting at {finding.path}:{finding.line}"
    return ""


def skipped_everywhere(program: Program) -> str:
    """The place of an FSDP(...) call, if the program has some and none of them can be rewritten; else empty."""
    return program.remember("skipped_everywhere", _skipped_everywhere)


def _skipped_everywhere(program: Program) -> str:
    stays = ""
    for context in program.files(_NAMED.search):
        draft = FileDraft(context, "torch")
        rewrite_constructors(draft, program)
        for note in draft.notes:
            if note.code == constructors.CODE and note.status is Status.REWRITTEN:
                return ""
            stays = stays or (f"FSDP(...) at {note.path}:{note.line}" if note.code == constructors.CODE else "")
    return stays


def copy_of_fsdp1(context: FileContext, program: Program) -> SourceFinding | None:
    """What to say of a file that defines FSDP1's class itself, as torch does: it is left alone as a whole."""
    own = context.classes.get(FSDP1.rpartition(".")[2])
    if own is None or own.name in subclasses(context, program):
        return None
    draft = FileDraft(context, "torch")
    draft.undecided(
        "SW102",
        own,
        "the file holds a copy of FSDP1 itself, and is left alone",
        "use torch's fully_shard where this class is used, and remove the copy",
    )
    return draft.notes[0]


def report_wrapped_elsewhere(draft: FileDraft, program: Program) -> None:
    """Say that models come from code that was not given, where that decides whether the rewrite is right."""
    fresh = [note for note in draft.notes if note.status is Status.REWRITTEN and note.code in _ON_MODELS]
    if not fresh or program.remember("wraps", _wraps):
        return
    draft.reported(
        "SW133",
        draft.context.tree,
        "no file given wraps a model: this is right if who wraps it moves to FSDP2 as well",
        "run migrate on the whole project; for a framework, switch its config to FSDP2",
    )


def _wraps(program: Program) -> bool:
    """Whether the program has an FSDP(...) call, or `fully_shard`."""
    if any("fully_shard(" in text or "sw.shard(" in text for text in program.texts.values()):
        return True
    return any(next(constructors.find(one, program), None) is not None for one in program.files(_NAMED.search))


Rule = Callable[[FileDraft, Program], None]
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

    A rule whose edits collide with earlier ones is not applied, and says so.

    Args:
        context: The file.
        program: All files given, this one among them.
        target: `torch` or `shardwise`.
    """
    if (copied := copy_of_fsdp1(context, program)) is not None:
        return context.text, [copied]
    for rules in (_RULES, ()):
        draft = FileDraft(context, target)
        rewrite_constructors(draft, program)
        for rule in _WITH_CONSTRUCTORS:
            _apply_rule(rule, draft, program, "")
        keeps = why_skipped(draft, program)
        for rule in rules:
            _apply_rule(rule, draft, program, keeps)
        report_leftovers(draft, program)
        if not keeps:
            report_handed_out(draft, program)
            report_numbers(draft, program)
            report_wrapped_elsewhere(draft, program)
        _apply_rule(_rewrite_frameworks, draft, program, "")
        notes = sorted(draft.notes, key=lambda note: (note.line, note.code))
        if not draft.edits:
            return context.text, notes
        try:
            text = finish(context, apply(context.text, draft.edits), draft.names, draft.helpers, draft.features)
            ast.parse(text)
        except (SourceError, SyntaxError):
            continue  # with fewer rules
        return text, notes
    return context.text, [_undone(note, "the rewritten file would not parse") for note in notes]


def _apply_rule(rule: Rule, draft: FileDraft, program: Program, keeps: str) -> None:
    """Apply a rule; where it collides with earlier edits, or FSDP1 stays, only say what was to be done."""
    earlier = draft.snapshot()
    rule(draft, program)
    why = keeps
    try:
        apply(draft.context.text, draft.edits)
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
        fix=f"rewrite it by hand, both together; or {KEEP_FSDP1_API}",
    )


def _rewrite_frameworks(draft: FileDraft, program: Program) -> None:
    for finding in framework_findings(draft.context):
        draft.edits += finding.edits
        draft.notes.append(finding)
