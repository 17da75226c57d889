"""parity() notices each usual mistake, names the first thing that differs, and says the likely cause."""

import itertools
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.config.schema import ShardConfig
from shardwise.diagnosing.parity import parity
from shardwise.diagnosing.parity_criteria import Parity
from shardwise.errors import ConfigError, ShardError
from tests.ranks import ranks
from tests.zoo.checking import mesh_of
from tests.zoo.containers import DIM, InSequential
from tests.zoo.odd_parameters import ConvNet


def batch(seed: int) -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(seed))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def scale_gradient(loss: Tensor, factor: float) -> Tensor:
    """The same value with a gradient `factor` times as large."""
    return loss.detach() + factor * (loss - loss.detach())


def summed(model: nn.Module, x: Tensor) -> Tensor:
    loss = squares(model, x)
    return scale_gradient(loss, dist.get_world_size()) if isinstance(model, FSDPModule) else loss


def divided_twice(model: nn.Module, x: Tensor) -> Tensor:
    loss = squares(model, x)
    return scale_gradient(loss, 1 / dist.get_world_size()) if isinstance(model, FSDPModule) else loss


def part_cut_off(model: nn.Module, x: Tensor) -> Tensor:
    if isinstance(model, FSDPModule):
        model.get_submodule("out").requires_grad_(False)
    return squares(model, x)


def other_forward(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x * 1.001 if isinstance(model, FSDPModule) else x)


def other_forward_on_one_rank(model: nn.Module, x: Tensor) -> Tensor:
    is_wrong = isinstance(model, FSDPModule) and dist.get_rank() == 1
    return squares(model, x * 1.001 if is_wrong else x)


def one_block_wrong(model: nn.Module, x: Tensor) -> Tensor:
    """Adds a term for one block only; its value is 0, its gradient is not."""
    loss = squares(model, x)
    hidden = model.get_submodule("blocks.1")(x)
    return loss + 0.1 * isinstance(model, FSDPModule) * (hidden - hidden.detach()).sum()


def forgetful(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Does not move sharded parameters."""
    parameters = list(parameters)
    return torch.optim.SGD(parameters, lr=0.0 if isinstance(parameters[0], DTensor) else 0.1)


def stepping_too_far(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    parameters = list(parameters)
    return torch.optim.SGD(parameters, lr=0.11 if isinstance(parameters[0], DTensor) else 0.1)


def compare(loss: Callable[..., Tensor] = squares, **options: object) -> Parity:
    return parity(InSequential, batch, loss, mesh=mesh_of(2), **options)  # pyrefly: ignore[bad-argument-type]


FAULTS = {
    "summed": (summed, "gradient", "inp", "2 times too large"),
    "divided_twice": (divided_twice, "gradient", "inp", "2 times too small"),
    "part_cut_off": (part_cut_off, "gradient", "out", "never reached the shard"),
    "other_forward": (other_forward, "loss", "", "the forward itself differs"),
    "other_forward_on_one_rank": (other_forward_on_one_rank, "loss", "", "the forward itself differs"),
    "one_block_wrong": (one_block_wrong, "gradient", "blocks.1", "some gradients agree"),
}


@pytest.mark.parametrize("fault", FAULTS)
@ranks(2)
def test_wrong_loss_or_gradient_is_named(rank: int, fault: str):
    loss, quantity, module, cause = FAULTS[fault]
    result = compare(loss)
    assert not result.equal
    first = result.first_difference
    assert first is not None
    assert (first.deviation.step, first.deviation.quantity) == (1, quantity)
    assert first.deviation.name.startswith(module)
    assert cause in first.cause, first.cause
    if fault == "other_forward_on_one_rank":
        assert first.deviation.rank == 1  # told to every rank, seen by one


@pytest.mark.parametrize(
    ("optimizer", "cause"),
    [(forgetful, "optimizer did not change it"), (stepping_too_far, "the update does not")],
)
@ranks(2)
def test_wrong_update_is_named(rank: int, optimizer: Callable[..., torch.optim.Optimizer], cause: str):
    result = compare(optimizer=optimizer)
    first = result.first_difference
    assert first is not None
    assert (first.deviation.step, first.deviation.quantity) == (1, "parameter")
    assert first.deviation.name.startswith("inp")  # the first in forward order, not in registration order
    assert cause in first.cause, first.cause


@ranks(2)
def test_wrong_buffer_is_named(rank: int):
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = model(x).square().mean()
        if isinstance(model, FSDPModule):
            model.get_buffer("blocks.0.1.num_batches_tracked").add_(1)
        return value

    def images(seed: int) -> Tensor:
        return torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(seed))

    result = parity(ConvNet, images, loss, mesh=mesh_of(2), steps=1)
    first = result.first_difference
    assert first is not None
    assert (first.deviation.quantity, first.deviation.name) == ("buffer", "blocks.0.1.num_batches_tracked")


@ranks(2)
def test_later_fault_is_dated(rank: int):
    """The first step is right; the second uses other weights than the optimizer wrote."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        calls = next(counters[isinstance(model, FSDPModule)])
        return squares(model, x + 0.1 if isinstance(model, FSDPModule) and calls == 1 else x)

    counters = {False: itertools.count(), True: itertools.count()}
    first = compare(loss).first_difference
    assert first is not None
    assert (first.deviation.step, first.deviation.quantity) == (2, "loss")
    assert "outlived optimizer.step()" in first.cause


@ranks(2)
def test_verdict_is_the_same_on_every_rank_and_readable(rank: int):
    result = compare(other_forward_on_one_rank)
    verdicts: list[object] = [None, None]
    dist.all_gather_object(verdicts, str(result))
    assert verdicts[0] == verdicts[1]
    text = str(result)
    assert text.startswith("parity: DIFFERENT after 3 steps on 2 ranks\n  loss differs at step 1 on rank 1")
    assert "likely cause: " in text
    assert result.to_dict()["first_difference"]["deviation"]["rank"] == 1


@ranks(2)
def test_weights_that_differ_between_ranks_are_refused(rank: int):
    def build() -> nn.Module:
        model = InSequential()
        with torch.no_grad():
            model.inp.bias.add_(float(dist.get_rank()))
        return model

    with pytest.raises(ShardError, match="weights that build_model makes"):
        parity(build, batch, squares, mesh=mesh_of(2))


@ranks(2)
def test_random_state_is_given_back(rank: int):
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    assert compare(steps=1).equal
    assert torch.equal(torch.randn(3), expected)


@ranks(2)
def test_misuse_is_refused_with_a_fix(rank: int):
    shared, calls = InSequential(), itertools.count()
    misuses: list[tuple[Callable[[], object], str]] = [
        (lambda: parity(lambda: shared, batch, mesh=mesh_of(2)), "same module twice"),
        (lambda: parity(lambda: 3, batch, mesh=mesh_of(2)), "returned a int"),  # pyrefly: ignore
        (
            lambda: parity(lambda: nn.Linear(2, 2 + next(calls)), batch, mesh=mesh_of(2)),
            "different weights each time",
        ),
        (lambda: compare(steps=0), "steps is 0"),
        (lambda: compare(lambda model, x: model(x).detach().mean()), "depends on no trainable parameter"),
        (
            lambda: parity(InSequential, lambda a, b, c: a, mesh=mesh_of(2)),
            "make_batch has parameters a, b, c",
        ),
    ]
    for misuse, message in misuses:
        with pytest.raises(ConfigError, match=message) as caught:
            misuse()
        assert caught.value.fix


@ranks(2)
def test_configuration_reaches_the_sharded_model(rank: int):
    result = compare(config=ShardConfig(group_by="root"))
    assert result.equal
    assert " in 1 groups " in result.plan
