"""Copies of traces on another machine: what arrives, in what order, and who sends it."""

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardwise.distributed.collective_trace import (
    HISTORY,
    GroupNames,
    RankTrace,
    StepAgreement,
    StoreExchange,
    create_shared_trace,
    group_by_machine,
    open_shared_trace,
)
from shardwise.distributed.tracer import PeerView

NAMES = ["a", "a", "b", "b", "c"]


@pytest.fixture
def machines() -> dict[str, list[RankTrace]]:
    found = {}
    for machine in sorted(set(NAMES)):
        path = create_shared_trace(len(NAMES))
        found[machine] = open_shared_trace(path, len(NAMES))
        path.unlink()
    for rank, machine in enumerate(NAMES):
        found[machine][rank].open()
    return found


@pytest.fixture
def exchanges(machines: dict[str, list[RankTrace]]) -> list[StoreExchange]:
    store = dist.HashStore()
    made = [
        StoreExchange(machines[machine], group_by_machine(NAMES, rank), rank, store)
        for rank, machine in enumerate(NAMES)
    ]
    for exchange in made:
        exchange.publish()
    exchange_all(made)
    return made


def exchange_all(exchanges: list[StoreExchange]) -> None:
    for _ in range(2):
        for exchange in exchanges:
            exchange.exchange(with_all=True)


def test_events_steps_and_ends_arrive(machines: dict[str, list[RankTrace]], exchanges: list[StoreExchange]):
    trace, copy = machines["b"][3], machines["a"][3]
    write = trace.writer([])
    for event in (7, 8, 9):
        write(event)
    trace.step = 5
    exchange_all(exchanges)
    assert (copy.count, copy.step) == (3, 5)
    assert [copy.event(index) for index in range(4)] == [7, 8, 9, None]
    assert not copy.has_ended
    trace.has_ended = True
    exchange_all(exchanges)
    assert copy.has_ended
    assert copy.is_alive


def test_what_was_never_heard_is_not_compared(machines: dict[str, list[RankTrace]], exchanges: list[StoreExchange]):
    """More events between two looks than a trace keeps: the gap must not be taken for a difference."""
    ours, theirs, copy = machines["a"][0], machines["b"][2], machines["a"][2]
    view = PeerView(machines["a"], 0, GroupNames(("root",)))
    write_ours, write_theirs = ours.writer([]), theirs.writer([])
    seeded = random.Random(0)
    for size in (10, 3 * HISTORY, 1, HISTORY, 5 * HISTORY + 3, HISTORY + 1):
        for _ in range(size):
            event = seeded.randrange(1 << 16)
            write_ours(event)
            write_theirs(event)
        exchange_all(exchanges)
        assert copy.count == theirs.count
        assert view.first_difference() is None
        assert copy.event(copy.count - 1) == theirs.event(theirs.count - 1)
    write_ours(1)
    write_theirs(2)
    exchange_all(exchanges)
    assert view.first_difference() == ours.count - 1


def test_stacks_and_verdicts_arrive(machines: dict[str, list[RankTrace]], exchanges: list[StoreExchange]):
    theirs, here = machines["c"][4], machines["a"][4]
    theirs.set_text("in the loader")
    exchange_all(exchanges)
    assert (here.text, here.verdict, here.is_text_current) == ("in the loader", None, True)
    theirs.set_text("all is lost", is_verdict=True)
    exchange_all(exchanges)
    assert here.verdict == "all is lost"


def test_the_next_rank_speaks_for_a_machine_whose_first_has_gone(
    machines: dict[str, list[RankTrace]], exchanges: list[StoreExchange]
):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: gone.pid)
        machines["b"][2].open()
    machines["b"][2].touch(seconds_ago=1.0)
    machines["b"][3].writer([])(3)
    living = [exchange for rank, exchange in enumerate(exchanges) if rank != 2]
    exchange_all(living)
    assert not machines["a"][2].is_alive
    assert machines["a"][3].is_alive
    assert machines["a"][3].count == 1
    machines["a"][0].writer([])(4)
    exchange_all(living)
    assert machines["b"][0].count == 1, "and reads for it"


def test_a_machine_that_is_silent_grows_old(
    machines: dict[str, list[RankTrace]], exchanges: list[StoreExchange], monkeypatch: pytest.MonkeyPatch
):
    import time

    exchange_all(exchanges)
    exchanges[0].exchange(with_all=True)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 5.0)
    exchange_all(exchanges[:4])
    assert machines["a"][4].seconds_unheard > 4.0
    assert machines["a"][2].seconds_unheard < 1.0
    assert machines["a"][0].seconds_unheard == 0.0


def test_a_store_that_went_away_is_left_alone(machines: dict[str, list[RankTrace]]):
    class Gone:
        calls = 0

        def set(self, key: str, value: bytes) -> None:
            Gone.calls += 1
            raise RuntimeError("connection reset")

        def multi_get(self, keys: list[str]) -> list[bytes]:
            raise AssertionError

    exchange = StoreExchange(machines["a"], group_by_machine(NAMES, 0), 0, Gone())
    exchange.publish()
    exchange.exchange()
    assert Gone.calls == 1


def test_machines_are_told_apart():
    machines = group_by_machine(["x", "y", "x", "z", "w", "v"], 2)
    assert machines.ranks == ((0, 2), (1,), (3,), (4,), (5,))
    assert machines.local == (0, 2)
    assert machines.others == (1, 2, 3, 4)
    assert machines.near == (1, 4)
    assert group_by_machine(["x", "y", "x", "z", "w", "v"], 4).near == (0, 2, 4)


@pytest.mark.parametrize(("digests", "expected"), [("aaa", [True] * 3), ("aab", [False] * 3), ("baa", [False] * 3)])
def test_machines_agree_before_a_step(digests: str, expected: list[bool]):
    """Twice, so that the second step is not taken for the first."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def ask(machine: int) -> list[bool]:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        agreement = StepAgreement(store, machine, len(digests))
        return [agreement.is_shared(digest, lambda: None) for digest in ("same", digests[machine])]

    with ThreadPoolExecutor(len(digests)) as pool:
        answers = list(pool.map(ask, range(len(digests))))
    assert answers == [[True, each] for each in expected]


def test_an_error_ends_the_wait_for_a_machine_that_does_not_come():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=0.1))

    def stop() -> None:
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        StepAgreement(server, 0, 2).is_shared("same", stop)
