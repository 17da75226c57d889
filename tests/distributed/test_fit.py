"""`fit` on real ranks: it learns, ranks agree, and how a batch is cut or laid out does not change what is learnt."""

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.config.load import load
from shardwise.config.run import RunConfig
from shardwise.config.schema import MeshConfig
from shardwise.distributed.agreement import agree_on
from shardwise.training.loop import fit
from shardwise.training.metrics import read_records
from tests.distributed.fit_runs import MODEL_OPTIONS, Recorder, changed, fit_on, losses, tiny
from tests.ranks import ranks


@ranks(2)
def test_loss_falls_and_all_is_told(rank: int, tmp_path: Path):
    recorder = Recorder()
    config = tiny(tmp_path, steps=12, sample="w0")
    training = fit(config, progress=recorder)
    agree_on(repr((training.first_loss, training.last_loss, training.sample)), "the losses")
    assert training.last_loss < training.first_loss - 0.3
    assert training.tokens == 12 * 4 * 16
    assert training.sample.startswith("w0")
    assert recorder.events == [("start", 12, "training tutorial"), *[("advance", 1)] * 12, ("finish",)]
    assert re.fullmatch(r"loss \d\.\d{3}  [\d.]+k? tokens/s  [\d.]+ [KMG]iB  [\d.]+ (s|min) left", recorder.notes[-1])
    assert Path(training.checkpoint).is_dir()
    assert load(RunConfig, tmp_path / "run" / "config.yaml") == config
    records = read_records(Path(training.metrics))
    assert [record["step"] for record in records] == list(range(1, 13))
    assert records[-1].keys() >= {
        "step", "loss", "learning_rate", "grad_norm", "tokens_per_s", "mfu", "memory_bytes", "data_wait_s",
        "checkpoint_wait_s",
    }  # fmt: skip
    assert training.read_losses() == {record["step"]: record["loss"] for record in records}
    assert records[-1]["loss"] == training.last_loss
    assert json.loads(json.dumps(training.to_dict()))["resume_command"].endswith("--set training.steps=24")


@ranks(2)
def test_same_seed_is_the_same_run_to_the_last_bit_and_another_seed_is_not(rank: int, tmp_path: Path):
    """Dropout included: every rank and step has a seed of its own."""
    config = replace(tiny(tmp_path, steps=4), model_options=MODEL_OPTIONS | {"dropout": 0.2}, deterministic=True)
    first, same, other = (
        fit(replace(config, folder=str(tmp_path / name), seed=seed)) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first.read_losses() == same.read_losses()
    assert first.last_loss != other.last_loss
    assert not torch.are_deterministic_algorithms_enabled()


def test_micro_batches_and_accumulation_modes_learn_what_the_whole_batch_does(tmp_path: Path):
    config = tiny(tmp_path, steps=3, batch_size=8)
    whole = fit_on(2, replace(config, folder=str(tmp_path / "whole")))
    for size, mode in ((1, "comm"), (3, "memory")):
        cut = changed(config, training={"micro_batch_size": size, "accumulation": mode})
        parts = fit_on(2, replace(cut, folder=str(tmp_path / f"{mode}-{size}")))
        assert parts == pytest.approx(whole, abs=1e-5)


@pytest.mark.slow
def test_one_rank_two_ranks_and_a_hybrid_mesh_learn_the_same(tmp_path: Path):
    config = tiny(tmp_path, steps=3)
    alone = fit_on(1, replace(config, folder=str(tmp_path / "one")))
    assert fit_on(2, replace(config, folder=str(tmp_path / "two"))) == pytest.approx(alone, abs=1e-5)
    hybrid = replace(config, folder=str(tmp_path / "hybrid"), mesh=MeshConfig(replicate=2))
    assert fit_on(4, hybrid) == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
def test_ragged_batches_weigh_every_token_alike_on_four_ranks(tmp_path: Path):
    config = ragged(tmp_path)
    alone = fit_on(1, replace(config, folder=str(tmp_path / "one")))
    assert fit_on(4, replace(config, folder=str(tmp_path / "four"))) == pytest.approx(alone, abs=1e-5)


def ragged(folder: Path) -> RunConfig:
    """Prompts are masked and answers differ in length."""
    lines = [{"prompt": "p" * (1 + n % 5), "response": "r" * (1 + n * 7 % 11)} for n in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return changed(tiny(folder, steps=4), data={"source": str(folder / "pairs.jsonl"), "pack": False})


def test_ragged_batches_weigh_every_token_alike(tmp_path: Path):
    """Ranks and micro-steps hold different numbers of tokens."""
    config = ragged(tmp_path)
    alone = fit_on(1, replace(config, folder=str(tmp_path / "one")))
    cut = changed(config, training={"micro_batch_size": 1})
    assert fit_on(2, replace(cut, folder=str(tmp_path / "two"))) == pytest.approx(alone, abs=1e-5)
    counted = [record["tokens"] for record in read_records(tmp_path / "two" / "metrics.jsonl")]
    assert len(set(counted)) > 1, "the batches are not ragged: this proves nothing"
    later = changed(cut, training={"objective": "tests.distributed.fit_runs:plain"})
    assert fit_on(2, replace(later, folder=str(tmp_path / "later"))) == pytest.approx(alone, abs=1e-5)
    assert [record["tokens"] for record in read_records(tmp_path / "later" / "metrics.jsonl")] == counted


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_held_out_loss_is_that_of_one_process_and_of_the_average(tmp_path: Path, num_ranks: int):
    config = changed(tiny(tmp_path, steps=4, evaluate_every=2), data={"evaluation_fraction": 0.1})

    def evaluations(num_ranks: int, run: RunConfig) -> dict[int, float]:
        fit_on(num_ranks, run)
        records = read_records(Path(run.folder) / "metrics.jsonl")
        return {r["step"]: r["evaluation_loss"] for r in records if "evaluation_loss" in r}

    alone = evaluations(1, replace(config, folder=str(tmp_path / "one")))
    assert list(alone) == [2, 4]
    assert evaluations(num_ranks, replace(config, folder=str(tmp_path / "many"))) == pytest.approx(alone, abs=1e-5)
    still = changed(config, training={"ema_decay": 1.0})  # an average that never moves: the first weights
    average = evaluations(2, replace(still, folder=str(tmp_path / "average")))
    assert average[2] == average[4]
    assert average[4] > alone[4] + 0.05


@ranks(2)
def test_signal_to_one_rank_stops_all_and_the_run_goes_on_later(rank: int, tmp_path: Path):
    class Interrupting(Recorder):
        def advance(self, steps: int = 1, note: str = "") -> None:
            super().advance(steps, note)
            if rank == 1 and len(self.notes) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    config = tiny(tmp_path)
    stopped = fit(config, progress=Interrupting())
    assert stopped.stopped == "SIGTERM"
    assert stopped.steps == 3
    assert stopped.checkpoint.endswith("step-00000003")
    assert stopped.resume_command == f"shardwise train {tmp_path / 'run' / 'config.yaml'}"
    resumed = fit(config)
    assert (resumed.stopped, resumed.resumed_step, resumed.steps) == (None, 3, 6)
    assert list(losses(config)) == list(range(1, 7))
    whole = fit(replace(config, folder=str(tmp_path / "whole")))
    assert resumed.last_loss == whole.last_loss


@ranks(2)
def test_complete_run_says_so_and_trains_no_further(rank: int, tmp_path: Path):
    config = tiny(tmp_path, steps=2)
    fit(config)
    again = fit(config)
    assert (again.steps, again.first_loss) == (2, None)
    assert "2 steps were done already" in str(again)
