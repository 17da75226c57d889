"""Decoders divided into pipeline stages train as they do in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.config.schema import MeshConfig, PipelineConfig, ShardConfig
from shardwise.distributed.mesh import data_parallel_rank, make_mesh
from shardwise.errors import CheckpointError
from shardwise.sharding.pipeline import pipeline
from shardwise.training.step import clip_grad_norm_
from tests.decoders import build, make_batch, num_tokens, summed_loss, train_alone
from tests.ranks import ranks


def rows_of(batch: dict[str, Tensor], mesh: Any) -> dict[str, Tensor]:
    """This rank's rows of a batch."""
    num_ranks = mesh.size() // mesh["pipeline"].size()
    return {key: value.chunk(num_ranks)[data_parallel_rank(mesh)] for key, value in batch.items()}


def assert_equal_runs(name: str, mesh: Any, config: ShardConfig, *, documents: str = "") -> None:
    batches = [make_batch(step, 8, documents=documents) for step in range(3)]
    losses, norms, weights = train_alone(name, batches)
    rows = [rows_of(batch, mesh) for batch in batches]
    pipe = pipeline(build(name), config, mesh=mesh, loss=summed_loss, example_inputs=rows[0])
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.3, momentum=0.9)
    for step, batch in enumerate(rows):
        alone, _ = pipe.evaluate(batch)
        loss = pipe.step(batch)
        if mesh["pipeline"].size() == mesh.size():
            torch.testing.assert_close(alone / num_tokens(batch), loss)
        norm = clip_grad_norm_(pipe.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss.item(), losses[step], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(norm.item(), norms[step], rtol=1e-4, atol=1e-5)
    for key, parameter in pipe.model.named_parameters():
        found = parameter.detach().full_tensor()
        torch.testing.assert_close(found, weights[key], rtol=1e-4, atol=2e-5, msg=partial("{}: {}".format, key))


@ranks(2)
def test_two_stages_equal_one_process(rank: int):
    mesh = make_mesh(MeshConfig(shard=1, pipeline=2, device="cpu"))
    config = ShardConfig(pipeline=PipelineConfig(microbatches=4))
    assert_equal_runs("tied", mesh, config, documents="ids")


@ranks(4)
@pytest.mark.parametrize("name", ["llama", "tied", "moe", "hf_llama", "hf_qwen3", "hf_mixtral"])
def test_every_decoder_equals_one_process(rank: int, name: str):
    mesh = make_mesh(MeshConfig(shard=2, pipeline=2, device="cpu"))
    documents = "positions" if name.startswith("hf") else "ids"
    assert_equal_runs(name, mesh, ShardConfig(pipeline=PipelineConfig(microbatches=2)), documents=documents)
    assert_equal_runs(name, mesh, ShardConfig(pipeline=PipelineConfig(microbatches=4, schedule="gpipe")))
    interleaved = PipelineConfig(microbatches=4, schedule="interleaved", stages_per_rank=2)
    assert_equal_runs(name, mesh, ShardConfig(pipeline=interleaved))


@ranks(4)
def test_checkpoints_move_between_stages_and_shards(rank: int, tmp_path):
    mesh = make_mesh(MeshConfig(shard=2, pipeline=2, device="cpu"))
    flat = make_mesh(MeshConfig(shard=4, device="cpu"))
    batches = [make_batch(step, 8) for step in range(4)]
    rows = [rows_of(batch, mesh) for batch in batches]

    def pipelined() -> tuple[Any, Any]:
        pipe = pipeline(build("tied"), mesh=mesh, loss=summed_loss, example_inputs=rows[0])
        return pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-2)

    pipe, optimizer = pipelined()
    for batch in rows[:2]:
        pipe.step(batch)
        optimizer.step()
        optimizer.zero_grad()
    with sw.Checkpointer(tmp_path / "stages", asynchronous=False) as stages:
        stages.save(2, model=pipe.model, optimizers=optimizer)
        model = sw.shard(build("tied"), mesh=flat)
        whole = torch.optim.AdamW(model.parameters(), lr=1e-2)
        assert stages.load(model=model, optimizers=whole) == 2
    losses = [pipe.step(batch).item() for batch in rows[2:3]]
    mine = {key: value.chunk(4)[rank] for key, value in batches[2].items()}
    loss = sw.token_mean(summed_loss(model, mine), num_tokens(mine), mesh=flat)
    loss.backward()
    torch.testing.assert_close(sw.mean_over_ranks(loss, mesh=flat).item(), losses[0], rtol=1e-5, atol=1e-5)
    whole.step()
    whole.zero_grad()
    with sw.Checkpointer(tmp_path / "flat", asynchronous=False) as shards:
        shards.save(3, model=model, optimizers=whole)
        other, again = pipelined()
        shards.load(model=other.model, optimizers=again)
    optimizer.step()
    full = {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}
    for name, parameter in other.model.named_parameters():
        assert torch.equal(parameter.detach().full_tensor(), full[name])
        expected = pipe.model.get_parameter(name).detach().full_tensor()
        torch.testing.assert_close(parameter.detach().full_tensor(), expected, rtol=1e-3, atol=1e-4)
    for state in again.state.values():
        assert state["step"] == 3
    path = tmp_path / "model.safetensors"
    sw.save_weights(model, path)
    shards, _ = pipelined()
    assert not sw.load_weights(shards.model, path).missing
    with pytest.raises(CheckpointError, match="is a stage of a pipeline"):
        sw.save_weights(shards.model, tmp_path / "stage")
    sw.convert_checkpoint(
        tmp_path / "stages" / "step-00000002", tmp_path / f"rank{rank}.safetensors", format="safetensors"
    )
