"""Modules may be entered by any method, twice at once, in parts, or from outside the model."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import compat
from shardwise.config.schema import ShardConfig
from shardwise.sharding.apply import shard
from tests.ranks import ranks
from tests.toy_models import Block
from tests.zoo.checking import mesh_of


class Layer(nn.Module):
    """BAGEL's shape: forward dispatches to a method that is also called from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        out = self.forward_train(x) if self.training else self.forward_inference(x)
        return out + self.norm(x)  # the parameters are needed after the inner method has returned

    def forward_train(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

    def forward_inference(self, x):
        return self.forward_train(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.layers, self.out = nn.Linear(8, 8), nn.ModuleList([Layer(), Layer()]), nn.Linear(8, 8)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)

    def generate(self, x, steps: int = 2):
        for _ in range(steps):
            x = self(x)
        return self.out(x)

    def cache_update(self, x):
        for layer in self.layers:
            x = layer.forward_train(self.inp(x))
        return x


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def count_entries(model: nn.Module) -> dict[str, int]:
    """How often FSDP2's own pre-forward runs, per module."""
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        if (state := compat.fsdp_state(module)) is not None:
            enter = state._pre_forward

            def counted(*args, _enter=enter, _name=name):
                counts[_name] = counts.get(_name, 0) + 1
                return _enter(*args)

            state._pre_forward = counted
    return counts


CALLS = {
    "forward": lambda model, x: model(x),
    "forward_by_name": lambda model, x: model.forward(x),
    "generate": lambda model, x: model.generate(x),
    "cache_update": lambda model, x: model.cache_update(x),
}


@ranks(2)
@pytest.mark.parametrize("call", sorted(CALLS))
def test_every_entry_computes_what_one_process_computes(rank: int, call: str):
    reference, model = Model(), Model()
    shard(model, mesh=mesh_of(2))
    for seed in range(2):
        (CALLS[call](reference, batch(seed)).square().mean() / 2).backward()
    output = CALLS[call](model, batch(rank))
    output.square().mean().backward()
    torch.testing.assert_close(output, CALLS[call](reference, batch(rank)))
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-6)


@ranks(2)
def test_hooks_are_entered_once_per_call(rank: int):
    """From forward to forward_train, whose hooks would be a second entry."""
    model = shard(Model(), mesh=mesh_of(2))
    counts = count_entries(model)
    model(batch(rank)).sum().backward()
    assert counts["layers.0"] == counts["layers.1"] == counts[""] == 1
    model.generate(batch(rank), steps=3).sum().backward()
    assert counts[""] == 2  # the root once for all of generate
    assert counts["layers.0"] == 1 + 3


@ranks(2)
def test_a_method_raising_leaves_the_model_usable(rank: int):
    model, reference = shard(Model(), mesh=mesh_of(2)), Model()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.generate(torch.randn(3, 5))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(3, 5))
    torch.testing.assert_close(model(batch(rank)), reference(batch(rank)))


@ranks(2)
def test_parts_of_the_model_can_be_called_from_outside(rank: int):
    """Before the root was ever entered, too."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(8)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.tower, self.head = Tower(), nn.Linear(8, 8)

        def forward(self, x):
            return self.head(self.tower(x))

    reference, model = Whole(), Whole()
    shard(model, mesh=mesh_of(2))
    x = batch(rank)
    torch.testing.assert_close(model.tower(x), reference.tower(x))
    model.tower(x).sum().backward()
    for seed in range(2):
        (reference.tower(batch(seed)).sum() / 2).backward()
    torch.testing.assert_close(model.tower.norm.weight.grad.full_tensor(), reference.tower.norm.weight.grad)
    torch.testing.assert_close(model(x), reference(x))


@ranks(2)
def test_recomputation_gathers_again(rank: int):
    """Activation checkpointing written into the model, around blocks and around their insides."""

    class Recomputing(Model):
        def forward(self, x):
            x = self.inp(x)
            x = checkpoint(self.layers[0], x, use_reentrant=False)
            return checkpoint(lambda y: self.out(self.layers[1](y)), x, use_reentrant=False)

    reference, model = Recomputing(), Recomputing()
    shard(model, mesh=mesh_of(2))
    for seed in range(2):
        (reference(batch(seed)).square().mean() / 2).backward()
    model(batch(rank)).square().mean().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-6)


@ranks(2)
def test_the_user_can_name_entry_points(rank: int):
    model = shard(Model(), ShardConfig(entry_points=("layers.0:forward_inference",)), mesh=mesh_of(2))
    model(batch(rank))
    expected = Model().layers[0].forward_inference(batch(rank))
    torch.testing.assert_close(model.layers[0].forward_inference(batch(rank)), expected)


@ranks(2)
def test_a_model_trains_after_inference_mode(rank: int):
    """What was gathered in inference mode must not be saved for backward later."""
    reference, model = Model(), shard(Model(), mesh=mesh_of(2))
    with torch.inference_mode():
        torch.testing.assert_close(model(batch(rank)), reference(batch(rank)))
    for seed in range(2):
        (reference(batch(seed)).square().mean() / 2).backward()
    model(batch(rank)).square().mean().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-6)
