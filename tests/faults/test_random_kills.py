"""SIGKILL at random moments, over and over in one folder: the last committed checkpoint always loads."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.faults.killed_run import Kind, Running, assert_intact, assert_swept


def kill_repeatedly(folder: Path, num_kills: int, seed: int) -> None:
    chance = random.Random(seed)
    known = -1
    for _ in range(num_kills):
        num_ranks = chance.choice([1, 1, 2])
        run = Running(folder, Kind(num_ranks=num_ranks, asynchronous=chance.random() < 0.7))
        run.wait_for_save()
        time.sleep(chance.random() * 0.25)
        run.kill(chance.choice([None, [0], [num_ranks - 1]]))
        known = assert_intact(folder, max(known, run.last_committed()))
    assert_swept(folder)
    assert_intact(folder, known)


def test_a_few_random_kills(tmp_path: Path):
    kill_repeatedly(tmp_path / "run", 6, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_random_kills(tmp_path: Path, seed: int):
    kill_repeatedly(tmp_path / "run", 24, seed)
