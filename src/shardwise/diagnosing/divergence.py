"""From the board to a sentence: which rank did not do what, and where it is instead. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.diagnosing.board import Slot
from shardwise.diagnosing.events import Kind, comes_first, group_of, in_words, kind_of
from shardwise.errors import ShardError

_WHY = (
    "every gather and every reduction is a collective of all ranks; ranks that run different modules wait for each "
    "other for ever, or mix up each other's data"
)
_FIX = (
    "run the same modules on every rank: a dummy batch where a rank has none for a tower, `lockstep(loader)` where "
    "loaders differ in length; parameters that only some ranks use: ShardConfig(unused_parameters='reduce')"
)

_SILENT_SECONDS = 3.0
_MAX_TEXT = 1500  # five of them, quoted, fit on the board


@dataclass(frozen=True, slots=True)
class Difference:
    """Ranks that came to different collectives at the same place."""

    error: ShardError
    odd: tuple[int, ...]
    """The ranks that did not do what the others did."""


def describe_difference(slots: Sequence[Slot], index: int, step: int, groups: Sequence[str]) -> Difference | None:
    """What differs at a place that belongs to `step`; None where nothing does."""
    ranks_at: dict[int, list[int]] = {}
    for rank, slot in enumerate(slots):
        if (event := slot.event(index)) is not None:
            ranks_at.setdefault(event, []).append(rank)
    if len(ranks_at) < 2:
        return None
    skipped, others = _skipped(ranks_at)
    odd = sorted(rank for event in others for rank in ranks_at[event])
    rows = [f"{_ranks(ranks)}: {in_words(event, groups)}" for event, ranks in sorted(ranks_at.items(), key=_first_rank)]
    sentence = _sentence(skipped, others[0], odd, groups, step)
    return Difference(ShardError(sentence, where="; ".join(rows), why=_WHY, fix=_FIX), tuple(odd))


def describe_absence(slots: Sequence[Slot], rank: int, absent: int, groups: Sequence[str]) -> ShardError:
    """The error for a rank that will not come to the collective in which `rank` waits."""
    waiting, missing = slots[rank], slots[absent]
    event = waiting.event(waiting.count - 1)
    doing = f"is in the {in_words(event, groups)}" if event is not None else "waits"
    if not missing.is_alive:
        return ShardError(
            f"rank {absent} died in step {missing.step}",
            where=f"rank {rank} {doing} and waits for it; {_last(missing, absent, groups)}",
            why="its process is gone: killed (out of memory?), crashed, or ended by an error of its own",
            fix=f"read the log of rank {absent}; `dmesg` says whether the system killed it",
        )
    if missing.has_ended:
        return ShardError(
            f"rank {absent} has left the training loop after {max(missing.step - 1, 0)} steps; rank {rank} goes on",
            where=f"rank {rank} {doing} in step {waiting.step}",
            why="its data ended earlier, or it broke out of the loop alone",
            fix="for batch in shardwise.lockstep(loader): ... stops all ranks together",
        )
    if missing.seconds_unheard > _SILENT_SECONDS:
        return ShardError(
            f"rank {absent} died in step {missing.step}, or its machine cannot be reached",
            where=f"rank {rank} {doing} and waits for it; {_last(missing, absent, groups)}",
            why=f"nothing has been heard from its machine for {missing.seconds_unheard:.0f} s",
            fix=f"read the log of rank {absent}; see whether its machine still runs, and its network",
        )
    return ShardError(
        f"rank {absent} has not come to what rank {rank} waits for since {missing.seconds_still:.0f} s",
        where=f"rank {rank} {doing} in step {waiting.step}; {_last(missing, absent, groups)}",
        why="it is busy with something else (loading data, saving, evaluating), or hangs",
        fix="see where it is, below",
    )


def to_text(error: ShardError, stack: str) -> str:
    """An error as a rank leaves it on the board, with where that rank was."""
    parts = [error.what, error.where, error.why, error.fix, stack[-_MAX_TEXT:]]
    return json.dumps([part[:_MAX_TEXT] for part in parts])


def from_text(text: str, rank: int) -> tuple[ShardError, str] | None:
    """The error that `rank` left on the board, and where it was; None if only a part of it has arrived."""
    try:
        what, where, why, fix, stack = json.loads(text)
    except ValueError:
        return None
    error = ShardError(what, where=where, why=why, fix=fix)
    error.add_note(f"(found by rank {rank})")
    return error, stack


def _skipped(ranks_at: dict[int, list[int]]) -> tuple[int, list[int]]:
    """The event that somebody left out, and the events of those who did.

    Most ranks are right; of two equally many, those have skipped something that are further in the step.
    """
    events = list(ranks_at)
    size = max(len(ranks) for ranks in ranks_at.values())
    largest = [event for event in events if len(ranks_at[event]) == size]
    usual = largest[0]
    for event in largest[1:]:
        if comes_first(event, usual):
            usual = event
    others = [event for event in events if event != usual]
    if len(largest) == 1 and len(others) == 1 and comes_first(others[0], usual):
        # A minority runs something that the majority does not: it is they who are odd, but what is missing is theirs.
        return others[0], [usual]
    return usual, others


def _sentence(skipped: int, other: int, odd: list[int], groups: Sequence[str], step: int) -> str:
    name = groups[group_of(skipped)]
    kinds = kind_of(skipped), kind_of(other)
    if group_of(skipped) == group_of(other):
        if kinds[0] == kinds[1]:
            return f"{_ranks(odd)} brought other gradients or shapes of `{name}` than the rest at step {step}"
        if Kind.GATHER_EVALUATION in kinds:
            return f"{_ranks(odd)} ended an evaluation, or began one, without the others at step {step}"
    done = "reduce the gradients of" if kinds[0] is Kind.REDUCE else "run"
    return f"{_ranks(odd)} did not {done} `{name}` at step {step}"


def _last(slot: Slot, rank: int, groups: Sequence[str]) -> str:
    event = slot.event(slot.count - 1) if slot.count else None
    return f"last on rank {rank}: {in_words(event, groups)}" if event is not None else f"nothing yet on rank {rank}"


def _first_rank(entry: tuple[int, list[int]]) -> int:
    return entry[1][0]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
