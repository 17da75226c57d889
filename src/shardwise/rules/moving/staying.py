"""Whether a file's models are FSDP2's in the end: where they may not be, what is done with them stays as it is."""

from __future__ import annotations

import re

from shardwise.errors import SourceError
from shardwise.findings import SourceFinding, Status
from shardwise.rules.moving import constructors
from shardwise.rules.moving.both_kinds import tells_apart
from shardwise.rules.moving.constructing import rewrite_constructors
from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.frameworks import framework_findings
from shardwise.rules.moving.leftovers import built_anywhere, subclasses
from shardwise.rules.moving.program import Program
from shardwise.rules.names import FSDP1
from shardwise.rules.source import FileContext

_NAMED = re.compile(r"FSDP|FullyShardedDataParallel")
_FRAMEWORK = re.compile(r"FSDPStrategy|FullyShardedDataParallelPlugin|fsdp_config|TrainingArguments")
_ON_MODELS = ("SW120", "SW121", "SW123", "SW124", "SW126")


def why_it_stays(draft: Draft, program: Program) -> str:
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
    if not program.remember("wraps", _wraps) and (framework := program.remember("framework_stays", _framework_stays)):
        return f"{framework} is left alone, and its models stay FSDP1's"
    stays = stays_everywhere(program)
    return f"{stays} is left alone, and so are all others" if stays else ""


def _framework_stays(program: Program) -> str:
    """The place where a framework is told to wrap models by FSDP1, if a person must decide about that."""
    for path, text in program.texts.items():
        if not _FRAMEWORK.search(text):
            continue
        try:
            found = framework_findings(program.file(path))
        except SourceError:
            continue
        for finding in found:
            if finding.status is Status.NEEDS_DECISION:
                return f"the framework's setting at {path}:{finding.line}"
    return ""


def stays_everywhere(program: Program) -> str:
    """The place of an FSDP(...) call, if the program has some and none of them can be rewritten; else empty."""
    return program.remember("stays_everywhere", _stays_everywhere)


def _stays_everywhere(program: Program) -> str:
    stays = ""
    for path, text in program.texts.items():
        if not _NAMED.search(text):
            continue
        try:
            draft = Draft(program.file(path), "torch")
        except SourceError:
            continue
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
    draft = Draft(context, "torch")
    draft.undecided(
        "SW102",
        own,
        "the file holds a copy of FSDP1 itself, and is left alone",
        "use torch's fully_shard where this class is used, and remove the copy",
    )
    return draft.notes[0]


def report_wrapped_elsewhere(draft: Draft, program: Program) -> None:
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
    texts = [(path, text) for path, text in program.texts.items() if _NAMED.search(text) or "fully_shard" in text]
    for path, text in texts:
        if "fully_shard(" in text or "sw.shard(" in text:
            return True
        try:
            context = program.file(path)
        except SourceError:
            continue
        if next(constructors.find(context, program), None) is not None:
            return True
    return False
