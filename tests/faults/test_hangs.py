"""explain_hang(): the dumps of a run that really hung name the odd rank and the module; hostile ones run nothing."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.diagnosing.hangs import explain_hang
from shardwise.errors import CheckpointError, ConfigError
from tests.unit.cli.test_main import shardwise


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2])
def test_a_run_that_hung_is_explained_from_its_dumps(tmp_path: Path, num_ranks: int):
    command = [sys.executable, "-m", "tests.faults.hanging", str(tmp_path), str(num_ranks)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    (hang,) = explain_hang(tmp_path)
    assert hang.odd == (num_ranks - 1,)
    assert "all_gather" in hang.doing[0]
    assert "`embed" in hang.doing[0]
    assert "never came to it" in hang.doing[num_ranks - 1]
    result = shardwise("explain", str(tmp_path))
    assert result.returncode == 0
    assert f"rank {num_ranks - 1} is not where the others are" in result.stdout


def entry(number: int, sizes: list[list[int]]) -> dict[str, object]:
    return {
        "collective_seq_id": number, "profiling_name": "nccl:_all_gather_base", "process_group": ("0", "default_pg"),
        "input_sizes": sizes, "input_dtypes": ["Float"], "state": "scheduled", "is_p2p": False, "frames": [],
    }  # fmt: skip


def test_ranks_that_brought_different_sizes_are_told_apart(tmp_path: Path):
    for rank in range(3):
        entries = [entry(1, [[8]]), entry(2, [[16 if rank == 1 else 8]]), entry(3, [[8]])]
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps({"version": "2.10", "entries": entries}))
    (hang,) = explain_hang(tmp_path)
    assert (hang.odd, hang.number) == ((1,), 2)


def test_ranks_that_agree_give_nothing(tmp_path: Path):
    for rank in range(2):
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps({"version": "2.10", "entries": [entry(1, [[8]])]}))
    assert explain_hang(tmp_path) == []


def test_a_folder_without_dumps_says_how_to_make_them(tmp_path: Path):
    with pytest.raises(ConfigError, match="no flight recorder dumps"):
        explain_hang(tmp_path)


def test_a_hostile_dump_runs_nothing(tmp_path: Path):
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'owned'}",)

    (tmp_path / "rank_0").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError):
        explain_hang(tmp_path)
    assert not (tmp_path / "owned").exists()
