"""Optimizers built before sharding are re-pointed or refused; one left behind never steps in silence."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import shard
from shardwise.errors import ShardError
from tests.collectives import count_collectives
from tests.ranks import ranks


class Net(nn.Module):
    """Tied embedding and head, an uneven layer, a scalar, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.hidden = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.hidden(self.embed(tokens)) * self.scale))


TOKENS = torch.arange(28).view(4, 7) % 7


def train(model: nn.Module, optimizer: Optimizer, tokens: torch.Tensor, steps: int = 2) -> None:
    for _ in range(steps):
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def assert_equal_weights(model: nn.Module, reference: nn.Module) -> None:
    for name, parameter in reference.named_parameters():
        found = full(model.get_parameter(name))
        torch.testing.assert_close(found, parameter.detach(), rtol=1e-5, atol=1e-6, msg=name)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with options of their own; decay for matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": others, "weight_decay": 0.0, "lr": 0.02}, {"params": matrices, "weight_decay": 0.1}]


MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(groups_of(model), lr=0.01),
    "adamw-fused": lambda model: torch.optim.AdamW(groups_of(model), lr=0.01, fused=True),
    "adamw-foreach": lambda model: torch.optim.AdamW(groups_of(model), lr=0.01, foreach=True),
    "sgd": lambda model: torch.optim.SGD(groups_of(model), lr=0.01, momentum=0.9),
    "nadam": lambda model: torch.optim.NAdam(groups_of(model), lr=0.01),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("steps_before", [0, 2])
@ranks(2)
def test_optimizer_built_before_sharding_trains_on(rank: int, name: str, steps_before: int):
    """With state from steps before sharding or without, updates equal those of a single process."""
    reference = Net()
    model = copy.deepcopy(reference)
    expected, optimizer = MAKERS[name](reference), MAKERS[name](model)
    train(reference, expected, TOKENS, steps_before)
    train(model, optimizer, TOKENS, steps_before)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)

    shard(model, optimizers=[optimizer])

    for group in expected.param_groups:
        group["lr"] *= 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [g["lr"] for g in expected.param_groups]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 4]
    assert optimizer.param_groups[0]["params"][0] is model.get_parameter("scale")
    train(reference, expected, TOKENS)
    train(model, optimizer, TOKENS[2 * rank : 2 * rank + 2])
    scheduler.step()
    assert_equal_weights(model, reference)


@ranks(2)
def test_state_is_split_like_its_parameter(rank: int):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, TOKENS)
    moments = optimizer.state[model.embed.weight]["exp_avg"].clone()
    shard(model, optimizers=optimizer)
    weight = model.get_parameter("embed.weight")
    state = optimizer.state[weight]
    assert isinstance(weight, DTensor)
    assert isinstance(state["exp_avg"], DTensor)
    assert state["exp_avg"].placements == weight.placements
    assert state["exp_avg"].to_local().shape == weight.to_local().shape
    assert torch.equal(full(state["exp_avg"]), moments)
    assert not isinstance(state["step"], DTensor)
    assert state["step"].item() == 2
    scalar = optimizer.state[model.get_parameter("scale")]
    assert isinstance(scalar["exp_avg"], DTensor)
    assert not isinstance(scalar["step"], DTensor), "a counter, though it has the shape of the parameter"
    assert len(optimizer.state) == len([p for p in model.parameters() if p.requires_grad])


@ranks(2)
def test_optimizer_of_another_model_is_refused_before_anything_changes(rank: int):
    model, other = Net(), Net()
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [*other.hidden.parameters()]}], lr=0.1)
    with pytest.raises(ShardError, match="4 of 4 parameters are not parameters of Net") as caught:
        shard(model, optimizers=[optimizer])
    assert caught.value.where == "optimizers[0] (SGD), param_groups[1]"
    assert not isinstance(model, FSDPModule)


@ranks(2)
def test_parameter_held_twice_is_refused(rank: int):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"].append(model.hidden[0].weight)
    with pytest.raises(ShardError, match=r"the optimizer holds hidden\.0\.weight twice"):
        shard(model, optimizers=[optimizer])


@ranks(2)
def test_state_that_cannot_be_split_is_refused(rank: int):
    model = Net()
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, TOKENS, steps=1)
    with pytest.raises(ShardError, match=r"state 'row_var' of \S+ has shape") as caught:
        shard(model, optimizers=[optimizer])
    assert "new state" in caught.value.fix
    assert not isinstance(model, FSDPModule)


@ranks(2)
def test_optimizer_left_behind_raises_at_its_first_step(rank: int):
    """Plain torch: two steps, no error, no change. Ours: an error on every rank."""
    raw = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    fully_shard(raw)
    before = full(raw.get_parameter("0.weight")).clone()
    raw(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert torch.equal(full(raw.get_parameter("0.weight")), before), "torch has begun to handle this itself"

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model)
    model(TOKENS).sum().backward()
    with pytest.raises(ShardError, match="SGD holds 8 of 8 parameters that Net no longer uses") as caught:
        optimizer.step()
    assert "shard(model, optimizers=[optimizer])" in caught.value.fix


@ranks(2)
def test_optimizer_that_stepped_before_sharding_and_was_left_behind_raises(rank: int):
    first, model = Net(), Net()
    shard(first)  # the hook is installed and has seen the optimizer before its model is sharded
    optimizer = torch.optim.SGD([*model.parameters()], lr=0.1)
    train(model, optimizer, TOKENS)
    shard(model)
    with pytest.raises(ShardError, match="8 of 8"):
        optimizer.step()


@ranks(2)
def test_optimizer_built_while_the_model_stood_gathered_raises(rank: int):
    model = shard(Net())
    assert isinstance(model, FSDPModule)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.reshard()
    with pytest.raises(ShardError, match="no longer uses") as caught:
        optimizer.step()
    assert "reshard" in caught.value.fix


@ranks(2)
def test_group_added_later_is_looked_at_too(rank: int):
    model = Net()
    old = model.hidden[0].weight
    shard(model)
    optimizer = torch.optim.SGD([model.get_parameter("embed.weight")], lr=0.1)
    optimizer.step()
    optimizer.add_param_group({"params": [old]})
    with pytest.raises(ShardError, match=r"holds 1 of 2 parameters") as caught:
        optimizer.step()
    assert caught.value.where.startswith("param_groups [1]")


@ranks(2)
def test_nothing_is_kept_alive(rank: int):
    model = Net()
    old = weakref.ref(model.hidden[0].weight)
    shard(model)
    gc.collect()
    assert old() is None, "the old parameters must not outlive sharding"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, TOKENS)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None, "neither the hook nor the optimizer may keep the model"


def evaluate(model: nn.Module) -> None:
    """A forward without gradients, as in evaluation or for a reference model's probabilities."""
    with torch.no_grad():
        model(TOKENS)


def gather(model: nn.Module) -> None:
    """The user gathers by hand and forgets."""
    model.unshard()  # pyrefly: ignore[not-callable]


def gather_and_do_not_wait(model: nn.Module) -> None:
    """As `gather`, but the gather is still on its way when the optimizer steps."""
    model.unshard(async_op=True)  # pyrefly: ignore[not-callable]


def nothing(model: nn.Module) -> None:
    """Stay gathered by `set_reshard_after_backward(False)` alone."""


DISTURBANCES = {
    "forward without gradients": evaluate,
    "unshard": gather,
    "unshard, not waited for": gather_and_do_not_wait,
    "no reshard after backward": nothing,
}


class Plain(nn.Module):
    """What plain FSDP2 takes: no scalar, no tie, an output that is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).exp()


def disturbed_training(model: nn.Module, disturb: Callable[[nn.Module], None]) -> list[float]:
    """Losses of four steps, with something between backward and step that leaves parameters gathered."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if disturb is nothing and isinstance(model, FSDPModule):
        model.set_reshard_after_backward(False)
    losses = []
    for _ in range(4):
        loss = model(TOKENS).log().square().mean()
        loss.backward()
        if isinstance(model, FSDPModule) or disturb is evaluate:
            disturb(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", DISTURBANCES)
@ranks(2)
def test_step_and_next_forward_use_the_same_weights(rank: int, name: str):
    """Plain torch trains on stale weights without a word; ours equals a single process."""
    disturb = DISTURBANCES[name]
    reference = Plain()
    raw, model = copy.deepcopy(reference), copy.deepcopy(reference)
    expected = disturbed_training(reference, disturb)
    for block in raw.blocks:
        fully_shard(block)
    fully_shard(raw)
    stale = disturbed_training(raw, disturb)
    assert max(abs(a - b) for a, b in zip(stale, expected, strict=True)) > 1e-3, "torch handles this by now"

    found = disturbed_training(shard(model), disturb)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert_equal_weights(model, reference)


@ranks(2)
def test_optimizer_built_after_a_forward_without_gradients_trains_everything(rank: int):
    """Plain torch: the root's parameters never change. Ours: the root stands sharded after such a forward."""
    raw = Plain()
    fully_shard(raw)
    evaluate(raw)
    assert not isinstance(raw.head.weight, DTensor), "torch reshards the root by now"

    reference = Plain()
    model = shard(copy.deepcopy(reference))
    evaluate(model)
    disturbed_training(reference, lambda _: None)
    disturbed_training(model, lambda _: None)
    assert_equal_weights(model, reference)


@ranks(2)
def test_a_criterion_that_is_first_used_in_a_later_step_is_refused_then(rank: int):
    model, criterion = shard(nn.Sequential(nn.Linear(4, 4))), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    criterion(model(torch.ones(2, 4) + rank)).sum().backward()
    with pytest.raises(ShardError, match="another gradient on each rank"):
        optimizer.step()


@ranks(1)
def test_one_rank_compares_no_gradients(rank: int):
    """On a GPU the host would wait for them, in every step until each parameter has one."""
    model, criterion = shard(nn.Sequential(nn.Linear(4, 4))), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    with count_collectives(model) as trace:
        optimizer.step()
    assert not trace.collectives
