"""save_full() and load_full(): a run in one torch.save file, whatever number of ranks wrote it and reads it."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import shard
from shardwise.checkpointing.weights import load_full, load_weights, save_full
from shardwise.errors import CheckpointError
from tests.distributed.test_weights_load import Net, assert_equal, full, on_meta, reference
from tests.ranks import ranks


class Counter:
    """A state that nested dictionaries of text and lists alone would not give back: numbers as keys, a tuple."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"seen": {3: "three"}, "shape": (2, 3), "table": torch.arange(3)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(step))


def trained(model: nn.Module, steps: range, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    """The same batches on every rank, so that the number of ranks does not matter but for rounding."""
    if optimizer is None:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=0.01)
    for step in steps:
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: {key: full(value).clone() for key, value in state.items()}
        for parameter, state in optimizer.state.items()
    }


@ranks(2)
def test_torch_load_gives_plain_full_tensors_by_name(rank: int, tmp_path: Path):
    model = shard(reference())
    optimizer = trained(model, range(2))
    save_full(tmp_path / "run.pt", model=model, optimizers=optimizer, extra={"step": 2, "note": "hé"}, data=Counter())
    dist.barrier()
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    assert saved["extra"] == {"step": 2, "note": "hé"}
    assert not any(isinstance(tensor, DTensor) for tensor in saved["model"].values())
    assert saved["model"]["head.weight"].data_ptr() == saved["model"]["embed.weight"].data_ptr()
    plain = Net()
    plain.load_state_dict(saved["model"])
    for name, state in moments(model, optimizer).items():
        for key, tensor in state.items():
            assert torch.equal(saved["optim"]["state"][name][key], tensor), (name, key)
    assert saved["optim"]["param_groups"][1]["weight_decay"] == 0.0
    assert set(saved["optim"]["param_groups"][0]["params"]) == {
        "embed.weight", "blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight", "blocks.1.down.weight",
    }  # fmt: skip
    assert saved["data"]["seen"] == {3: "three"}


@pytest.mark.parametrize("broadcast", [False, True])
@ranks(4)
def test_a_run_goes_on_as_if_it_had_not_stopped(rank: int, tmp_path: Path, broadcast: bool):
    """Written by two groups of two (a hybrid mesh), read into a mesh of four, and by a plain model on every rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(reference(), mesh=mesh)
    optimizer = trained(model, range(3))
    saved = Counter()
    save_full(tmp_path / "run.pt", model=model, optimizers=optimizer, extra={"step": 3}, data=saved)
    dist.barrier()
    expected = {name: full(parameter).clone() for name, parameter in model.named_parameters()}
    expected_moments = moments(model, optimizer)

    other = shard(on_meta(Net), mesh=init_device_mesh("cpu", (4,)))
    fresh, data = trained(other, range(0)), Counter()
    data.state = {}
    path = tmp_path / "run.pt" if rank == 0 or not broadcast else tmp_path / "not here"
    extra = load_full(path, model=other, optimizers=fresh, broadcast=broadcast, data=data)
    assert extra == {"step": 3}
    assert data.state.keys() == saved.state.keys()
    assert data.state["seen"] == {3: "three"}
    assert data.state["shape"] == (2, 3)
    for name, parameter in other.named_parameters():
        assert torch.equal(full(parameter), expected[name]), name
    for name, state in moments(other, fresh).items():
        for key, tensor in state.items():
            assert torch.equal(tensor, expected_moments[name][key]), (name, key)
    assert [group["lr"] for group in fresh.param_groups] == [0.01, 0.01]
    trained(model, range(3, 5), optimizer)
    trained(other, range(3, 5), fresh)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(other.get_parameter(name)), full(parameter), rtol=1e-5, atol=1e-6)


@ranks(1)
def test_a_plain_process_reads_and_writes_it(rank: int, tmp_path: Path):
    model = reference()
    optimizer = trained(model, range(2))
    save_full(tmp_path / "run.pt", model=model, optimizers=optimizer)
    other = on_meta(Net)
    load_full(tmp_path / "run.pt", model=other)
    assert_equal(other, model)
    other = on_meta(Net)
    report = load_weights(other, tmp_path / "run.pt")
    assert report.is_exact
    assert_equal(other, model)


@ranks(2)
def test_an_optimizer_that_was_not_saved_is_an_error_not_an_empty_one(rank: int, tmp_path: Path):
    model = shard(reference())
    save_full(tmp_path / "run.pt", model=model)
    with pytest.raises(CheckpointError, match="no state of this optimizer"):
        load_full(tmp_path / "run.pt", model=model, optimizers=trained(model, range(0)))


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("verify", ["while", "before"])
@ranks(2)
def test_a_flipped_bit_is_found_and_the_model_marked_or_left_alone(
    rank: int, tmp_path: Path, broadcast: bool, verify: str
):
    model = shard(reference())
    save_full(tmp_path / "run.pt", model=model)
    dist.barrier()
    if rank == 0:
        data = bytearray((tmp_path / "run.pt").read_bytes())
        weight = full_bytes(reference().blocks[1].up.weight)
        at = bytes(data).index(weight)
        data[at + 5] ^= 1
        (tmp_path / "run.pt").write_bytes(data)
    dist.barrier()
    other = shard(Net())
    before = {name: parameter.to_local().clone() for name, parameter in other.named_parameters()}
    with pytest.raises(CheckpointError, match=r"run\.pt"):
        load_full(tmp_path / "run.pt", model=other, verify=verify, broadcast=broadcast)
    if verify == "before":
        for name, parameter in other.named_parameters():
            assert torch.equal(parameter.to_local(), before[name])
        other(batch(0))
    else:
        with pytest.raises(CheckpointError, match="corrupt"):
            other(batch(0))


def full_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


@ranks(2)
def test_a_full_disk_leaves_the_earlier_file(rank: int, tmp_path: Path):
    model = shard(nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)))
    save_full(tmp_path / "run.pt", model=model)
    dist.barrier()
    before = (tmp_path / "run.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="write the file"):
            save_full(tmp_path / "run.pt", model=model, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    assert (tmp_path / "run.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
