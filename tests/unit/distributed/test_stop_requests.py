"""Stop requests and restarts of local ranks: which signal counts, what is given back, what is told."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from shardwise.distributed.launchers import read_launch
from shardwise.distributed.local_ranks import start_local
from shardwise.distributed.stop_requests import STOP_SIGNALS, StopRequest, stop_requests
from shardwise.errors import ConfigError, EnvironmentProblem


def kill(name: str) -> None:
    signal.raise_signal(signal.Signals[name])


@pytest.mark.parametrize("name", STOP_SIGNALS)
def test_a_signal_asks_and_the_first_is_kept(name: str):
    before = {each: signal.getsignal(signal.Signals[each]) for each in STOP_SIGNALS}
    with stop_requests() as stop:
        assert (stop.asked, stop.why) == (False, "")
        kill(name)
        assert (stop.asked, stop.why) == (True, name)
        kill("SIGUSR1")
        kill("SIGTERM")
        assert stop.why == name
    assert {each: signal.getsignal(signal.Signals[each]) for each in STOP_SIGNALS} == before


def test_the_second_interrupt_cannot_wait():
    with stop_requests() as stop:
        kill("SIGTERM")
        kill("SIGINT")
        assert stop.why == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            kill("SIGINT")
        with pytest.raises(KeyboardInterrupt):
            kill("SIGINT")


def test_inside_another_block_it_is_the_same_request():
    with stop_requests(["SIGTERM"]) as outer:
        with stop_requests(["SIGUSR1"]) as inner:
            assert inner is outer
            assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        handler = signal.getsignal(signal.SIGTERM)
        assert handler not in (signal.SIG_DFL, signal.SIG_IGN)
        kill("SIGTERM")
        assert outer.asked
    with stop_requests(["SIGTERM"]) as later:
        assert later is not outer
        assert not later.asked
        later.ask("I said so")
        later.ask("again")
        assert later.why == "I said so"


def test_signals_are_given_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)

    def fail() -> None:
        with stop_requests():
            raise LookupError("inside")

    with pytest.raises(LookupError):
        fail()
    assert signal.getsignal(signal.SIGTERM) == before
    with stop_requests() as stop:
        assert not stop.asked


def test_another_thread_sets_no_handler():
    found: list[object] = []
    before = signal.getsignal(signal.SIGTERM)

    def work() -> None:
        with stop_requests() as stop:
            found.append((stop.asked, signal.getsignal(signal.SIGTERM) == before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(False, True)]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "SIGNOPE", "TERM", ""])
def test_signals_that_cannot_ask(name: str):
    with pytest.raises(ConfigError) as caught, stop_requests(["SIGTERM", name]):
        pass
    assert caught.value.what == f"{name!r} is not a signal that can stop a run"
    assert caught.value.fix == "use some of SIGTERM, SIGINT, SIGUSR1"


def test_a_request_hears_interrupts_apart_from_the_rest():
    stop = StopRequest()
    assert [stop.record(number) for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGINT)] == [False, False, False]
    assert (stop.why, stop.record(signal.SIGINT), stop.record(signal.SIGTERM)) == ("SIGUSR1", True, False)


def die_twice(folder: str) -> tuple[int, int]:
    """Rank 1 is killed the first two times."""
    launch = read_launch()
    if launch.rank == 1:
        path = Path(folder) / f"start-{launch.restarts}"
        path.touch()
        if launch.restarts < 2:
            os.kill(os.getpid(), signal.SIGKILL)
    return launch.rank, launch.restarts


@pytest.mark.slow
def test_ranks_that_die_are_started_again(tmp_path: Path):
    told: list[str] = []
    results = start_local(f"{__name__}:die_twice", 2, (str(tmp_path),), max_restarts=3, tell=told.append)
    assert results == [(0, 2), (1, 2)]
    assert told == [
        "rank 1 was killed by SIGKILL; starting all 2 ranks again (restart 1 of 3)",
        "rank 1 was killed by SIGKILL; starting all 2 ranks again (restart 2 of 3)",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start-0", "start-1", "start-2"]
    with pytest.raises(EnvironmentProblem, match="rank 1 was killed by SIGKILL") as caught:
        start_local(f"{__name__}:die_twice", 2, (str(tmp_path),), max_restarts=1, tell=told.append)
    assert caught.value.__notes__ == ["(after 1 restart)"]
