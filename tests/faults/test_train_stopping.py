"""Stop requests: to a process, to a launcher of local ranks, to all its processes at once, twice, and kill -9."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from shardwise.distributed.stop_requests import STOP_SIGNALS, StopRequest, stop_requests
from shardwise.errors import ConfigError

JOBS = "tests.faults.local_jobs"
ROOT = Path(__file__).parents[2]


@contextmanager
def launcher(job: str, folder: Path, *args: int) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a session of its own, so that its whole group can be signalled as a terminal does."""
    command = [sys.executable, "-m", JOBS, job, str(folder), *map(str, args)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(condition, what: str, timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.02)


def wait_until_started(folder: Path) -> list[psutil.Process]:
    files = [folder / f"started-{rank}" for rank in range(2)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), "the ranks start")
    return [psutil.Process(int(file.read_text())) for file in files]


def saved(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob("saved-*"))]


def test_first_signal_asks_and_second_interrupt_raises():
    before = {name: signal.getsignal(signal.Signals[name]) for name in STOP_SIGNALS}
    with stop_requests() as stop:
        assert not stop.asked
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        assert stop.why == "SIGUSR1"
    with stop_requests() as stop:
        assert not stop.asked
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # a scheduler may repeat itself
        assert stop.why == "SIGTERM"
    with stop_requests() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.why == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert {name: signal.getsignal(signal.Signals[name]) for name in STOP_SIGNALS} == before


def test_interrupts_count_also_after_another_request():
    with stop_requests() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.why == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_only_the_signals_that_are_named_ask():
    with stop_requests(["SIGUSR2"]) as stop:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        signal.raise_signal(signal.SIGUSR2)
        assert stop.why == "SIGUSR2"


def test_inner_block_has_the_same_request():
    with stop_requests() as outer:
        with stop_requests() as inner:
            assert inner is outer
        signal.raise_signal(signal.SIGTERM)
        assert outer.asked


def test_another_thread_gets_a_request_without_signals():
    heard: list[StopRequest] = []

    def work() -> None:
        with stop_requests() as stop:
            heard.append(stop)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not heard[0].asked
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("name", ["SIGKILL", "TERM", "15"])
def test_what_cannot_ask_is_refused(name: str):
    with pytest.raises(ConfigError, match=f"'{name}' is not a signal") as failure, stop_requests([name]):
        pass
    assert failure.value.where == "training.stop_signals"


@pytest.mark.slow
def test_the_launcher_passes_a_request_on(tmp_path: Path):
    name = "SIGUSR1"
    with launcher("step_until_stopped", tmp_path, 1000) as process:
        wait_until_started(tmp_path)
        process.send_signal(signal.Signals[name])
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output == f"{[name, name]}\n"
    assert saved(tmp_path) == [name, name]
    assert errors == f"shardwise: {name}: the ranks stop after the next step; Ctrl-C ends them now\n"


@pytest.mark.slow
def test_a_request_during_the_start_is_kept(tmp_path: Path):
    with launcher("step_until_stopped", tmp_path, 1000) as process:
        children = psutil.Process(process.pid).children
        wait_for(lambda: len(children(recursive=True)) >= 2, "the fork server starts")
        time.sleep(1.0)  # torch is being imported, or the ranks are being forked
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) in ((0, "['SIGTERM', 'SIGTERM']\n"), (-signal.SIGTERM, "")), errors
    assert saved(tmp_path) in (["SIGTERM", "SIGTERM"], [])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_every_process_still_saves(tmp_path: Path, name: str):
    """As schedulers send SIGTERM and terminals SIGINT: also to the ranks and to the server they are forked from."""
    with launcher("step_until_stopped", tmp_path, 1000) as process:
        wait_until_started(tmp_path)
        os.killpg(process.pid, signal.Signals[name])
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output == f"{[name, name]}\n"
    assert saved(tmp_path) == [name, name]


@pytest.mark.slow
def test_the_second_interrupt_ends_everything_at_once(tmp_path: Path):
    with launcher("step_and_never_stop", tmp_path) as process:
        ranks = wait_until_started(tmp_path)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1.0)
        assert process.poll() is None
        start = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        assert time.monotonic() - start < 20  # after one interrupt ranks have 30 s to stop by themselves
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    assert process.returncode == -signal.SIGINT, errors  # Python ends so after KeyboardInterrupt
    assert errors.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", -2)])
def test_without_stop_signals_a_signal_ends_the_ranks(tmp_path: Path, name: str, status: int):
    with launcher("step_without_stop_signals", tmp_path, 1000) as process:
        ranks = wait_until_started(tmp_path)
        process.send_signal(signal.Signals[name])
        process.communicate(timeout=120)
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    assert process.returncode == status


@pytest.mark.slow
def test_ranks_outlive_no_launcher(tmp_path: Path):
    """After kill -9 of the launcher the ranks save what they have and end, and nobody waits for ever."""
    with launcher("step_until_stopped", tmp_path, 1000) as process:
        ranks = wait_until_started(tmp_path)
        process.kill()
        process.wait()
        wait_for(lambda: not any(rank.is_running() for rank in ranks), "the ranks end", 20)
        assert saved(tmp_path) == ["the launcher died"] * 2


@pytest.mark.slow
def test_ranks_that_cannot_stop_end_with_the_launcher(tmp_path: Path):
    with launcher("step_without_stop_signals", tmp_path, 1000) as process:
        ranks = wait_until_started(tmp_path)
        process.kill()
        process.wait()
        wait_for(lambda: not any(rank.is_running() for rank in ranks), "the ranks end", 20)
        assert saved(tmp_path) == []
