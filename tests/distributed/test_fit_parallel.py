"""`fit` on meshes with context, tensor and pipeline axes learns what one process does, and resumes on other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.config.run import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)
from shardwise.config.schema import LoraConfig, MeshConfig, PipelineConfig, ShardConfig
from shardwise.models.llama import SHAPES, Llama
from tests.distributed.fit_runs import changed, fit_on, losses

LENGTH = 32


def run_of(folder: Path, name: str, **sections: Any) -> RunConfig:
    """A run of a small llama on packed documents, from weights that all runs share."""
    text, weights = folder / "text.jsonl", folder / "weights.safetensors"
    if not text.exists():
        lines = ['{"text": "' + " ".join(f"w{k * n}" for k in range(3 + n % 7)) + '"}' for n in range(400)]
        text.write_text("\n".join(lines))
        torch.manual_seed(0)
        sw.save_weights(Llama(SHAPES["llama3-debug"]), weights)
    config = RunConfig(
        model="llama3-debug",
        weights=str(weights),
        data=DataConfig(source=str(text), sequence_length=LENGTH, workers=0, evaluation_fraction=0.1),
        optimizer=OptimizerConfig(name="sgd", learning_rate=0.1),
        schedule=ScheduleConfig(name="constant", warmup_steps=1),
        training=TrainingConfig(steps=4, batch_size=8, sample="w1", sample_tokens=4, evaluate_every=2),
        checkpoint=CheckpointConfig(every=2, asynchronous=False),
        mesh=MeshConfig(device="cpu"),
        folder=str(folder / name),
    )
    return changed(config, **sections)


def compare(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=2e-5), step


@pytest.mark.slow
def test_context_tensor_and_pipeline_runs_learn_what_one_process_does(tmp_path: Path):
    expected = fit_on(1, run_of(tmp_path, "alone"))
    compare(fit_on(2, run_of(tmp_path, "tensor", mesh={"shard": 1, "tensor": 2})), expected)
    compare(fit_on(2, run_of(tmp_path, "context", mesh={"shard": 1, "context": 2})), expected)
    compare(fit_on(2, run_of(tmp_path, "pipeline", mesh={"shard": 1, "pipeline": 2})), expected)


def test_what_a_pipeline_cannot_do_is_refused_before_it_starts(tmp_path: Path):
    for checkpoint in ({"format": "full"}, {"export": True}):
        config = run_of(tmp_path, "refused", mesh={"shard": 1, "pipeline": 2}, checkpoint=checkpoint)
        with pytest.raises(pytest.fail.Exception, match=r"no rank of a pipeline gathers the weights of all stages"):
            fit_on(2, config)


@pytest.mark.slow
def test_stages_beside_divided_sequences_learn_what_one_process_does(tmp_path: Path):
    expected = fit_on(1, run_of(tmp_path, "alone"))
    compare(fit_on(4, run_of(tmp_path, "both", mesh={"shard": 1, "context": 2, "pipeline": 2})), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["muon", "lora"])
def test_optimizers_with_groups_of_their_own_and_adapters_resume_on_other_meshes(tmp_path: Path, kind: str):
    """Stages have parameters of different kinds, hence different groups."""
    sections: dict[str, Any] = {"optimizer": {"name": "muon"}} if kind == "muon" else {"lora": LoraConfig(rank=4)}
    meshes: list[dict[str, int]] = [{"shard": 4}, {"shard": 2, "pipeline": 2}, {"shard": 2, "context": 2}]
    for step, mesh in enumerate(meshes, start=1):
        config = run_of(tmp_path, "moved", training={"steps": 2 * step}, mesh=mesh, **sections)
        fit_on(4, config)
    # From the mesh that the run began on: a pipeline draws other adapters.
    compare(losses(config), fit_on(4, run_of(tmp_path, "stayed", training={"steps": 6}, mesh=meshes[0], **sections)))


@pytest.mark.slow
def test_runs_resume_on_other_meshes(tmp_path: Path):
    expected = fit_on(1, run_of(tmp_path, "alone", training={"steps": 6}))
    meshes: list[dict[str, int]] = [
        {"shard": 2, "pipeline": 2},
        {"shard": 2, "tensor": 2},
        {"shard": 2, "context": 2},
    ]
    for step, mesh in enumerate(meshes, start=1):
        config = run_of(tmp_path, "moved", training={"steps": 2 * step}, mesh=mesh)
        fit_on(4, config)
    compare(losses(config), expected)
    interleaved = ShardConfig(pipeline=PipelineConfig(schedule="interleaved", stages_per_rank=2))
    options = {"mesh": {"shard": 2, "pipeline": 2}, "shard": interleaved, "training": {"steps": 6}}
    compare(fit_on(4, run_of(tmp_path, "interleaved", **options)), expected)
