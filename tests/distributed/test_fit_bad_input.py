"""Runs that cannot start: every problem at once, the same on every rank, with a fix, before anything is built."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config.run import RunConfig
from shardwise.config.schema import MeshConfig, PrecisionConfig
from shardwise.distributed.agreement import agree_on
from shardwise.errors import ConfigError, EnvironmentProblem, ShardwiseError
from shardwise.training.loop import fit
from tests.distributed.fit_runs import MODEL_OPTIONS, changed, tiny
from tests.ranks import ranks

Change = Callable[[RunConfig, Path], RunConfig]


def refused(config: RunConfig) -> ShardwiseError:
    """The one error that `fit` raises on this rank; nothing of the run is there afterwards."""
    with pytest.raises(ShardwiseError) as failure:
        fit(config)
    error = failure.value
    agree_on(str(error), "the error")
    assert error.fix
    assert not list(Path(config.folder or "").glob("checkpoints/*"))
    return error


@ranks(2)
def test_each_problem_is_one_error_with_its_setting_and_a_fix(rank: int, tmp_path: Path):
    config = tiny(tmp_path)
    (tmp_path / "empty.txt").touch()
    wrong: list[tuple[dict[str, Any], str, str, int]] = [
        ({"training": {"batch_size": 5}}, "5 sequences cannot be divided among 2 ranks", "training.batch_size = 4", 2),
        ({"data": {"sequence_length": 17}}, "longer than the maximum of tutorial: 16", "data.sequence_length = 16", 2),
        ({"data": {"source": str(tmp_path / "no.txt")}}, "no.txt", "", 2),
        ({"data": {"source": str(tmp_path / "empty.txt")}}, "empty", "", 2),
        ({"data": {"tokenizer": str(tmp_path / "no.json")}}, "no.json", "", 2),
        ({"training": {"steps": 0}}, "training.steps: input should be greater than or equal to 1, got 0", "", 2),
        (
            {"training": {"ema_decay": 1.5}},
            "training.ema_decay: input should be less than or equal to 1, got 1.5",
            "",
            2,
        ),
        ({"training": {"objective": "no.such:thing"}}, "no module 'no", "", 2),
        ({"optimizer": {"betas": (0.9, 1.0)}}, "optimizer.betas.1: input should be less than 1, got 1.0", "", 2),
        ({"checkpoint": {"resume": str(tmp_path / "no")}}, "there is no checkpoint at", "checkpoint.resume = auto", 2),
        ({"shard": {"precision": PrecisionConfig(param_dtype="float16")}}, "compute in float16", "bfloat16", 2),
        ({"weights": str(tmp_path / "no")}, "there are no weights at", "weights = none", 2),
        ({"mesh": {"shard": 4}}, "a 1 x 4 mesh needs 4 ranks, got 2", "start 4 ranks", 2),
        ({"mesh": {"shard": 1}}, "a 1 x 1 mesh needs 1 ranks, got 2", "mesh.shard = 2", 2),
    ]
    for changes, what, fix, status in wrong:
        error = refused(changed(config, **changes))
        assert what in f"{error.what} {error.where}", error
        assert fix in error.fix, error
        assert error.exit_code == status


@ranks(2)
def test_tokens_that_the_model_does_not_know_are_refused(rank: int, tmp_path: Path):
    error = refused(replace(tiny(tmp_path), model_options=MODEL_OPTIONS | {"vocab_size": 200}))
    assert "257" in str(error)
    assert "200" in str(error)


@ranks(2)
def test_folder_that_cannot_be_written_is_refused(rank: int, tmp_path: Path):
    config = tiny(tmp_path)
    error = refused(replace(config, folder=str(tmp_path / "words.txt" / "run")))  # a folder inside a file
    assert "cannot write into" in error.what
    assert error.exit_code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@ranks(2)
def test_absent_gpu_is_a_problem_of_the_environment(rank: int, tmp_path: Path):
    error = refused(replace(tiny(tmp_path), mesh=MeshConfig(device="cuda")))
    assert isinstance(error, EnvironmentProblem)
    assert error.exit_code == 3
    assert "mesh.device = cpu" in error.fix


@ranks(2)
def test_all_problems_come_in_one_error(rank: int, tmp_path: Path):
    config = changed(
        tiny(tmp_path, batch_size=5, steps=0), data={"sequence_length": 32}, checkpoint={"resume": "nowhere"}
    )
    error = refused(config)
    assert isinstance(error, ConfigError)
    assert error.what == "4 problems in the settings of this run"
    for place in ("training.steps", "training.batch_size", "data.sequence_length", "checkpoint.resume"):
        assert f"{place}: " in error.where
    mesh_too = replace(config, mesh=MeshConfig(shard=3))
    with pytest.raises(ConfigError) as failure:
        fit(mesh_too)
    assert "mesh.replicate, mesh.shard: a 1 x 3 mesh needs 3 ranks, got 2" in failure.value.where


@pytest.mark.parametrize("objective", ["auto", "tests.distributed.fit_runs:plain"])
@pytest.mark.parametrize("batch_size", [4, 24])
@ranks(2)
def test_data_that_fails_on_one_rank_ends_all(rank: int, tmp_path: Path, batch_size: int, objective: str):
    """The third batch of rank 1 cannot be made, or the first of rank 0: the other does not wait for ever."""
    config = tiny(tmp_path, batch_size=batch_size, objective=objective)
    config = changed(config, data={"source": "tests.distributed.fit_runs:breaking", "shuffle": False})
    failing = 1 if batch_size == 4 else 0
    with pytest.raises(OSError if rank == failing else ShardwiseError, match="sample 11 is gone"):
        fit(config)
