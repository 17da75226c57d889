"""load_weights(): each rank's part from a plain file, for every way in which a model is sharded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise import compat, shard
from shardwise.checkpointing.names import local_chunks
from shardwise.checkpointing.weights import load_weights
from shardwise.errors import CheckpointError
from tests.ranks import ranks


class Block(nn.Module):
    """Uneven rows on 2 and 4 ranks, batch statistics, and a table that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 13)
        self.norm = nn.BatchNorm1d(13)
        self.down = nn.Linear(13, 6)
        self.register_buffer("table", torch.empty(5), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.get_buffer("table").copy_(torch.arange(5.0) * 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x))) * self.get_buffer("table").sum()


class Net(nn.Module):
    """Blocks between an embedding and a head that is the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def reference() -> Net:
    torch.manual_seed(7)
    model = Net()
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer += 0.25
    for block in model.blocks:
        block.reset_parameters()
    return model


def write(model: nn.Module, path: Path, rank: int, *, drop: tuple[str, ...] = ("head.weight",)) -> None:
    """As others write it: one file, tied tensors once."""
    if rank == 0:
        save_file({k: v.detach().clone() for k, v in model.state_dict().items() if k not in drop}, path)
    if dist.is_initialized():
        dist.barrier()


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    """Bitwise, tables included, and what was one tensor still is."""
    theirs = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(full(ours[name]), tensor), name


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("built_on", ["cpu", "meta"])
@ranks(2)
def test_a_plain_file_fills_a_sharded_model(rank: int, tmp_path: Path, built_on: str, broadcast: bool):
    expected = reference()
    write(expected, tmp_path / "w.safetensors", rank)
    model = shard(on_meta(Net) if built_on == "meta" else Net())
    report = load_weights(model, tmp_path / "w.safetensors", broadcast=broadcast)
    assert_equal(model, expected)
    assert report.is_exact
    assert report.tied == {"head.weight": "embed.weight"}
    assert report.rebuilt == (("blocks.0.table", "blocks.1.table") if built_on == "meta" else ())
    assert model.head.weight is model.embed.weight
    tokens = torch.arange(8).view(2, 4)
    model.eval(), expected.eval()
    torch.testing.assert_close(full(model(tokens[0])), expected(tokens[0]))


@ranks(4)
def test_replicas_of_a_hybrid_mesh_are_filled(rank: int, tmp_path: Path):
    expected = reference()
    write(expected, tmp_path / "w.safetensors", rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for broadcast in (False, True):
        model = shard(on_meta(Net), mesh=mesh)
        load_weights(model, tmp_path / "w.safetensors", broadcast=broadcast)
        assert_equal(model, expected)


@ranks(4)
def test_more_ranks_than_rows(rank: int, tmp_path: Path):
    """Three rows on four ranks: the last has none of them."""
    torch.manual_seed(0)
    expected = nn.Linear(5, 3)
    write(expected, tmp_path / "w.safetensors", rank)
    model = on_meta(lambda: nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    load_weights(model, tmp_path / "w.safetensors")
    assert_equal(model, expected)


@ranks(2)
def test_shards_along_another_dimension(rank: int, tmp_path: Path):
    torch.manual_seed(0)
    expected = nn.Linear(6, 4, bias=False)
    write(expected, tmp_path / "w.safetensors", rank)
    model = nn.Linear(6, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda parameter: Shard(1))
    load_weights(model, tmp_path / "w.safetensors")
    assert model.weight.to_local().shape == (4, 3)
    assert_equal(model, expected)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def with_tensor_parallelism(mesh: DeviceMesh, build: Callable[[], nn.Module] = Mlp) -> nn.Module:
    model = build()
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


@ranks(4)
def test_tensor_parallelism_interleaves_the_rows(rank: int, tmp_path: Path):
    """The colwise weight is cut twice along dim 0, first by the inner axis: torch calls that a strided shard."""
    torch.manual_seed(0)
    expected = Mlp()
    write(expected, tmp_path / "w.safetensors", rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for build in (Mlp, lambda: on_meta(Mlp)):
        for broadcast in (False, True):
            model = with_tensor_parallelism(mesh, build)
            assert type(model.up.weight.placements[0]) is not Shard
            load_weights(model, tmp_path / "w.safetensors", broadcast=broadcast)
            assert_equal(model, expected)


@ranks(4)
def test_parts_are_the_rows_that_torch_gives_each_rank(rank: int):
    """Every placement that distribute_tensor knows, on two axes, in sizes that do not divide."""
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(7 * 5, dtype=torch.float32).view(7, 5)
    for placements in (
        [Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)], [Replicate(), Shard(0)],
        [Shard(1), Replicate()], [Replicate(), Replicate()], [Shard(-1), Shard(-2)],
    ):  # fmt: skip
        tensor = distribute_tensor(whole, mesh, placements)
        for spec, memory in local_chunks(tensor):
            rows, columns = spec.starts
            height, width = spec.sizes
            assert torch.equal(memory, whole[rows : rows + height, columns : columns + width]), placements


@ranks(2)
def test_rows_that_are_dealt_out_in_turn_are_several_parts(rank: int):
    """Alone on its axis, a strided shard leaves each rank every other run of rows."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(9 * 2, dtype=torch.float32).view(9, 2)
    rows = [[0, 1, 2, 5, 6], [3, 4, 7, 8]][rank]
    like = DTensor.from_local(whole, mesh, [_StridedShard(0, split_factor=2)], shape=whole.shape, stride=(2, 1))
    parts = local_chunks(compat.dtensor_like(whole[rows].clone(), like))
    assert [(spec.starts[0], spec.sizes[0]) for spec, _ in parts] == [[(0, 3), (5, 2)], [(3, 2), (7, 2)]][rank]
    for spec, memory in parts:
        start, count = spec.starts[0], spec.sizes[0]
        assert torch.equal(memory, whole[start : start + count])


@ranks(2)
def test_partial_sums_are_refused(rank: int):
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(CheckpointError, match="partial sums"):
        local_chunks(tensor)


@ranks(2)
def test_offset_of_one_rank_in_a_file_of_other_dtype(rank: int, tmp_path: Path):
    """bfloat16 on the disk, float32 in the model: cast on the way, and said so."""
    expected = reference().to(torch.bfloat16)
    write(expected, tmp_path / "w.safetensors", rank)
    model = shard(on_meta(Net))
    report = load_weights(model, tmp_path / "w.safetensors")
    assert report.cast["embed.weight"] == ("bfloat16", "float32")
    for name, tensor in expected.named_parameters():
        assert torch.equal(full(model.get_parameter(name)), tensor.float()), name


@ranks(2)
def test_all_problems_are_one_error_on_every_rank_and_nothing_is_written(rank: int, tmp_path: Path):
    state = {key: value.detach().clone() for key, value in reference().state_dict().items() if key != "head.weight"}
    state["block.0.up.weight"] = state.pop("blocks.0.up.weight")
    state["embed.weight"] = state["embed.weight"][:10].clone()
    if rank == 0:
        save_file(state, tmp_path / "w.safetensors")
    dist.barrier()
    model = shard(Net())
    before = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, tmp_path / "w.safetensors")
    total = len(model.state_dict()) - 1  # the head is tied
    assert f"the model of {total} tensors: 1 missing, 1 unexpected, 1 mis-shaped" in caught.value.what
    assert "missing     blocks.0.up.weight (did you mean block.0.up.weight?)" in caught.value.where
    assert "embed.weight: stored as float32 [10, 6], the model's is float32 [11, 6]" in caught.value.where
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), before[name])


@ranks(2)
def test_missing_tensors_are_initialised_never_garbage(rank: int, tmp_path: Path):
    expected = reference()
    write(expected, tmp_path / "w.safetensors", rank, drop=("head.weight", "blocks.1.up.weight", "head.bias"))
    model = shard(on_meta(Net))
    report = load_weights(model, tmp_path / "w.safetensors", strict=False)
    assert report.missing == ("blocks.1.up.weight", "head.bias")
    assert set(report.rebuilt) == {"blocks.0.table", "blocks.1.table", "blocks.1.up.weight", "head.bias"}
    drawn = full(model.blocks[1].up.weight)
    assert drawn.abs().max() <= 6**-0.5
    assert drawn.std() > 0.1
    assert torch.equal(full(model.blocks[0].up.weight), expected.blocks[0].up.weight)
    assert torch.equal(full(model.embed.weight), expected.embed.weight)


@ranks(2)
def test_ranks_that_see_other_files_are_told(rank: int, tmp_path: Path):
    mine = tmp_path / f"{rank}.safetensors"
    save_file({"weight": torch.zeros(4, 3, dtype=torch.float32 if rank else torch.float16)}, mine)
    model = fully_shard(nn.Linear(3, 4, bias=False), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(CheckpointError, match="have other weights"):
        load_weights(model, mine)


@ranks(2)
def test_a_file_that_one_rank_cannot_open_stops_all(rank: int, tmp_path: Path):
    expected = nn.Linear(3, 4, bias=False)
    mine = tmp_path / f"{rank}.safetensors"
    if rank == 0:
        save_file(expected.state_dict(), mine)
    model = fully_shard(nn.Linear(3, 4, bias=False), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(CheckpointError, match=r"1\.safetensors"):
        load_weights(model, mine)
    load_weights(model, tmp_path / "0.safetensors" if rank == 0 else "nowhere", broadcast=True)
    dist.barrier()


@ranks(2)
def test_shards_with_an_index(rank: int, tmp_path: Path):
    expected = reference()
    names = [name for name in expected.state_dict() if name != "head.weight"]
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    if rank == 0:
        for file in set(files.values()):
            part = {name: expected.state_dict()[name].clone() for name in names if files[name] == file}
            save_file(part, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    dist.barrier()
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        model = shard(on_meta(Net))
        load_weights(model, path)
        assert_equal(model, expected)
