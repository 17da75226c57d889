"""What earlier versions stored is read for ever: every sample, by every road, down to the last element."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.config.load import load
from tests.contract import samples
from tests.contract.command_line import run
from tests.contract.samples import NUM_RANKS, RUN_STEPS, SEED, STEP, Net, run_checkpoint
from tests.contract.store import STORED, stored_versions
from tests.ranks import ranks

VERSIONS = stored_versions()
# Whole runs: model, optimizer, schedule, average and extra values.
RUNS = (f"checkpoints/step-{STEP:08d}", f"converted/step-{STEP:08d}", "full.pt", "converted.pt")
WEIGHTS = ("weights", "weights.safetensors", "weights.pt", "converted-weights", "fsdp1-local", *RUNS)
LOOKED_AT = (*WEIGHTS, *(f"run/checkpoints/{run_checkpoint(Path(), kind).name}" for kind in RUN_STEPS), "run/export")

each_version = pytest.mark.parametrize("version", VERSIONS)


def test_samples_of_a_version_are_stored():
    assert VERSIONS


@each_version
@pytest.mark.parametrize("name", RUNS)
def test_run_loads_in_one_process(version: str, name: str):
    model = Net()
    optimizer = samples.make_optimizer(model)
    load_and_compare(STORED / version / name, model, optimizer)


@ranks(2)
@each_version
@pytest.mark.parametrize("name", RUNS)
def test_run_loads_on_two_ranks(rank: int, version: str, name: str):
    model, optimizer, _, _ = samples.sharded_run()
    load_and_compare(STORED / version / name, model, optimizer)


@ranks(2)
@each_version
def test_latest_checkpoint_brings_random_numbers_back(rank: int, version: str):
    model, optimizer, scheduler, average = samples.sharded_run()
    with sw.Checkpointer(STORED / version / "checkpoints") as checkpointer:
        assert checkpointer.latest() == STEP
        checkpointer.load(model=model, optimizers=optimizer, scheduler=scheduler, ema=average)
    assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(SEED + rank)))
    assert random.random() == random.Random(SEED + rank).random()


@each_version
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_load_in_one_process(version: str, name: str):
    load_and_compare_weights(STORED / version / name, Net(with_scalar=name != "fsdp1-local"))


@ranks(2)
@each_version
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_load_on_two_ranks(rank: int, version: str, name: str):
    torch.manual_seed(0)
    model = sw.shard(Net(with_scalar=name != "fsdp1-local"), mesh=sw.init_distributed(sw.MeshConfig(device="cpu")))
    load_and_compare_weights(STORED / version / name, model)


@each_version
@pytest.mark.parametrize("name", LOOKED_AT)
def test_commands_find_nothing_wrong(version: str, name: str):
    path = STORED / version / name
    inspected = run("ckpt", "inspect", path, "--format", "json")
    assert inspected.status == 0, inspected.output + inspected.errors
    assert json.loads(inspected.output)["tensors"]
    verified = run("ckpt", "verify", path, "--format", "json")
    assert verified.status == 0, verified.output + verified.errors
    graver = [finding for finding in json.loads(verified.output)["findings"] if finding["severity"] != "note"]
    assert not graver


@each_version
def test_others_read_the_files_too(version: str):
    folder = STORED / version
    expected = samples.expected_state(Net())
    full = torch.load(folder / "full.pt", weights_only=True)
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.load({"model": state}, checkpoint_id=folder / RUNS[0], no_dist=True)
    for found in (full["model"], state, torch.load(folder / "weights.pt", weights_only=True)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    stored = load_file(folder / "weights.safetensors")
    assert stored.keys() == expected.keys() - {"head.weight"}, "a tied tensor is stored once"
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stored.items())


@each_version
def test_plan_is_read(version: str):
    text = (STORED / version / "plan.json").read_text()
    plan = sw.Plan.from_json(text)
    assert plan.num_shards == NUM_RANKS
    assert {parameter.fqn for parameter in plan.parameters} == {name for name, _ in Net().named_parameters()}
    missing = list(not_in(json.loads(text), json.loads(plan.to_json())))
    assert not missing, "fields of the stored plan that a plan no longer has"


@ranks(2)
@each_version
@pytest.mark.parametrize("kind", RUN_STEPS)
def test_run_goes_on_from_each_format(rank: int, version: str, kind: str, tmp_path: Path):
    folder, steps = STORED / version, RUN_STEPS[kind] + 1
    changes = {
        "folder": tmp_path / "run",
        "data.source": folder / "text.txt",
        "checkpoint.resume": run_checkpoint(folder, kind),
        "training.steps": steps,
    }
    training = sw.fit(load(sw.RunConfig, folder / "run" / "config.yaml", [f"{k}={v}" for k, v in changes.items()]))
    assert (training.resumed_step, training.steps, training.num_ranks) == (RUN_STEPS[kind], steps, NUM_RANKS)


def load_and_compare(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a run and compare everything in it with what its names stand for."""
    scheduler, average = samples.make_scheduler(optimizer), sw.EMA(model, 0.5)
    with sw.Checkpointer(path.parent, rng=False) as checkpointer:
        step = checkpointer.load(path=path, model=model, optimizers=optimizer, scheduler=scheduler, ema=average)
        extra = checkpointer.extra
    assert step == (STEP if path.parent.name in ("checkpoints", "converted") or path.name == "converted.pt" else 0)
    compare_model(model)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert whole(state["step"]).item() == STEP, name
        for key in ("exp_avg", "exp_avg_sq"):
            expected = samples.expected_moment(name, key, tuple(parameter.shape))
            assert torch.equal(whole(state[key]), expected), f"{key} of {name}"
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [tuple(group["betas"]) for group in optimizer.param_groups] == [(0.8, 0.95)] * 2
    assert scheduler.last_epoch == STEP
    assert average.num_updates == 0
    for name, shadow in average.state_dict()["shadow"].items():
        assert torch.equal(whole(shadow), samples.expected_average(name, tuple(shadow.shape))), f"average of {name}"
    expected_extra = samples.expected_extra()
    assert torch.equal(extra.pop("tensor"), expected_extra.pop("tensor"))
    assert extra == expected_extra
    assert type(extra["pair"]) is tuple


def load_and_compare_weights(path: Path, model: nn.Module) -> None:
    report = sw.load_weights(model, path)
    assert not report.missing
    assert not report.unexpected
    compare_model(model)


def compare_model(model: nn.Module) -> None:
    for name, expected in samples.expected_state(model).items():
        tensor = whole(model.state_dict()[name])
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def not_in(stored: object, now: object, where: str = "plan") -> list[str]:
    """Places at which `now` has not what was stored; it may have more."""
    if isinstance(stored, dict) and isinstance(now, dict):
        return [line for name in stored for line in not_in(stored[name], now.get(name, "absent"), f"{where}.{name}")]
    if isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        return [
            line
            for index, (a, b) in enumerate(zip(stored, now, strict=True))
            for line in not_in(a, b, f"{where}[{index}]")
        ]
    return [] if stored == now else [f"{where}: {stored!r}, now {now!r}"]
