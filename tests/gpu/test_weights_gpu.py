"""load_weights(), save_weights() and one-file checkpoints on a GPU: shards there, or offloaded and pinned."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import ShardConfig, shard
from shardwise.checkpointing.weights import load_full, load_weights, save_full, save_weights
from shardwise.distributed.mesh import init_distributed, shutdown

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Net(nn.Module):
    """A tie, batch statistics with an integer, a computed table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.statistics = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def reset_buffers(self) -> None:
        self.table = torch.arange(4.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.statistics(self.block(self.embed(tokens)).mean(1)))


@pytest.fixture(autouse=True)
def single_rank() -> Iterator[None]:
    init_distributed()
    yield
    shutdown()


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu() for name, t in tensors.items()}


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    ours, theirs = values(model), values(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_weights_go_to_the_gpu_and_back(tmp_path: Path, name: str, offload: bool, broadcast: bool):
    torch.manual_seed(0)
    expected = Net()
    format = "torch" if name.endswith(".pt") else "safetensors"
    save_weights(shard(Net(), ShardConfig(offload=offload)), tmp_path / "other.safetensors")
    save_weights(expected, tmp_path / name, format)
    model = shard(on_meta(), ShardConfig(offload=offload))
    load_weights(model, tmp_path / name, broadcast=broadcast)
    assert_same(model, expected)
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        assert local.is_pinned() if offload and isinstance(parameter, DTensor) else local.is_cuda
    save_weights(model, tmp_path / "again.safetensors")
    again = Net()
    load_weights(again, tmp_path / "again.safetensors")
    assert_same(again, expected)
    model(torch.arange(8, device="cuda").view(2, 4)).sum().backward()


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_run_in_one_file_goes_on(tmp_path: Path, broadcast: bool):
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.arange(8, device="cuda").view(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    model = shard(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step(model, optimizer)
    save_full(tmp_path / "run.pt", model=model, optimizers=optimizer, extra={"step": 1})
    other = shard(on_meta())
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    assert load_full(tmp_path / "run.pt", model=other, optimizers=resumed, broadcast=broadcast) == {"step": 1}
    assert_same(other, model)
    step(model, optimizer)
    step(other, resumed)
    for name, tensor in values(model).items():
        torch.testing.assert_close(values(other)[name], tensor, rtol=1e-6, atol=1e-7)


def test_memory_besides_the_model_is_small(tmp_path: Path):
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(32)])  # 16 MiB each
    shard(model)
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    save_weights(nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(32)]), tmp_path / "w.safetensors")
    load_weights(model, tmp_path / "w.safetensors")
    save_weights(model, tmp_path / "again.safetensors")
    peak = (torch.cuda.max_memory_allocated() - start) / 2**20
    assert peak <= 32 * 16 + 200
