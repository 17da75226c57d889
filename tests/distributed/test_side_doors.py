"""Backward finds its parameters unsharded by whatever path a tensor left the module that computed it."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.config.schema import PrecisionConfig, ShardConfig
from shardwise.sharding.apply import shard
from shardwise.sharding.hooks.graph_calls import graph_calls
from tests.ranks import ranks
from tests.zoo.checking import mesh_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, cache=None):
        return x + self.down(self.up(self.norm(x)).relu())


class Keeping(Block):
    """Keeps a tensor on an attribute, made after its output."""

    def forward(self, x, cache=None):
        out = super().forward(x)
        self.kept = self.down(self.up(self.norm(x)).tanh())
        return out


class Caching(Block):
    """Attends to keys of earlier calls, in an object that it is given and fills."""

    def forward(self, x, cache=None):
        keys = self.up(self.norm(x))
        cache.keys.setdefault(id(self), []).append(keys)
        return x + self.down(sum(cache.keys[id(self)]).relu())


class Cache:
    def __init__(self) -> None:
        self.keys: dict[int, list[torch.Tensor]] = {}


class Capturing(Block):
    """Hands out a closure over what it computed."""

    def forward(self, x, cache=None):
        hidden = self.up(self.norm(x))
        self.penalty = lambda: hidden.square().mean()
        return x + self.down(hidden.relu())


class Scaled(torch.autograd.Function):
    """Keeps its weight on the context instead of saving it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight, ctx.x = weight, x
        return x * weight

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,) = gradients
        return gradient * ctx.weight, (gradient * ctx.x).sum(0)


class Writing(Block):
    """Puts a result of an autograd function into a list that outlives the call."""

    def forward(self, x, cache=None):
        RESULTS.append(Scaled.apply(self.norm(x), self.norm.weight))
        return super().forward(x)


RESULTS: list[torch.Tensor] = []


class Model(nn.Module):
    def __init__(self, kind: type[Block], *, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.blocks, self.out = nn.Linear(8, 8), nn.ModuleList([kind() for _ in range(3)]), nn.Linear(8, 8)
        self.recompute = recompute

    def forward(self, x, cache=None):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, cache, use_reentrant=False) if self.recompute else block(x, cache)
        return self.out(x)


def loss_of_attribute(model, x):
    return model(x).square().mean() + model.blocks[1].kept.square().mean()


def loss_of_attribute_only(model, x):
    model(x)
    return model.blocks[1].kept.square().mean()


def loss_of_cache(model, x):
    """The first call's output is dropped; only its keys matter."""
    cache = Cache()
    model(x, cache)
    return model(x * 2, cache).square().mean()


def loss_of_closure(model, x):
    model(x)
    return model.blocks[0].penalty() + model.blocks[2].penalty()


def loss_of_list(model, x):
    RESULTS.clear()
    model(x)
    return torch.stack(RESULTS).square().mean()


CASES = {
    "attribute": (Keeping, loss_of_attribute),
    "attribute_only": (Keeping, loss_of_attribute_only),
    "cache": (Caching, loss_of_cache),
    "closure": (Capturing, loss_of_closure),
    "list": (Writing, loss_of_list),
}


def train(model, compute_loss, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for x in batches:
            (compute_loss(model, x + step) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    # FSDP2's nodes refer to the model, which would keep itself alive by a tensor of its own.
    RESULTS.clear()
    for block in model.blocks:
        block.kept = block.penalty = None


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


@ranks(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", sorted(CASES))
def test_gradients_flow_by_every_path(rank: int, case: str, recompute: bool):
    kind, compute_loss = CASES[case]
    if recompute and kind is Caching:
        pytest.skip("recomputation would fill the cache twice, in one process too")
    reference = Model(kind, recompute=recompute)
    model = shard(Model(kind, recompute=recompute), ShardConfig(reshard_after_forward=True), mesh=mesh_of(2))
    train(reference, compute_loss, [batch(0), batch(1)])
    train(model, compute_loss, [batch(rank)])
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, msg=lambda text, name=name: f"{name}: {text}")


@ranks(2)
@pytest.mark.parametrize("recompute", [False, True])
def test_an_ordinary_graph_is_not_followed(rank: int, recompute: bool):
    """It costs time for every node."""
    model = shard(Model(Block, recompute=recompute), ShardConfig(reshard_after_forward=True), mesh=mesh_of(2))
    for _ in range(2):
        model(batch(rank)).square().mean().backward()
        assert not graph_calls()._is_followed
    sum(model(batch(rank) + step).square().mean() for step in range(2)).backward()
    assert not graph_calls()._is_followed


@ranks(2)
def test_a_graph_that_is_dropped_is_freed(rank: int):
    model = shard(Model(Block), ShardConfig(reshard_after_forward=True), mesh=mesh_of(2))
    x = batch(rank)
    freed = []
    out = model(x)
    weakref.finalize(x, freed.append, True)
    del x, out
    assert freed
    assert sum(call.until >= 0 for call in graph_calls().calls) >= 4  # numbers alone are kept


class Appending(Block):
    """Changes what it is given: a list, a dictionary in an object, and a tensor of another dtype."""

    def forward(self, x, cache=None):
        notes, out = cache, super().forward(x)
        notes["kept"].append(out)
        notes["kept"][0] = notes["kept"][0] + out.mean()
        notes["last"] = notes.pop("first")
        notes["sums"] += out.sum().detach()
        return out


def notes_of(model, x):
    notes = {"kept": [model.inp(x)], "first": x.clone().requires_grad_(), "sums": torch.zeros(1)}
    out = model.out(model.blocks[0](x, notes))
    return notes, out.square().mean() + torch.stack(notes["kept"]).square().mean()


@ranks(2)
@pytest.mark.parametrize("dtype", ["storage", "bfloat16"])
def test_changed_arguments_are_changed_for_the_caller(rank: int, dtype: str):
    config = ShardConfig(precision=PrecisionConfig(param_dtype=dtype), reshard_after_forward=True)
    reference, model = Model(Appending), shard(Model(Appending), config, mesh=mesh_of(2))
    (expected, expected_loss), (found, loss) = notes_of(reference, batch(rank)), notes_of(model, batch(rank))
    close = {"rtol": 0.05, "atol": 0.05} if dtype == "bfloat16" else {}
    assert found.keys() == expected.keys()
    assert len(found["kept"]) == 2
    for key in ("last", "sums"):
        torch.testing.assert_close(found[key], expected[key], **close)
    for ours, theirs in zip(found["kept"], expected["kept"], strict=True):
        torch.testing.assert_close(ours.float(), theirs, **close)
    torch.testing.assert_close(loss.float(), expected_loss, **close)
    loss.backward()
