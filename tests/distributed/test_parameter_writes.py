"""Parameters written by the model or the loop, in any state: the next forward sees what one process would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.config.schema import PrecisionConfig, ShardConfig
from shardwise.errors import ShardError
from shardwise.sharding.hooks.shard_views import ShardView
from tests.ranks import ranks

pytestmark = pytest.mark.torch


def clamp(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.clamp_(max=0.7)


def clamp_data(parameter: nn.Parameter) -> None:
    parameter.data.clamp_(max=0.7)


def assign_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.clamp(max=0.7)


def copy_into(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.copy_(parameter.clamp(max=0.7))


WRITES: list[Callable[[nn.Parameter], None]] = [clamp, clamp_data, assign_data, copy_into]


def set_rows(weight: torch.Tensor) -> None:
    weight[2] = 0.5
    weight[1, 3] = 2.0
    weight[torch.tensor([0, 7])] = torch.ones(2, 8)


def change_rows(weight: torch.Tensor) -> None:
    weight[2].mul_(2)
    weight[3:6] += 1
    weight[4:7][1].copy_(torch.arange(8.0))
    weight.t()[:, 6].neg_()


def change_parts(weight: torch.Tensor) -> None:
    weight.narrow(0, 1, 4).zero_()
    weight.chunk(4)[1].add_(1)
    for row in weight:
        row.div_(2)
    weight.view(-1)[5:20].fill_(1.0)
    weight.diagonal().add_(1)
    weight.fill_diagonal_(0.3)


def change_by_index(weight: torch.Tensor) -> None:
    weight.index_fill_(0, torch.tensor([1]), 0.5)
    weight.index_copy_(0, torch.tensor([6]), torch.ones(1, 8))
    weight.renorm_(2, 0, 0.5)
    torch.nn.init.zeros_(weight[:3])


PARTIAL_WRITES: list[Callable[[torch.Tensor], None]] = [set_rows, change_rows, change_parts, change_by_index]


class Scaled(nn.Module):
    """A block that limits its scale each time it is called, as CLIP limits its logit scale."""

    def __init__(self, write: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self.linear, self.scale, self.write = nn.Linear(8, 8), nn.Parameter(torch.linspace(0.5, 1.5, 8)), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self.scale)
        return torch.relu(self.linear(x)) * self.scale


class Model(nn.Module):
    """Blocks that are resharded after forward, and a root with a scalar and a vector of its own."""

    def __init__(
        self, write: Callable[[nn.Parameter], None] = lambda parameter: None, *, in_root: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Scaled((lambda _: None) if in_root else write) for _ in range(3))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.logit_scale = nn.Parameter(torch.tensor(1.4))
        self.write = write if in_root else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.write is not None:
            self.write(self.logit_scale)
            self.write(self.gain)
        for block in self.blocks:
            x = x + block(x)
        return x * self.gain * self.logit_scale


def train(model: nn.Module, rows: slice, between: Callable[[nn.Module], None] = lambda model: None) -> dict[str, Any]:
    """Parameters after three steps on these rows of each batch; `between` runs after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(batch[rows]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        between(model)
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}


def compare(
    model: nn.Module, rank: int, between: Callable[[nn.Module], None] = lambda model: None, **config: Any
) -> None:
    """Train it on two ranks and in one process."""
    expected = train(copy.deepcopy(model), slice(None), between)
    sw.shard(model, ShardConfig(**config), mesh=init_device_mesh("cpu", (2,)))
    found = train(model, slice(2 * rank, 2 * rank + 2), between)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach(), value.detach(), msg=lambda text, name=name: f"{name}: {text}")


@ranks(2)
@pytest.mark.parametrize("in_root", [False, True], ids=["block", "root"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_in_forward_reaches_the_shards(rank: int, write: Callable[[nn.Parameter], None], in_root: bool):
    compare(Model(write, in_root=in_root), rank)


@ranks(2)
def test_a_write_in_16_bits_rounds_only_what_it_changed(rank: int):
    model = Model(clamp)
    with torch.no_grad():
        model.blocks[0].scale.copy_(torch.linspace(0.5001, 1.5001, 8))
    before = model.blocks[0].scale.detach().clone()
    sw.shard(model, ShardConfig(precision=PrecisionConfig(param_dtype="bfloat16")), mesh=init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        model(torch.ones(2, 8))
    after = model.blocks[0].scale.full_tensor().detach()
    limit = torch.tensor(0.7).bfloat16().float()
    torch.testing.assert_close(after, torch.where(before.bfloat16() > 0.7, limit, before), rtol=0, atol=0)


@ranks(2)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_between_steps_is_seen(rank: int, write: Callable[[nn.Parameter], None]):
    compare(Model(), rank, lambda model: [write(parameter) for parameter in model.parameters()] and None)


class Teacher(nn.Module):
    """A student and its slow copy, which the forward moves as MoCo and BYOL do."""

    def __init__(self, move: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
        super().__init__()
        self.student, self.move = Model(), move
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                self.move(slow, fast)
            target = self.teacher(x)
        return self.student(x) - target


def lerp(slow: nn.Parameter, fast: nn.Parameter) -> None:
    slow.lerp_(fast, 0.1)


def multiply_and_add(slow: nn.Parameter, fast: nn.Parameter) -> None:
    slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


def assign(slow: nn.Parameter, fast: nn.Parameter) -> None:
    slow.data = slow.data * 0.9 + fast.data * 0.1


@ranks(2)
@pytest.mark.parametrize("move", [lerp, multiply_and_add, assign], ids=lambda move: move.__name__)
def test_a_teacher_that_forward_moves(rank: int, move: Callable[[nn.Parameter, nn.Parameter], None]):
    compare(Teacher(move), rank)


@pytest.mark.parametrize("write", PARTIAL_WRITES)
@ranks(2)
def test_a_write_to_a_part_is_kept(rank: int, write: Callable[[torch.Tensor], None]):
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = sw.shard(copy.deepcopy(expected))
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    for of_weight in (lambda weight: weight, lambda weight: weight.data, lambda weight: weight.detach()):
        with torch.no_grad():
            write(of_weight(model[0].weight))
            write(of_weight(expected[0].weight))
        torch.testing.assert_close(model[0].weight.full_tensor(), expected[0].weight)
        torch.testing.assert_close(model(x[rank]), expected(x[rank]))


def computed(model: nn.Module) -> torch.Tensor:
    return model[0].weight.detach() * 2


def gradient(model: nn.Module) -> torch.Tensor:
    model(torch.ones(4, 8)).square().sum().backward()
    return model[0].weight.grad


def optimizer_state(model: nn.Module) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model.parameters())
    gradient(model)
    optimizer.step()
    return optimizer.state[model[0].weight]["exp_avg"]


def sums(model: nn.Module) -> torch.Tensor:
    """A vector of which each rank has its rows' terms."""
    return model[0].weight.detach().sum(0)


def write_elements(tensor: torch.Tensor) -> None:
    tensor[0] = 1.0
    tensor[-2].mul_(0.5)
    tensor[3:5].zero_()
    tensor.view(-1)[2:5].add_(1)
    for part in tensor.chunk(4):
        part.sub_(1)
    for row in tensor:
        row.mul_(2)


@pytest.mark.parametrize("of", [computed, gradient, optimizer_state, sums])
@ranks(2)
def test_a_write_to_a_part_of_any_sharded_tensor_is_kept(rank: int, of: Callable[[nn.Module], torch.Tensor]):
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = sw.shard(copy.deepcopy(expected))
    found, wanted = of(model), of(expected)
    for write in [write_elements] if of is sums else [write_elements, *PARTIAL_WRITES]:
        write(found)
        write(wanted)
        torch.testing.assert_close(found.full_tensor(), wanted)


@ranks(2)
def test_a_part_can_be_read_saved_and_combined(rank: int, tmp_path: Path):
    model = sw.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with torch.no_grad():
        rows = model[0].weight[:3]
        if ShardView.is_dispatched:  # torch 2.11 refuses to combine a DTensor of any class with a plain tensor
            torch.testing.assert_close(rows + torch.ones(8), model[0].weight.full_tensor()[:3] + 1)
        torch.testing.assert_close((rows + 1).full_tensor(), model[0].weight.full_tensor()[:3] + 1)
    torch.save({"rows": rows, **model.state_dict()}, tmp_path / f"{rank}.pt")
    saved = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
    assert type(saved["rows"]) is DTensor
    torch.testing.assert_close(saved["rows"].full_tensor(), rows.full_tensor())


@ranks(2)
def test_data_can_be_exchanged_and_exchanged_back(rank: int):
    model = sw.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    before = [parameter.full_tensor().detach() for parameter in model.parameters()]
    averages = [parameter.detach() * 0.5 for parameter in model.parameters()]
    for expected in (0.5, 1.0):
        for index, parameter in enumerate(model.parameters()):
            parameter.data, averages[index] = averages[index], parameter.data
        for parameter, average, value in zip(model.parameters(), averages, before, strict=True):
            torch.testing.assert_close(parameter.full_tensor(), value * expected)
            torch.testing.assert_close(average.full_tensor(), value * (1.5 - expected))
    held = model[0].bias.data
    model[0].bias.data = torch.add(model[0].bias.data, 1)
    held.zero_()  # the memory of before, no longer the parameter's
    torch.testing.assert_close(model[0].bias.full_tensor(), before[1] + 1)


@ranks(2)
def test_data_of_a_gradient_can_be_assigned(rank: int):
    model = sw.shard(Model(), mesh=init_device_mesh("cpu", (2,)))
    model(torch.ones(2, 8)).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data = torch.full_like(parameter.grad, 2.0)
        assert bool((parameter.grad.full_tensor() == 2.0).all())


@ranks(2)
def test_another_shape_is_refused_in_forward(rank: int):
    def grow(parameter: nn.Parameter) -> None:
        parameter.data = torch.ones(9)

    model = sw.shard(Model(grow), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ShardError, match=r"`.data` of a sharded parameter, \[8\] torch.float32, was assigned \[9\]"):
        model(torch.ones(2, 8))


@ranks(2)
def test_data_is_kept_after_a_change_of_dtype(rank: int):
    model = sw.shard(Model(), mesh=init_device_mesh("cpu", (2,))).double()
    model.blocks[0].scale.data = torch.zeros(8, dtype=torch.float64)
    model(torch.ones(2, 8, dtype=torch.float64))
    assert bool((model.blocks[0].scale.full_tensor() == 0).all())


@ranks(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_optimizers_in_backward_step_as_after_it(rank: int):
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    expected = train(copy.deepcopy(model), slice(None))
    sw.shard(model, mesh=init_device_mesh("cpu", (2,)))
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})
    for step in range(3):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(batch[2 * rank : 2 * rank + 2]).square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), expected[name])


@ranks(2)
def test_what_is_written_to_a_unit_of_fsdp1_is_kept(rank: int):
    from shardwise.fsdp1 import FullyShardedDataParallel

    unit = FullyShardedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    for write in (assign_data, clamp_data, clamp):
        write(unit.module[0].weight)
        unit(torch.ones(2, 8)).sum().backward()
        unit.module[1].bias.grad.data = torch.full_like(unit.module[1].bias.grad, 2.0)
        with FullyShardedDataParallel.summon_full_params(unit, with_grads=True):
            assert unit.module[0].weight.max() <= 0.7
            assert bool((unit.module[1].bias.grad == 2.0).all())
