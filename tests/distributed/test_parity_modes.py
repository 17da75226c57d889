"""Other ways to run than the default equal one process too: meshes, offload, dtypes, the loop's parts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.config.schema import PrecisionConfig, PrefetchConfig
from shardwise.diagnosing.parity import Task, bind_batch, bind_loss
from shardwise.models.random_state import seed_everything
from tests.ranks import ranks
from tests.zoo import Case, cases
from tests.zoo.checking import check_parity, mesh_of, sharded

PAIR = ("tutorial", "bagel")
# float32: sums over ranks and micro-steps are taken in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
BFLOAT16 = PrecisionConfig(param_dtype="bfloat16", reduce_dtype="float32")
MODES: dict[str, dict[str, Any]] = {
    "keep_gathered": {"reshard_after_forward": False},
    "reshard_root_too": {"reshard_after_forward": True},
    "offload": {"offload": True},
    "prefetch": {"prefetch": PrefetchConfig(forward=2, backward=2)},
    "first_dim": {"shard_dim": "first"},
    "children": {"group_by": "children"},
    "root_only": {"group_by": "root"},
    "bfloat16": {"precision": BFLOAT16},
}


def with_options(name: str, **options: Any) -> Case:
    case = cases("hard_cases")[name]
    return replace(case, config=replace(case.config, **options))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PAIR)
@ranks(2)
def test_each_option_equals_one_process(rank: int, name: str, mode: str):
    result = check_parity(with_options(name, **MODES[mode]), mesh_of(2))
    assert result.tolerance == (0.1 if mode == "bfloat16" else 1e-5)


@pytest.mark.parametrize("name", [*PAIR, "openpi", "batch_norm", "tied_across"])
@ranks(4)
def test_hybrid_sharding_equals_one_process(rank: int, name: str):
    check_parity(cases("hard_cases")[name], mesh_of(2, 2))


@pytest.mark.parametrize("name", [*PAIR, "openpi", "used_twice"])
@ranks(4)
def test_resharding_to_half_the_ranks_equals_one_process(rank: int, name: str):
    check_parity(with_options(name, reshard_after_forward=2), mesh_of(4))


@pytest.mark.parametrize("name", PAIR)
@ranks(4)
def test_hybrid_sharding_with_offload_equals_one_process(rank: int, name: str):
    check_parity(with_options(name, offload=True), mesh_of(2, 2))


def task_of(case: Case) -> Task:
    return Task(
        make_batch=bind_batch(case.make_batch),
        loss=bind_loss(case.loss),
        seed=0,
        num_ranks=dist.get_world_size(),
        device=torch.device("cpu"),
    )


def one_process(case: Case) -> nn.Module:
    seed_everything(0)
    return case.build()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Linear in the gradient: a wrong factor shows, and rounding is not magnified as by Adam."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def assert_same_parameters(model: nn.Module, reference: nn.Module) -> None:
    ours = dict(model.named_parameters())
    for name, theirs in reference.named_parameters():
        parameter = ours[name]
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(
            parameter.full_tensor(), theirs, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


def reference_backward(task: Task, model: nn.Module, first: int, num_micro_steps: int) -> None:
    """Gradients summed over micro-steps and averaged over ranks, in one process."""
    for micro_step in range(num_micro_steps):
        for rank in range(task.num_ranks):
            (task.loss_of(model, rank, first + micro_step) / task.num_ranks).backward()


def check_accumulation(name: str, mode: Any, sizes: tuple[int, ...], rank: int) -> None:
    case, micro_steps = cases("hard_cases")[name], 3
    task, reference = task_of(case), one_process(case)
    model, _ = sharded(case, mesh_of(*sizes))
    ours, theirs = sgd(model), sgd(reference)
    for step in range(2):
        reference_backward(task, reference, step * micro_steps, micro_steps)
        for micro_step in range(micro_steps):
            with shardwise.accumulate(model, micro_step, micro_steps, mode=mode):
                task.loss_of(model, rank, step * micro_steps + micro_step).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)


@pytest.mark.parametrize("mode", ["comm", "memory", "hsdp"])
@pytest.mark.parametrize("name", PAIR)
@ranks(2)
def test_accumulation_equals_one_process(rank: int, name: str, mode: str):
    check_accumulation(name, mode, (2,), rank)


@pytest.mark.parametrize("mode", ["comm", "memory", "hsdp"])
@ranks(4)
def test_accumulation_under_hybrid_sharding_equals_one_process(rank: int, mode: str):
    check_accumulation("tutorial", mode, (2, 2), rank)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", [*PAIR, "scalars"])
@ranks(2)
def test_clipping_equals_one_process(rank: int, name: str, offload: bool):
    case = with_options(name, offload=offload)
    task, reference = task_of(case), one_process(case)
    model, _ = sharded(case, mesh_of(2))
    ours, theirs = sgd(model), sgd(reference)
    for step in range(3):
        reference_backward(task, reference, step, 1)
        task.loss_of(model, rank, step).backward()
        norm: Tensor = shardwise.clip_grad_norm_(model.parameters(), 0.05)
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        assert expected > 0.05, "nothing would be clipped"
        assert type(norm) is torch.Tensor
        torch.testing.assert_close(norm, expected, **TOLERANCE)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)


@pytest.mark.parametrize("name", PAIR)
@ranks(2)
def test_moving_average_equals_one_process(rank: int, name: str):
    case, decay = cases("hard_cases")[name], 0.9
    task, reference = task_of(case), one_process(case)
    model, _ = sharded(case, mesh_of(2))
    average = shardwise.EMA(model, decay)
    expected = {name: p.detach().clone() for name, p in reference.named_parameters() if p.requires_grad}
    ours, theirs = sgd(model), sgd(reference)
    for step in range(3):
        reference_backward(task, reference, step, 1)
        task.loss_of(model, rank, step).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        average.update()
        for key, parameter in reference.named_parameters():
            if key in expected:
                expected[key].lerp_(parameter.detach(), 1 - decay)
    with average.swap():
        held: dict[str, Any] = dict(model.named_parameters())
        for key, theirs_averaged in expected.items():
            torch.testing.assert_close(held[key].full_tensor(), theirs_averaged, **TOLERANCE)
    assert_same_parameters(model, reference)
