"""Compute dtypes follow the hardware, reduction is in 32 bits, mixed storage is split."""

import pytest
import torch
from torch import nn

from shardwise.config.schema import GroupOverride, MeshConfig, PrecisionConfig, ShardConfig
from shardwise.planning.planner import make_plan, plan
from shardwise.planning.settings import choose_compute, choose_reduce, majority, widest
from tests.toy_models import Block, Stack

TWO_RANKS = MeshConfig(shard=2, device="cpu")
TWO_GPUS = MeshConfig(shard=2, device="cuda")


@pytest.mark.parametrize(
    ("device", "capability", "storage", "dtype", "scaler"),
    [
        ("cuda", (9, 0), ["float32"], "bfloat16", False),
        ("cuda", (8, 0), ["float32"], "bfloat16", False),
        ("cuda", (7, 5), ["float32"], "float16", True),
        ("cuda", (9, 0), ["bfloat16", "float32"], None, False),
        ("cuda", (9, 0), ["float64"], None, False),
        ("cpu", None, ["float32"], None, False),
    ],
)
def test_hardware_chooses_the_compute_dtype(device, capability, storage, dtype, scaler):
    chosen = choose_compute(PrecisionConfig(), device, capability, storage)
    assert (chosen.dtype, chosen.grad_scaler) == (dtype, scaler)
    assert chosen.reason


def test_what_the_user_asks_for_wins():
    assert choose_compute(PrecisionConfig(param_dtype="float16"), "cpu", None, ["float32"]).grad_scaler
    assert choose_compute(PrecisionConfig(param_dtype="storage"), "cuda", (9, 0), ["float32"]).dtype is None


def test_reduction_is_written_out_in_32_bits_or_wider():
    assert choose_reduce(PrecisionConfig(), ["bfloat16"]) == "float32"
    assert choose_reduce(PrecisionConfig(), ["float64"]) == "float64"
    assert choose_reduce(PrecisionConfig(reduce_dtype="bfloat16"), ["float32"]) == "bfloat16"
    assert choose_reduce(PrecisionConfig(), ["complex64"]) is None


def test_majority_counts_elements_and_widest_holds_all():
    assert majority([("bfloat16", 100), ("float32", 40), ("float32", 40)]) == "bfloat16"
    assert widest(["bfloat16", "float32"]) == "float32"
    assert widest(["bfloat16", "float16"]) == "float32"


def test_an_old_gpu_is_planned_with_float16_and_a_scaler():
    result = make_plan(Stack(nn.ModuleList([Block()])), ShardConfig(), TWO_GPUS, None, capability=(7, 0))
    assert result.grad_scaler
    assert {group.param_dtype for group in result.groups} == {"float16"}
    assert {group.reduce_dtype for group in result.groups} == {"float32"}


def half_stored() -> Stack:
    """bfloat16 matrices, float32 norms: openpi's choice."""
    model = Stack(nn.ModuleList([Block(), Block()]))
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.to(torch.bfloat16)
    return model


def test_trainable_dtypes_are_split_into_groups_of_one():
    result = plan(half_stored(), mesh=TWO_RANKS)
    for group in result.groups:
        assert len({p.dtype for p in group.parameters if p.trainable}) <= 1
    split = next(group for group in result.groups if group.modules == ("blocks.0.norm",))
    assert split.kind == "storage"
    assert "one more all-gather" in split.reason


def test_frozen_dtypes_may_mix():
    model = half_stored()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(False)
    assert all(group.kind != "storage" for group in plan(model, mesh=TWO_RANKS).groups)


def test_upcast_stores_all_in_the_widest_dtype():
    result = plan(half_stored(), ShardConfig(mixed_storage="upcast"), mesh=TWO_RANKS)
    block = next(group for group in result.groups if group.modules == ("blocks.0",))
    assert {p.dtype for p in block.parameters} == {"float32"}
    assert {p.upcast_from for p in block.parameters} == {None, "bfloat16"}


def test_two_dtypes_in_one_leaf_are_replicated():
    model = Stack(nn.ModuleList([Block(), Block()]))
    model.head.to(torch.bfloat16)
    model.head.bias = nn.Parameter(torch.zeros(64))
    result = plan(model, ShardConfig(allow_16bit_storage=True), mesh=TWO_RANKS)
    assert [p.fqn for p in result.replicated] == ["head.bias"]


def test_16_bit_masters_are_warned_of_unless_allowed():
    model = Stack(nn.ModuleList([Block()])).to(torch.bfloat16)
    assert "stored in bfloat16" in plan(model, mesh=TWO_RANKS).warnings[0]
    assert not plan(model, ShardConfig(allow_16bit_storage=True), mesh=TWO_RANKS).warnings
    assert not plan(model.requires_grad_(False), mesh=TWO_RANKS).warnings


def test_an_override_sets_an_island_apart():
    island = GroupOverride(pattern="*.norm", param_dtype="float32", output_dtype="bfloat16")
    config = ShardConfig(precision=PrecisionConfig(param_dtype="bfloat16"), overrides=(island,))
    result = plan(Stack(nn.ModuleList([Block(), Block()])), config, mesh=TWO_RANKS)
    norm = next(group for group in result.groups if "blocks.0.norm" in group.modules)
    block = next(group for group in result.groups if group.modules == ("blocks.0",))
    assert (norm.kind, norm.param_dtype, norm.output_dtype) == ("island", "float32", "bfloat16")
    assert block.param_dtype == "bfloat16"
