"""Any format in, any format out, bit by bit, with or without a cast."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from shardwise.checkpointing import convert
from shardwise.checkpointing.convert import convert_checkpoint
from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.inspecting import diff_checkpoints, inspect_checkpoint, verify_checkpoint
from shardwise.errors import CheckpointError, ConfigError
from tests.unit.checkpointing.every_format import FORMATS, RUNS, flat_tensors, model_state, run_state

TARGETS = {"dcp": "step-00000009", "full": "out.pt", "safetensors": "weights"}


@pytest.fixture
def source_folder(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", FORMATS)
def test_every_pair_of_formats_keeps_every_bit(source: str, target: str, source_folder: Path, tmp_path: Path):
    path = FORMATS[source](source_folder)
    done = convert_checkpoint(path, tmp_path / TARGETS[target], target)
    assert verify_checkpoint(done.path) == []
    difference = diff_checkpoints(path, done.path)
    assert difference.is_empty, str(difference)
    carries_run = source in RUNS and target != "safetensors"
    assert difference.num_equal == (16 if carries_run else 7)


@pytest.mark.parametrize("source", RUNS)
def test_torch_reads_what_is_written(source: str, source_folder: Path, tmp_path: Path):
    """`torch.load`, `torch.distributed.checkpoint.load` and safetensors, each the state that was saved."""
    path = RUNS[source](source_folder)
    state, expected = run_state(), flat_tensors(run_state())
    convert_checkpoint(path, tmp_path / "out.pt", "full")
    loaded = torch.load(tmp_path / "out.pt")
    assert loaded["optim"]["param_groups"] == state["optim"]["param_groups"]
    assert loaded["extra"] == state["extra"]
    ends = {loaded["model"][name].data_ptr() for name in ("head.weight", "embed.weight")}
    assert len(ends) == (2 if source == "dcp" else 1)  # torch's DCP stores tied weights twice
    found = flat_tensors(loaded)
    assert set(found) == set(expected)
    assert all(same(found[name], expected[name]) for name in expected)

    convert_checkpoint(path, tmp_path / "dcp", "dcp")
    empty: dict[str, Any] = {"model": {name: torch.zeros_like(each) for name, each in model_state().items()}}
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.load(empty, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(same(empty["model"][name], each) for name, each in model_state().items())

    convert_checkpoint(path, tmp_path / "weights", "safetensors")
    weights = safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors")
    assert all(same(weights[name], each) for name, each in model_state().items())


@pytest.mark.parametrize("target", TARGETS)
def test_a_cast_changes_the_weights_alone(target: str, source_folder: Path, tmp_path: Path):
    path = RUNS["full"](source_folder)
    convert_checkpoint(path, tmp_path / TARGETS[target], target, dtype=torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in open_checkpoint(tmp_path / TARGETS[target]).tensors.items()}
    prefix = "" if target == "safetensors" else "model."
    assert dtypes[f"{prefix}embed.weight"] == dtypes[f"{prefix}block.bias"] == "bfloat16"
    assert (dtypes[f"{prefix}block.count"], dtypes[f"{prefix}block.mask"]) == ("int64", "bool")
    assert dtypes.get("optim.state.embed.weight.exp_avg", "float32") == "float32"


def test_large_tensors_are_copied_in_parts(source_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of no more than the bound, rows too long for it included."""
    monkeypatch.setattr(convert, "_CHUNK_BYTES", 40)
    sizes: list[int] = []
    read_chunk = convert.read_chunk

    def recorded(contents: Any, tensor: Any, spec: Any) -> torch.Tensor:
        part = read_chunk(contents, tensor, spec)
        sizes.append(part.numel() * part.element_size())
        return part

    monkeypatch.setattr(convert, "read_chunk", recorded)
    tensors = {"rows": torch.randn(9, 2, 3), "long": torch.randn(2, 33), "line": torch.arange(40)}
    torch.save(tensors, source_folder / "x.pt")
    for target, name in TARGETS.items():
        convert_checkpoint(source_folder / "x.pt", tmp_path / name, target)
        assert diff_checkpoints(source_folder / "x.pt", tmp_path / name).num_equal == 3
    assert max(sizes) <= 40


def test_shards_are_no_larger_than_asked_and_open_with_their_index(source_folder: Path, tmp_path: Path):
    path = RUNS["full"](source_folder)
    (source_folder / "config.json").write_text('{"model_type": "x"}')
    (source_folder / "secret.txt").write_text("not a companion of weights")
    convert_checkpoint(path, tmp_path / "weights", "safetensors", max_shard_bytes=200)
    names = sorted(file.name for file in (tmp_path / "weights").iterdir())
    assert names[0] == "config.json"
    assert "model.safetensors.index.json" in names
    assert "secret.txt" not in names
    assert sum(name.endswith(".safetensors") for name in names) > 1
    assert diff_checkpoints(path, tmp_path / "weights").is_empty


def test_a_source_that_is_damaged_leaves_nothing_behind(source_folder: Path, tmp_path: Path):
    """Files of torch carry CRC-32 sums that torch.load never looks at."""
    path = RUNS["full"](source_folder)
    data = bytearray(path.read_bytes())
    at = data.find(model_state()["embed.weight"].numpy().tobytes())
    data[at + 3] ^= 1
    path.write_bytes(data)
    torch.load(path)
    for target, name in TARGETS.items():
        with pytest.raises(CheckpointError, match="damaged") as error:
            convert_checkpoint(path, tmp_path / name, target)
        assert error.value.where == str(path)
        assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_what_is_there_is_not_written_over(source_folder: Path, tmp_path: Path):
    path = RUNS["full"](source_folder)
    for target, name in TARGETS.items():
        convert_checkpoint(path, tmp_path / name, target)
        with pytest.raises(CheckpointError, match="already"):
            convert_checkpoint(path, tmp_path / name, target)
    convert_checkpoint(path, tmp_path / "weights", "safetensors", overwrite=True, dtype="bfloat16")
    assert open_checkpoint(tmp_path / "weights").tensors["embed.weight"].dtype == "bfloat16"


def test_wrong_arguments_are_said_before_anything_is_read(tmp_path: Path):
    with pytest.raises(ConfigError, match="format is 'gguf'"):
        convert_checkpoint(tmp_path, tmp_path / "out", "gguf")
    torch.save({"x": torch.ones(1)}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="'int8' is not a floating-point dtype"):
        convert_checkpoint(tmp_path / "x.pt", tmp_path / "out", "full", dtype="int8")


def test_a_numbered_optimizer_is_named_by_its_model(source_folder: Path, tmp_path: Path):
    """What `optimizer.state_dict()` of a plain script gives."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source_folder / "x.pt")
    with pytest.raises(CheckpointError, match="numbers its parameters"):
        convert_checkpoint(source_folder / "x.pt", tmp_path / "out.pt", "full")
    convert_checkpoint(source_folder / "x.pt", tmp_path / "out.pt", "full", model=model)
    found = torch.load(tmp_path / "out.pt")["optim"]
    assert found["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for number, name in enumerate(found["param_groups"][0]["params"]):
        assert same(found["state"][name]["exp_avg_sq"], optimizer.state_dict()["state"][number]["exp_avg_sq"])


ARRAYS = {
    "array": np.arange(6, dtype=">i4").reshape(2, 3),
    "fortran": np.asfortranarray(np.eye(2, 3)),
    "words": np.array(["ab", "c"]),
    "scalar": np.float64(1.5),
    "state": np.random.RandomState(1).get_state(),
}


@pytest.mark.parametrize("target", ["dcp", "full"])
def test_arrays_in_a_torch_file_are_values(tmp_path: Path, target: Any):
    torch.save({"model": {"w": torch.ones(2)}, **ARRAYS}, tmp_path / "a.pt")
    assert inspect_checkpoint(tmp_path / "a.pt").left_out == {}
    assert convert_checkpoint(tmp_path / "a.pt", tmp_path / "out", target).left_out == {}
    assert diff_checkpoints(tmp_path / "a.pt", tmp_path / "out").is_empty
    torch.save({"model": {"w": torch.ones(2)}, **ARRAYS, "array": np.zeros((2, 3), ">i4")}, tmp_path / "b.pt")
    assert diff_checkpoints(tmp_path / "b.pt", tmp_path / "out").values == ("extra.array",)


def test_objects_that_are_never_made_are_named_in_a_diff(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(2), "objects": np.array([None, name], dtype=object)}, tmp_path / name)
    torch.save({"w": torch.ones(2)}, tmp_path / "c.pt")
    assert diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt").is_empty
    assert "objects is in both, but not compared" in caplog.text
    assert diff_checkpoints(tmp_path / "a.pt", tmp_path / "c.pt").only_in_a == ("objects",)


@pytest.mark.parametrize(
    ("target", "name"),
    [("safetensors", "x.pt"), ("dcp", "x.pt"), ("dcp", "x.safetensors"), ("full", "x.safetensors")],
)
def test_a_path_that_ends_as_another_format_is_refused(source_folder: Path, tmp_path: Path, target: Any, name: str):
    torch.save({"w": torch.ones(2)}, source_folder / "x.pt")
    with pytest.raises(ConfigError, match="but the path ends in"):
        convert_checkpoint(source_folder / "x.pt", tmp_path / name, target)
    assert not (tmp_path / name).exists()
