"""Recomputing blocks under FSDP2: the gradients, and the collectives, of a model that keeps everything."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.diagnosing.parity import Task, bind_batch, bind_loss
from tests.by_hand import assert_same, full, full_gradients
from tests.collectives import count_collectives
from tests.ranks import ranks
from tests.zoo import find

DIM = 8


class PostNormBlock(nn.Module):
    """Draws random numbers, holds a scalar, and ends in a norm: the last thing recomputed is a module."""

    def __init__(self, norm_dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.first, self.last = nn.LayerNorm(DIM, dtype=norm_dtype), nn.LayerNorm(DIM, dtype=norm_dtype)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.to(self.first.weight.dtype)).to(self.up.weight.dtype)
        hidden = self.down(self.dropout(torch.tanh(self.up(hidden)))) * self.gain
        return self.last((x + hidden).to(self.last.weight.dtype)).to(self.up.weight.dtype)


class Stack(nn.Module):
    def __init__(self, norm_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, DIM)
        self.blocks = nn.ModuleList(PostNormBlock(norm_dtype) for _ in range(3))
        self.head = nn.Linear(DIM, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(norm_dtype: torch.dtype = torch.float32) -> Stack:
    torch.manual_seed(0)
    return Stack(norm_dtype)


def batch(rank: int) -> Tensor:
    return torch.randint(0, 16, (3, 5), generator=torch.Generator().manual_seed(rank))


def step(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """Gradients of one step, the same dropout masks whenever it is run."""
    model.zero_grad()
    torch.manual_seed(100 + rank)
    model(batch(rank)).square().mean().backward()
    return full_gradients(model)


def first_only(name: str, block: nn.Module) -> str:
    return "full" if name.endswith(".0") else "selective"


@pytest.mark.parametrize("policy", ["full", "selective", "every_n", first_only])
@ranks(2)
def test_gradients_equal_those_without_recomputing(rank: int, policy: Any) -> None:
    kept = step(sw.shard(build()), rank)
    model = sw.shard(sw.checkpoint_activations(build(), policy))
    for _ in range(2):  # the second step meets what the first one's backward left
        assert_same(step(model, rank), kept, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("policy", ["full", "selective"])
@ranks(2)
def test_norms_of_another_dtype_are_gathered_again_for_the_recomputation(rank: int, policy: Any) -> None:
    """float64 norms are groups inside the block, and the recomputation ends inside the last of them."""
    kept = step(sw.shard(build(torch.float64)), rank)
    model = sw.shard(sw.checkpoint_activations(build(torch.float64), policy))
    for _ in range(2):
        assert_same(step(model, rank), kept, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("reshard", [True, False])
@ranks(2)
def test_a_block_is_gathered_once_for_recomputation_and_backward(rank: int, reshard: bool) -> None:
    config = sw.ShardConfig(reshard_after_forward=reshard)
    counts = []
    for model in (build(), sw.checkpoint_activations(build())):
        sw.shard(model, config)
        step(model, rank)
        with count_collectives(model) as trace:
            model.zero_grad()
            model(batch(rank)).square().mean().backward()
        counts.append(Counter((each.kind, each.num_bytes) for each in trace.collectives))
    assert counts[0] == counts[1]
    assert counts[0].total() >= (3 * 3 if reshard else 2 * 3)  # all-gathers and a reduce-scatter of each block


@ranks(2)
def test_training_goes_on_alike_with_a_module_called_under_no_grad_between_steps(rank: int) -> None:
    models = [sw.shard(build()), sw.shard(sw.checkpoint_activations(build()))]
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            step(model, rank)
            optimizer.step()
            with torch.no_grad():
                model(batch(rank))
    left, right = ({name: full(p) for name, p in model.named_parameters()} for model in models)
    assert_same(left, right, atol=0.0, rtol=0.0)


@ranks(2)
def test_a_copy_made_before_sharding_recomputes_its_own_weights(rank: int) -> None:
    model = sw.checkpoint_activations(build())
    teacher = copy.deepcopy(model)
    for parameter in teacher.parameters():
        parameter.data.mul_(0.5)
    sw.shard(model)
    sw.shard(teacher)
    plain = build()
    for parameter in plain.parameters():
        parameter.data.mul_(0.5)
    assert_same(step(teacher, rank), step(sw.shard(plain), rank), atol=0.0, rtol=0.0)


ZOO = [
    "llama", "t5", "gpt2", "albert", "mixtral", "whisper", "llava", "gemma2", "deepseek_v3", "resnet",
    "openpi_bfloat16", "bagel", "tied_blocks", "scalars", "spectral_norm", "experts_by_index",
]  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("policy", ["full", "selective"])
@ranks(2, timeout_s=120)
def test_models_of_the_zoo_have_the_gradients_they_have_without_recomputing(rank: int, policy: Any, name: str) -> None:
    case = find(name)
    make_batch, loss = bind_batch(case.make_batch), bind_loss(case.loss)
    task = Task(make_batch=make_batch, loss=loss, seed=0, num_ranks=2, device=torch.device("cpu"))
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = case.build()
        if checkpointed:
            sw.checkpoint_activations(model, policy, config=case.config)
        sw.shard(model, case.config)
        for step in range(2):
            model.zero_grad()
            task.loss_of(model, rank, step).backward()
        gradients.append(full_gradients(model))
    assert_same(gradients[1], gradients[0])


@ranks(2)
def test_a_sharded_model_is_refused(rank: int) -> None:
    with pytest.raises(sw.ShardError, match="comes too late: the model is already sharded"):
        sw.checkpoint_activations(sw.shard(build()))


class MarkedBlock(nn.Module):
    """Marks a region that is kept, and draws random numbers in it and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM), nn.Dropout(0.3)
        self.calls = 0

    def expand(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.dropout(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        remat = pytest.importorskip("torch_remat")
        hidden = remat.region(self.expand, "expand", recompute=False)(x)
        remat.recompute_needs_tensor(hidden)
        return x + self.dropout(torch.tanh(self.down(hidden)))


def marked() -> Stack:
    model = build()
    torch.manual_seed(1)
    model.blocks = nn.ModuleList(MarkedBlock() for _ in range(3))
    return model


@ranks(2)
def test_marked_regions_are_not_recomputed(rank: int) -> None:
    pytest.importorskip("torch_remat")
    expected = step(sw.shard(marked()), rank)
    for policy, num_calls in (("regions", 1), ("full", 2)):
        model: Any = sw.shard(sw.checkpoint_activations(marked(), policy))
        assert_same(step(model, rank), expected)
        assert [block.calls for block in model.blocks] == [num_calls] * 3, policy


class NestedBlock(PostNormBlock):
    """Recomputes a part of itself, as models that checkpoint their own do."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("policy", ["full", "selective"])
@ranks(2)
def test_blocks_that_recompute_themselves(rank: int, policy: Any) -> None:
    def nested() -> Stack:
        model = build()
        for block in model.blocks:
            block.__class__ = NestedBlock
        return model

    expected = step(sw.shard(build()), rank)
    assert_same(step(sw.shard(nested()), rank), expected)
    assert_same(step(sw.shard(sw.checkpoint_activations(nested(), policy)), rank), expected)


class CastBlock(PostNormBlock):
    """Computes in bfloat16 of its own accord."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


@pytest.mark.parametrize("policy", ["full", "selective"])
@ranks(2)
def test_autocast_inside_and_outside_is_recomputed_alike(rank: int, policy: Any) -> None:
    """Backward runs outside of it; what is recomputed there must not be in another dtype."""

    def cast_step(model: nn.Module, outside: bool) -> dict[str, Tensor]:
        model.zero_grad()
        torch.manual_seed(100 + rank)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
            loss = model(batch(rank)).float().square().mean()
        loss.backward()
        return full_gradients(model)

    for outside in (True, False):
        models = [build() for _ in range(2)]
        for block in [block for model in models for block in model.blocks] if not outside else ():
            block.__class__ = CastBlock
        plain, recomputed = sw.shard(models[0]), sw.shard(sw.checkpoint_activations(models[1], policy))
        expected = cast_step(plain, outside)
        assert_same(cast_step(recomputed, outside), expected, rtol=0, atol=0)
        whole = step(sw.shard(build()), rank)
        assert any(not torch.equal(expected[name], whole[name]) for name in whole), "nothing was cast"


@ranks(2)
def test_a_plan_carries_the_activations_of_its_config(rank: int):
    config = sw.ShardConfig(activations="full")
    models = sw.shard(build(), config), sw.shard(build(), plan=sw.plan(build(), config, mesh=sw.MeshConfig(shard=2)))
    counts = []
    for model in models:
        calls: Counter[str] = Counter()
        model.blocks[0].up.register_forward_hook(lambda *_, calls=calls: calls.update(["up"]))
        model(batch(rank)).sum().backward()
        counts.append(calls["up"])
    assert counts == [2, 2]
