"""Gradients that FSDP2 does not reduce by itself: outside its groups, and of parameters some ranks did not use."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardwise.config.schema import PrecisionConfig, ShardConfig
from shardwise.errors import ShardError
from shardwise.sharding.apply import shard
from shardwise.sharding.materialize import materialize
from shardwise.training.step import accumulate
from tests.ranks import ranks
from tests.toy_models import Block
from tests.zoo.checking import mesh_of

pytestmark = pytest.mark.torch


class Scaled(nn.Module):
    """A scalar, an empty parameter, and experts of which a rank may use any."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.spare = nn.Parameter(torch.tensor(2.5))  # nobody uses it: no gradient, so no weight decay either
        self.experts = nn.ModuleList([Block() for _ in range(3)])
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x, choice: int):
        for block in self.blocks:
            x = block(x)
        chosen = torch.tensor([choice])
        for index in chosen.tolist():
            x = self.experts[index](x)
        return x * self.scale + self.empty.sum()


class IgnoresSecond(nn.Module):
    """A block that is given the output of another module and does not use it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unread, self.blocks = Block(), nn.ModuleList([Second(), Second()])

    def forward(self, x, choice: int):
        beside = self.unread(x)
        for block in self.blocks:
            x = block(x, beside)
        return x


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x, beside):
        return self.block(x)


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def steps(model: nn.Module, reference: nn.Module, choices: list[list[int]], rank: int, **options) -> None:
    """Train both and compare gradients and parameters after each step."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (model, reference)]
    num_ranks = dist.get_world_size()
    for chosen in choices:
        for other in range(num_ranks):
            (reference(batch(other), chosen[other]).square().mean() / num_ranks).backward()
        model(batch(rank), chosen[rank]).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                torch.testing.assert_close(whole, q.grad, rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        torch.testing.assert_close(whole, q, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@ranks(2)
def test_scalars_train_and_stay_dtensors(rank: int):
    reference = Scaled()
    model = shard(copy.deepcopy(reference), mesh=mesh_of(2))
    assert isinstance(model.scale, DTensor)
    assert model.scale.placements == (Replicate(),)
    assert model.scale.shape == ()
    steps(model, reference, [[0, 0], [0, 0], [0, 0]], rank)


@ranks(2)
def test_scalars_built_on_meta_are_averaged_too(rank: int):
    """Materialising registers new parameters; the average must follow them."""
    with torch.device("meta"):
        model = Scaled()
    shard(model, mesh=mesh_of(2))
    materialize(model, init=lambda module: [nn.init.constant_(p, 0.1) for p in module.parameters(recurse=False)])
    reference = Scaled()
    for parameter in reference.parameters():
        nn.init.constant_(parameter, 0.1)
    steps(model, reference, [[0, 0], [0, 0]], rank)


@ranks(2)
def test_experts_used_on_one_rank_or_none_match_one_process(rank: int):
    """An expert nobody used has no gradient at all: zeros would let weight decay and momentum move it."""
    reference = Scaled()
    model = shard(copy.deepcopy(reference), mesh=mesh_of(2))
    steps(model, reference, [[0, 1], [1, 1], [2, 0], [0, 0]], rank)


@ranks(2)
def test_module_whose_output_no_block_reads_has_no_gradient(rank: int):
    """The block's node for post-backward sees the unread input too, and must not send zeros back through it."""
    reference = IgnoresSecond()
    model = shard(copy.deepcopy(reference), mesh=mesh_of(2))
    steps(model, reference, [[0, 0], [0, 0]], rank)


@ranks(1)
def test_experts_on_a_single_rank(rank: int):
    reference = Scaled()
    model = shard(copy.deepcopy(reference), mesh=mesh_of(1))
    steps(model, reference, [[0], [1], [0]], rank)


@ranks(4)
def test_experts_over_replicas(rank: int):
    reference = Scaled()
    model = shard(copy.deepcopy(reference), mesh=mesh_of(2, 2))
    steps(model, reference, [[0, 1, 1, 0], [0, 0, 0, 2]], rank)


@ranks(2)
def test_ignored_parameters_stay_equal_on_all_ranks(rank: int):
    """FSDP2 leaves their gradients alone, and ranks drift apart."""
    reference = Scaled()
    model = shard(copy.deepcopy(reference), ShardConfig(ignored=("blocks.0.up",)), mesh=mesh_of(2))
    assert not isinstance(model.blocks[0].up.weight, DTensor)
    steps(model, reference, [[0, 0], [0, 1], [1, 1]], rank)


@ranks(2)
@pytest.mark.parametrize("mode", ["comm", "memory"])
def test_accumulated_gradients_outside_the_groups_are_averaged_once(rank: int, mode: str):
    reference = Scaled()
    config = ShardConfig(ignored=("blocks.1.norm",), precision=PrecisionConfig(reduce_dtype="float32"))
    model = shard(copy.deepcopy(reference), config, mesh=mesh_of(2))
    picks = [[0, 1], [1, 0], [1, 1]]
    for micro, chosen in enumerate(picks):
        for other in range(2):
            (reference(batch(10 * micro + other), chosen[other]).square().mean() / 2).backward()
        with accumulate(model, micro, len(picks), mode=mode):
            model(batch(10 * micro + rank), chosen[rank]).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            torch.testing.assert_close(whole, q.grad, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@ranks(2)
def test_an_infinity_on_one_rank_skips_the_step_on_all(rank: int):
    """float16 needs loss scaling; the scaler must see what other ranks see."""
    reference = Scaled()
    config = ShardConfig(precision=PrecisionConfig(param_dtype="float16", output_dtype="float32"))
    model = shard(copy.deepcopy(reference), config, mesh=mesh_of(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    before = [p.full_tensor().clone() for p in model.parameters()]
    loss = model(batch(rank), 0).square().mean()
    scaler.scale(loss * (float("inf") if rank == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True))
    assert scaler.get_scale() == 2.0
    optimizer.zero_grad()
    scaler.scale(model(batch(rank), 0).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert any(not torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True))
    assert scaler.get_scale() == 2.0


@ranks(2)
def test_a_hook_on_several_sharded_parameters_is_refused(rank: int):
    model = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda gradients: None)
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(ShardError, match="register_multi_grad_hook"):
        loss.backward()
