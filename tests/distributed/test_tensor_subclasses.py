"""Tensor subclasses of the user's own, which say how FSDP2 gathers them, train and checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.by_hand import assert_same, full, full_gradients, mesh_1d
from tests.collectives import count_collectives
from tests.ranks import ranks
from tests.toy_models import Block, Stack

_KEPT = {
    getattr(torch.ops.aten, name)
    for name in (
        "empty_like", "new_zeros", "slice", "copy_", "view", "as_strided", "_to_copy", "split", "clone", "detach"
    )
}  # fmt: skip


class Int8Gather(torch.Tensor):
    """A float32 weight that is all-gathered in 8 bits, as the tutorial's extension point has it."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Int8Gather:
        options = {"dtype": inner.dtype, "device": inner.device, "requires_grad": inner.requires_grad}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, inner.stride(), **options)

    def __init__(self, inner: Tensor) -> None:
        self.stored = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["stored"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_unused: object) -> Int8Gather:
        return Int8Gather(inner["stored"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # pyrefly: ignore
        from torch.utils._pytree import tree_map_only

        args, kwargs = tree_map_only(cls, lambda tensor: tensor.stored, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree_map_only(Tensor, cls, result) if func.overloadpacket in _KEPT else result

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        return (rounded(self.stored), torch.full((1,), SCALE)), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        codes, _ = outputs
        if out is None:
            values = codes.to(param_dtype) * SCALE
            return values, (values,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            return out.copy_(codes).mul_(SCALE)


SCALE = 1 / 128


def rounded(values: Tensor) -> Tensor:
    return (values / SCALE).round().clamp(-127, 127).to(torch.int8)


class Rounding(torch.autograd.Function):
    """What the gather does, in one process: rounds on the way in, passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return rounded(weight).to(weight.dtype) * SCALE

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class RoundedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, Rounding.apply(self.weight), self.bias)


def build(*, wraps: bool) -> Stack:
    torch.manual_seed(0)
    model = Stack(nn.ModuleList(Block(16) for _ in range(2)), dim=16)
    for block in model.blocks:
        for linear in (block.up, block.down):
            if wraps:
                linear.weight = nn.Parameter(Int8Gather(linear.weight.detach()))
            else:
                linear.__class__ = RoundedLinear
    return model


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def ids(step: int) -> Tensor:
    return torch.randint(0, 64, (4, 6), generator=torch.Generator().manual_seed(step))


@ranks(2)
def test_a_subclass_trains_and_checkpoints(rank: int, tmp_path: Path):
    """Plan, shard, train as one process does, gather, save, load; on meta too."""
    mesh, model, reference = mesh_1d(2), build(wraps=True), build(wraps=False)
    expected = {name: value.clone() for name, value in reference.state_dict().items()}
    sw.shard(model, mesh=mesh)
    assert {name: full.shape for name, full in sw.iter_full_tensors(model)} == {n: v.shape for n, v in expected.items()}
    with sw.full_params(model):
        assert_same(dict(model.state_dict()), expected, rtol=0, atol=0)

    pairs = [(model, torch.optim.AdamW(model.parameters(), lr=1e-2), ids(0)[2 * rank : 2 * rank + 2])]
    pairs.append((reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), ids(0)))
    losses = []
    for each, optimizer, batch in pairs:
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(each, batch)
            loss.backward()
            optimizer.step()
        losses.append(sw.mean_over_ranks(loss.detach()) if each is model else loss.detach())
    torch.testing.assert_close(*losses)
    assert_same(full_gradients(model), {n: p.grad for n, p in reference.named_parameters()}, rtol=1e-4, atol=1e-5)
    trained = {name: p.detach() for name, p in reference.named_parameters()}
    assert_same({n: full(p).detach() for n, p in model.named_parameters()}, trained, rtol=1e-3, atol=1e-4)
    with count_collectives(model) as trace:
        loss_of(model, ids(1))
    gathered = sum(c.num_bytes for c in trace.collectives if c.served.startswith("blocks.0"))
    weights = 2 * 16 * 64  # 8 bits an element; the rest of the block in float32, and a scale for each weight and rank
    assert gathered == (weights + 4 * (64 + 16 + 16 + 16) + 2 * 2 * 4) * 3 // 2

    with sw.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(3, model=model, optimizers=pairs[0][1])
        checkpointer.wait()
        with torch.device("meta"):
            again = build(wraps=True)
        sw.shard(again, mesh=mesh)
        optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
        checkpointer.load(model=again, optimizers=optimizer)
    sw.save_weights(model, tmp_path / "weights")
    plain = build(wraps=False)
    sw.load_weights(plain, tmp_path / "weights")
    shown = {name: full(p).detach() for name, p in again.named_parameters()}
    assert_same(shown, {n: full(p).detach() for n, p in model.named_parameters()}, rtol=0, atol=0)
    assert_same(shown, {n: p.detach() for n, p in plain.named_parameters()}, rtol=0, atol=0)
    for each, its_optimizer in ((model, pairs[0][1]), (again, optimizer)):
        its_optimizer.zero_grad()
        loss_of(each, ids(2)[2 * rank : 2 * rank + 2]).backward()
        its_optimizer.step()
    both = [{n: full(p).detach() for n, p in each.named_parameters()} for each in (model, again)]
    assert_same(both[0], both[1], rtol=0, atol=0)

    fresh = copy.deepcopy(build(wraps=True)).to("meta")
    sw.materialize(sw.shard(fresh, mesh=mesh))
    assert all(torch.isfinite(value).all() for _, value in sw.iter_full_tensors(fresh))
    loss_of(fresh, ids(3)).backward()
    fresh.blocks[0].up.register_forward_hook(_clear_weight)
    with pytest.raises(ShardwiseError, match="written to while it was unsharded"), torch.no_grad():
        fresh(ids(3))


def _clear_weight(linear: nn.Linear, *_unused: object) -> None:
    linear.weight.zero_()
