"""What a constructor call asks for, read without ranks: strategies, dtypes, devices, what is ignored."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, ShardingStrategy

from shardwise.errors import ConfigError
from shardwise.fsdp1 import BackwardPrefetch, initialising
from shardwise.fsdp1.initialising import Settings, find_device, find_ignored, initialise_unit, read_settings, warn_once

PRE = BackwardPrefetch.BACKWARD_PRE
BF16 = torch.bfloat16


def settings(**given: object) -> Settings:
    asked = {"sharding_strategy": None, "cpu_offload": None, "backward_prefetch": PRE, "mixed_precision": None}
    return read_settings(**(asked | given))


@pytest.mark.parametrize(
    ("strategy", "reshard"),
    [
        (None, None),
        (ShardingStrategy.FULL_SHARD, None),
        (ShardingStrategy.HYBRID_SHARD, None),
        (ShardingStrategy.SHARD_GRAD_OP, False),
        (ShardingStrategy._HYBRID_SHARD_ZERO2, False),
        (ShardingStrategy.NO_SHARD, False),
    ],
)
def test_strategies_say_what_is_freed_after_forward(strategy: ShardingStrategy | None, reshard: bool | None):
    assert settings(sharding_strategy=strategy).options["reshard_after_forward"] is reshard


@pytest.mark.parametrize(
    ("precision", "param", "reduce"),
    [
        (None, None, None),
        (MixedPrecision(), None, None),
        (MixedPrecision(param_dtype=BF16), BF16, BF16),
        (MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32), BF16, torch.float32),
        (MixedPrecision(reduce_dtype=BF16), None, BF16),
    ],
)
def test_gradients_are_summed_in_the_compute_dtype_unless_told_otherwise(
    precision: MixedPrecision | None, param: torch.dtype | None, reduce: torch.dtype | None
):
    policy = settings(mixed_precision=precision).options["mp_policy"]
    assert (policy.param_dtype, policy.reduce_dtype, policy.cast_forward_inputs) == (param, reduce, False)


def test_offloading_is_pinned_only_where_there_is_an_accelerator():
    policy = settings(cpu_offload=CPUOffload(offload_params=True)).options["offload_policy"]
    assert isinstance(policy, CPUOffloadPolicy)
    assert policy.pin_memory == torch.accelerator.is_available()
    assert not isinstance(settings(cpu_offload=CPUOffload()).options["offload_policy"], CPUOffloadPolicy)


def test_what_is_different_is_said_once():
    initialising._SAID.clear()
    with pytest.warns(UserWarning, match="keep_low_precision_grads"):
        settings(mixed_precision=MixedPrecision(keep_low_precision_grads=True))
    settings(mixed_precision=MixedPrecision(keep_low_precision_grads=True))
    with pytest.warns(UserWarning, match="shardwise.fsdp1: a: b"):
        warn_once("a", "b")


def test_a_strategy_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="choose among FULL_SHARD"):
        settings(sharding_strategy="FULL_SHARD")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="says what happens without an accelerator")
@pytest.mark.parametrize("device_id", [None, 0, torch.device("cpu"), "cpu"])
def test_a_machine_without_an_accelerator_computes_on_its_cpu(device_id: int | torch.device | None):
    assert find_device(device_id, None, nn.Linear(2, 2)) == torch.device("cpu")


def test_ignored_modules_bring_all_they_hold():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    ignored = find_ignored(model, [model[0]], None, [])
    assert ignored.parameters == set(model[0].parameters())
    assert ignored.modules == set(model[0].modules())
    by_parameter = find_ignored(model, None, [model[1].bias], [])
    assert (by_parameter.parameters, by_parameter.modules) == ({model[1].bias}, set())
    with pytest.raises(ConfigError, match="both are given"):
        find_ignored(model, [model[0]], [model[1]], [])


def test_ties_survive_initialisation_from_meta():
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3, bias=False)})
        model["b"].weight = model["a"].weight
    initialise_unit(model, torch.device("cpu"), set(), set(), None)
    assert model["a"].weight is model["b"].weight
    assert not model["a"].weight.is_meta
