"""Runs that continue: in each format to the last bit, on other numbers of ranks, and back after bad steps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardwise.checkpointing.inspecting import diff_checkpoints, inspect_checkpoint
from shardwise.config.run import RunConfig
from shardwise.errors import CheckpointError, ConfigError, TrainingError
from shardwise.training.loop import fit
from shardwise.training.run_folder import find_checkpoints
from tests.distributed.fit_runs import LENGTH, MODEL_OPTIONS, POISON, changed, fit_on, losses, tiny
from tests.ranks import ranks

FORMATS = ("sharded", "full", "dcp")


def folder_of(config: RunConfig) -> Path:
    return Path(config.folder or "")


@pytest.mark.parametrize("optimizer", [pytest.param("adamw"), pytest.param("muon", marks=pytest.mark.slow)])
@pytest.mark.parametrize("format", FORMATS)
def test_each_format_goes_on_to_the_last_bit(tmp_path: Path, format: str, optimizer: str):
    """Optimizer, schedule, data, average and dropout: three and three steps are six."""
    config = replace(tiny(tmp_path, ema_decay=0.5), model_options=MODEL_OPTIONS | {"dropout": 0.2})
    config = changed(config, checkpoint={"format": format}, optimizer={"name": optimizer})
    whole = replace(config, folder=str(tmp_path / "whole"))
    fit_on(2, whole)
    fit_on(2, changed(config, training={"steps": 3}))
    assert fit_on(2, config) == losses(whole)
    ours, theirs = (find_checkpoints(folder_of(run) / "checkpoints")[-1] for run in (config, whole))
    assert (ours.step, ours.kind) == (theirs.step, theirs.kind) == (6, "full" if format == "full" else "sharded")
    differences = diff_checkpoints(ours.path, theirs.path)
    assert differences.is_empty, str(differences)
    names = [tensor.name for tensor in inspect_checkpoint(ours.path).tensors]
    for kept in ("blocks.0.attention.output.weight", "exp_avg" if optimizer == "adamw" else "momentum", "shadow"):
        assert any(kept in name for name in names), names


@pytest.mark.slow
def test_four_ranks_go_on_where_two_stopped_and_every_sample_is_seen_once(tmp_path: Path):
    # Without a micro-batch size the first steps are tried once more, and the objective sees their samples twice.
    config = tiny(tmp_path, steps=10, batch_size=8, micro_batch_size=4, objective="tests.distributed.fit_runs:recorded")
    whole = fit_on(2, replace(config, folder=str(tmp_path / "whole")))
    fit_on(2, changed(config, training={"steps": 5}))
    assert fit_on(4, config) == pytest.approx(whole, abs=1e-5)

    def seen(folder: Path) -> list[tuple[int, ...]]:
        return sorted(tuple(row) for path in folder.glob("seen-*.json") for row in json.loads(path.read_text()))

    ours, theirs = seen(tmp_path / "run"), seen(tmp_path / "whole")
    assert len(ours) == len(set(ours)) == 80
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("format", ["full", "dcp"])
def test_other_formats_go_on_at_another_world_size_too(tmp_path: Path, format: str):
    config = changed(tiny(tmp_path), checkpoint={"format": format})
    whole = fit_on(4, replace(config, folder=str(tmp_path / "whole")))
    fit_on(2, changed(config, training={"steps": 3}))
    assert fit_on(4, config) == pytest.approx(whole, abs=1e-5)


@pytest.mark.slow
def test_run_that_changes_its_format_goes_on_from_the_newest_of_any(tmp_path: Path):
    config = tiny(tmp_path)
    whole = fit_on(2, replace(config, folder=str(tmp_path / "whole")))
    for steps, format in ((2, "full"), (4, "dcp"), (6, "sharded")):
        fit_on(2, changed(config, training={"steps": steps}, checkpoint={"format": format}))
    assert losses(config) == whole
    kinds = [found.kind for found in find_checkpoints(folder_of(config) / "checkpoints")]
    assert kinds == ["full", "sharded", "sharded"]


@pytest.mark.slow
@ranks(2)
def test_plain_dcp_reads_what_the_dcp_format_wrote(rank: int, tmp_path: Path):
    config = changed(tiny(tmp_path, steps=2), checkpoint={"format": "dcp"})
    training = fit(config)
    stored = dcp.FileSystemReader(training.checkpoint).read_metadata().state_dict_metadata
    assert "model.token_embedding.weight" in stored
    assert "optim.state.token_embedding.weight.exp_avg" in stored


@pytest.mark.slow
@ranks(2)
def test_half_written_checkpoints_are_passed_over_and_old_ones_go(rank: int, tmp_path: Path):
    for format in FORMATS:
        config = replace(tiny(tmp_path), folder=str(tmp_path / format))
        config = changed(config, checkpoint={"format": format, "every": 1, "keep_last": 2, "keep_every": 3})
        fit(config)
        folder = folder_of(config) / "checkpoints"
        assert [found.step for found in find_checkpoints(folder)] == [3, 5, 6]
        if rank == 0:
            (folder / "step-00000009.partial").mkdir()
            (folder / "step-00000009").mkdir()
        torch.distributed.barrier()
        assert fit(config).resumed_step == 6


@pytest.mark.slow
@ranks(2)
def test_best_checkpoint_stays(rank: int, tmp_path: Path):
    """A learning rate that ruins the model: the first evaluation is the best."""
    config = changed(
        tiny(tmp_path, evaluate_every=2), data={"evaluation_fraction": 0.1}, optimizer={"learning_rate": 3.0}
    )
    for format in FORMATS:
        kept = {"format": format, "every": 2, "keep_last": 1, "keep_best": 1}
        fit(changed(replace(config, folder=str(tmp_path / format)), checkpoint=kept))
        assert [found.step for found in find_checkpoints(tmp_path / format / "checkpoints")] == [2, 6]


@pytest.mark.slow
@ranks(2)
def test_another_run_can_be_taken_up(rank: int, tmp_path: Path):
    config = tiny(tmp_path, steps=3)
    first = fit(config)
    for place in (first.folder, first.checkpoint):
        branch = changed(config, training={"steps": 5}, checkpoint={"resume": place})
        training = fit(replace(branch, folder=str(tmp_path / f"branch-{Path(place).name}")))
        assert (training.resumed_step, training.steps) == (3, 5)
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        fit(changed(replace(config, folder=str(tmp_path / "new")), checkpoint={"resume": str(tmp_path / "nowhere")}))


@ranks(2)
def test_checkpoint_of_another_model_is_refused_and_nothing_is_lost(rank: int, tmp_path: Path):
    config = tiny(tmp_path, steps=2)
    kept = fit(config).checkpoint
    other = replace(config, model_options=MODEL_OPTIONS | {"width": 32})
    with pytest.raises(ConfigError, match="the folder holds a run of tutorial with") as failure:
        fit(other)
    assert failure.value.fix
    elsewhere = replace(other, folder=str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="checkpoint is of another model: 29 tensors differ"):
        fit(changed(elsewhere, checkpoint={"resume": kept}))
    with pytest.raises(ConfigError, match="has a checkpoint of step 2"):
        fit(changed(config, checkpoint={"resume": "never"}))
    more = fit(changed(config, training={"steps": 3}))
    assert more.resumed_step == 2


@pytest.mark.slow
@ranks(2)
def test_other_data_is_refused_with_the_difference(rank: int, tmp_path: Path):
    config = tiny(tmp_path, steps=2)
    fit(config)
    with pytest.raises(CheckpointError, match="training on other data"):
        fit(changed(config, training={"steps": 3}, data={"shuffle": False}))


def poisonous(folder: Path, **training: object) -> tuple[RunConfig, RunConfig]:
    """A run whose fourth batch is poisonous, and the same run on the text without that batch."""
    config = changed(
        tiny(folder, objective="tests.distributed.fit_runs:poisoned", **training),
        data={"shuffle": False, "pack": True},
        checkpoint={"every": 2},
    )
    text = (folder / "words.txt").read_bytes()
    per_batch = 4 * LENGTH
    begin = 3 * per_batch  # its first byte stays: it is the last label of the batch before
    poison = text[begin : begin + 1] + bytes([POISON]) * (per_batch - 1)
    (folder / "bad.txt").write_bytes(text[:begin] + poison + text[begin:])
    bad = changed(config, data={"source": str(folder / "bad.txt")})
    return bad, replace(config, folder=str(folder / "clean"))


def test_rewind_leaves_the_bad_batch_out_and_learns_as_if_it_had_never_been(tmp_path: Path):
    bad, clean = poisonous(tmp_path, on_bad_loss="rewind")
    assert fit_on(2, bad) == fit_on(2, clean)


@ranks(2)
def test_skip_counts_the_step_and_keeps_the_weights(rank: int, tmp_path: Path):
    bad, _ = poisonous(tmp_path, on_bad_loss="skip")
    training = fit(bad)
    assert training.bad_steps == 1
    assert training.steps == 6
    told = losses(bad)
    assert [step for step, loss in told.items() if loss != loss] == [4]
    assert told[6] < told[1]


@ranks(2)
def test_stop_raises_on_every_rank_and_leaves_the_last_checkpoint(rank: int, tmp_path: Path):
    bad, _ = poisonous(tmp_path, on_bad_loss="stop")
    with pytest.raises(TrainingError, match="step 4 has loss nan") as failure:
        fit(bad)
    assert failure.value.fix
    assert [found.step for found in find_checkpoints(folder_of(bad) / "checkpoints")] == [2]


@ranks(2)
def test_too_many_bad_steps_end_the_run(rank: int, tmp_path: Path):
    bad, _ = poisonous(tmp_path, on_bad_loss="rewind", max_bad_steps=0)
    with pytest.raises(TrainingError, match="bad step"):
        fit(bad)
