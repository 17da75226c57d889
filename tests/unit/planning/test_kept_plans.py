"""The plans of many small models, to the letter but for their reasons."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import compat
from shardwise.models.llama import SHAPES, Llama
from shardwise.planning.plan import PlannedParameter
from tests.golden import same_as_kept
from tests.zoo import cases

HARD = cases("hard_cases")
PROSE = {"reason", "reasons", "warnings"}


def told(thing: Any) -> dict[str, Any]:
    """What differs from the default; reasons are for people."""
    found = {}
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        if field.name not in PROSE and value != field.default:
            found[field.name] = value
    return found


def parameter_line(parameter: Any) -> str:
    given = told(parameter)
    shape = "x".join(map(str, given.pop("shape")))
    rest = [f"{name}={value}" for name, value in given.items() if name not in ("fqn", "dtype")]
    num_reasons = [f"reasons={len(parameter.reason.split('; '))}"] if parameter.reason else []
    return " ".join([given["fqn"], shape, given["dtype"], *rest, *num_reasons])


def plan_lines(plan: sw.Plan) -> dict[str, Any]:
    assert sw.Plan.from_json(plan.to_json()) == plan
    whole = told(plan)
    for name in ("groups", "replicated", "ignored"):
        whole.pop(name, None)
    groups = []
    for group in plan.groups:
        given = told(group)
        lines = [parameter_line(parameter) for parameter in given.pop("parameters", ())]
        assert all(plan.group_of(parameter.fqn) is group for parameter in group.parameters)
        assert group.reason
        groups.append([" ".join(f"{name}={value}" for name, value in given.items()), *lines])
    return {
        "summary": str(plan).splitlines()[0],
        "whole": " ".join(f"{name}={value}" for name, value in whole.items()),
        "bytes": [plan.num_bytes, plan.bytes_per_rank],
        "groups": groups,
        "outside": [parameter_line(parameter) for parameter in (*plan.replicated, *plan.ignored)],
        "num_warnings": len(plan.warnings),
        "num_reasons": len(plan.reasons),
    }


def planned(build: Callable[[], nn.Module], config: sw.ShardConfig, mesh: sw.MeshConfig) -> dict[str, Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan_lines(sw.plan(build(), config, mesh=mesh))


@pytest.mark.parametrize("name", sorted(HARD))
def test_plans_of_hard_cases(name: str):
    case = HARD[name]
    if name == "complex" and not compat.SPLITS_GROUPS:
        pytest.skip("before torch 2.12 a module has one group, and complex parameters beside real ones are replicated")
    same_as_kept("plans", name, planned(case.build, case.config, sw.MeshConfig(shard=4, device="cpu")))


MIXED = sw.PrecisionConfig(param_dtype="bfloat16", reduce_dtype="float32")
SETTINGS: dict[str, tuple[sw.ShardConfig, sw.MeshConfig]] = {
    "default": (sw.ShardConfig(), sw.MeshConfig(device="cpu")),
    "hsdp": (sw.ShardConfig(), sw.MeshConfig(shard=4, replicate=2, device="cpu")),
    "cuda": (sw.ShardConfig(), sw.MeshConfig(shard=8, device="cuda")),
    "cuda-hsdp": (sw.ShardConfig(), sw.MeshConfig(shard=3, replicate=2, device="cuda")),
    "mixed": (sw.ShardConfig(precision=MIXED), sw.MeshConfig(shard=2, device="cpu")),
    "cuda-mixed": (sw.ShardConfig(precision=MIXED), sw.MeshConfig(shard=2, device="cuda")),
    "ignored": (sw.ShardConfig(ignored=("model.norm.weight",)), sw.MeshConfig(shard=2, device="cpu")),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_plans_by_settings(name: str):
    config, mesh = SETTINGS[name]
    same_as_kept("plans", f"llama, {name}", planned(lambda: Llama(SHAPES["llama3-debug"]), config, mesh))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int64,
        torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    ],
    ids=str,
)  # fmt: skip
def test_bytes_of_every_dtype(dtype: torch.dtype):
    parameter = PlannedParameter(fqn="w", shape=(5, 3), dtype=str(dtype).removeprefix("torch."))
    assert parameter.numel == 15
    assert parameter.num_bytes == 15 * torch.empty((), dtype=dtype).element_size()
    assert parameter.bytes_per_rank(2) == 9 * torch.empty((), dtype=dtype).element_size(), "padded to six rows"
    assert parameter.bytes_per_rank(8) == 3 * torch.empty((), dtype=dtype).element_size()


def test_bytes_of_parameters_that_are_not_split():
    for placement in ("replicate", "ignore"):
        assert PlannedParameter(fqn="w", shape=(4,), dtype="float32", placement=placement).bytes_per_rank(4) == 16
    assert PlannedParameter(fqn="w", shape=(), dtype="float32").bytes_per_rank(4) == 4
    assert PlannedParameter(fqn="w", shape=(0, 3), dtype="float32").bytes_per_rank(4) == 0
    assert PlannedParameter(fqn="w", shape=(4, 6), dtype="float32", shard_dim=1).bytes_per_rank(4) == 2 * 4 * 4
