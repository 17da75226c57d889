"""Sequences divided over ranks train as whole ones do in one process."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.config.schema import ContextConfig, MeshConfig, ShardConfig
from shardwise.distributed.mesh import data_parallel_mesh, data_parallel_rank, make_mesh
from shardwise.errors import ConfigError, ShardError
from shardwise.sharding.parallel.context_attention import split_sequences
from shardwise.training.generating import generate
from shardwise.training.step import accumulate, clip_grad_norm_, mean_over_ranks, token_mean
from tests.decoders import VOCAB, build, make_batch, num_tokens, summed_loss, train_alone
from tests.ranks import ranks


def train_parallel(
    model: nn.Module, mesh: Any, config: ShardConfig, batches: list[dict[str, Tensor]], *, micro_steps: int = 1
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final parameters of a run on `mesh`."""
    model = sw.shard(model, config, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    num_rows = batches[0]["input_ids"].shape[0] // data_parallel_mesh(mesh).size()
    first = data_parallel_rank(mesh) * num_rows
    losses, norms = [], []
    for batch in batches:
        rows = {key: value[first : first + num_rows] for key, value in batch.items()}
        part = split_sequences(rows, mesh=mesh, balanced=config.context.balanced)
        total = torch.zeros(())
        for step in range(micro_steps):
            micro = {key: value.chunk(micro_steps)[step] for key, value in part.items()}
            with accumulate(model, step, micro_steps):
                loss = token_mean(summed_loss(model, micro), num_tokens(part), mesh=mesh)
                loss.backward()
            total += loss.detach()
        norms.append(clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(total, mesh=mesh).item())
    return losses, norms, {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def assert_equal_runs(
    name: str,
    mesh: Any,
    config: ShardConfig,
    *,
    model: nn.Module | None = None,
    documents: str = "",
    micro_steps: int = 1,
) -> None:
    batches = [make_batch(step, 4, documents=documents) for step in range(3)]
    expected = train_alone(name, batches)
    found = train_parallel(model or build(name), mesh, config, batches, micro_steps=micro_steps)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)
    for key, value in expected[2].items():
        torch.testing.assert_close(
            found[2][key], value, rtol=1e-4, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


@ranks(2)
def test_sequences_over_two_ranks_equal_one_process(rank: int):
    mesh = make_mesh(MeshConfig(shard=1, context=2, device="cpu"))
    assert_equal_runs("llama", mesh, ShardConfig(), documents="ids")
    assert_equal_runs("hf_llama", mesh, ShardConfig(), documents="positions")


@ranks(4)
@pytest.mark.parametrize("name", ["llama", "moe", "hf_llama", "hf_qwen3", "hf_mixtral", "hf_mistral"])
def test_every_decoder_equals_one_process(rank: int, name: str):
    documents = "positions" if name.startswith("hf") else "ids"
    for mesh_config in (MeshConfig(shard=2, context=2, device="cpu"), MeshConfig(shard=1, context=4, device="cpu")):
        mesh = make_mesh(mesh_config)
        assert_equal_runs(name, mesh, ShardConfig())
        assert_equal_runs(name, mesh, ShardConfig(context=ContextConfig(balanced=False)), documents=documents)


@ranks(4)
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("name", ["llama", "hf_qwen3"])
def test_recomputation_accumulation_and_compilation_change_nothing(rank: int, name: str, recompute: Any):
    mesh = make_mesh(MeshConfig(shard=2, context=2, device="cpu"))
    documents = "positions" if name.startswith("hf") else "ids"
    assert_equal_runs(name, mesh, ShardConfig(activations=recompute), documents=documents, micro_steps=2)
    model = build(name)
    sw.checkpoint_activations(model, recompute)
    sw.compile_blocks(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's tracer, which hides them from default filters only
        assert_equal_runs(name, mesh, ShardConfig(), model=model)


class Convolution(nn.Module):
    """A block that also looks at the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.linear(before)


class WrittenOut(nn.Module):
    """Attention without scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x) @ x.mT
        is_later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return x + scores.masked_fill(is_later, -math.inf).softmax(-1) @ x


class Mixed(nn.Module):
    """Blocks of which one mixes positions in its own way."""

    def __init__(self, odd: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.places = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList([Attending(), Attending(), odd or Attending(), Attending()])

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        return x + mixed.transpose(1, 2).flatten(2)


@ranks(2)
def test_what_would_be_silently_wrong_is_refused_on_all_ranks(rank: int):
    mesh = make_mesh(MeshConfig(shard=1, context=2, device="cpu"))
    batch = make_batch(0, 2)
    del batch["labels"]
    part = split_sequences(batch, mesh=mesh)
    patterns = ShardConfig(block_patterns=("blocks.*",))

    def shard(odd: nn.Module | None = None) -> nn.Module:
        torch.manual_seed(0)
        return sw.shard(Mixed(odd), patterns, mesh=mesh)

    shard()(**part)
    for odd in (Convolution(), WrittenOut()):
        model = shard(odd)
        with pytest.raises(ShardError, match=r"blocks\.2.*another result with context parallelism"):
            model(**part)
    with pytest.raises(ShardError, match="the same tokens"):
        shard()(**batch, position_ids=torch.arange(32).expand(2, -1))
    with pytest.raises(ShardError, match="not in the order"):
        shard()(**split_sequences(batch, mesh=mesh, balanced=False))
    short = {key: value[:, : 8 + 4 * rank] for key, value in part.items()}
    with pytest.raises(ShardError, match="tokens"):
        shard()(**short)
    with pytest.raises(ConfigError, match="cannot be divided into 4 chunks"):
        split_sequences({"input_ids": torch.zeros(2, 30)}, mesh=mesh)
    model = shard()
    model(**part)
    with pytest.raises(ShardError, match="without the model around it"):
        model.blocks[0](torch.zeros(2, 8, 16))  # pyrefly: ignore


@ranks(2)
def test_tools_on_parts_of_sequences(rank: int):
    """generate, EMA, full_params, check and guard, on whole sequences and on parts."""
    mesh = make_mesh(MeshConfig(shard=1, context=2, device="cpu"))
    alone, model = build("tied"), sw.shard(build("tied"), mesh=mesh)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert torch.equal(generate(model, prompt, 4, seed=3), generate(alone, prompt, 4, seed=3))
    optimizer, ema = torch.optim.AdamW(model.parameters(), lr=0.1), sw.EMA(model, 0.5)
    before = {name: tensor.clone() for name, tensor in sw.iter_full_tensors(model)}
    part = split_sequences(make_batch(0, 4), mesh=mesh)
    with sw.guard(model):
        token_mean(summed_loss(model, part), num_tokens(part), mesh=mesh).backward()
        optimizer.step()
    assert not sw.check(model, optimizer)
    ema.update()
    after = {name: tensor.clone() for name, tensor in sw.iter_full_tensors(model)}
    with ema.swap():
        for name, tensor in sw.iter_full_tensors(model):
            torch.testing.assert_close(tensor, (before[name] + after[name]) / 2)
    with sw.full_params(model):
        assert all(torch.equal(parameter, after[name]) for name, parameter in model.named_parameters())
