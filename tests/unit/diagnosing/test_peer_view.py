"""What one rank reads from the others' events: who differs, who is missing, dead or late, in which words."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from shardwise.distributed.collective_trace import (
    HISTORY,
    CollectiveKind,
    GroupNames,
    RankTrace,
    create_shared_trace,
    encode,
    group_by_machine,
    open_shared_trace,
)
from shardwise.distributed.tracer import CollectiveTracer, PeerView, to_text
from shardwise.errors import ShardError

GROUPS = GroupNames(("(root)", "embed", "layers.0", "layers.1"))
OPTIMIZER_STEP = GROUPS.add_step([(0, 0), (1, 0)])
RANKS = 4
FORWARD, EVALUATION, BACKWARD, REDUCE = CollectiveKind


@pytest.fixture
def traces() -> list[RankTrace]:
    path = create_shared_trace(RANKS)
    made = open_shared_trace(path, RANKS)
    path.unlink()
    for slot in made:
        slot.open()
    return made


def event(kind: CollectiveKind, group: int, size: int = 8) -> int:
    return encode(kind, group, size)


def write(traces: list[RankTrace], *events: list[int]) -> None:
    """A list of events for each rank."""
    for slot, own in zip(traces, events, strict=True):
        for each in own:
            slot.writer([])(each)


A, B = event(FORWARD, 1), event(FORWARD, 2)
IN_A, IN_B = "in the forward of `embed`", "in the forward of `layers.0`"
CASES = {
    "skipped-forward": ([A, A, A, B], f"ranks diverge at step 1: ranks 0, 1, 2 {IN_A}, rank 3 {IN_B}", (3,)),
    "two-skipped": ([B, A, A, B], f"ranks diverge at step 1: ranks 0, 3 {IN_B}, ranks 1, 2 {IN_A}", (1, 2)),
    "one-does-more": ([A, B, B, B], f"ranks diverge at step 1: rank 0 {IN_A}, ranks 1, 2, 3 {IN_B}", (0,)),
    "reduction-left-out": (
        [event(REDUCE, 2)] * 3 + [event(REDUCE, 1)],
        "ranks diverge at step 1: ranks 0, 1, 2 after the backward of `layers.0`, rank 3 after the backward of `embed`",
        (3,),
    ),
    "gather-before-the-reduction": (
        [event(BACKWARD, 1)] * 3 + [event(REDUCE, 2)],
        "ranks diverge at step 1: ranks 0, 1, 2 in the backward of `embed`, rank 3 after the backward of `layers.0`",
        (3,),
    ),
    "step-without-the-reduction": (
        [event(REDUCE, 2)] * 3 + [OPTIMIZER_STEP],
        "ranks diverge at step 1: ranks 0, 1, 2 after the backward of `layers.0`, rank 3 in the optimizer step",
        (3,),
    ),
    "other-shapes": (
        [event(REDUCE, 2)] * 3 + [event(REDUCE, 2, 9)],
        "rank 3 reduced gradients of `layers.0` of other shapes than the rest at step 1",
        (3,),
    ),
    "evaluation": (
        [event(EVALUATION, 1)] * 3 + [A],
        "rank 3 ended an evaluation, or began one, without the others at step 1",
        (3,),
    ),
    "forward-or-backward": (
        [event(BACKWARD, 3), event(FORWARD, 3), event(BACKWARD, 3), event(BACKWARD, 3)],
        "ranks diverge at step 1: ranks 0, 2, 3 in the backward of `layers.1`, rank 1 in the forward of `layers.1`",
        (1,),
    ),
    "three-ways": (
        [event(FORWARD, 1), event(FORWARD, 1), event(FORWARD, 2), event(FORWARD, 3)],
        f"ranks diverge at step 1: ranks 0, 1 {IN_A}, rank 2 {IN_B}, rank 3 in the forward of `layers.1`",
        (2, 3),
    ),
}


@pytest.mark.parametrize(
    ("events", "fix"),
    [
        ([A, A, A, B], "guard(model, repair=['embed']) or shardwise.guard(model, repair=['layers'])"),
        (
            [B, B, B, event(FORWARD, 3)],
            "guard(model, repair=['layers.0']) or shardwise.guard(model, repair=['layers.1'])",
        ),
        (
            [event(FORWARD, 0), A, A, A],
            "For a tower that some ranks have no inputs for: shardwise.guard(model, repair=['embed'])",
        ),
        ([event(EVALUATION, 1), A, A, A], "call the model equally often"),
        ([event(REDUCE, 1), OPTIMIZER_STEP, OPTIMIZER_STEP, OPTIMIZER_STEP], "repair=[]"),
    ],
)
def test_the_fix_names_the_towers(traces: list[RankTrace], events: list[int], fix: str):
    write(traces, *([each] for each in events))
    difference = PeerView(traces, 0, GROUPS).difference_at(0)
    assert difference is not None
    assert fix in difference.error.fix


@pytest.mark.parametrize("case", CASES)
def test_who_differs(traces: list[RankTrace], case: str):
    events, sentence, odd = CASES[case]
    before = [event(FORWARD, 0)] * 3
    write(traces, *([*before, each] for each in events))
    for rank in range(RANKS):
        view = PeerView(traces, rank, GROUPS)
        assert view.first_difference() == 3
        difference = view.difference_at(3)
        assert difference is not None
        assert (difference.error.what, difference.odd) == (sentence, odd)
        assert view.difference_at(2) is None
        cause = view.cause_of_failure()
        assert cause is not None
        assert cause.what == sentence


def test_where_each_rank_is(traces: list[RankTrace]):
    write(traces, [A], [B], [A], [event(REDUCE, 3)])
    difference = PeerView(traces, 1, GROUPS).difference_at(0)
    assert difference is not None
    assert difference.error.where == (
        "ranks 0, 2: all-gather of `embed` for a forward; rank 1: all-gather of `layers.0` for a forward; "
        "rank 3: reduce-scatter of the gradients of `layers.1`"
    )
    traces[0].writer([])(event(EVALUATION, 0))
    traces[1].writer([])(event(BACKWARD, 1))
    again = PeerView(traces, 1, GROUPS).difference_at(1)
    assert again is not None
    assert again.error.where == (
        "rank 0: all-gather of `(root)` for a forward without gradients; rank 1: all-gather of `embed` for backward"
    )


def test_the_step_is_that_of_the_place(traces: list[RankTrace]):
    view = PeerView(traces, 0, GROUPS)
    for step in (2, 3):
        write(traces, *[[A, A]] * RANKS)
        traces[0].step = step
        view.note_step()
    write(traces, [A, A], [A, B], [A, A], [A, A])
    assert view.first_difference() == 5
    difference = view.difference_at(5)
    assert difference is not None
    assert difference.error.what == f"ranks diverge at step 3: ranks 0, 2, 3 {IN_A}, rank 1 {IN_B}"
    write(traces, [A], [A], [A], [A])
    earlier = PeerView(traces, 0, GROUPS).difference_at(5)
    assert earlier is not None
    assert "at step 1" in earlier.error.what, "one that has seen no step end knows of one step"


def test_ranks_that_are_not_there_yet_do_not_differ(traces: list[RankTrace]):
    write(traces, [A, B], [A], [], [A, B])
    view = PeerView(traces, 0, GROUPS)
    assert view.first_difference() is None
    assert view.difference_at(1) is None
    assert view.missing() is None
    assert view.dead() is None
    assert view.cause_of_failure() is None
    assert view.verdict_of_others() is None
    traces[1].writer([])(A)
    assert view.first_difference() == 1, "what has newly arrived is compared"


def test_the_earliest_difference_counts_whichever_rank_it_is_of(traces: list[RankTrace]):
    write(traces, [A, B, A], [A, B, B], [A, A, A], [A, B, A])
    assert PeerView(traces, 0, GROUPS).first_difference() == 1


def test_a_difference_of_which_word_came_late_is_told_and_not_what_followed_from_it(traces: list[RankTrace]):
    """Rank 3 left `embed` out; by the time others hear of it they are a place further."""
    machines = group_by_machine(["a", "b", "c", "d"], rank=0)
    tracer = CollectiveTracer(0, GROUPS, range(RANKS), patience=60.0, report=lambda text: None)
    tracer.open(traces, machines)
    tracer.write(A)
    write(traces, [], [A, B], [A, B], [B, event(FORWARD, 3)])
    tracer.write(B)
    traces[1].writer([])(event(FORWARD, 3))  # the neighbour that rank 0 compares with
    with pytest.raises(ShardError, match=r"rank 3 in the forward of `layers\.0`"):
        tracer.write(B)


def test_who_has_left(traces: list[RankTrace]):
    write(traces, [A, B], [A, B], [A], [A, B])
    traces[1].has_ended = True
    view = PeerView(traces, 0, GROUPS)
    assert view.missing() is None, "it came as far as this one before it left"
    traces[2].has_ended = True
    traces[2].step = 4
    traces[0].step = 5
    assert view.missing() == 2
    error = view.absence_of(2)
    assert error.what == "rank 2 has left the training loop after 3 steps; rank 0 continues"
    assert error.where == "rank 0 is in the all-gather of `layers.0` for a forward in step 5"
    cause = view.cause_of_failure()
    assert cause is not None
    assert cause.what == error.what


def test_who_has_died(traces: list[RankTrace]):
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    own = os.getpid
    os.getpid = lambda: child.pid
    try:
        traces[3].open()
    finally:
        os.getpid = own
    write(traces, [A, B], [A, B], [A, B], [A])
    traces[3].step = 7
    view = PeerView(traces, 0, GROUPS)
    assert (view.missing(), view.dead(), traces[3].is_alive) == (None, None, True)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not traces[3].is_alive, "a zombie is dead"
    child.communicate()
    assert (view.missing(), view.dead()) == (3, 3)
    error = view.absence_of(3)
    assert error.what == "rank 3 died in step 7"
    assert error.where == (
        "rank 0 is in the all-gather of `layers.0` for a forward and waits for it; "
        "last on rank 3: all-gather of `embed` for a forward"
    )
    traces[3].writer([])(B)
    assert (view.missing(), view.dead()) == (None, 3), "dead, though it came as far"
    cause = view.cause_of_failure()
    assert cause is not None
    assert cause.what == "rank 3 died in step 7"


def test_a_rank_that_left_with_an_error_is_not_the_cause(traces: list[RankTrace]):
    """Rank 2 raised because rank 3 is dead, and ended before it came as far as rank 0."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    traces[2].pid = traces[3].pid = child.pid
    write(traces, [], [A, B], [A], [A])
    died = ShardError("rank 3 died in step 1", where="", why="", fix="")
    traces[2].set_text(to_text(died, ""), is_verdict=True)
    tracer = CollectiveTracer(0, GROUPS, range(RANKS), patience=60.0, report=lambda text: None)
    tracer.open(traces, group_by_machine(["a"] * RANKS, rank=0))
    tracer.start()
    tracer.write(A)
    tracer.write(B)
    deadline = time.monotonic() + 20
    while tracer.error is None and time.monotonic() < deadline:
        time.sleep(0.05)
    tracer.close()
    assert tracer.error is not None
    assert tracer.error.what == "rank 3 died in step 1"


def test_who_is_late(traces: list[RankTrace]):
    write(traces, [A, B], [A, B], [], [A])
    view = PeerView(traces, 0, GROUPS)
    for rank, seconds in enumerate((99.0, 99.0, 20.0, 30.0)):
        traces[rank].touch(seconds_ago=seconds)
    assert view.late(10.0) == 2
    assert view.late(25.0) == 3
    assert view.late(50.0) is None
    error = view.absence_of(2)
    assert error.what == "rank 2 has made no progress for 20 s; rank 0 waits for it"
    assert error.where == "rank 0 is in the all-gather of `layers.0` for a forward in step 1; nothing yet on rank 2"
    assert "last on rank 3: all-gather of `embed` for a forward" in view.absence_of(3).where


def with_flags(message: bytes, *, has_ended: bool = False, is_gone: bool = False) -> bytes:
    changed = RankTrace.from_buffer_copy(message)
    changed.has_ended, changed.is_gone = has_ended, is_gone
    return bytes(changed)


def test_a_machine_that_is_silent(traces: list[RankTrace], monkeypatch: pytest.MonkeyPatch):
    write(traces, [A, B], [A, B], [A, B], [A])
    message = traces[3].to_bytes()
    traces[3].copy_from(message)
    view = PeerView(traces, 0, GROUPS)
    assert view.dead() is None
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3.4)
    assert view.dead() is None
    monkeypatch.setattr(time, "monotonic", lambda: now + 5.0)
    assert view.dead() == 3
    assert traces[0].seconds_unheard == 0.0
    error = view.absence_of(3)
    assert error.what == "rank 3 died in step 1, or its machine cannot be reached"
    assert error.why == "nothing has been heard from its machine for 5 s"
    traces[3].copy_from(with_flags(message, is_gone=True))
    assert not traces[3].is_alive
    assert view.absence_of(3).what == "rank 3 died in step 1"
    traces[3].copy_from(with_flags(message, has_ended=True))
    monkeypatch.setattr(time, "monotonic", lambda: now + 50.0)
    assert view.dead() is None, "it said that it left"


def test_what_others_found_is_handed_on(traces: list[RankTrace]):
    view = PeerView(traces, 0, GROUPS)
    traces[2].set_text("half a te", is_verdict=True)
    assert view.verdict_of_others() is None
    traces[2].set_text('["what", "where", "why", "fix", "in the loader"]', is_verdict=True)
    found = view.verdict_of_others()
    assert found is not None
    assert (found.what, found.where, found.why, found.fix) == ("what", "where", "why", "fix")
    assert found.__notes__ == ["(found by rank 2)"]
    view.note_stacks_of_finders(found)
    view.note_stacks_of_finders(found)
    assert found.__notes__ == ["(found by rank 2)", "rank 2 is here:\nin the loader"]
    assert PeerView(traces, 2, GROUPS).verdict_of_others() is None, "its own is known to it"
    cause = view.cause_of_failure()
    assert cause is not None
    assert cause.what == "what"


def test_a_slot_remembers_its_last_events(traces: list[RankTrace]):
    slot = traces[0]
    assert (slot.count, slot.first, slot.step, slot.event(0), slot.text, slot.verdict) == (0, 0, 1, None, "", None)
    write_event = slot.writer([])
    for number in range(3 * HISTORY):
        write_event(number)
    assert slot.count == 3 * HISTORY
    assert slot.first == 2 * HISTORY
    found = [slot.event(index) for index in (2 * HISTORY - 1, 2 * HISTORY, 3 * HISTORY - 1, 3 * HISTORY)]
    assert found == [None, 2 * HISTORY, 3 * HISTORY - 1, None]
    window = slot.events(2 * HISTORY, 3 * HISTORY)
    assert [int.from_bytes(window[at : at + 4], "little") for at in (0, 4, len(window) - 4)] == [
        2 * HISTORY, 2 * HISTORY + 1, 3 * HISTORY - 1,
    ]  # fmt: skip
    edge = slot.events(2 * HISTORY - 2, 2 * HISTORY + 1)
    assert len(edge) == 12


def test_texts(traces: list[RankTrace]):
    slot = traces[1]
    assert (slot.wants_all, slot.has_ended, slot.is_text_current) == (False, False, False)
    slot.set_text("first é")
    assert (slot.text, slot.is_text_current) == ("first é", True)
    slot.writer([])(A)
    assert not slot.is_text_current, "the rank has moved since"
    slot.wants_all = True
    slot.has_ended = True
    assert (slot.wants_all, slot.has_ended) == (True, True)
    slot.set_text("x" * 20_000)
    assert set(slot.text) == {"x"}
    assert 7000 < len(slot.text) < 8192
    assert traces[0].text == "", "nothing runs over into another's"
    assert traces[2].text == ""


def test_a_writer_notices_neighbours_that_differ(traces: list[RankTrace]):
    write_first = traces[0].writer([traces[1], traces[2]])
    write_third = traces[2].writer([traces[0], traces[1]])
    assert write_first(A) is False
    assert write_third(A) is False
    assert write_third(B) is False
    assert write_first(A) is True
    assert traces[0].count == 2
    assert traces[0].event(1) == A


@pytest.mark.parametrize(
    ("names", "rank", "ranks", "own", "local", "others", "near"),
    [
        ("aabb", 2, ((0, 1), (2, 3)), 1, (2, 3), (0,), (0,)),
        ("abab", 3, ((0, 2), (1, 3)), 1, (1, 3), (0,), (0,)),
        ("aaaa", 0, ((0, 1, 2, 3),), 0, (0, 1, 2, 3), (), ()),
        ("abcde", 0, ((0,), (1,), (2,), (3,), (4,)), 0, (0,), (1, 2, 3, 4), (1, 4)),
        ("abcde", 2, ((0,), (1,), (2,), (3,), (4,)), 2, (2,), (0, 1, 3, 4), (0, 1, 3)),
        ("abcde", 4, ((0,), (1,), (2,), (3,), (4,)), 4, (4,), (0, 1, 2, 3), (0, 3)),
    ],
)
def test_machines(names: str, rank: int, ranks: object, own: int, local: object, others: object, near: object):
    found = group_by_machine(list(names), rank)
    assert (found.ranks, found.own, found.local, found.others, found.near) == (ranks, own, local, others, near)
