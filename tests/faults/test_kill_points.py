"""Killed at every point of a save, in the process that trains or in the one that writes: the last checkpoint loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.checkpointing.faults import POINTS
from tests.faults.killed_run import Kind, Running, assert_intact, assert_swept


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "background"])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at(tmp_path: Path, point: str, asynchronous: bool):
    folder = tmp_path / "run"
    run = Running(folder, Kind(asynchronous=asynchronous, point=point))
    run.wait_for_save()
    run.end(timeout_s=60)
    assert [process.exitcode for process in run.processes] == [-9], "the point was not reached"
    assert_intact(folder, run.last_committed())
    assert_swept(folder)
    again = Running(folder, Kind(asynchronous=asynchronous))
    again.wait_for_save()
    again.kill()
    assert assert_intact(folder, again.last_committed()) > run.last_committed()


@pytest.mark.parametrize("point", ["file-half-written", "file-synced", "manifest-half-written", "renamed"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_ranks_killed_at(tmp_path: Path, point: str, rank: int):
    if rank == 1 and not point.startswith("file"):
        pytest.skip("only rank 0 commits")
    folder = tmp_path / "run"
    run = Running(folder, Kind(num_ranks=2, asynchronous=True, point=point, strikes_rank=rank))
    run.wait_for_save()
    run.processes[rank].join(60)
    assert run.processes[rank].exitcode == -9, "the point was not reached"
    run.end(timeout_s=5)
    assert_intact(folder, run.last_committed())
    assert_swept(folder)
