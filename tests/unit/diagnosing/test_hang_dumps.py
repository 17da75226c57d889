"""explain_hang(): where ranks parted, from dumps of any shape: exact ranks, numbers, names and lines."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from shardwise.diagnosing.hangs import explain_hang
from tests.unit.cli.test_main import shardwise


def entry(number: int, sizes: Any = ((8,),), name: str = "nccl:_all_gather_base", **more: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": number, "profiling_name": name, "process_group": ("0", "default_pg"),
        "input_sizes": [list(size) for size in sizes], "input_dtypes": ["Float"], "state": "scheduled",
        "is_p2p": False, "frames": [], **more,
    }  # fmt: skip


def dump(folder: Path, *ranks: list[Any], name: str = "nccl_trace_rank_{}", **more: Any) -> None:
    for rank, entries in enumerate(ranks):
        (folder / name.format(rank)).write_bytes(pickle.dumps({"version": "2.10", "entries": entries, **more}))


def shown(folder: Path) -> list[str]:
    return [str(hang) for hang in explain_hang(folder)]


def test_the_rank_that_did_not_come_is_named_with_its_last(tmp_path: Path):
    (tmp_path / "groups.json").write_text(json.dumps({"gather 8": "layers.0", "reduce 16": "layers.1 or head"}))
    reduce = entry(2, ((4, 4),), "nccl:_reduce_scatter_base")
    dump(tmp_path, [entry(1), reduce, entry(3)], [entry(1), reduce], [entry(1), reduce, entry(3)])
    assert shown(tmp_path) == [
        "rank 1 is not where the others are, at collective 3 of default_pg:\n"
        "  rank 0: nccl:_all_gather_base of `layers.0`\n"
        "  rank 1: never came to it; its last was nccl:_reduce_scatter_base of `layers.1 or head`\n"
        "  rank 2: nccl:_all_gather_base of `layers.0`"
    ]
    result = shardwise("explain", str(tmp_path))
    assert result.returncode == 0
    assert shown(tmp_path)[0].splitlines()[0] in result.stdout


def test_two_ranks_that_brought_something_else(tmp_path: Path):
    frames = [
        {"filename": "/lib/torch/nn.py", "line": 1},
        {"filename": "/x/shardwise/sharding.py", "line": 2},
        {"filename": "", "line": 3},
        {"filename": "/home/me/train.py", "line": 41},
        {"filename": "/home/me/main.py", "line": 7},
    ]
    other = entry(5, ((2, 3), (9,)), "nccl:all_reduce", frames=frames)
    dump(tmp_path, [entry(5)], [other], [other], [entry(5)], [entry(5)], name="rank_{}")
    (hang,) = explain_hang(tmp_path)
    assert (hang.process_group, hang.number, hang.odd) == ("default_pg", 5, (1, 2))
    assert dict(hang.doing) == {
        0: "nccl:_all_gather_base of 8",
        1: "nccl:all_reduce of 2x3, from /home/me/train.py:41",
        2: "nccl:all_reduce of 2x3, from /home/me/train.py:41",
        3: "nccl:_all_gather_base of 8",
        4: "nccl:_all_gather_base of 8",
    }
    assert str(hang).startswith("ranks 1, 2 are not where the others are, at collective 5 of default_pg:\n")


@pytest.mark.parametrize(
    ("field", "value"), [("input_sizes", [[9]]), ("input_dtypes", ["Half"]), ("profiling_name", "nccl:broadcast")]
)
def test_each_thing_that_must_agree(tmp_path: Path, field: str, value: Any):
    dump(tmp_path, [entry(1), entry(2)], [entry(1), entry(2) | {field: value}], [entry(1), entry(2)])
    (hang,) = explain_hang(tmp_path)
    assert (hang.number, hang.odd) == (2, (1,))


def test_of_absent_and_present_ranks_the_absent_ones_are_odd(tmp_path: Path):
    """Even where most are absent: a rank that came is where all should be."""
    dump(tmp_path, [entry(1)], [entry(1)], [entry(1), entry(2)])
    (hang,) = explain_hang(tmp_path)
    assert (hang.number, hang.odd) == (2, (0, 1))


def test_what_a_short_record_has_forgotten_is_not_compared(tmp_path: Path):
    dump(tmp_path, [entry(3), entry(4)], [entry(1), entry(2), entry(3), entry(4)])
    assert explain_hang(tmp_path) == []
    dump(tmp_path, [entry(3), entry(4)], [entry(2), entry(3), entry(4, ((1,),))])
    assert [(hang.number, hang.odd) for hang in explain_hang(tmp_path)] == [(4, (1,))]


def test_process_groups_are_told_apart_and_point_to_point_is_left_out(tmp_path: Path):
    one, two = {"process_group": ("1", "mesh_shard")}, {"process_group": ("2",)}
    dump(
        tmp_path,
        [entry(1, **two), entry(1, **one), entry(2, **one), entry(9, is_p2p=True)],
        [entry(1, **two), entry(1, **one), "noise", entry(2, **two), entry(7, process_group=None, is_p2p=True)],
    )
    assert [(hang.process_group, hang.number, hang.odd) for hang in explain_hang(tmp_path)] == [
        ("2", 2, (0,)),
        ("mesh_shard", 2, (1,)),
    ]


def test_groups_of_one_description_are_not_mixed_up(tmp_path: Path):
    """Each replica of hybrid sharding has a group called `mesh_shard`, which may be ahead of the others."""
    first, second = {"process_group": ("1", "mesh_shard")}, {"process_group": ("2", "mesh_shard")}
    ahead = [entry(1, **second), entry(2, **second)]
    dump(tmp_path, [entry(1, **first)], [entry(1, **first)], ahead, ahead)
    assert explain_hang(tmp_path) == []


def test_dumps_without_details(tmp_path: Path):
    bare = {"collective_seq_id": 1, "profiling_name": "gloo:barrier"}
    dump(tmp_path, [bare], [])
    dump(tmp_path, [bare, bare | {"collective_seq_id": 2}], [bare], name="{}")
    (tmp_path / "nccl_trace_rank_0").unlink()
    (tmp_path / "nccl_trace_rank_1").unlink()
    (hang,) = explain_hang(tmp_path)
    assert (hang.process_group, hang.odd) == ("?", (1,))
    assert dict(hang.doing) == {0: "gloo:barrier", 1: "never came to it; its last was gloo:barrier"}


@pytest.mark.parametrize("name", ["gloo:all_gather", "nccl:_allgather_base", "nccl:_all_gather_base"])
def test_modules_are_found_by_what_they_gather(tmp_path: Path, name: str):
    (tmp_path / "groups.json").write_text(json.dumps({"gather 24": "blocks.1", "reduce 24": "no", "gather 8": "no"}))
    dump(tmp_path, [entry(1, ((2, 3, 4),), name)], [entry(1, ((8,),), "gloo:all_reduce")])
    (hang,) = explain_hang(tmp_path)
    assert hang.doing == {0: f"{name} of `blocks.1`", 1: "gloo:all_reduce of 8"}
