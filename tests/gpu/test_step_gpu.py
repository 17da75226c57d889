"""What only a GPU shows of a step: memory that really runs out, numbers that are read without waiting, Muon's bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shardwise.compat import LocalGradScaler
from shardwise.config.run import OptimizerConfig
from shardwise.distributed.local_ranks import start_local
from shardwise.training.metrics import peak_flops
from shardwise.training.objective import allows_step
from shardwise.training.optimizers import build_optimizer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_memory_that_runs_out_on_one_of_two_ranks():
    for found in start_local("tests.gpu.step_jobs:run_out_for_real", 2):
        assert found["saved"] > 0, "halving must save memory for this test to mean anything"
        assert (found["size"], found["halvings"]) == (8, 1)
        assert found["worst"] < 1e-4
        assert found["left"] <= 0


def test_muon_gives_the_same_bits_on_two_ranks():
    found = start_local("tests.gpu.step_jobs:muon_on_shards", 2)
    assert [each["differing"] for each in found] == [0, 0], found


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_bad_step_is_left_out_without_waiting(name: str, no_waiting: None):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))]).cuda()
    optimizer = build_optimizer(model, OptimizerConfig(name=name))
    weights = []
    for loss in (1.0, math.nan, 1.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, loss)
        value, norm = torch.tensor(loss, device="cuda"), torch.tensor(1.0, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        assert allows_step(optimizer, value, norm)
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert all(a.isfinite().all() for a in weights[2])
    assert not torch.equal(weights[1][0], weights[2][0])


def test_a_bad_step_is_known_where_it_is_waited_for():
    optimizer = build_optimizer(nn.Linear(8, 8).cuda(), OptimizerConfig())
    loss, norm = torch.tensor(math.nan, device="cuda"), torch.tensor(1.0, device="cuda")
    assert not allows_step(optimizer, loss, norm, wait=True), "an average of the weights would move"


class Agreeing(LocalGradScaler):
    """Plays a rank whose peer has found a value that is not finite."""

    num_calls = 0

    def agree(self, found_inf: torch.Tensor) -> None:
        """Stands for the all-reduce."""
        self.num_calls += 1
        found_inf.add_(1)


@pytest.mark.parametrize("devices", [["cuda"], ["cpu"], ["cpu", "cuda"]], ids="-".join)
def test_ranks_agree_once_whatever_devices_have_gradients(devices: list[str]):
    parameters = [nn.Parameter(torch.ones(2, device=device)) for device in devices]
    scaler, optimizer = Agreeing("cuda", init_scale=4.0), torch.optim.SGD(parameters, lr=1.0)
    scaler.scale(torch.ones((), device="cuda"))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    scaler.step(optimizer)
    assert scaler.num_calls == 1
    assert all(bool((parameter == 1).all()) for parameter in parameters), "the peer's finding skips the step here"


def test_step_metrics_are_read_one_step_late_without_waiting():
    assert start_local("tests.gpu.step_jobs:read_metrics_without_waiting", 1) == [
        {"read": [None, 1, 2, 3], "losses": [2.0, 3.0, 4.0]}
    ]


def test_the_device_is_known_or_has_no_peak():
    peak = peak_flops("cuda")
    assert peak is None or 1e13 < peak < 1e16
    if "H200" in torch.cuda.get_device_name():
        assert peak == 989e12
