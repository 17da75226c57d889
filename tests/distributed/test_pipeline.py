"""Decoders divided into pipeline stages train as they do in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpointing.weights import save_full
from shardwise.config.schema import GroupOverride, MeshConfig, PipelineConfig, ShardConfig
from shardwise.distributed.mesh import data_parallel_mesh, data_parallel_rank, make_mesh
from shardwise.errors import CheckpointError, ConfigError, ShardError
from shardwise.sharding.parallel.pipeline import pipeline
from shardwise.training.generating import generate
from shardwise.training.step import clip_grad_norm_
from tests.decoders import build, make_batch, num_tokens, summed_loss, train_alone
from tests.ranks import ranks


def rows_of(batch: dict[str, Tensor], mesh: Any) -> dict[str, Tensor]:
    """This rank's rows of a batch."""
    num_ranks = data_parallel_mesh(mesh).size()
    return {key: value.chunk(num_ranks)[data_parallel_rank(mesh)] for key, value in batch.items()}


def assert_equal_runs(
    name: str, mesh: Any, config: ShardConfig, *, documents: str = "", model: nn.Module | None = None
) -> None:
    batches = [make_batch(step, 8, documents=documents) for step in range(3)]
    losses, norms, weights = train_alone(name, batches)
    rows = [sw.split_sequences(rows_of(batch, mesh), mesh=mesh) for batch in batches]
    pipe = pipeline(model or build(name), config, mesh=mesh, loss=summed_loss, example_inputs=rows[0])
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


def prepared(name: str, policy: Any = "full", **compile_options: Any) -> nn.Module:
    """A model whose blocks recompute, and are compiled, before they are divided into stages."""
    model = sw.checkpoint_activations(build(name), policy)
    return sw.compile_blocks(model, **compile_options) if compile_options else model


@ranks(2)
def test_blocks_that_recompute_stay_on_their_stages(rank: int):
    mesh = make_mesh(MeshConfig(shard=1, pipeline=2, device="cpu"))
    config = ShardConfig(pipeline=PipelineConfig(microbatches=4))
    assert_equal_runs("llama", mesh, config, model=prepared("llama"))


@ranks(4)
@pytest.mark.filterwarnings("ignore")  # of torch's tracer
@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("name", ["llama", "hf_qwen3", "hf_mixtral"])
def test_recomputation_and_compilation_change_nothing(rank: int, name: str, policy: str):
    mesh = make_mesh(MeshConfig(shard=2, pipeline=2, device="cpu"))
    config = ShardConfig(pipeline=PipelineConfig(microbatches=2))
    assert_equal_runs(name, mesh, replace(config, activations=policy))
    assert_equal_runs(name, mesh, config, model=prepared(name, policy, backend="aot_eager"))


@ranks(4)
@pytest.mark.parametrize("name", ["tied", "hf_qwen3", "hf_mixtral"])
def test_sequences_divided_in_stages_equal_one_process(rank: int, name: str):
    mesh = make_mesh(MeshConfig(shard=1, context=2, pipeline=2, device="cpu"))
    documents = "positions" if name.startswith("hf") else "ids"
    for schedule, stages_per_rank in (("1f1b", 1), ("interleaved", 2)):
        pipelined = PipelineConfig(microbatches=4, schedule=schedule, stages_per_rank=stages_per_rank)
        assert_equal_runs(name, mesh, ShardConfig(pipeline=pipelined, activations="full"), documents=documents)


class Convolution(nn.Module):
    """Looks at the token before."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.block(x, *rest) + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


@ranks(4)
def test_a_block_of_a_later_stage_that_mixes_positions_is_refused_on_all_ranks(rank: int):
    mesh = make_mesh(MeshConfig(shard=1, context=2, pipeline=2, device="cpu"))
    model: Any = build("llama")
    model.model.layers[3] = Convolution(model.model.layers[3])
    part = sw.split_sequences(make_batch(0, 4), mesh=mesh)
    pipe = pipeline(model, mesh=mesh, loss=summed_loss, example_inputs=part)
    with pytest.raises(ShardError, match=r"layers\.3.*another result with context parallelism"):
        pipe.step(part)


@ranks(4)
def test_a_stage_may_have_no_experts_and_no_module_that_a_setting_names(rank: int):
    """DeepSeek's first layers are dense."""
    mesh = make_mesh(MeshConfig(shard=1, expert=2, pipeline=2, device="cpu"))
    override = GroupOverride(pattern="model.layers.3.mlp.gate", param_dtype="float32")
    config = ShardConfig(pipeline=PipelineConfig(microbatches=2), overrides=(override,))
    assert_equal_runs("hf_deepseek", mesh, config)


@ranks(4)
def test_batches_of_ranks_may_have_different_lengths(rank: int):
    mesh = make_mesh(MeshConfig(shard=2, pipeline=2, device="cpu"))
    lengths = [(32, 32), (32, 20), (24, 20)]
    batches = [[make_batch(10 * step + data, 4) for data in range(2)] for step in range(3)]
    cut = [
        [{key: value[:, :length] for key, value in batch.items()} for batch, length in zip(*pair, strict=True)]
        for pair in zip(batches, lengths, strict=True)
    ]
    config = ShardConfig(pipeline=PipelineConfig(microbatches=2))
    pipe = pipeline(build("llama"), config, mesh=mesh, loss=summed_loss, example_inputs=cut[0][0])
    alone = build("llama")
    for step in cut:
        loss = pipe.step(step[data_parallel_rank(mesh)])
        expected = sum(summed_loss(alone, each) for each in step) / sum(num_tokens(each) for each in step)
        torch.testing.assert_close(loss, expected)


@ranks(2)
def test_a_frozen_tie_between_stages_stays(rank: int):
    mesh, batch, model = make_mesh(MeshConfig(shard=1, pipeline=2, device="cpu")), make_batch(0, 4), build("tied")
    tied = model.lm_head.weight.requires_grad_(False).clone()
    pipe = pipeline(model, mesh=mesh, loss=summed_loss, example_inputs=batch)
    optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(2):
        losses.append(pipe.step(batch))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]
    held = {key: parameter for key, parameter in pipe.model.named_parameters() if "embed" in key or "lm_head" in key}
    assert held
    assert all(torch.equal(parameter.full_tensor(), tied) for parameter in held.values())


@ranks(2)
def test_tools_on_stages(rank: int):
    """check, guard, EMA, full_params, generate and parity know stages; what would go wrong is refused."""
    mesh, batch = make_mesh(MeshConfig(shard=1, pipeline=2, device="cpu")), make_batch(0, 4)
    alone = build("tied")
    pipe = pipeline(build("tied"), mesh=mesh, loss=summed_loss, example_inputs=batch)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert torch.equal(generate(pipe, prompt, 4, seed=3), generate(alone, prompt, 4, seed=3))
    optimizer, ema = torch.optim.AdamW(pipe.parameters(), lr=0.1), sw.EMA(pipe.model, 0.5)
    before = {name: tensor.clone() for name, tensor in sw.iter_full_tensors(pipe.model)}
    with sw.guard(pipe.model):
        pipe.step(batch)
        optimizer.step()
    assert not sw.check(pipe.model, optimizer)
    ema.update()
    after = {name: tensor.clone() for name, tensor in sw.iter_full_tensors(pipe.model)}
    with ema.swap():
        for name, tensor in sw.iter_full_tensors(pipe.model):
            torch.testing.assert_close(tensor, (before[name] + after[name]) / 2)
    with sw.full_params(pipe.model):
        assert all(torch.equal(parameter, after[name]) for name, parameter in pipe.model.named_parameters())
    with pytest.raises(CheckpointError, match="is a stage of a pipeline"):
        save_full("weights.pt", model=pipe.model)
    with pytest.warns(UserWarning, match="2 ranks along the pipeline axis hold the same Llama"):
        sw.shard(alone, mesh=mesh)
    with pytest.raises(ConfigError, match="1 sequences on each rank cannot be divided"):
        pipe.step({key: value[:1] for key, value in batch.items()})


def tokens(rank: int, step: int, seed: int) -> dict[str, Tensor]:
    return {"input_ids": make_batch(seed, 4)["input_ids"]}


@ranks(2)
def test_parity_compares_stages_and_parts_of_sequences(rank: int):
    for sizes in ({"pipeline": 2}, {"context": 2}):
        mesh = make_mesh(MeshConfig(shard=1, device="cpu", **sizes))
        result = sw.parity(lambda: build("tied"), tokens, mesh=mesh, steps=2)
        assert result.equal, str(result)
        result = sw.parity(lambda: build("tied"), tokens, mesh=mesh, steps=1, tolerance=1e-12)
        assert not result.equal
        with pytest.raises(ConfigError, match="make_batch returns a Tensor"):
            sw.parity(lambda: build("tied"), lambda seed: make_batch(seed, 4)["input_ids"], mesh=mesh)


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


class Unsaveable:
    """Has a state on some ranks, and an error on the others."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise ValueError("no state here")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@ranks(2)
def test_a_stage_that_cannot_be_saved_ends_the_save_on_all(rank: int, tmp_path: Path):
    mesh = make_mesh(MeshConfig(shard=1, pipeline=2, device="cpu"))
    config = ShardConfig(pipeline=PipelineConfig(microbatches=2))
    pipe = pipeline(build("llama"), config, mesh=mesh, loss=summed_loss, example_inputs=make_batch(0, 4))
    with sw.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        with pytest.raises((ValueError, CheckpointError), match="no state here"):
            checkpointer.save(1, model=pipe.model, odd=Unsaveable(rank == 1))
        assert checkpointer.save(2, model=pipe.model, odd=Unsaveable(False))
