"""Compiled blocks under FSDP2: the same gradients as uncompiled, from graphs that no hook of FSDP2 breaks."""

import os
import warnings

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.models.transformer import Transformer, TransformerConfig
from tests.by_hand import assert_same, full, full_gradients
from tests.ranks import ranks


def build() -> Transformer:
    torch.manual_seed(0)
    shape = TransformerConfig(vocab_size=32, max_sequence_length=8, width=16, num_layers=3, num_heads=2, dropout=0.2)
    return Transformer(shape)


def batch(rank: int) -> Tensor:
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(rank))


def step(model: nn.Module, rank: int) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(100 + rank)
    with warnings.catch_warnings():
        # torch's tracer looks at `.grad` of every tensor and hides the warning from default filters only.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        model(batch(rank)).square().mean().backward()
    return full_gradients(model)


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@ranks(2)
def test_gradients_equal_those_of_uncompiled_blocks(rank: int, backend: str, policy: str) -> None:
    torch.compiler.reset()
    plain = sw.shard(build())
    model = sw.checkpoint_activations(build(), policy)  # pyrefly: ignore
    model = sw.shard(sw.compile_blocks(model, backend=backend, fullgraph=True))
    assert list(model.state_dict()) == list(plain.state_dict())
    for one in (plain, model):
        step(one, rank)
    assert_same(step(model, rank), step(plain, rank))


@pytest.mark.parametrize("when", ["before", "after", "in place"])
@ranks(2)
def test_a_model_compiled_as_a_whole_trains_as_uncompiled(rank: int, when: str) -> None:
    torch.compiler.reset()
    plain, model = sw.shard(build()), build()
    called: nn.Module = model
    if when == "before":
        called = sw.shard(torch.compile(model, backend="aot_eager"))  # pyrefly: ignore
    elif when == "after":
        called = torch.compile(sw.shard(model), backend="aot_eager")  # pyrefly: ignore
    else:
        model.compile(backend="aot_eager")
        sw.shard(model)
    for one in (plain, called):
        step(one, rank)
    expected = step(plain, rank)
    step(called, rank)
    assert_same(full_gradients(model), expected)


@ranks(2)
def test_a_memory_budget_changes_no_gradient(rank: int) -> None:
    torch.compiler.reset()
    plain = sw.shard(build().eval())
    with pytest.raises(sw.ConfigError, match=r"activations is 0\.3, and blocks are not compiled"):
        sw.shard(build(), sw.ShardConfig(activations=0.3))
    model = sw.checkpoint_activations(build().eval(), 0.3)
    model = sw.shard(sw.compile_blocks(model, backend="aot_eager_decomp_partition"))
    assert_same(step(model, rank), step(plain, rank))


@ranks(2)
def test_the_optimizer_trains_compiled_blocks(rank: int) -> None:
    torch.compiler.reset()
    ends = []
    for model in (build(), sw.compile_blocks(build(), backend="eager")):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sw.shard(model, optimizers=optimizer)
        for _ in range(3):
            step(model, rank)
            optimizer.step()
        ends.append({name: full(parameter) for name, parameter in model.named_parameters()})
    assert_same(ends[1], ends[0])


@ranks(2)
def test_a_sharded_model_is_refused(rank: int) -> None:
    with pytest.raises(sw.ShardError, match="compile_blocks comes too late"):
        sw.compile_blocks(sw.shard(build()))


@pytest.mark.slow
@ranks(2, timeout_s=300)
def test_inductor_compiles_recomputed_blocks(rank: int) -> None:
    torch.compiler.reset()
    expected = step(sw.shard(build().eval()), rank)  # inductor draws its own random numbers
    model = sw.shard(sw.compile_blocks(sw.checkpoint_activations(build().eval())))
    assert_same(step(model, rank), expected, atol=1e-5, rtol=1e-4)
    os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)  # inductor leaves it behind
