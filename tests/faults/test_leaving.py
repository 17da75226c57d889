"""However a program leaves, short of SIGKILL, a save that it began is finished first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from shardwise.checkpointing.manager import Checkpointer

SCRIPT = Path(__file__).with_name("leaving_run.py")
STATUS = {"ends": 0, "raises": 1, "exits": 4, "is terminated": -signal.SIGTERM, "destroys the group": 0}
STATUS["closes an earlier one"] = -signal.SIGTERM
"""Two checkpointers, of which the first is closed before the program is terminated."""


def start(manner: str, folder: Path, rank: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), manner, str(folder), str(rank)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )


SLOW = ("raises", "exits", "ends", "closes an earlier one")


@pytest.mark.parametrize(
    "manner", [pytest.param(each, marks=[pytest.mark.slow] if each in SLOW else []) for each in STATUS]
)
def test_save_is_finished_when_the_program(tmp_path: Path, manner: str):
    folder = tmp_path / "run"
    num_ranks = 2 if manner == "destroys the group" else 1
    processes = [start(manner, folder, rank) for rank in range(num_ranks)]
    outputs = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [STATUS[manner]] * num_ranks, outputs
    assert all(output.strip() == "saved" for output, _ in outputs)
    assert ("on purpose" in outputs[0][1]) == (manner == "raises")
    model = nn.Linear(64, 64)
    with Checkpointer(folder, asynchronous=False) as checkpointer:
        assert checkpointer.load(model=model) == 1
    assert torch.equal(model.weight, torch.full((64, 64), 7.0))


TERMINATED = """
import os, signal, sys, threading, time
from torch import nn
from shardwise.checkpointing.manager import Checkpointer

checkpointer, model = Checkpointer(sys.argv[1]), nn.Linear(6000, 6000)
checkpointer.prepare(model=model)
lock, finish = threading.Lock(), checkpointer._saver.finish

def finish_locked(*arguments, **settings):  # as one that logs, or allocates pinned memory
    with lock:
        finish(*arguments, **settings)

checkpointer._saver.finish = finish_locked
lock.acquire()
checkpointer.save(1, model=model)
try:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # launchers that both pass it on
finally:
    lock.release()
time.sleep(60)
"""


def test_sigterm_within_a_lock_that_the_save_needs(tmp_path: Path):
    status = subprocess.run([sys.executable, "-c", TERMINATED, str(tmp_path)], timeout=40, check=False).returncode
    assert status == -signal.SIGTERM
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_writer_goes_when_its_parent_is_killed(tmp_path: Path):
    process = start("is killed", tmp_path / "run")
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    writer, forked = map(int, process.stdout.readline().split())
    try:
        assert process.wait(180) == -signal.SIGKILL
        deadline = time.monotonic() + 30
        while psutil.pid_exists(writer) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert psutil.pid_exists(forked)
        assert not psutil.pid_exists(writer)
    finally:
        os.kill(forked, signal.SIGKILL)
        process.communicate()
