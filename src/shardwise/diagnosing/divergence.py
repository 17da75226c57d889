"""From the board to a sentence: which rank did not do what, and where it is instead. No torch."""

from __future__ import annotations

from collections.abc import Sequence

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


def describe_difference(slots: Sequence[Slot], index: int, groups: Sequence[str]) -> ShardError | None:
    """The error for ranks that came to different collectives at the same place; None where none did."""
    events = {rank: slot.event(index) for rank, slot in enumerate(slots)}
    ranks_at: dict[int, list[int]] = {}
    for rank, event in events.items():
        if event is not None:
            ranks_at.setdefault(event, []).append(rank)
    if len(ranks_at) < 2:
        return None
    skipped, others = _skipped(ranks_at)
    odd = sorted(rank for event in others for rank in ranks_at[event])
    step = slots[ranks_at[skipped][0]].step
    rows = [f"{_ranks(ranks)}: {in_words(event, groups)}" for event, ranks in ranks_at.items()]
    return ShardError(_sentence(skipped, others[0], odd, groups, step), where="; ".join(rows), why=_WHY, fix=_FIX)


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
    return ShardError(
        f"rank {absent} has not come to what rank {rank} waits for since {missing.seconds_still:.0f} s",
        where=f"rank {rank} {doing} in step {waiting.step}; {_last(missing, absent, groups)}",
        why="it is busy with something else (loading data, saving, evaluating), or hangs",
        fix="see where it is, below",
    )


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


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
