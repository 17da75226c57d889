"""prepare_fully_shard on real ranks: it trains as one process does, whatever spelling the settings have."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecision, ShardingStrategy

import shardwise as sw
from shardwise.planning.plan import Plan
from shardwise.sharding.registry import sharded_state
from tests.by_hand import Block, Tiny, assert_same, full, loss_of, tiny, tokens
from tests.ranks import ranks


class Composed(Tiny):
    """Says itself what its groups are, as Composer's models do. Its embedding and head are tied."""

    def fsdp_wrap_fn(self, module: nn.Module) -> Any:
        if isinstance(module, Block):
            return {"reshard_after_forward": False}
        return isinstance(module, nn.Embedding | nn.Linear)


def composed() -> Composed:
    torch.manual_seed(0)
    return Composed()


def plan_of(model: nn.Module) -> Plan:
    state = sharded_state(model)
    assert state is not None
    return state.plan


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[list[Tensor]]) -> dict[str, Tensor]:
    """A step for each list of batches, whose gradients are averaged."""
    for batch_of in batches:
        optimizer.zero_grad()
        for batch in batch_of:
            (loss_of(model, batch) / len(batch_of)).backward()
        optimizer.step()
    return {name: full(parameter.detach()) for name, parameter in model.named_parameters()}


def trained_alone(model: nn.Module, num_ranks: int) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return train(model, optimizer, [[tokens(rank, step) for rank in range(num_ranks)] for step in range(3)])


@pytest.mark.parametrize(
    "config",
    [
        None,
        sw.ShardConfig(block_classes=("Block",)),
        {"sharding_strategy": "FULL_SHARD", "mixed_precision": "DEFAULT", "use_orig_params": True},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "forward_prefetch": True, "cpu_offload": True},
        {"auto_wrap": False, "mixed_precision": "FULL", "limit_all_gathers": True},
        {"ignored_modules": ["blocks.1"], "precision": "fp32", "mixed_precision": "PURE"},
    ],
)
@pytest.mark.parametrize("build", [tiny, composed])
@ranks(2)
def test_three_steps_equal_one_process_with_an_optimizer_built_before(rank: int, build: Any, config: Any) -> None:
    model = build()
    expected = trained_alone(model, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepared = sw.prepare_fully_shard(model, optimizer, config)
    assert prepared is model
    assert isinstance(prepared, FSDPModule)
    assert_same(train(model, optimizer, [[tokens(rank, step)] for step in range(3)]), expected)


@ranks(2)
def test_the_groups_are_those_the_model_asks_for_and_ties_go_to_the_group_around(rank: int) -> None:
    model = sw.prepare_fully_shard(composed())
    plan = plan_of(model)
    groups = {group.name: group for group in plan.groups}
    inner = {f"blocks.{index}.{name}" for index in range(2) for name in ("up", "down")}
    assert groups.keys() == {"blocks.0", "blocks.1", "frozen", "(root)", *inner}
    assert groups["blocks.0"].reshard_after_forward is False
    assert groups["blocks.0.up"].reshard_after_forward is True
    assert "embedding.weight" in {parameter.fqn for parameter in groups["(root)"].parameters}
    assert any("embedding.weight = head.weight" in reason for reason in plan.reasons)
    assert model.head.weight is model.embedding.weight


@ranks(2)
def test_the_config_comes_before_the_model(rank: int) -> None:
    plan = plan_of(sw.prepare_fully_shard(composed(), None, {"block_classes": ["Block"]}))
    assert {"blocks.0", "blocks.1"} < {group.name for group in plan.groups}
    assert "blocks.0.up" not in {group.name for group in plan.groups}
    assert any("not asked" in reason for reason in plan.reasons)


@ranks(2)
def test_several_optimizers_are_pointed_at_the_shards(rank: int) -> None:
    model = tiny()
    halves = [torch.optim.SGD(model.blocks.parameters(), lr=0.1), torch.optim.SGD([model.gain], lr=0.1)]
    before = copy.deepcopy(model)
    sw.prepare_fully_shard(model, halves)
    loss_of(model, tokens(rank)).backward()
    for optimizer in halves:
        optimizer.step()
    for name in ("gain", "blocks.0.up.weight"):
        assert not torch.equal(full(model.get_parameter(name)), before.get_parameter(name)), name
    assert torch.equal(full(model.embedding.weight), before.embedding.weight)


@ranks(2)
def test_explanations_of_settings_stand_in_the_plan(rank: int) -> None:
    config = {"limit_all_gathers": True, "verbose": False, "keep_low_precision_grads": True}
    with pytest.warns(UserWarning, match="keep_low_precision_grads: "):
        plan = plan_of(sw.prepare_fully_shard(tiny(), None, config))
    for key in ("limit_all_gathers", "verbose"):
        assert sum(reason.startswith(f"{key}: ") for reason in plan.reasons) == 1
    assert any(warning.startswith("keep_low_precision_grads: ") for warning in plan.warnings)


@ranks(2)
def test_mixed_precision_reaches_the_groups_and_buffers(rank: int) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    model = sw.prepare_fully_shard(tiny(), None, {"mixed_precision": precision})
    assert {(group.param_dtype, group.reduce_dtype) for group in plan_of(model).groups} == {("bfloat16", "float32")}
    assert model.scale.dtype is torch.bfloat16
    loss_of(model, tokens(rank)).backward()
    assert model.blocks[0].up.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@ranks(4)
def test_hybrid_sharding_is_built_from_degrees(rank: int, strategy: str) -> None:
    model = tiny()
    expected = trained_alone(model, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = {
        "sharding_strategy": strategy,
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": -1,
    }
    sw.prepare_fully_shard(model, optimizer, config)
    plan = plan_of(model)
    assert plan.axes == (("replicate", 2), ("shard", 2))
    assert plan.groups[0].reshard_after_forward is (strategy == "HYBRID_SHARD")
    assert_same(train(model, optimizer, [[tokens(rank, step)] for step in range(3)]), expected)


@ranks(4)
def test_a_mesh_without_names_is_read_as_fsdp1_reads_it(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model = sw.prepare_fully_shard(tiny(), None, {"sharding_strategy": 4, "device_mesh": mesh})
    assert plan_of(model).axes == (("replicate", 2), ("shard", 2))


@ranks(4)
def test_a_hybrid_mesh_contradicts_full_shard(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(sw.ConfigError, match="FULL_SHARD shards over all ranks, but the mesh has 2 copies"):
        sw.prepare_fully_shard(tiny(), None, {"sharding_strategy": "FULL_SHARD", "device_mesh": mesh})


@ranks(2)
def test_hybrid_sharding_on_a_mesh_of_one_axis_is_refused(rank: int) -> None:
    config = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": sw.init_distributed()}
    with pytest.raises(sw.ConfigError, match="HYBRID_SHARD needs a mesh with a replicate axis") as raised:
        sw.prepare_fully_shard(tiny(), None, config)
    assert "data_parallel_replicate_degree" in str(raised.value)


@pytest.mark.parametrize("elsewhere", ["other values", "meta"])
@ranks(2)
def test_sync_module_states_sends_rank_0s_weights_and_buffers(rank: int, elsewhere: str) -> None:
    expected = tiny(seed=0)
    if rank == 0:
        model = tiny(seed=0)
    elif elsewhere == "meta":
        with torch.device("meta"):
            model = Tiny()
    else:
        model = tiny(seed=7)
        model.scale.zero_()
    sw.prepare_fully_shard(model, None, {"sync_module_states": True})
    for name, parameter in expected.named_parameters():
        assert torch.equal(full(model.get_parameter(name)), parameter), name
    assert torch.equal(model.scale, expected.scale)
    assert model.head.weight is model.embedding.weight
    loss_of(model, tokens(rank)).backward()


@ranks(2)
def test_sync_needs_values_on_rank_0(rank: int) -> None:
    with torch.device("meta" if rank == 0 else "cpu"):
        model = Tiny()
    with pytest.raises(sw.ShardError, match="rank 0 has no values"):
        sw.prepare_fully_shard(model, None, {"sync_module_states": True})


@ranks(2)
def test_a_refused_config_changes_nothing(rank: int) -> None:
    model = tiny()
    config = {"sharding_strategy": "SOME_SHARD", "te_checkpoint_wrapper": True, "shardin_strategy": 1}
    with pytest.raises(sw.ConfigError, match="3 problems in the config of prepare_fully_shard"):
        sw.prepare_fully_shard(model, None, config)
    assert not isinstance(model, FSDPModule)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@ranks(2)
def test_a_config_of_another_kind_is_refused(rank: int) -> None:
    with pytest.raises(sw.ConfigError, match="the config is a int"):
        sw.prepare_fully_shard(tiny(), None, 1)
    with pytest.raises(sw.ConfigError, match="cannot read FULL_SHARD: no such file"):
        sw.prepare_fully_shard(tiny(), None, "FULL_SHARD")


@ranks(2)
def test_an_optimizer_of_another_model_is_refused(rank: int) -> None:
    with pytest.raises(sw.ShardError, match="are not parameters of Tiny"):
        sw.prepare_fully_shard(tiny(), torch.optim.SGD(tiny(1).parameters(), lr=0.1))
