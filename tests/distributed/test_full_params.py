"""Full parameters: read, written back, discarded, on one rank or all, and streamed with bounded memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import ConfigError, ShardError
from shardwise.sharding.full_params import full_params, iter_full_tensors
from tests.by_hand import (
    Tiny,
    assert_same,
    full,
    loss_of,
    mesh_1d,
    mesh_2d,
    shard_by_hand,
    shard_module,
    tiny,
    tokens,
)
from tests.ranks import ranks

EXACT = {"atol": 0.0, "rtol": 0.0}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.detach()).clone() for name, p in model.named_parameters()}


def with_scalar(model: Tiny, mesh) -> Tiny:
    """Add a 0-dim parameter held whole on every rank, as shardwise keeps scalars."""
    whole = torch.tensor(0.25)
    placements = [Replicate()] * mesh.ndim
    model.register_parameter("scalar", nn.Parameter(DTensor.from_local(whole, mesh, placements)))
    return model


def settings_of(case: str) -> dict[str, Any]:
    return {
        "plain": {},
        "bf16": {"mp_policy": BF16},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "dim1": {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else Shard(0)},
    }[case]


@ranks(2)
@pytest.mark.parametrize("case", ["plain", "bf16", "offload", "dim1"])
@pytest.mark.parametrize("after_forward", [False, True])
def test_parameters_inside_are_full_and_plain(rank: int, case: str, after_forward: bool):
    """Also while the root stands gathered in its compute dtype: inside are the stored values."""
    reference = tiny()
    model = shard_by_hand(reference, mesh_1d(2), **settings_of(case))
    if after_forward:
        with torch.no_grad():
            model(tokens(rank))
    with full_params(model):
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        assert_same(values(model), values(reference), **EXACT)
        assert model.head.weight is model.embedding.weight
        assert not model.frozen.weight.requires_grad
        assert_same(dict(model.state_dict()), dict(reference.state_dict()), **EXACT)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert model.head.weight is model.embedding.weight


@ranks(4)
@pytest.mark.parametrize("writeback", [False, True])
@pytest.mark.parametrize("rank0_only", [False, True])
def test_changes_reach_every_shard_or_none(rank: int, writeback: bool, rank0_only: bool):
    reference = tiny()
    mesh = mesh_2d()
    model = with_scalar(shard_by_hand(reference, mesh), mesh)
    before = gathered(model)
    identities = [id(p) for p in model.parameters()]
    with full_params(model, writeback=writeback, rank0_only=rank0_only):
        assert all(p.is_meta == (rank0_only and rank > 0) for p in model.parameters())
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                parameter.mul_(2).add_(index)
    expected = before
    if writeback:
        expected = {name: 2 * old + index for index, (name, old) in enumerate(before.items())}
    assert_same(gathered(model), expected, **EXACT)
    assert [id(p) for p in model.parameters()] == identities, "optimizers must keep their parameters"
    reference_state = {name: expected[name] for name in values(reference)}
    reference.load_state_dict(reference_state, strict=False)
    torch.testing.assert_close(model(tokens(0)), reference(tokens(0)))


@ranks(2)
def test_changes_are_dropped_when_the_block_raises(rank: int):
    model = shard_by_hand(tiny(), mesh_1d(2))
    with pytest.raises(ZeroDivisionError), full_params(model, writeback=True):  # noqa: PT012
        nn.init.zeros_(model.embedding.weight)
        raise ZeroDivisionError
    assert_same(gathered(model), values(tiny()), **EXACT)
    loss_of(model, tokens(rank)).backward()


@ranks(2)
def test_error_on_one_rank_reaches_the_other_before_writing(rank: int):
    model = shard_by_hand(tiny(), mesh_1d(2))
    with pytest.raises((ZeroDivisionError, ShardError)), full_params(model, writeback=True):  # noqa: PT012
        nn.init.zeros_(model.embedding.weight)
        if rank == 1:
            raise ZeroDivisionError
    assert_same(gathered(model), values(tiny()), **EXACT)


@ranks(2)
def test_full_state_dict_loads_inside(rank: int):
    model, other = shard_by_hand(tiny(), mesh_1d(2)), tiny(seed=1)
    for assign in (False, True):
        with full_params(model, writeback=True):
            model.load_state_dict(other.state_dict(), assign=assign)
        assert_same(gathered(model), values(other), **EXACT)
        other = tiny(seed=2)
    loss_of(model, tokens(rank)).backward()


@ranks(2)
def test_forward_inside_is_refused_and_works_after(rank: int):
    model = shard_by_hand(tiny(), mesh_1d(2))
    with full_params(model):
        with pytest.raises(ShardError, match="inside full_params"):
            model(tokens(rank))
        assert model.head(torch.ones(1, 6)).shape == (1, 7), "a part that is no group runs on full parameters"
    torch.testing.assert_close(model(tokens(0)), tiny()(tokens(0)))


@ranks(2)
def test_replaced_parameter_is_written_back_unless_its_shape_changed(rank: int):
    model = shard_by_hand(tiny(), mesh_1d(2))
    new = torch.arange(36.0).view(6, 6)
    with full_params(model, writeback=True):
        model.frozen.weight = nn.Parameter(new.clone())
    torch.testing.assert_close(gathered(model)["frozen.weight"], new)
    before = gathered(model)
    with pytest.raises(ShardError, match=r"frozen\.weight"), full_params(model, writeback=True):  # noqa: PT012
        model.frozen.weight = nn.Parameter(torch.zeros(5, 6))
        model.gain.data.zero_()
    assert_same(gathered(model), before, **EXACT)


@ranks(2)
def test_without_recursion_nested_groups_stay_sharded(rank: int):
    model = shard_by_hand(tiny(), mesh_1d(2))
    with full_params(model, recurse=False):
        plain = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    assert plain == {"embedding.weight", "frozen.weight", "frozen.bias", "gain"}
    with full_params(model.blocks[0]):
        assert not isinstance(model.blocks[0].up.weight, DTensor)
        assert isinstance(model.blocks[1].up.weight, DTensor)


@ranks(4)
def test_tensor_parallel_parameters_are_full_inside_and_written_back(rank: int):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.LayerNorm(6))
    model = copy.deepcopy(reference)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    shard_module(model, mesh["shard"])
    assert_same(dict(iter_full_tensors(model)), dict(reference.state_dict()), **EXACT)
    for rank0_only in (False, True):
        with full_params(model, writeback=True, rank0_only=rank0_only):
            assert all(p.is_meta == (rank0_only and rank > 0) for p in model.parameters())
            if rank == 0 or not rank0_only:
                assert_same(values(model), values(reference), **EXACT)
            for parameter in (*model.parameters(), *reference.parameters()):
                parameter.data.add_(1)
    assert_same(gathered(model), values(reference), **EXACT)


class AllGathers(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += "allgather" in str(func)
        return func(*args, **(kwargs or {}))


@ranks(2)
@pytest.mark.parametrize(("bucket_bytes", "expected_gathers"), [(1, 16), (600, 3), (1 << 20, 1)])
def test_streamed_tensors_equal_the_state_dict(rank: int, bucket_bytes: int, expected_gathers: int):
    reference = tiny()
    model = shard_by_hand(reference, mesh_1d(2), mp_policy=BF16)
    with AllGathers() as counted:
        pairs = list(iter_full_tensors(model, bucket_bytes=bucket_bytes))
    expected = dict(reference.state_dict())
    del expected["head.weight"]  # tied: once, under its first name
    assert [name for name, _ in pairs] == list(expected)
    assert_same(dict(pairs), expected, **EXACT)
    assert counted.num == expected_gathers


@ranks(2)
def test_streamed_tensors_are_cast_before_they_travel(rank: int):
    model = shard_by_hand(tiny(), mesh_1d(2))
    cast = dict(iter_full_tensors(model, dtype=torch.bfloat16, include_buffers=False))
    assert_same(cast, {name: value.bfloat16() for name, value in values(tiny()).items()}, **EXACT)


@ranks(4)
def test_streamed_to_the_first_rank_only(rank: int):
    model = shard_by_hand(tiny(), mesh_2d())
    names = [name for name, _ in iter_full_tensors(model, rank0_only=True)]
    assert bool(names) == (rank == 0)
    counts: list[int | None] = [None] * 4
    dist.all_gather_object(counts, len(names))
    assert counts == [17, 0, 0, 0]


@ranks(2)
def test_mixed_dtypes_share_a_bucket_and_wrappers_leave_no_trace(rank: int):
    reference = tiny()
    reference.blocks[0].norm.to(torch.bfloat16)
    reference.blocks[1].down.to(torch.float64)
    model = copy.deepcopy(reference)
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    for module in (model.blocks[0].norm, model.blocks[1].down, *model.blocks, model):
        shard_module(module, mesh_1d(2))
    with AllGathers() as counted:
        streamed = dict(iter_full_tensors(model, include_buffers=False))
    assert_same(streamed, values(reference), **EXACT)
    assert counted.num == 1


@ranks(2)
def test_parameters_on_meta_are_refused(rank: int):
    with torch.device("meta"):
        model = Tiny()
    shard_module(model, mesh_1d(2))
    with pytest.raises(ShardError, match="meta"), full_params(model):
        pass
    with pytest.raises(ShardError, match="meta"):
        iter_full_tensors(model)


def test_plain_model():
    model = tiny()
    with full_params(model):
        nn.init.zeros_(model.gain)
    assert_same(values(model), values(tiny()), **EXACT)
    with full_params(model, writeback=True, rank0_only=True):
        nn.init.zeros_(model.gain)
    assert model.gain.item() == 0
    assert dict(iter_full_tensors(model)).keys() == model.state_dict().keys() - {"head.weight"}


def test_bucket_must_have_room():
    with pytest.raises(ConfigError, match="bucket_bytes is 0"):
        iter_full_tensors(tiny(), bucket_bytes=0)
