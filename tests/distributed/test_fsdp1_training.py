"""shardwise.fsdp1 trains as FSDP1 does: the same losses, norms, weights and optimizer state, over its arguments."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from shardwise.fsdp1 import wrap as our_wrap
from tests.by_hand import Block, loss_of, tokens
from tests.fsdp1_pairs import COARSE, EXACT, OURS, assert_alike, both, model_for, trained, wrapped
from tests.ranks import ranks

BLOCKS = ModuleWrapPolicy({Block})


def by_class(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, Block)


def with_settings(module: nn.Module) -> bool | dict[str, Any]:
    """Not all of a model need have one strategy."""
    if isinstance(module, nn.Embedding | nn.Linear):
        return False
    return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if isinstance(module, Block) else False


POLICIES: dict[str, Any] = {
    "none": None,
    "classes": BLOCKS,
    "transformer": functools.partial(our_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "size": functools.partial(our_wrap.size_based_auto_wrap_policy, min_num_params=60),
    "lambda": functools.partial(our_wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm)),
    "function": by_class,
    "custom": CustomPolicy(with_settings),
    "or": functools.partial(
        our_wrap._or_policy,
        policies=[
            functools.partial(our_wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm)),
            functools.partial(our_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        ],
    ),
}


def names_of_units(unit: nn.Module, kind: type) -> list[str]:
    return [name for name, module in unit.named_modules() if isinstance(module, kind)]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@ranks(2)
def test_every_policy_wraps_and_trains_as_fsdp1(rank: int, policy: str, use_orig_params: bool):
    def run(api: Any) -> Any:
        model = model_for(api)
        if policy == "size":  # FSDP1 cannot split a tie over units, and the size would have it do so
            model.head = nn.Linear(6, 7, bias=False)
            nn.init.constant_(model.head.weight, 0.1)
        unit = wrapped(api, model, auto_wrap_policy=POLICIES[policy], use_orig_params=use_orig_params)
        return trained(api, unit, rank, clip=0.5), names_of_units(unit, api.FullyShardedDataParallel)

    (real, real_names), (ours, our_names) = both(run)
    assert our_names == real_names
    assert_alike(ours, real)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ranks(4)
def test_every_strategy_trains_as_fsdp1(rank: int, strategy: str):
    def run(api: Any) -> Any:
        chosen = ShardingStrategy[strategy]
        unit = wrapped(api, model_for(api), auto_wrap_policy=BLOCKS, sharding_strategy=chosen, use_orig_params=True)
        return trained(api, unit, rank, clip=0.5)

    real, ours = both(run)
    assert_alike(ours, real)


@pytest.mark.parametrize("given", ["mesh", "unnamed mesh", "groups"])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@ranks(4)
def test_hybrid_strategies_train_as_fsdp1(rank: int, strategy: str, given: str):
    names = ("replicate", "shard") if given == "mesh" else None
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    place: dict[str, Any] = {"device_mesh": mesh}
    if given == "groups":
        place = {"process_group": (mesh.get_group(1), mesh.get_group(0))}

    def run(api: Any) -> Any:
        settings = place | {"sharding_strategy": ShardingStrategy[strategy], "auto_wrap_policy": BLOCKS}
        unit = wrapped(api, model_for(api), **settings)
        assert dist.get_process_group_ranks(unit.process_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
        return trained(api, unit, rank, clip=0.5)

    real, ours = both(run)
    assert_alike(ours, real)


@ranks(2)
def test_no_shard_keeps_a_copy_on_every_rank(rank: int):
    for place in ({}, {"process_group": init_device_mesh("cpu", (1, 2)).get_group(1)}):
        unit = wrapped(OURS, model_for(OURS), sharding_strategy=ShardingStrategy.NO_SHARD, **place)
        assert all(parameter.to_local().shape == parameter.shape for parameter in unit.parameters())
        assert (unit.rank, unit.world_size) == (rank, 2)
        loss_of(unit, tokens(rank)).backward()


@ranks(4)
def test_a_group_of_some_ranks_shards_over_those_only(rank: int):
    group = init_device_mesh("cpu", (2, 2)).get_group(1)

    def run(api: Any) -> Any:
        unit = wrapped(api, model_for(api), process_group=group, auto_wrap_policy=BLOCKS)
        return trained(api, unit, rank)

    real, ours = both(run)
    assert_alike(ours, real)


PRECISIONS: dict[str, MixedPrecision] = {
    "all bf16": MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "bf16, reduced as computed": MixedPrecision(param_dtype=torch.bfloat16),
    "bf16, reduced in fp32": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "only reduced in bf16": MixedPrecision(reduce_dtype=torch.bfloat16),
    "cast at every unit": MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True),
    "fp32": MixedPrecision(torch.float32, torch.float32, torch.float32),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@ranks(2)
def test_every_precision_trains_as_fsdp1(rank: int, precision: str):
    def run(api: Any) -> Any:
        settings = {"mixed_precision": PRECISIONS[precision], "auto_wrap_policy": BLOCKS, "use_orig_params": True}
        return trained(api, wrapped(api, model_for(api), **settings), rank, clip=0.5)

    real, ours = both(run)
    # At two ranks nothing is summed in another order: even 16 bits give the same, bit for bit or nearly so.
    assert_alike(ours, real, **EXACT)


@pytest.mark.parametrize("precision", ["none", "bf16, reduced in fp32", "all bf16"])
@pytest.mark.parametrize("no_sync", [False, True])
@ranks(2)
def test_accumulation_trains_as_fsdp1(rank: int, no_sync: bool, precision: str):
    def run(api: Any) -> Any:
        settings = {"auto_wrap_policy": BLOCKS, "use_orig_params": True}
        unit = wrapped(api, model_for(api), mixed_precision=PRECISIONS.get(precision), **settings)
        return trained(api, unit, rank, micro_steps=3, no_sync=no_sync, clip=0.5)

    real, ours = both(run)
    # FSDP1 adds up unreduced gradients in 16 bits, FSDP2 in the reduce dtype.
    assert_alike(ours, real, **(COARSE if no_sync and precision == "bf16, reduced in fp32" else EXACT))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@ranks(2)
def test_clipping_gives_fsdp1s_norm(rank: int, norm_type: float):
    def run(api: Any) -> Any:
        unit = wrapped(api, model_for(api), auto_wrap_policy=BLOCKS)
        loss_of(unit, tokens(rank)).backward()
        return [unit.clip_grad_norm_(0.1, norm_type).item(), unit.clip_grad_norm_(0.1, norm_type).item()]

    real, ours = both(run)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(real), **EXACT)
    assert ours[1] < 0.1001 < ours[0]


def copies_of_blocks(module: nn.Module) -> bool | dict[str, Any]:
    return {"sharding_strategy": ShardingStrategy.NO_SHARD} if isinstance(module, Block) else False


@ranks(2)
def test_units_of_one_model_may_have_different_strategies(rank: int):
    def run(api: Any) -> Any:
        settings = {"auto_wrap_policy": CustomPolicy(copies_of_blocks), "use_orig_params": True}
        return trained(api, wrapped(api, model_for(api), **settings), rank, clip=0.5)

    real, ours = both(run)
    assert_alike(ours, real)


@ranks(2)
def test_offloading_trains_as_without(rank: int):
    """On the CPU it moves nothing; FSDP1 refuses it there."""
    plain = trained(OURS, wrapped(OURS, model_for(OURS), auto_wrap_policy=BLOCKS), rank, clip=0.5)
    settings = {"auto_wrap_policy": BLOCKS, "cpu_offload": CPUOffload(offload_params=True)}
    offloaded = trained(OURS, wrapped(OURS, model_for(OURS), **settings), rank, clip=0.5)
    assert_alike(offloaded, plain)


@pytest.mark.parametrize("use_reentrant", [False, True])
@ranks(2)
def test_units_inside_recomputed_modules_train_as_fsdp1(rank: int, use_reentrant: bool):
    """Checkpointing around a unit runs its forward again in backward, casts included."""
    implementation = CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT

    def run(api: Any) -> Any:
        model = model_for(api)
        precision = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
        unit = wrapped(api, model, auto_wrap_policy=BLOCKS, mixed_precision=precision)
        for index, block in enumerate(unit.module.blocks):
            unit.module.blocks[index] = checkpoint_wrapper(block, implementation)
        return trained(api, unit, rank)

    real, ours = both(run)
    assert_alike(ours, real)
