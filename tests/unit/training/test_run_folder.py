"""The folder of a run, its name and its settings; which checkpoint it continues from; what it says at the end."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from shardwise.config.run import CheckpointConfig, RunConfig
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.training.loop import deterministic_algorithms, seed_for, seed_step
from shardwise.training.run import resolved_yaml
from shardwise.training.run_folder import (
    Checkpoints,
    Training,
    find_checkpoints,
    find_resumed,
    prepare_folder,
    refuse_other_model,
    remove_if_empty,
    with_folder,
    write_config,
)

DONE = Training(
    model="tutorial",
    num_params=892_000,
    num_ranks=1,
    steps=2,
    total_steps=2,
    first_loss=5.5,
    last_loss=2.25,
    evaluation_loss=2.5,
    tokens=4000,
    seconds=2.0,
    folder="runs/tutorial-1",
    metrics="runs/tutorial-1/metrics.jsonl",
    checkpoint="runs/tutorial-1/checkpoints/step-00000002",
    sample="def f():\n    pass",
)


def test_new_names_are_counted_up_and_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = RunConfig(model="models/My Llama")
    assert with_folder(config, reserve=False).folder == "runs/My-Llama-1"
    first, second = with_folder(config), with_folder(config)
    assert (first.folder, second.folder) == ("runs/My-Llama-1", "runs/My-Llama-2")
    Path("runs/My-Llama-2/metrics.jsonl").touch()
    remove_if_empty(first)
    remove_if_empty(second)
    assert [path.name for path in Path("runs").iterdir()] == ["My-Llama-2"]
    assert with_folder(replace(config, folder="mine")).folder == "mine"


def test_job_of_a_launcher_names_the_folder_and_keeps_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "night/7"}.items():
        monkeypatch.setenv(name, value)
    names = {with_folder(RunConfig(model="tutorial")).folder for _ in range(2)}
    assert names == {"runs/tutorial-night-7"}


def test_settings_are_kept_and_another_model_is_refused(tmp_path: Path):
    config = RunConfig(model="tutorial", model_options={"width": 8}, folder=str(tmp_path / "run"))
    prepare_folder(tmp_path / "run")
    refuse_other_model(tmp_path / "run", config)
    write_config(tmp_path / "run", config)
    refuse_other_model(tmp_path / "run", config)
    with pytest.raises(ConfigError, match=r"holds a run of tutorial with \{'width': 8\}, and this one trains tutorial"):
        refuse_other_model(tmp_path / "run", replace(config, model_options={}))


def test_folder_inside_a_file_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write into"):
        prepare_folder(tmp_path / "file" / "run")


def test_run_that_shall_start_afresh_or_elsewhere_finds_no_checkpoint(tmp_path: Path):
    assert find_resumed(tmp_path / "checkpoints", "auto") is None
    assert find_resumed(tmp_path / "checkpoints", "never") is None
    (tmp_path / "other.pt").touch()
    found = find_resumed(tmp_path / "checkpoints", str(tmp_path / "other.pt"))
    assert found is not None
    assert found.kind == "full"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShardwiseError, match="there is no checkpoint at"):
        find_resumed(tmp_path / "checkpoints", str(tmp_path / "empty"))


def test_an_older_step_of_the_run_is_not_resumed_silently(tmp_path: Path):
    steps = [tmp_path / f"step-{number:08d}.pt" for number in (100, 300)]
    for step in steps:
        step.touch()
    with pytest.raises(ConfigError, match="is step 100 of this run, which has continued to step 300"):
        find_resumed(tmp_path, str(steps[0]))
    for name in (str(steps[1]), "auto", str(tmp_path / "elsewhere")):
        found = find_resumed(tmp_path, name)
        assert found is not None
        assert found.step == 300


def test_summary_says_what_was_done_and_how_to_go_on():
    assert str(DONE) == (
        "trained tutorial (892k parameters) on 1 rank: loss 5.500 -> 2.250 in 2 steps, 2 s, 2k tokens/s\n"
        "evaluation loss 2.500\n"
        "\n"
        "sample\n"
        "    def f():\n"
        "        pass\n"
        "\n"
        "checkpoint  runs/tutorial-1/checkpoints/step-00000002\n"
        "metrics     runs/tutorial-1/metrics.jsonl\n"
        "train on    shardwise train runs/tutorial-1/config.yaml --set training.steps=4"
    )
    stopped = replace(DONE, stopped="SIGTERM", total_steps=5, resumed_step=1, evaluation_loss=None, sample=None)
    assert str(stopped).splitlines()[0].startswith("stopped (SIGTERM) tutorial (892k parameters) on 1 rank: loss")
    assert "in 1 steps from step 1" in str(stopped)
    assert str(stopped).endswith("resume      shardwise train runs/tutorial-1/config.yaml")


def test_seeds_of_other_purposes_ranks_and_steps_are_others():
    seeds = [seed_for(0, "a"), seed_for(0, "b"), seed_for(1, "a"), seed_for(0, "a", 1), seed_for(0, "a", 1, 0)]
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    draws = []
    for rank, step in ((0, 0), (0, 0), (1, 0), (0, 1)):
        seed_step(0, rank, step)
        draws.append(torch.rand(()).item())
    assert draws[0] == draws[1]
    assert len(set(draws)) == 3


def test_same_bits_are_asked_for_only_inside():
    with deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()


def test_resolved_settings_of_a_wrong_run_are_refused_with_all_problems(tmp_path: Path):
    config = RunConfig(model="tutorial", folder=str(tmp_path), data=replace(RunConfig().data, sequence_length=999))
    config = replace(config, training=replace(config.training, batch_size=3))
    with pytest.raises(ConfigError, match="2 problems in the settings of this run"):
        resolved_yaml(config, 2)


def test_a_url_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = RunConfig(folder="s3://bucket/run")
    for start in (lambda: with_folder(config), lambda: resolved_yaml(config, 1)):
        with pytest.raises(ConfigError, match="s3://bucket/run is a URL"):
            start()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["full", "sharded"])
def test_a_resumed_run_knows_which_checkpoint_was_best(tmp_path: Path, format: Literal["full", "sharded"]):
    config = CheckpointConfig(format=format, keep_last=1, keep_best=1, asynchronous=False)
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizers": torch.optim.SGD(model.parameters(), lr=0.1)}
    with ExitStack() as stack:
        checkpoints = Checkpoints(tmp_path, config, stack)
        for step, metric in {1: 0.5, 2: 2.0}.items():
            checkpoints.save(step, state, metric)
    with ExitStack() as stack:
        checkpoints = Checkpoints(tmp_path, config, stack)
        found = checkpoints.newest()
        assert found is not None
        checkpoints.load(found, state)
        checkpoints.save(3, state, 1.0)
    assert [each.step for each in find_checkpoints(tmp_path / "checkpoints")] == [1, 3]


@pytest.mark.parametrize("format", ["full", "sharded"])
def test_a_run_knows_its_folder_by_another_path(tmp_path: Path, format: Literal["full", "sharded"]):
    """Its later checkpoints are then abandoned, or its own to remove."""
    config = CheckpointConfig(format=format, keep_last=1, asynchronous=False)
    model = torch.nn.Linear(2, 2)
    with ExitStack() as stack:
        Checkpoints(tmp_path / "run", config, stack).save(1, {"model": model})
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with ExitStack() as stack:
        checkpoints = Checkpoints(tmp_path / "link", config, stack)
        [found] = find_checkpoints(tmp_path / "run" / "checkpoints")
        checkpoints.load(found, {"model": model})
        checkpoints.save(2, {"model": model})
    assert [each.step for each in find_checkpoints(tmp_path / "run" / "checkpoints")] == [2]
