"""Plain tensors and sharded ones in one operation: as in one process, or refused by name of the parameter and line."""

import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ShardError
from tests.by_hand import full
from tests.ranks import ranks


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def load(model: nn.Module) -> None:
    model.load_state_dict(build(1).state_dict())


@torch.no_grad()
def add_noise(model: nn.Module) -> None:
    torch.manual_seed(2)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.size()))
        parameter.data = parameter.data + torch.randn(parameter.size())


@torch.no_grad()
def precondition(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 2:
            values, vectors = torch.linalg.eigh(parameter @ parameter.T + torch.eye(len(parameter)))
            parameter.copy_((vectors * values) @ vectors.T @ parameter)


@ranks(2)
@pytest.mark.parametrize("change", [load, add_noise, precondition])
def test_parameters_change_as_in_one_process(rank: int, change: Callable[[nn.Module], None]) -> None:
    plain, model = build(), sw.shard(build())
    change(plain)
    change(model)
    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(parameter), expected.detach())


@ranks(2)
def test_a_plain_model_takes_the_values_of_a_sharded_one(rank: int) -> None:
    source, model = build(1), sw.shard(build(1))
    averages, others = (build(), build()), (build(), build())
    with torch.no_grad():
        for of, average in zip((source, model), averages, strict=True):
            for mine, theirs in zip(average.parameters(), of.parameters(), strict=True):
                mine.lerp_(theirs, 0.1).mul_(0.5).add_(theirs, alpha=0.1)
    for of, other in zip((source, model), others, strict=True):
        other.load_state_dict(of.state_dict())
    for first, second in (averages, others):
        torch.testing.assert_close(dict(second.named_parameters()), dict(first.named_parameters()))


@ranks(2)
def test_a_product_that_wants_a_gradient_names_parameter_and_line(rank: int) -> None:
    model = sw.shard(build())
    with pytest.raises(ShardError, match=r"(?s)'0.weight' and a plain tensor.*test_plain_tensors.py:\d+"):
        _ = model[0].weight * torch.ones(5, 6)


@ranks(2)
def test_addresses_tell_parameters_apart(rank: int) -> None:
    model = sw.shard(build())
    assert len({parameter.data_ptr() for parameter in model.parameters()}) == 4
    assert 0 not in {parameter.data_ptr() for parameter in model.parameters()}
    again = pickle.loads(pickle.dumps(model.state_dict()))
    torch.testing.assert_close(full(again["0.weight"]), full(model[0].weight))


def export(name: str) -> Callable[[nn.Module], object]:
    return lambda model: getattr(model[0].weight.detach(), name)()  # pyrefly: ignore


@ranks(2)
@pytest.mark.parametrize("name", ["numpy", "tolist", "storage"])
def test_exports_name_the_parameter(rank: int, name: str) -> None:
    with pytest.raises(ShardError, match=rf"{name}\(\) of the sharded parameter '0.weight'"):
        export(name)(sw.shard(build()))


@ranks(2)
def test_a_sharded_model_is_not_pickled_but_its_scalars_are_formatted(rank: int) -> None:
    model = sw.shard(build())
    with pytest.raises(ShardError, match="save_weights"):
        torch.save(model, io.BytesIO())
    assert f"{model[0].bias[1]:.4f}" == f"{build()[0].bias[1].item():.4f}"


@ranks(2)
def test_a_hessian_is_that_of_one_process(rank: int) -> None:
    plain, model, x = build(), sw.shard(build()), torch.ones(6)

    def hessian(model: nn.Module) -> Tensor:
        return torch.autograd.functional.hessian(lambda x: model(x).square().sum(), x)  # pyrefly: ignore

    for _ in range(2):
        torch.testing.assert_close(hessian(model), hessian(plain))
        for each in (plain, model):
            each(x).sum().backward()
            torch.optim.SGD(each.parameters(), lr=0.1).step()
