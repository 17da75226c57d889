"""Muon on shards gives what one process gives, each matrix worked on once, and resumes at another world size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from shardwise.checkpointing.manager import Checkpointer
from shardwise.config.run import OptimizerConfig
from shardwise.sharding.inventory import local_part
from shardwise.training import optimizers as muon
from shardwise.training import optimizers as muon_module
from shardwise.training.optimizers import Muon, build_optimizer, parameter_kinds
from tests.by_hand import full, mesh_1d, mesh_2d
from tests.ranks import ranks

MUON = OptimizerConfig(name="muon", learning_rate=0.01)
# Gradients summed in another order differ by 1e-7 of their size; the iteration magnifies that for small singular values
# by up to 3.4445**5 = 485, and a step is at most 0.02 long for each direction.
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 5e-6}


class Block(nn.Module):
    """Sizes that no number of ranks divides, one with fewer rows than ranks, and a stack of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 7)
        self.few = nn.Linear(7, 3)
        self.experts = nn.Parameter(torch.randn(3, 7, 5) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.einsum("...e,eij,...i->...j", self.few(x).softmax(-1), self.experts, x)
        return x + self.down(torch.tanh(self.up(self.norm(x)))) + F.pad(chosen, (0, 2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(7, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()  # FSDP2 warns of views


def build() -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model()


def sharded(mesh: DeviceMesh, **settings: Any) -> Model:
    model = build()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> None:
    for tokens in batches:
        (loss_of(model, tokens) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same_weights(model: nn.Module, reference: nn.Module, **tolerance: Any) -> None:
    for name, parameter in reference.named_parameters():
        actual = full(model.get_parameter(name)).detach()
        torch.testing.assert_close(actual, parameter.detach(), **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_bits(model: nn.Module, reference: nn.Module) -> None:
    """Of what Muon changes; AdamW's CPU kernel rounds the ends of a shard otherwise than its middle."""
    assert_same_weights(model, reference, rtol=1e-6, atol=1e-7)
    for parameter, kind in parameter_kinds(reference).items():
        name = next(name for name, each in reference.named_parameters() if each is parameter)
        assert kind != "blocks" or torch.equal(full(model.get_parameter(name)), parameter), name


def trains_like_one_process(model: Model, rank: int, num_ranks: int) -> None:
    reference = build()
    ours, theirs = build_optimizer(model, MUON), build_optimizer(reference, MUON)
    for step in range(3):
        train(model, ours, [batch(rank, step)])
        train(reference, theirs, [batch(other, step) for other in range(num_ranks)])
    assert_same_weights(model, reference, **TOLERANCE)
    assert not torch.equal(full(model.blocks[0].up.weight), build().blocks[0].up.weight)


@ranks(2)
def test_trains_like_one_process_on_two_ranks(rank: int):
    trains_like_one_process(sharded(mesh_1d(2)), rank, 2)


@ranks(4)
@pytest.mark.parametrize("layout", ["shards", "replicas", "offload"])
def test_trains_like_one_process_on_four_ranks(rank: int, layout: str):
    settings = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if layout == "offload" else {}
    mesh = mesh_2d() if layout == "replicas" else mesh_1d(4)
    trains_like_one_process(sharded(mesh, **settings), rank, 4)


def by_second_dim(parameter: nn.Parameter) -> Shard | None:
    """Wherever FSDP2 can: it cuts other dims than the first evenly only."""
    return Shard(1) if parameter.ndim > 1 and parameter.shape[1] % 2 == 0 else None


class Even(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.experts = nn.Parameter(torch.randn(3, 8, 4))
        self.odd = nn.Linear(5, 9)


def even() -> nn.ModuleList:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.ModuleList([Even(), Even()])


def set_gradients(model: nn.Module, step: int) -> None:
    """The same on any number of ranks, to the bit."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=generator)
        part = local_part(whole, parameter)
        if isinstance(parameter, DTensor):
            parameter.grad = DTensor.from_local(
                part, parameter.device_mesh, parameter.placements, shape=whole.shape, stride=whole.stride()
            )
        else:
            parameter.grad = whole


@ranks(4)
@pytest.mark.parametrize("mesh_shape", ["shards", "replicas"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bucket_bytes", [64, muon.BUCKET_BYTES])
def test_same_bits_and_every_matrix_once(rank: int, mesh_shape: str, dtype: torch.dtype, bucket_bytes: int):
    """From the same gradients come the same bits, in one exchange or many; ranks and replicas share the work."""
    mesh = mesh_2d() if mesh_shape == "replicas" else mesh_1d(4)
    model, reference = sharded(mesh), build()
    ours, theirs = build_optimizer(model, MUON), build_optimizer(reference, MUON)
    assert isinstance(ours, Muon)
    assert isinstance(theirs, Muon)
    ours.dtype = theirs.dtype = dtype
    ours.bucket_bytes = bucket_bytes
    num_calls = 0
    plain = muon_module.orthogonalize

    def counting(matrix: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        nonlocal num_calls
        num_calls += matrix.ndim == 2
        return plain(matrix, dtype)

    for step in range(2):
        set_gradients(model, step)
        set_gradients(reference, step)
        muon_module.orthogonalize = counting
        try:
            ours.step()
        finally:
            muon_module.orthogonalize = plain
        theirs.step()
    assert_same_bits(model, reference)
    calls = torch.tensor([num_calls])
    dist.all_reduce(calls)
    assert calls.item() == 2 * 6  # two steps, two blocks of three matrices
    # Ranks and replicas take turns, in any number of buckets.
    assert num_calls == [4, 4, 2, 2][rank]


@ranks(2)
def test_matrices_cut_along_another_dim(rank: int):
    mesh = mesh_1d(2)
    model, reference = even(), even()
    for block in model:
        fully_shard(block, mesh=mesh, shard_placement_fn=by_second_dim)
    ours, theirs = build_optimizer(model, MUON), build_optimizer(reference, MUON)
    for step in range(2):
        set_gradients(model, step)
        set_gradients(reference, step)
        ours.step()
        theirs.step()
    assert {str(p.placements) for p in model.parameters()} == {"(Shard(dim=0),)", "(Shard(dim=1),)"}
    assert_same_bits(model, reference)


@ranks(4)
def test_matrices_cut_along_two_dims(rank: int):
    """As tensor parallelism does on top of FSDP2; every rank then works on the whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model, reference = even(), even()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = [Shard(0), Shard(1)] if parameter.ndim > 1 else [Shard(0), Replicate()]
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
    ours, theirs = build_optimizer(model, MUON), build_optimizer(reference, MUON)
    for step in range(2):
        set_gradients(model, step)
        set_gradients(reference, step)
        ours.step()
        theirs.step()
    assert_same_bits(model, reference)


@ranks(2)
def test_a_parameter_without_gradient_is_left_alone(rank: int):
    model = sharded(mesh_1d(2))
    before = {name: full(p).detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, MUON)
    set_gradients(model, 0)
    model.blocks[1].up.weight.grad = None
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(full(p), before[name])}
    assert changed == before.keys() - {"blocks.1.up.weight"}
    assert model.blocks[1].up.weight not in optimizer.state


def first_half(folder: Path, rank: int, num_ranks: int) -> None:
    model = sharded(mesh_1d(num_ranks))
    optimizer = build_optimizer(model, MUON)
    for step in range(3):
        set_gradients(model, step)
        optimizer.step()
    with Checkpointer(folder, asynchronous=False) as checkpointer:
        checkpointer.save(3, model=model, optimizers=optimizer)


def second_half(folder: Path, model: Model) -> None:
    optimizer = build_optimizer(model, MUON)
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.load(model=model, optimizers=optimizer) == 3
    reference = build()
    theirs = build_optimizer(reference, MUON)
    for step in range(6):
        set_gradients(reference, step)
        theirs.step()
    for step in range(3, 6):
        set_gradients(model, step)
        optimizer.step()
    assert_same_bits(model, reference)


@ranks(2)
def save_on_two(rank: int, folder: Path) -> None:
    first_half(folder, rank, 2)


@ranks(4)
def resume_on_four(rank: int, folder: Path, replicas: bool) -> None:
    second_half(folder, sharded(mesh_2d() if replicas else mesh_1d(4)))


def test_resumes_at_another_world_size(tmp_path: Path):
    """Two ranks save; one process, four ranks and two replicas of two continue as if nothing had happened."""
    save_on_two(folder=tmp_path)
    resume_on_four(folder=tmp_path, replicas=False)
    resume_on_four(folder=tmp_path, replicas=True)
    second_half(tmp_path, build())
