"""Gradients of shardwise.fsdp1: hooks that reduce them, the scaler, accumulation that ends early."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as RealScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.errors import ConfigError
from shardwise.fsdp1 import FullyShardedDataParallel as FSDP
from shardwise.fsdp1.sharded_grad_scaler import ShardedGradScaler
from tests.by_hand import Block, assert_same, full_gradients, loss_of, tiny, tokens
from tests.collectives import count_collectives
from tests.fsdp1_pairs import EXACT, OURS, REAL, both, full_state, model_for, wrapped
from tests.ranks import ranks

BLOCKS = ModuleWrapPolicy({Block})


def whole_gradients(unit: nn.Module) -> dict[str, torch.Tensor]:
    return {name.replace("_fsdp_wrapped_module.", ""): grad for name, grad in full_gradients(unit).items()}


def reduced(unit: Any, rank: int) -> dict[str, torch.Tensor]:
    loss_of(unit, tokens(rank)).backward()
    return whole_gradients(unit)


def halving_hook(state: list[int], grad: torch.Tensor, output: torch.Tensor) -> None:
    """Half of the average, to see that it was this hook which reduced."""
    state.append(grad.numel())
    compat.reduce_scatter_flat(output, grad.div_(2 * dist.get_world_size()), dist.group.WORLD)


@ranks(2)
def test_torchs_own_hooks_reduce_as_ever(rank: int):
    plain = reduced(wrapped(OURS, tiny(), auto_wrap_policy=BLOCKS), rank)
    for hook in (default_hooks.reduce_scatter_hook, default_hooks.allreduce_hook):
        unit = wrapped(OURS, tiny(), auto_wrap_policy=BLOCKS)
        unit.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), hook)
        assert_same(reduced(unit, rank), plain)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@ranks(2)
def test_compressing_hooks_send_gradients_in_16_bits(rank: int, strategy: str):
    """FSDP1's own need an accelerator; reducing in that dtype is what they do."""
    chosen = ShardingStrategy[strategy]
    for hook, dtype in (
        (default_hooks.bf16_compress_hook, torch.bfloat16),
        (default_hooks.fp16_compress_hook, torch.float16),
    ):
        unit = wrapped(OURS, tiny(), auto_wrap_policy=BLOCKS, sharding_strategy=chosen)
        unit.register_comm_hook(default_hooks.LowPrecisionState(dist.group.WORLD), hook)
        expected = wrapped(
            OURS,
            tiny(),
            auto_wrap_policy=BLOCKS,
            sharding_strategy=chosen,
            mixed_precision=MixedPrecision(reduce_dtype=dtype),
        )
        ours, theirs = reduced(unit, rank), reduced(expected, rank)
        assert_same(ours, theirs)
        assert all(grad.dtype is torch.float32 for grad in ours.values())
        assert not torch.equal(ours["gain"], reduced(wrapped(OURS, tiny()), rank)["gain"])


@pytest.mark.parametrize("num_micro_steps", [1, 2])
@ranks(2)
def test_a_hook_of_the_script_does_the_reduction(rank: int, num_micro_steps: int):
    plain = reduced(wrapped(OURS, tiny(), auto_wrap_policy=BLOCKS), rank)
    unit, seen = wrapped(OURS, tiny(), auto_wrap_policy=BLOCKS), []
    unit.register_comm_hook(seen, halving_hook)
    ours = [reduced(unit, rank) for _ in range(num_micro_steps)]
    assert_same(ours[-1], {name: grad * num_micro_steps / 2 for name, grad in plain.items()})
    assert len(seen) == 3 * num_micro_steps


@ranks(4)
def test_hooks_that_have_no_place_are_refused(rank: int):
    mesh = init_device_mesh("cpu", (2, 2))
    hybrid = FSDP(tiny(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with pytest.raises(ConfigError, match="HYBRID_SHARD"):
        hybrid.register_comm_hook(None, default_hooks.reduce_scatter_hook)
    copies = FSDP(tiny(), sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(ConfigError, match="NO_SHARD"):
        copies.register_comm_hook(None, halving_hook)
    unit = FSDP(tiny())
    with pytest.raises(ConfigError, match="the hook is 3"):
        unit.register_comm_hook(None, 3)
    unit.register_comm_hook(None, default_hooks.reduce_scatter_hook)
    with pytest.raises(ConfigError, match="registered already"):
        unit.register_comm_hook(None, default_hooks.reduce_scatter_hook)


@pytest.mark.parametrize("bad_rank", [None, 1])
@ranks(2)
def test_the_scaler_skips_and_grows_as_fsdp1s_does(rank: int, bad_rank: int | None):
    def run(api: Any) -> Any:
        scaler = (RealScaler if api is REAL else ShardedGradScaler)("cpu", init_scale=8.0, growth_interval=2)
        unit = wrapped(api, model_for(api), auto_wrap_policy=BLOCKS, use_orig_params=True)
        optimizer = torch.optim.SGD(unit.parameters(), lr=0.1)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(unit, tokens(rank, step))
            if step == 1 and rank == bad_rank:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            unit.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, full_state(api, unit)

    real, ours = both(run)
    assert ours[0] == real[0]
    assert_same(ours[1], real[1])
    assert ours[0] == ([8.0, 16.0, 16.0, 32.0] if bad_rank is None else [8.0, 4.0, 4.0, 8.0])


@ranks(2)
def test_the_scaler_takes_plain_gradients_too(rank: int):
    """Ignored parameters have plain gradients beside sharded ones; an infinite one counts on every rank."""
    model = model_for(OURS)
    unit = FSDP(model, ignored_modules=[model.frozen])
    optimizer = torch.optim.SGD(unit.parameters(), lr=0.1)
    before = full_state(OURS, unit)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(unit, tokens(rank))).backward()
    if rank == 1:
        unit.frozen.weight.grad[0, 0] = float("nan")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert_same(full_state(OURS, unit), before)


@ranks(2)
def test_losses_keep_their_dtype_and_structure(rank: int):
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    assert scaler.scale(torch.tensor(2.0, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert scaler.scale((torch.tensor(1.0), [torch.tensor(2.0)])) == (torch.tensor(4.0), [torch.tensor(8.0)])
    off = ShardedGradScaler("cpu", enabled=False)
    assert off.scale(torch.tensor(1.0)).item() == 1.0


@ranks(2)
def test_zero_grad_drops_what_no_sync_left_unreduced(rank: int):
    def run(api: Any) -> Any:
        unit = wrapped(api, model_for(api), auto_wrap_policy=BLOCKS)
        optimizer = torch.optim.SGD(unit.parameters(), lr=0.1)
        with unit.no_sync():
            loss_of(unit, tokens(rank, 7)).backward()
        unit.zero_grad()
        loss_of(unit, tokens(rank)).backward()
        optimizer.step()
        return full_state(api, unit)

    real, ours = both(run)
    assert_same(ours, real)


@ranks(2)
def test_no_sync_reduces_nothing_until_it_is_left(rank: int):
    unit = wrapped(OURS, tiny(), auto_wrap_policy=BLOCKS)
    with unit.no_sync():
        with count_collectives(unit) as inside:
            loss_of(unit, tokens(rank)).backward()
        assert all(parameter.grad is None for parameter in unit.parameters())
    with count_collectives(unit) as outside:
        loss_of(unit, tokens(rank, 1)).backward()
    assert all(parameter.grad is not None for parameter in unit.parameters() if parameter.requires_grad)
    assert (inside.count("reduce_scatter"), outside.count("reduce_scatter")) == (0, 3)


@ranks(2)
def test_a_backward_outside_no_sync_reduces_although_forward_was_inside(rank: int):
    def run(api: Any) -> Any:
        unit = wrapped(api, model_for(api), auto_wrap_policy=BLOCKS)
        optimizer = torch.optim.SGD(unit.parameters(), lr=0.1)
        with unit.no_sync():
            loss = loss_of(unit, tokens(rank))
        loss.backward()
        optimizer.step()
        return full_state(api, unit)

    real, ours = both(run)
    assert_same(ours, real)


@ranks(2)
def test_gradients_are_sharded_and_average_over_ranks(rank: int):
    unit = wrapped(OURS, tiny(), auto_wrap_policy=BLOCKS)
    loss_of(unit, tokens(rank)).backward()
    assert all(isinstance(p.grad, DTensor) for p in unit.parameters() if p.requires_grad)
    single = tiny()
    for other in range(2):
        (loss_of(single, tokens(other)) / 2).backward()
    expected = {name: p.grad for name, p in single.named_parameters() if p.grad is not None}
    assert_same(whole_gradients(unit), expected, **EXACT)


@ranks(2)
def test_retain_graph_and_a_second_backward_add_up_as_in_fsdp1(rank: int):
    def run(api: Any) -> Any:
        unit = wrapped(api, model_for(api), auto_wrap_policy=BLOCKS, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        optimizer = torch.optim.SGD(unit.parameters(), lr=0.1)
        for step in range(2):
            loss_of(unit, tokens(rank, step)).backward()
        optimizer.step()
        return full_state(api, unit)

    real, ours = both(run)
    assert_same(ours, real)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ranks(2)
def test_gradients_between_forward_and_backward_are_those_of_the_shards(rank: int, strategy: str):
    """They are read, cleared by hand and shown whole by `summon_full_params`; the root stays unsharded for backward."""
    unit = wrapped(OURS, tiny(), auto_wrap_policy=BLOCKS, sharding_strategy=ShardingStrategy[strategy])
    first = reduced(unit, rank)
    loss = loss_of(unit, tokens(rank))
    assert all(isinstance(parameter, DTensor) for parameter in unit.parameters())
    assert_same(whole_gradients(unit), first)
    with FSDP.summon_full_params(unit, with_grads=True):
        shown = {name: each.grad for name, each in unit.named_parameters() if each.grad is not None}
        assert_same(shown, first)
    for parameter in unit.parameters():
        parameter.grad = None
    loss.backward()
    assert_same(whole_gradients(unit), first)
