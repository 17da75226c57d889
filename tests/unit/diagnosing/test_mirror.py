"""Copies of slots on another machine's board: what arrives, in what order, and who sends it."""

import os
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from shardwise.diagnosing.collective_trace import HISTORY, Board, create_board, open_board
from shardwise.diagnosing.peer_traces import Mirror, group_by_machine
from shardwise.diagnosing.tracer import Outlook

NAMES = ["a", "a", "b", "b", "c"]


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not arrive"
        time.sleep(0.01)


@pytest.fixture
def boards() -> Iterator[dict[str, Board]]:
    found = {}
    for machine in sorted(set(NAMES)):
        path = create_board(len(NAMES))
        found[machine] = open_board(path, len(NAMES))
        path.unlink()
    for rank, machine in enumerate(NAMES):
        found[machine].slots[rank].open()
    yield found
    for board in found.values():
        board.close()


@pytest.fixture
def mirrors(boards: dict[str, Board]) -> Iterator[list[Mirror]]:
    store = dist.HashStore()
    made = []
    for rank, machine in enumerate(NAMES):
        machines = group_by_machine(NAMES, rank)
        made.append(Mirror(boards[machine], machines, rank, lambda: store, announces=False))
    for rank in (0, 2, 4):
        made[rank].publish_first()
    for mirror in made:
        mirror.start()
    yield made
    for mirror in made:
        mirror.close()


def test_events_steps_and_ends_arrive(boards: dict[str, Board], mirrors: list[Mirror]):
    slot, copy = boards["b"].slots[3], boards["a"].slots[3]
    assert copy.is_copy
    assert not slot.is_copy
    for event in (7, 8, 9):
        slot.write(event)
    slot.set_step(5)
    wait_for(lambda: (copy.count, copy.step) == (3, 5))
    assert [copy.event(index) for index in range(4)] == [7, 8, 9, None]
    assert not copy.has_ended
    slot.end()
    wait_for(lambda: copy.has_ended)
    assert copy.is_alive


def test_what_was_never_heard_is_not_compared(boards: dict[str, Board], mirrors: list[Mirror]):
    """More events between two looks than a slot keeps: the gap must not be taken for a difference."""
    ours, theirs, copy = boards["a"].slots[0], boards["b"].slots[2], boards["a"].slots[2]
    outlook = Outlook(boards["a"], 0, ("root",))
    seeded = random.Random(0)
    for size in (10, 3 * HISTORY, 1, HISTORY, 5 * HISTORY + 3, HISTORY + 1):
        for _ in range(size):
            event = seeded.randrange(1 << 16)
            ours.write(event)
            theirs.write(event)
        wait_for(lambda: copy.count == theirs.count)
        assert outlook.first_difference() is None
        assert copy.event(copy.count - 1) == theirs.event(theirs.count - 1)
    ours.write(1)
    theirs.write(2)
    wait_for(lambda: copy.count == theirs.count)
    assert outlook.first_difference() == ours.count - 1


def test_a_copy_shows_only_what_it_was_given(boards: dict[str, Board]):
    """The last words of a process may follow a gap."""
    copy = boards["a"].slots[2]
    copy.become_copy(count=6, step=1, last=array("I", range(6)).tobytes())
    assert [copy.event(index) for index in range(7)] == [0, 1, 2, 3, 4, 5, None]
    copy.become_copy(count=500, step=9, last=array("I", [496, 497, 498, 499]).tobytes())
    assert [copy.event(index) for index in (0, 5, 300, 495, 496, 499, 500)] == [None, None, None, None, 496, 499, None]
    assert copy.first == 496


def test_a_question_is_handed_on_and_its_answer_comes_back(boards: dict[str, Board], mirrors: list[Mirror]):
    asked, here = boards["c"].slots[4], boards["a"].slots[4]
    here.ask()
    wait_for(lambda: asked.times_asked == 1)
    asked.say("in the loader")
    wait_for(lambda: here.times_said == 1)
    assert here.said == "in the loader"
    assert here.verdict is None
    asked.conclude("all is lost")
    wait_for(lambda: here.verdict == "all is lost")


def test_the_next_rank_speaks_for_a_machine_whose_first_has_gone(boards: dict[str, Board], mirrors: list[Mirror]):
    board = boards["b"]
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mirrors[2].close()  # with its process
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: gone.pid)
        board.slots[2].open()
    wait_for(lambda: not boards["a"].slots[2].is_alive)
    board.slots[3].write(3)
    wait_for(lambda: boards["a"].slots[3].count == 1)
    assert boards["a"].slots[3].is_alive


def test_a_machine_that_is_silent_grows_old(boards: dict[str, Board], mirrors: list[Mirror]):
    mirrors[4].close()
    wait_for(lambda: boards["a"].slots[4].seconds_unheard > 1.0)
    assert boards["a"].slots[2].seconds_unheard < 1.0
    assert boards["a"].slots[0].seconds_unheard == 0.0


def test_machines_are_told_apart():
    machines = group_by_machine(["x", "y", "x", "z", "w", "v"], 2)
    assert machines.ranks == ((0, 2), (1,), (3,), (4,), (5,))
    assert machines.local == (0, 2)
    assert machines.others == (1, 2, 3, 4)
    assert machines.near == (1, 4)
    assert group_by_machine(["x", "y", "x", "z", "w", "v"], 4).near == (0, 2, 4)
