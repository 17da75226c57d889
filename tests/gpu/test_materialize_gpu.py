"""materialize() and init_distributed() on a GPU: shards there, offloaded shards pinned, one rank a GPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import ShardConfig, shard
from shardwise.distributed.local_ranks import start_local
from shardwise.distributed.mesh import init_distributed, shutdown
from shardwise.errors import EnvironmentProblem
from shardwise.sharding.materialize import materialize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Net(nn.Module):
    """A block, batch statistics and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.statistics = nn.BatchNorm1d(64)
        self.scale = nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.statistics(self.block(x).mean(1)))


@pytest.fixture
def single_rank() -> Iterator[None]:
    mesh = init_distributed()
    assert mesh.device_type == "cuda"
    yield
    shutdown()


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (t.to_local() if isinstance(t, DTensor) else t).detach().cuda() for name, t in tensors.items()}


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("offload", [False, True])
def test_sharded_weights_are_those_of_the_unsharded_model(offload: bool):
    torch.manual_seed(0)
    expected = values(materialize(on_meta()))
    assert all(tensor.is_cuda for tensor in expected.values())
    model = shard(on_meta(), ShardConfig(offload=offload))
    torch.manual_seed(0)
    before = torch.cuda.get_rng_state()
    materialize(model)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    for name, tensor in expected.items():
        assert torch.equal(values(model)[name], tensor), name
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        assert local.is_pinned() if offload and parameter.ndim else local.is_cuda, name
    assert all(buffer.is_cuda for buffer in model.buffers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.randn(4, 8, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("single_rank")
def test_peak_memory_is_the_shard_and_one_module():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)])  # 16 MiB each
    shard(model)
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    materialize(model)
    peak = (torch.cuda.max_memory_allocated() - start) / 2**20
    assert 8 * 16 + 16 <= peak <= 8 * 16 + 16 * 1.5


def join() -> None:
    """What a rank does first."""
    init_distributed()


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="with more GPUs, each rank has its own")
def test_two_ranks_on_one_gpu_are_refused():
    with pytest.raises(EnvironmentProblem, match=r"ranks \[0, 1\] are all on"):
        start_local("tests.gpu.test_materialize_gpu:join", 2)
