"""Plain tensors and sharded ones in one operation: as in one process, or refused by name of the parameter and line."""

import io
import pickle
import sys
from collections.abc import Callable
from types import FrameType

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


def in_place_on_results(parameter: Tensor) -> list[Tensor]:
    """What a reduction returns is still a sum of the ranks' terms; torch refuses most writes, or adds them up."""
    writes: list[Callable[[Tensor], object]] = [
        lambda t: t.clamp_(min=0.1), lambda t: t.add_(1.5), lambda t: t.exp_(), lambda t: t.mul_(t),
        lambda t: t.tanh_(), lambda t: t.fill_(2.0), lambda t: t.masked_fill_(t > 0, 3.0),
        lambda t: t.lerp_(t * 2, 0.5), lambda t: t.add_(torch.ones(t.shape)), lambda t: t.copy_(torch.ones(t.shape)),
    ]  # fmt: skip
    reductions: list[Callable[[Tensor], Tensor]] = [torch.norm, torch.sum, torch.amax]
    reductions += [lambda t: t.norm(dim=0), lambda t: t.sum(0), lambda t: t.sum(1)]
    results = [reduce(parameter.detach()) for _ in writes for reduce in reductions]
    for index, result in enumerate(results):
        writes[index // len(reductions)](result)
    return results


def of_no_strategy(parameter: Tensor) -> list[Tensor]:
    """Operators for which torch raises NotImplementedError on sharded tensors."""
    p = parameter.detach()
    rows = torch.tensor([0, 2])
    found = [
        torch.renorm(p, 2, 0, 0.5),
        p.masked_select(p > 0),
        p.count_nonzero(),
        p.trace(),
        torch.unique(p),
        p[p > 0],
    ]
    found += [p.clone().masked_fill_(p > 0, torch.tensor(2.0)), p.mv(p[0]), p.index_add(0, rows, torch.ones(2, 6))]
    found += [p.clone().cumsum_(0), p.clone().triu_(), p.clone().tril_(1), p.clone().fill_diagonal_(2.0)]
    return [*found, *torch.aminmax(p), p.floor_divide(0.1), p.nonzero()]


@ranks(2)
@pytest.mark.parametrize("use", [in_place_on_results, of_no_strategy])
def test_operators_on_parameters_answer_as_in_one_process(rank: int, use: Callable[[Tensor], list[Tensor]]) -> None:
    plain, model = build(), sw.shard(build())
    for index, (expected, found) in enumerate(
        zip(use(next(plain.parameters())), use(next(model.parameters())), strict=True)
    ):
        torch.testing.assert_close(full(found), expected, msg=lambda text, index=index: f"[{index}] {text}")


@ranks(2)
def test_an_operator_that_changes_the_shape_in_place_is_refused(rank: int) -> None:
    weight = next(sw.shard(build()).parameters()).detach().clone()
    with pytest.raises((sw.ShardwiseError, RuntimeError), match=r"changes the shape in place|placement"):
        weight.unsqueeze_(0)


@ranks(2)
def test_writes_to_tensors_sharded_alike_are_dispatched_once(rank: int) -> None:
    """Optimizers without kernels for lists make some per parameter: two dispatches of each double their host time."""
    parameter, dispatched_again = sw.shard(build())[0].weight.detach(), 0
    average, square = torch.zeros_like(parameter), torch.ones_like(parameter)

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal dispatched_again
        code = frame.f_code
        if event == "call" and code.co_name == "plain" and "shardwise" in code.co_filename:
            dispatched_again += frame.f_locals["earlier"] is None  # otherwise it calls another handler

    expected = full(parameter) * 0.9 + 0.1 * full(parameter) * 0.1
    sys.setprofile(count)
    try:
        average.lerp_(parameter, 0.1)
        parameter.mul_(0.9).addcdiv_(average, square, value=0.1)
        parameter.add_(torch.tensor(1.0)).sub_(square)
    finally:
        sys.setprofile(None)
    assert not dispatched_again
    torch.testing.assert_close(full(parameter), expected)


@ranks(2)
def test_whole_values_are_assigned_to_data(rank: int) -> None:
    plain, model = build(), sw.shard(build())
    for each in (plain, model):
        parameters = list(each.parameters())
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(parameters) * 2, parameters)
            parameters[2].copy_(torch.nn.functional.normalize(parameters[2].mT.mT, dim=1))
        parameters[0].data = torch.renorm(parameters[0].data, 2, 0, 0.5)
    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(parameter), expected.detach())


@ranks(2)
def test_an_operator_without_strategy_that_wants_a_gradient_is_refused(rank: int) -> None:
    model = sw.shard(build())
    with pytest.raises(ShardError, match=r"aten.index.Tensor of .*0.weight(.|\n)*test_plain_tensors.py"):
        model[0].weight[model[0].weight > 0].sum()


@ranks(2)
def test_terms_of_norms_and_sums_are_refused_and_whole_values_are_not(rank: int):
    """fully_shard's `.item()` gives one rank's term: some programs add the terms up, others mean the whole."""
    model = sw.shard(build())
    model(torch.ones(2, 6)).sum().backward()
    gradient = model[0].weight.grad
    assert gradient is not None
    for ask in (lambda: gradient.norm().item(), lambda: float((gradient**2).sum()), lambda: int((gradient == 0).sum())):
        with pytest.raises(ShardError, match=r"(?s)norm or a sum.*test_plain_tensors.py:\d+.*full_tensor\(\)\.item"):
            ask()
    whole = full(gradient)
    assert gradient.norm().full_tensor().item() == pytest.approx(whole.norm().item())
    assert gradient.abs().max().item() == whole.abs().max().item()
    assert gradient.mean().item() == pytest.approx(whole.mean().item())
    assert not torch.isnan(gradient).any().item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6).item()
    assert norm == pytest.approx(torch.stack([full(p.grad).norm() for p in model.parameters()]).norm().item())
