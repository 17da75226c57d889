"""Inspect, verify, compare and open: the same answers for every format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fsspec
import numpy
import pytest
import torch

from shardwise.checkpointing.convert import convert_checkpoint
from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.inspecting import diff_checkpoints, inspect_checkpoint, verify_checkpoint
from shardwise.checkpointing.manager import Checkpointer
from shardwise.errors import CheckpointError
from tests.attacks.corrupting import MAKERS
from tests.unit.checkpointing.every_format import FORMATS, RUNS, flat_tensors, model_state, run_state

NAMES = {
    "full": "full", "dcp": "dcp", "sharded": "sharded",
    "safetensors": "safetensors", "safetensors-shards": "safetensors", "bin-shards": "full",
}  # fmt: skip
NUM_ELEMENTS = sum(tensor.numel() for name, tensor in model_state().items() if name != "head.weight")


@pytest.mark.parametrize("format", FORMATS)
def test_inspection_says_what_is_in_it(format: str, tmp_path: Path):
    found = inspect_checkpoint(FORMATS[format](tmp_path))
    assert found.format == NAMES[format]
    assert found.findings == ()
    expected = flat_tensors(run_state()) if format in RUNS else model_state()
    listed = {tensor.name: (tensor.dtype, tensor.shape) for tensor in found.tensors}
    assert listed == {
        name: (str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in expected.items()
    }
    stored_twice = format in ("dcp", "safetensors", "safetensors-shards", "bin-shards")
    assert found.num_elements == NUM_ELEMENTS + 35 * stored_twice
    assert found.sections["model"][0] == 7
    assert ("optim" in found.sections) == (format in RUNS)
    assert found.disk_bytes > found.num_bytes - 35 * 4
    assert found.is_checksummed == (format == "sharded")
    assert json.loads(json.dumps(found.to_dict()))["tensors"][0]["name"] == found.tensors[0].name
    assert str(found).endswith("nothing wrong in the index")


def test_inspection_of_ours_knows_step_ranks_and_values(tmp_path: Path):
    found = inspect_checkpoint(RUNS["sharded"](tmp_path))
    assert (found.step, found.world_size) == (7, 2)
    assert found.values["optim.param_groups.0.betas"] == "(0.9, 0.99)"
    assert "step 7, 2 ranks" in str(found)


@pytest.mark.parametrize("format", FORMATS)
def test_a_whole_checkpoint_has_nothing_wrong(format: str, tmp_path: Path):
    """But for a note where flips could not be seen."""
    found = verify_checkpoint(FORMATS[format](tmp_path))
    assert [finding.code for finding in found] == (["SW335"] if format.startswith("safetensors") else [])


def test_every_damaged_tensor_is_listed_with_its_file(tmp_path: Path):
    folder = RUNS["sharded"](tmp_path)
    contents = open_checkpoint(folder)
    for name in ("model.block.bias", "optim.state.block.weight.exp_avg"):
        chunk = contents.tensors[name].chunks[1]
        flip(folder / chunk.file, chunk.offset + 1)
    found = verify_checkpoint(folder)
    assert [finding.code for finding in found] == ["SW334", "SW334"]
    assert {finding.where for finding in found} == {str(folder / "__1_0.distcp")}
    assert "model.block.bias" in found[0].message + found[1].message


def test_the_folder_of_a_run_means_all_its_checkpoints(tmp_path: Path):
    folder = RUNS["sharded"](tmp_path)
    shutil.copytree(folder, tmp_path / "step-00000008")
    shutil.copytree(folder, tmp_path / "step-00000009.partial")
    assert verify_checkpoint(tmp_path) == []
    (tmp_path / "step-00000008" / "__0_0.distcp").unlink()
    found = verify_checkpoint(tmp_path)
    assert [(finding.code, finding.where) for finding in found] == [
        ("SW333", str(tmp_path / "step-00000008" / "__0_0.distcp"))
    ]
    assert open_checkpoint(tmp_path).path == tmp_path / "step-00000008"


def test_differences_are_found_in_names_shapes_dtypes_and_values(tmp_path: Path):
    one = {"same": torch.ones(3), "values": torch.zeros(4), "shape": torch.ones(2), "dtype": torch.ones(2), "a": one_()}
    other = {
        "same": torch.ones(3),
        "values": torch.tensor([0.0, 0.5, 0.0, -2.0]),
        "shape": torch.ones(3),
        "dtype": torch.ones(2, dtype=torch.bfloat16),
        "b": one_(),
    }
    torch.save({"model": one, "epoch": 1}, tmp_path / "a.pt")
    torch.save({"model": other, "epoch": 2}, tmp_path / "b.pt")
    found = diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt")
    assert (found.only_in_a, found.only_in_b, found.values) == (("model.a",), ("model.b",), ("extra.epoch",))
    assert [(each.name, each.what) for each in found.tensors] == [
        ("model.values", "values"), ("model.shape", "shape"), ("model.dtype", "dtype"),
    ]  # fmt: skip
    assert (found.tensors[0].largest, found.tensors[0].num_elements) == (2.0, 2)
    assert found.largest == found.tensors[0]
    assert found.num_equal == 1
    assert "largest difference: 2 in model.values" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["equal"] is False


def test_nan_on_one_side_is_a_difference_and_on_both_is_not(tmp_path: Path):
    nan = torch.tensor([1.0, float("nan")])
    torch.save({"x": nan, "y": nan}, tmp_path / "a.pt")
    torch.save({"x": nan, "y": torch.ones(2)}, tmp_path / "b.pt")
    found = diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt")
    assert [each.name for each in found.tensors] == ["model.y"]
    assert found.tensors[0].largest != found.tensors[0].largest


def test_values_are_compared_as_a_whole_and_nan_equals_itself(tmp_path: Path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for number, path in enumerate(paths):
        extra = {"best": float("nan"), "array": numpy.arange(3), "moved": numpy.arange(3) + number}
        with Checkpointer(path, asynchronous=False, rng=False) as checkpointer:
            checkpointer.save(1, model=torch.nn.Identity(), extra=extra)
    found = diff_checkpoints(*paths)
    assert [name.rpartition(".")[2] for name in found.values] == ["moved"]
    assert diff_checkpoints(paths[0], paths[0]).is_empty


def test_every_step_of_a_run_in_an_object_store_is_verified(tmp_path: Path):
    store = fsspec.filesystem("memory")
    with Checkpointer("memory://verified/run", asynchronous=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, model=torch.nn.Linear(2, 2))
    try:
        assert verify_checkpoint("memory://verified/run") == []
        (shard,) = (name for name in store.find("/verified/run/step-00000001") if name.endswith(".distcp"))
        data = bytearray(store.cat(shard))
        data[-1] ^= 1
        store.pipe(shard, bytes(data))
        assert [finding.code for finding in verify_checkpoint("memory://verified/run")]
    finally:
        store.rm("/", recursive=True)


@pytest.mark.parametrize("make", ["nothing", "empty", "text", "partial", "index"])
def test_what_is_no_checkpoint_is_refused_with_what_was_tried(make: str, tmp_path: Path):
    path = tmp_path / "x"
    expected = {
        "nothing": "no such file or folder",
        "empty": "the folder is empty",
        "text": "not a checkpoint of a known format",
        "partial": "not a checkpoint of a known format",
        "index": "no index",
    }[make]
    if make != "nothing":
        path.mkdir()
    if make in ("text", "partial"):
        (path / "notes.txt").write_text("hello")
    if make == "index":
        (path / "__0_0.distcp").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=expected) as error:
        open_checkpoint(path)
    assert error.value.where.startswith(str(path))
    assert error.value.fix


@pytest.mark.parametrize("format", MAKERS)
def test_checkpoints_in_an_object_store_are_read_all_the_same(format: str, tmp_path: Path):
    store = fsspec.filesystem("memory")
    path = MAKERS[format](tmp_path)
    store.put(str(tmp_path), "/run", recursive=True)
    url = f"memory://run/{path.relative_to(tmp_path)}".removesuffix("/.")
    try:
        assert diff_checkpoints(path, url).is_empty
        assert [each.code for each in verify_checkpoint(url)] == [each.code for each in verify_checkpoint(path)]
        if format in RUNS:
            convert_checkpoint(url, "memory://out", "dcp")
            assert diff_checkpoints(path, "memory://out").is_empty
            with pytest.raises(CheckpointError, match="local disk only"):
                convert_checkpoint(url, "memory://other", "full")
    finally:
        store.rm("/", recursive=True)


def test_files_of_a_folder_open_the_folder(tmp_path: Path):
    folder = RUNS["dcp"](tmp_path)
    for name in (".metadata", "__0_0.distcp"):
        assert open_checkpoint(folder / name).path == folder


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def one_() -> torch.Tensor:
    return torch.ones(1)
