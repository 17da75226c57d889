"""save_weights(): the full weights in files that everybody reads, gathered a bucket at a time."""

import json
import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import shard
from shardwise.checkpointing.formats.safetensors import read_safetensors
from shardwise.checkpointing.weights import load_weights, save_weights
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError
from tests.distributed.test_weights_load import Mlp, Net, assert_equal, on_meta, reference, with_tensor_parallelism
from tests.ranks import ranks


def sharded() -> tuple[nn.Module, nn.Module]:
    """A sharded model and a plain one with the same values."""
    expected = reference()
    model = shard(reference())
    return model, expected


def state_of(model: nn.Module, *, tied: bool) -> dict[str, torch.Tensor]:
    return {k: v.detach() for k, v in model.state_dict().items() if tied or k != "head.weight"}


@ranks(2)
def test_one_safetensors_file(rank: int, tmp_path: Path):
    model, expected = sharded()
    save_weights(model, tmp_path / "w.safetensors")
    loaded = load_file(tmp_path / "w.safetensors")
    wanted = state_of(expected, tied=False)
    assert loaded.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(loaded[name], tensor), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.safetensors"]


@ranks(4)
def test_hybrid_and_tensor_parallel_models_are_gathered(rank: int, tmp_path: Path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    expected = reference()
    save_weights(shard(reference(), mesh=mesh), tmp_path / "hybrid.safetensors")
    plain = Net()
    load_weights(plain, tmp_path / "hybrid.safetensors")
    assert_equal(plain, expected)

    torch.manual_seed(0)
    expected = Mlp()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    save_weights(with_tensor_parallelism(mesh), tmp_path / "tp.safetensors")
    plain = Mlp()
    load_weights(plain, tmp_path / "tp.safetensors")
    assert_equal(plain, expected)


@ranks(2)
def test_a_folder_with_shards_and_an_index(rank: int, tmp_path: Path):
    model, expected = sharded()
    save_weights(model, tmp_path / "out", max_shard_bytes=500)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    wanted = state_of(expected, tied=False)
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in wanted.values())
    sizes = {}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], wanted[name])
        sizes[file] = sizes.get(file, 0) + wanted[name].numel() * wanted[name].element_size()
    assert len(sizes) > 2
    assert all(size <= 500 for size in sizes.values())
    model = shard(on_meta(Net))
    load_weights(model, tmp_path / "out")
    assert_equal(model, expected)


@pytest.mark.parametrize("format", ["safetensors", "torch"])
@ranks(2)
def test_cast_to_another_dtype(rank: int, tmp_path: Path, format: str):
    model, expected = sharded()
    path = tmp_path / ("w.safetensors" if format == "safetensors" else "w.pt")
    save_weights(model, path, format, dtype="bfloat16")
    loaded = load_file(path) if format == "safetensors" else torch.load(path, weights_only=True)
    for name, tensor in state_of(expected, tied=format == "torch").items():
        wanted = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert loaded[name].dtype == wanted.dtype, name
        assert torch.equal(loaded[name], wanted), name


@ranks(2)
def test_a_torch_file_is_a_plain_state_dict(rank: int, tmp_path: Path):
    model, expected = sharded()
    save_weights(model, tmp_path / "w.pt", "torch")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    assert not any(isinstance(tensor, DTensor) for tensor in loaded.values())
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    plain = Net()
    plain.load_state_dict(loaded)
    assert_equal(plain, expected)
    mapped = torch.load(tmp_path / "w.pt", weights_only=True, mmap=True)
    assert torch.equal(mapped["embed.weight"], expected.embed.weight)
    model = shard(on_meta(Net))
    load_weights(model, tmp_path / "w.pt")
    assert_equal(model, expected)


@ranks(2)
def test_nothing_is_overwritten_unasked(rank: int, tmp_path: Path):
    model, _ = sharded()
    kinds = {"w.safetensors": "safetensors", "w.pt": "torch", "out": "safetensors"}
    for path, format in ((tmp_path / name, format) for name, format in kinds.items()):
        save_weights(model, path, format)
        with pytest.raises(CheckpointError, match="already"):
            save_weights(model, path, format)
        save_weights(model, path, format, overwrite=True)
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "w.pt", "w.safetensors"]


@ranks(2)
def test_overwriting_a_folder_keeps_what_is_no_weight_and_no_stale_shard(rank: int, tmp_path: Path):
    model, _ = sharded()
    save_weights(model, tmp_path / "out", max_shard_bytes=500)
    if rank == 0:
        (tmp_path / "out" / "tokenizer.json").write_text("{}")
        (tmp_path / "out" / "more").mkdir()
        (tmp_path / "out" / "more" / "notes.txt").write_text("mine")
    dist.barrier()
    save_weights(model, tmp_path / "out", overwrite=True)
    dist.barrier()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors", "more", "tokenizer.json"]
    assert (tmp_path / "out" / "more" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("format", ["safetensors", "torch"])
@ranks(2)
def test_a_full_disk_is_one_error_on_every_rank_and_leaves_the_old_file(rank: int, tmp_path: Path, format: str):
    path = tmp_path / ("w.pt" if format == "torch" else "w.safetensors")
    torch.manual_seed(3)
    model = shard(nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)))
    save_weights(model, path, format)
    dist.barrier()
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, limits[1]))  # Python ignores SIGXFSZ: writes fail
    try:
        with pytest.raises(CheckpointError, match="write the file"):
            save_weights(model, path, format, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@ranks(2)
def test_a_folder_that_cannot_be_made(rank: int, tmp_path: Path):
    model, _ = sharded()
    (tmp_path / f"file{rank}").write_text("")
    dist.barrier()
    with pytest.raises(CheckpointError):
        save_weights(model, tmp_path / "file0" / "w.safetensors")


@ranks(2)
def test_wrong_settings(rank: int, tmp_path: Path):
    model, _ = sharded()
    for settings in ({"format": "onnx"}, {"dtype": "int8"}, {"dtype": "bf17"}, {"max_shard_bytes": "5 pounds"}):
        with pytest.raises(ConfigError):
            save_weights(model, tmp_path / "out", **settings)
    with pytest.raises(ShardwiseError, match="no values"):
        save_weights(shard(on_meta(Net)), tmp_path / "out")
    dist.barrier()
    assert os.listdir(tmp_path) == []


@ranks(2)
def test_progress_is_told_every_byte(rank: int, tmp_path: Path):
    class Heard:
        total = done = finished = 0

        def start(self, total: int, label: str) -> None:
            self.total = total

        def advance(self, steps: int = 1, note: str = "") -> None:
            self.done += steps

        def finish(self, note: str = "") -> None:
            self.finished += 1

    model, expected = sharded()
    heard = Heard()
    save_weights(model, tmp_path / "w.safetensors", progress=heard)
    size = sum(t.numel() * t.element_size() for t in state_of(expected, tied=False).values())
    assert (heard.total, heard.done, heard.finished) == ((size, size, 1) if rank == 0 else (0, 0, 0))
    heard = Heard()
    load_weights(model, tmp_path / "w.safetensors", progress=heard)
    assert heard.done == heard.total > 0
    assert heard.finished == 1


@ranks(2)
def test_what_we_write_carries_checksums(rank: int, tmp_path: Path):
    model, _ = sharded()
    save_weights(model, tmp_path / "w.safetensors")
    dist.barrier()
    contents = read_safetensors(tmp_path / "w.safetensors")
    assert contents.block_bytes
    assert all(tensor.chunks[0].checksums for tensor in contents.tensors.values())
