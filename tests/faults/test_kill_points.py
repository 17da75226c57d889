"""Killed at every point of a save, in the process that trains or in the one that writes: the last checkpoint loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kill_points import POINTS
from tests.faults.killed_run import Kind, Running, assert_intact, assert_swept

FEW = ("file-half-written", "manifest-half-written", "partial-synced", "renamed", "retired")
POINTS_AND_WAYS = [
    pytest.param(point, background, marks=[] if background and point in FEW else pytest.mark.slow, id=f"{point}, {way}")
    for way, background in (("background", True), ("waiting", False))
    for point in POINTS
]


@pytest.mark.parametrize(("point", "asynchronous"), POINTS_AND_WAYS)
def test_killed_at(tmp_path: Path, point: str, asynchronous: bool):
    folder = tmp_path / "run"
    run = Running(folder, Kind(asynchronous=asynchronous, point=point))
    run.wait_for_save()
    run.end(timeout_s=180)
    assert [process.exitcode for process in run.processes] == [-9], "the point was not reached"
    assert_intact(folder, run.last_committed())
    assert_swept(folder)
    again = Running(folder, Kind(asynchronous=asynchronous))
    again.wait_for_save()
    again.kill()
    assert assert_intact(folder, again.last_committed()) > run.last_committed()


@pytest.mark.parametrize(
    ("rank", "point"),
    [
        (1, "file-half-written"),
        (0, "renamed"),
        pytest.param(0, "file-half-written", marks=pytest.mark.slow),
        pytest.param(1, "file-synced", marks=pytest.mark.slow),
        pytest.param(0, "manifest-half-written", marks=pytest.mark.slow),
    ],
)
def test_one_of_two_ranks_killed_at(tmp_path: Path, point: str, rank: int):
    folder = tmp_path / "run"
    run = Running(folder, Kind(num_ranks=2, asynchronous=True, point=point, strikes_rank=rank))
    run.wait_for_save()
    run.processes[rank].join(180)
    assert run.processes[rank].exitcode == -9, "the point was not reached"
    run.end(timeout_s=5)
    assert_intact(folder, run.last_committed())
    assert_swept(folder)
