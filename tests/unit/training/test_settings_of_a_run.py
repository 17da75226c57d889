"""Settings of a run, looked at before anything starts: each at its limit, all problems at once, and the reasons."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.config.run import RunConfig
from shardwise.config.schema import MeshConfig
from shardwise.errors import ConfigError
from shardwise.training.run import resolved_yaml

OPTIONS = {"width": 16, "num_layers": 2, "num_heads": 2, "max_sequence_length": 16}


def run(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    config = RunConfig(model="tutorial", model_options=OPTIONS, folder=str(folder / "run"))
    sections.setdefault("data", {})
    sections["data"] = {"sequence_length": 16, **sections["data"]}
    sections["training"] = {"steps": 10, "batch_size": 4, **sections.get("training", {})}
    for name, values in sections.items():
        config = replace(config, **{name: replace(getattr(config, name), **values)})
    return config


def refused(config: RunConfig, num_ranks: int = 2) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolved_yaml(config, num_ranks)
    return caught.value


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("training.steps", 0, 1), ("training.batch_size", 0, 2), ("training.micro_batch_size", 0, 1),
        ("training.evaluate_every", 0, 1), ("training.evaluation_batches", 0, 1),
        ("training.max_bad_steps", -1, 0), ("training.max_restarts", -1, 0),
        ("training.max_grad_norm", -0.5, 0), ("training.sample_tokens", -1, 0),
        ("checkpoint.every", 0, 1), ("checkpoint.keep_last", 0, 1), ("checkpoint.keep_every", 0, 1),
        ("checkpoint.keep_best", 0, 1), ("metrics.every", 0, 1), ("data.sequence_length", 0, 1),
    ],
)  # fmt: skip
def test_each_number_has_a_lowest_value(tmp_path: Path, name: str, bad: Any, good: Any):
    section, _, field = name.partition(".")
    error = refused(run(tmp_path, **{section: {field: bad}}))
    least = good if field != "batch_size" else 1
    assert f"{name}: input should be greater than or equal to {least}, got {bad}" in error.where
    resolved_yaml(run(tmp_path, **{section: {field: good}}), 2)


@pytest.mark.parametrize(("decay", "is_good"), [(-0.01, False), (0.0, True), (1.0, True), (1.01, False), (None, True)])
def test_the_average_decays_between_none_and_all(tmp_path: Path, decay: float | None, is_good: bool):
    config = run(tmp_path, training={"ema_decay": decay})
    if is_good:
        resolved_yaml(config, 2)
    else:
        assert refused(config).where.startswith("training.ema_decay: input should be ")


@pytest.mark.parametrize(
    ("size", "num_ranks", "fix"),
    [
        (6, 4, "set training.batch_size = 4, or start 3 ranks"),
        (3, 4, "set training.batch_size = 4, or start 3 ranks"),
        (7, 4, "set training.batch_size = 4, or start 1 rank"),
        (9, 4, "set training.batch_size = 8, or start 3 ranks"),
    ],
)
def test_a_batch_is_divided_among_ranks(tmp_path: Path, size: int, num_ranks: int, fix: str):
    error = refused(run(tmp_path, training={"batch_size": size}), num_ranks)
    assert error.what == f"a batch of {size} sequences cannot be divided among {num_ranks} ranks"
    assert (error.where, error.fix) == ("training.batch_size", fix)


def test_all_problems_at_once(tmp_path: Path):
    config = run(tmp_path, training={"batch_size": 3, "steps": 0}, data={"sequence_length": 17}, metrics={"every": -1})
    error = refused(config)
    assert error.what == "3 problems in the settings of this run"
    assert error.where.splitlines() == [
        "training.steps: input should be greater than or equal to 1, got 0",
        "metrics.every: input should be greater than or equal to 1, got -1: 2 setting(s) out of range",
        "training.batch_size: a batch of 3 sequences cannot be divided among 2 ranks",
        "data.sequence_length: sequences of 17 tokens are longer than the maximum of tutorial: 16",
    ]
    assert len(error.fix.splitlines()) == 3
    assert error.exit_code == 2


def test_a_mesh_that_does_not_fit_is_told_first(tmp_path: Path):
    error = refused(replace(run(tmp_path), mesh=MeshConfig(shard=3)))
    assert error.what == "a 1 x 3 mesh needs 3 ranks, got 2"


def reasons(text: str) -> dict[str, str]:
    """The comment above each setting."""
    found, above = {}, []
    for line in text.splitlines():
        if line.strip().startswith("#"):
            above.append(line.strip().removeprefix("#").strip())
        else:
            if above:
                found[line.strip().partition(":")[0]] = "\n".join(above)
            above = []
    return found


@pytest.mark.parametrize(
    ("training", "num_ranks", "batch", "micro", "steps"),
    [
        (
            {}, 2, "2 sequences on each of 2 ranks, 64 tokens a step",
            "2 of a rank's 2 sequences at once: 1 micro-step a step; halved on all ranks when one runs out of memory",
            "640 tokens in all",
        ),
        (
            {"batch_size": 20, "micro_batch_size": 3, "steps": 1000}, 2,
            "10 sequences on each of 2 ranks, 320 tokens a step",
            "3 of a rank's 10 sequences at once: 4 micro-steps a step", "320k tokens in all",
        ),
        (
            {"micro_batch_size": 9}, 1, "4 sequences on each of 1 ranks, 64 tokens a step",
            "4 of a rank's 4 sequences at once: 1 micro-step a step", "640 tokens in all",
        ),
    ],
    ids=["whole", "parts", "more-than-there-are"],
)  # fmt: skip
def test_reasons(tmp_path: Path, training: dict[str, Any], num_ranks: int, batch: str, micro: str, steps: str):
    found = reasons(resolved_yaml(run(tmp_path, training=training), num_ranks))
    assert found["batch_size"] == batch
    assert found["micro_batch_size"] == micro
    assert found["steps"] == steps
    assert found["resume"] == "starts from scratch"
    assert found["weights"] == "initialised from the seed"
    assert re.fullmatch(r"[\d.]+k parameters", found["model"])
    assert found["mesh"] == f"{num_ranks} ranks: shard {num_ranks}"
    assert found["device"] == "auto is cpu here"
    assert "folder" not in found
    assert list(tmp_path.iterdir()) == []


def test_reasons_of_another_mesh_and_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.safetensors").write_bytes(b"")
    config = replace(
        run(tmp_path), mesh=MeshConfig(replicate=2, device="cpu"), weights=str(tmp_path / "w.safetensors"), folder=None
    )
    found = reasons(resolved_yaml(config, 4))
    assert found["mesh"] == "4 ranks: replicate 2, shard 2"
    assert "device" not in found
    assert found["weights"] == f"read from {tmp_path / 'w.safetensors'}"
    assert found["folder"].startswith("the next free name in `runs`")
    assert "groups over replicate 2 x shard 2" in found["shard"].splitlines()[0], found["shard"]
    assert "folder: runs/tutorial-1\n" in resolved_yaml(config, 4)
