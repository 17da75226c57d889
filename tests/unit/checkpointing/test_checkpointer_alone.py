"""The Checkpointer in one process: what is kept and loaded, what is refused and in which words."""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Checkpointer, diff_checkpoints
from shardwise.checkpointing.state import seed_from_state
from shardwise.errors import CheckpointError, ConfigError


def a_run(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def folders(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


def saves(folder: Path, metrics: dict[int, float | None], **settings: Any) -> None:
    model, _ = a_run()
    with Checkpointer(folder, fsync=False, asynchronous=False, **settings) as checkpointer:
        for step, metric in metrics.items():
            assert checkpointer.save(step, model=model, metric=metric) is True


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [40, 50, 60]),
        ({"keep_last": 2}, [50, 60]),
        ({"keep_last": None}, [10, 20, 30, 40, 50, 60]),
        ({"keep_last": 1, "keep_every": 20}, [20, 40, 60]),
        ({"keep_last": 1, "keep_best": 2}, [20, 50, 60]),
        ({"keep_last": 1, "keep_best": 2, "best": "max"}, [10, 30, 60]),
    ],
    ids=["default", "two", "all", "every", "best-min", "best-max"],
)
def test_what_is_kept_over_saves(tmp_path: Path, settings: dict[str, Any], kept: list[int]):
    saves(tmp_path, {10: 3.0, 20: 0.5, 30: 2.5, 40: math.nan, 50: 1.0, 60: None}, **settings)
    assert names(tmp_path) == folders(*kept)


def test_metrics_of_the_run_that_is_resumed_count(tmp_path: Path):
    saves(tmp_path, {1: 0.25, 2: 0.75, 3: math.inf, 4: None}, keep_last=None)
    model, _ = a_run()
    with Checkpointer(tmp_path, asynchronous=False, keep_last=1, keep_best=2) as checkpointer:
        checkpointer.load(model=model)
        checkpointer.save(5, model=model, metric=0.5)
    assert names(tmp_path) == folders(1, 5)


def test_checkpoints_of_another_run_are_never_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    saves(tmp_path, {10: None, 20: None})
    saves(tmp_path, {1: None, 2: None, 3: None}, keep_last=1)
    assert names(tmp_path) == folders(3, 10, 20)
    (record,) = caplog.records
    assert "neither saved nor loaded the checkpoints of steps [10, 20]; they are kept" in record.getMessage()


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def refuse(path: Path) -> None:
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr("shutil.rmtree", refuse)
    saves(tmp_path, {1: None, 2: None}, keep_last=1)
    assert "step-00000002" in names(tmp_path)
    assert "could not be removed" in caplog.text
    assert "Directory not empty" in caplog.text


def test_a_newest_checkpoint_that_is_not_whole_costs_no_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Somebody else cuts the file between its writing and the end of the save."""
    model, _ = a_run()
    with Checkpointer(tmp_path, asynchronous=False, keep_last=1, fsync=False) as checkpointer:
        checkpointer.save(1, model=model)
        rename = os.rename

        def cut(source: Any, target: Any) -> None:
            rename(source, target)
            file = Path(target) / "__0_0.distcp"
            if file.exists():
                os.truncate(file, file.stat().st_size - 1)

        monkeypatch.setattr(os, "rename", cut)
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp changed after it was written"):
            checkpointer.save(2, model=model)
    assert names(tmp_path) == folders(1, 2)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"keep_last": 0}, "keep_last is 0"),
        ({"keep_last": -1, "keep_best": 0}, "keep_last is -1, keep_best is 0"),
        ({"keep_every": 0}, "keep_every is 0"),
        ({"best": "least"}, "best is 'least'"),
        ({"on_busy": "queue"}, "on_busy is 'queue'"),
    ],
    ids=["last", "two", "every", "best", "busy"],
)
def test_arguments_that_mean_nothing(tmp_path: Path, settings: dict[str, Any], what: str):
    with pytest.raises(ConfigError) as caught:
        Checkpointer(tmp_path, **settings)
    assert caught.value.what == what
    assert Checkpointer(tmp_path, keep_last=1, keep_every=1, keep_best=1).close() is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_everything_comes_back(tmp_path: Path, asynchronous: bool):
    model, optimizer = a_run()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer)
    schedule.step()
    extra = {"epoch": 3, "names": ["a", None], "pair": (1, 2.5)}
    with Checkpointer(tmp_path, asynchronous=asynchronous) as checkpointer:
        assert checkpointer.latest() is None
        assert checkpointer.path(7) == tmp_path / "step-00000007"
        checkpointer.prepare(model=model, optimizers=optimizer, schedule=schedule)
        assert checkpointer.save(7, model=model, optimizers=optimizer, extra=extra, schedule=schedule) is True
        after = torch.rand(3), random.random()
        train(model, optimizer)
        checkpointer.save(9, model=model, optimizers=optimizer, schedule=schedule)
        checkpointer.wait()
        assert checkpointer.latest() == 9
        other, fresh = a_run(5)
        later = torch.optim.lr_scheduler.StepLR(fresh, 1, 0.5)
        assert checkpointer.load(model=other, optimizers=fresh, step=7, schedule=later) == 7
        assert checkpointer.extra == extra
        assert checkpointer.notes == ()
        assert later.last_epoch == 1
        assert fresh.param_groups[0]["lr"] == 0.05
        assert torch.equal(torch.rand(3), after[0])
        assert random.random() == after[1]
        assert checkpointer.load(model=other) == 9
        assert checkpointer.extra is None
    for ours, theirs in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_typo_in_verify_is_no_other_way_to_verify(tmp_path: Path):
    model = nn.Linear(2, 2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=model)
        checkpointer.wait()
        with pytest.raises(ConfigError, match="befor"):
            checkpointer.load(model=model, verify="befor")  # pyrefly: ignore[bad-argument-type]


def test_without_rng_the_streams_go_on(tmp_path: Path):
    model, _ = a_run()
    with Checkpointer(tmp_path, rng=False, asynchronous=False) as checkpointer:
        checkpointer.save(1, model=model)
        torch.manual_seed(9)
        checkpointer.load(model=model)
        drawn = torch.rand(2)
    torch.manual_seed(9)
    assert torch.equal(torch.rand(2), drawn)


def test_what_is_not_there_is_said_with_what_is(tmp_path: Path):
    model, _ = a_run()
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        with pytest.raises(CheckpointError) as caught:
            checkpointer.load(model=model)
        assert caught.value.what == "there is no checkpoint to load"
        assert caught.value.why == "no save into this folder was ever committed"
        with pytest.raises(CheckpointError) as caught:
            checkpointer.load(model=model, step=3)
        assert caught.value.what == "there is no checkpoint of step 3"
        checkpointer.save(2, model=model)
        checkpointer.save(5, model=model)
        with pytest.raises(CheckpointError) as caught:
            checkpointer.load(model=model, step=3)
        assert caught.value.why == "the committed steps are [2, 5]"
        assert caught.value.fix == "load step 5, the latest"
        assert caught.value.where == str(tmp_path)


def test_a_closed_one_does_nothing_more(tmp_path: Path):
    model, _ = a_run()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.close()
    checkpointer.close()
    calls = (
        lambda: checkpointer.save(1, model=model),
        lambda: checkpointer.load(model=model),
        lambda: checkpointer.prepare(model=model),
        checkpointer.latest,
    )
    for use in calls:
        with pytest.raises(CheckpointError, match="the Checkpointer is closed"):
            use()
    assert names(tmp_path) == []


def test_leftovers_are_removed_once_and_nothing_else(tmp_path: Path):
    model, _ = a_run()
    for name in ("step-00000001.partial", "step-00000002.removing", "notes", "step-1"):
        (tmp_path / name).mkdir()
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(3, model=model)
        assert names(tmp_path) == ["notes", "step-00000003", "step-1"]
        (tmp_path / "step-00000009.partial").mkdir()
        checkpointer.save(4, model=model)
        assert "step-00000009.partial" in names(tmp_path)


def test_a_failure_in_the_background_is_raised_once(tmp_path: Path):
    model, _ = a_run()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=model)
        checkpointer.wait()
        (tmp_path / "step-00000002").write_text("in the way")
        with pytest.raises(CheckpointError, match="step-00000002 already"):
            checkpointer.save(2, model=model)
        checkpointer.wait()
        checkpointer.save(3, model=model)
        checkpointer.wait()
        assert checkpointer.latest() == 3


def test_an_error_of_the_block_is_not_hidden_by_one_of_the_last_save(tmp_path: Path):
    class Failing:
        def start(self, total: int, label: str) -> None: ...

        def advance(self, steps: int = 1, note: str = "") -> None:
            raise ValueError("no terminal")

        def finish(self, note: str = "") -> None: ...

    model, _ = a_run()

    def fail() -> None:
        with Checkpointer(tmp_path, progress=Failing()) as checkpointer:
            checkpointer.save(1, model=model)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        fail()
    assert any("also, the last save failed" in note for note in caught.value.__notes__)


ENDING = """
import os, signal, sys
import torch
from torch import nn
import shardwise as sw
from shardwise import Checkpointer, diff_checkpoints
from shardwise.checkpointing.state import seed_from_state

if sys.argv[2] == "own":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
checkpointer = Checkpointer(sys.argv[1])
assert (signal.getsignal(signal.SIGTERM) == signal.SIG_DFL) is False
checkpointer.save(1, model=nn.Linear(2000, 2000))
if sys.argv[2] == "closed":
    checkpointer.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
elif sys.argv[2] != "exit":
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("way", "status"), [("exit", 0), ("closed", 0), ("term", -signal.SIGTERM), ("own", 5)])
def test_a_program_that_ends_finishes_its_save(tmp_path: Path, way: str, status: int):
    command = [sys.executable, "-c", ENDING, str(tmp_path), way]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == status, result.stderr
    assert names(tmp_path) == folders(1)


def test_notes_of_a_load_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model, _ = a_run()
    torch.save({"model": model.state_dict()}, tmp_path / "plain.pt")
    with caplog.at_level(logging.INFO, logger="shardwise.checkpointing"), Checkpointer(tmp_path / "x") as checkpointer:
        assert checkpointer.load(model=model, path=tmp_path / "plain.pt") == 0
        assert tuple(record.getMessage() for record in caplog.records) == checkpointer.notes


def test_random_states_that_nobody_seeded_are_no_difference(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model, _ = a_run()
    for name in ("a", "b"):
        torch.manual_seed(3)
        random.random()
        with Checkpointer(tmp_path / name, asynchronous=False) as checkpointer:
            checkpointer.save(1, model=model)
    assert diff_checkpoints(tmp_path / "a", tmp_path / "b").is_empty
    assert "rng.0.python differs; not counted" in caplog.text
    torch.manual_seed(4)
    with Checkpointer(tmp_path / "c", asynchronous=False) as checkpointer:
        checkpointer.save(1, model=model)
    assert [each.name for each in diff_checkpoints(tmp_path / "a", tmp_path / "c").tensors] == ["rng.0.torch"]


def test_the_default_device_does_not_matter(tmp_path: Path):
    def a_run_with_a_tensor_lr(seed: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = a_run(seed)
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(lr), foreach=False)

    model, optimizer = a_run_with_a_tensor_lr(0, 0.1)
    train(model, optimizer)
    tensors = model.state_dict()
    strided = {**tensors, "0.weight": tensors["0.weight"].double().t().contiguous().t()}
    torch.save(strided, tmp_path / "strided.pt")
    runs = [a_run_with_a_tensor_lr(seed, 0.3) for seed in range(1, 5)]
    with torch.device("meta"):
        with Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(1, model=model, optimizers=optimizer)
        sw.save_full(tmp_path / "run.pt", model=model, optimizers=optimizer)
        sw.convert_checkpoint(tmp_path / "strided.pt", tmp_path / "weights", "safetensors", dtype="float32")
        assert sw.verify_checkpoint(tmp_path / "run") == []
        with Checkpointer(tmp_path / "other") as checkpointer:
            for path, run in zip((tmp_path / "run" / "step-00000001", tmp_path / "run.pt"), runs, strict=False):
                checkpointer.load(path=path, model=run[0], optimizers=run[1])
        sw.load_weights(runs[2][0], tmp_path / "weights")
        sw.load_weights(runs[3][0], tmp_path / "strided.pt", broadcast=True)
        seed_from_state({"torch": torch.get_rng_state()}, 1)
    for loaded, _ in runs:
        assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))
    for _, loaded in runs[:2]:
        assert loaded.param_groups[0]["lr"].item() == pytest.approx(0.1)
        assert all(
            torch.equal(loaded.state[a]["exp_avg"], optimizer.state[b]["exp_avg"])
            for a, b in zip(loaded.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True)
        )


def test_a_url_that_became_a_path_is_refused():
    with pytest.raises(CheckpointError, match="is a URL that pathlib has changed"):
        Checkpointer(Path("s3://bucket/run"))


def test_run_that_goes_back_continues_from_there(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model = nn.Linear(2, 2)

    def save(checkpointer: Checkpointer, step: int, value: float) -> None:
        model.weight.data.fill_(value)
        checkpointer.save(step, model=model)

    with Checkpointer(tmp_path, asynchronous=False, keep_last=None) as checkpointer:
        for step in (10, 20, 30):
            save(checkpointer, step, step)
    with Checkpointer(tmp_path, asynchronous=False, keep_last=2) as checkpointer:
        checkpointer.load(model=model, step=10)
        assert checkpointer.latest() == 30  # loading changes nothing
        save(checkpointer, 15, 15.5)
        assert "continues from step 10" in caplog.text
        assert checkpointer.latest() == 15
        assert checkpointer.path(10).exists()
        save(checkpointer, 20, 20.5)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load(model=model) == 20
        assert model.weight[0, 0] == 20.5
        checkpointer.load(model=model, path=tmp_path / "step-00000020.abandoned")
        assert model.weight[0, 0] == 20
    assert sorted(os.listdir(tmp_path)) == [
        "step-00000015",
        "step-00000020",
        "step-00000020.abandoned",
        "step-00000030.abandoned",
    ]


def test_steps_after_the_loaded_one_are_abandoned_however_its_path_is_written(tmp_path: Path):
    folder = tmp_path / "run"
    saves(folder, dict.fromkeys((1, 2, 3)))
    (tmp_path / "link").symlink_to(folder)
    model, _ = a_run()
    with Checkpointer(tmp_path / "link", asynchronous=False) as checkpointer:
        checkpointer.load(model=model, path=folder / "step-00000001")
        checkpointer.save(2, model=model)
        assert checkpointer.latest() == 2
    assert names(folder) == [*folders(1, 2), "step-00000002.abandoned", "step-00000003.abandoned"]
