"""The functions of the loop on models that `shard()` made, with scalars, ignored parameters, entry points."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.config.schema import ShardConfig
from shardwise.errors import ShardError
from shardwise.sharding.apply import shard
from shardwise.sharding.full_params import full_params, iter_full_tensors
from shardwise.sharding.registry import recover
from shardwise.training.ema import EMA
from shardwise.training.step import AccumulationMode, accumulate, clip_grad_norm_, lockstep, token_mean
from tests.by_hand import Tiny, assert_same, full, full_gradients, loss_of, mesh_1d, mesh_2d, tiny, tokens
from tests.ranks import ranks

EXACT = {"atol": 0.0, "rtol": 0.0}


class Scaled(nn.Module):
    """A scalar parameter, which FSDP2 cannot split, and one that the user keeps out of sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tiny()
        self.logit_scale = nn.Parameter(torch.tensor(0.7))
        self.own = nn.Parameter(torch.linspace(0.5, 1.5, 7))

    def forward(self, batch: torch.Tensor, skip: tuple[int, ...] = ()) -> torch.Tensor:
        return self.encode(batch, skip) * self.own

    def encode(self, batch: torch.Tensor, skip: tuple[int, ...] = ()) -> torch.Tensor:
        return self.body(batch, skip) * self.logit_scale.exp()


def sharded(num_ranks: int) -> Scaled:
    config = ShardConfig(ignored=("own",), entry_points=(":encode",))
    return shard(Scaled(), config, mesh=mesh_1d(2) if num_ranks == 2 else mesh_2d())


def reference(num_ranks: int, num_micro_steps: int) -> dict[str, torch.Tensor]:
    model = Scaled()
    for step in range(num_micro_steps):
        for rank in range(num_ranks):
            (loss_of(model, tokens(rank, step)) / num_ranks).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def accumulated(model: Scaled, rank: int, mode: AccumulationMode) -> None:
    for step in range(3):
        with accumulate(model, step, 3, mode):
            loss_of(model, tokens(rank, step)).backward()


@ranks(4)
@pytest.mark.parametrize("mode", ["comm", "memory", "hsdp"])
def test_accumulated_and_clipped_like_one_process(rank: int, mode: AccumulationMode):
    model, expected = sharded(4), reference(4, 3)
    accumulated(model, rank, mode)
    assert isinstance(model.logit_scale, DTensor)
    assert not isinstance(model.own, DTensor)
    assert_same(full_gradients(model), expected)
    whole = torch.cat([grad.flatten() for grad in expected.values()]).norm()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(norm, whole, rtol=1e-5, atol=1e-6)
    assert_same(full_gradients(model), {name: grad * (0.1 / whole) for name, grad in expected.items()})


@ranks(2)
def test_full_parameters_hold_scalars_and_ignored_ones(rank: int):
    model, plain = sharded(2), Scaled()
    expected = {name: p.detach().clone() for name, p in plain.named_parameters()}
    assert_same(dict(iter_full_tensors(model, include_buffers=False)), expected, **EXACT)
    with full_params(model):
        assert_same({name: p.detach() for name, p in model.named_parameters()}, expected, **EXACT)
        for call in (model, model.encode):
            with pytest.raises(ShardError, match="inside full_params"):
                call(tokens(rank))
        nn.init.zeros_(model.own)
    torch.testing.assert_close(model(tokens(0)), plain(tokens(0)))
    with full_params(model, writeback=True, rank0_only=True):
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.25)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.detach()), torch.full_like(expected[name], 0.25))


@ranks(2)
def test_average_and_swap(rank: int):
    model = sharded(2)
    before = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    ema = EMA(model, 0.75)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_of(model, tokens(rank)).backward()
    optimizer.step()
    after = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    ema.update()
    plain = Scaled()
    average = {name: 0.75 * before[name] + 0.25 * after[name] for name in before}
    plain.load_state_dict({**plain.state_dict(), **average, "body.head.weight": average["body.embedding.weight"]})
    with ema.swap(), torch.no_grad():
        torch.testing.assert_close(model(tokens(0)), plain(tokens(0)))
    assert_same({name: full(p.detach()) for name, p in model.named_parameters()}, after, **EXACT)


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        raise FloatingPointError("in backward")


@ranks(2)
@pytest.mark.parametrize("asked", [True, False], ids=["recover", "by-itself"])
def test_step_after_a_failed_backward(rank: int, asked: bool):
    """The next forward notices by itself, too."""
    model = sharded(2)
    body: Tiny = model.body
    handle = body.blocks[0].register_forward_hook(lambda module, args, output: Fuse.apply(output))
    with pytest.raises(FloatingPointError):
        loss_of(model, tokens(rank, 9)).backward()
    handle.remove()
    if asked:
        recover(model)
    for _ in range(2):
        loss_of(model, tokens(rank)).backward()
        assert_same(full_gradients(model), reference(2, 1))
        model.zero_grad()


@ranks(4)
def test_unused_blocks_add_up_beside_shards_own_handling_of_them(rank: int):
    """`shard()` fills in zeros for what some rank did not use; partial sums must count those in."""
    plain = tiny()
    model = shard(copy.deepcopy(plain), ShardConfig(unused_parameters="reduce"), mesh=mesh_2d())
    skips: list[tuple[int, ...]] = [(), (1,), (0,)]
    for _ in range(2):
        model.zero_grad()
        for step, skip in enumerate(skips):
            with accumulate(model, step, len(skips), "hsdp"):
                loss_of(model, tokens(rank, step), skip=skip).backward()
        expected = copy.deepcopy(plain)
        for step, skip in enumerate(skips):
            for other in range(4):
                (loss_of(expected, tokens(other, step), skip=skip) / 4).backward()
        gradients = {name: p.grad for name, p in expected.named_parameters() if p.grad is not None}
        assert_same(full_gradients(model), gradients)


@ranks(1)
@pytest.mark.parametrize("mode", ["comm", "memory", "hsdp"])
def test_one_rank_takes_the_same_path(rank: int, mode: AccumulationMode):
    model = shard(Scaled(), ShardConfig(ignored=("own",)), mesh=mesh_1d(1))
    accumulated(model, rank, mode)
    expected = reference(1, 3)
    assert_same(full_gradients(model), expected)
    whole = torch.cat([grad.flatten() for grad in expected.values()]).norm()
    torch.testing.assert_close(clip_grad_norm_(model, 1e9), whole)
    ema = EMA(model, 0.0)
    with full_params(model, writeback=True, rank0_only=True):
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
    ema.update()
    for _, tensor in iter_full_tensors(model, include_buffers=False):
        assert torch.equal(tensor, torch.full_like(tensor, 0.5))
    assert all(torch.equal(full(t), torch.full_like(full(t), 0.5)) for t in ema.state_dict()["shadow"].values())
    recover(model)
    assert token_mean(torch.tensor(6.0), 3).item() == 2.0
    assert list(lockstep([1, 2])) == [1, 2]
