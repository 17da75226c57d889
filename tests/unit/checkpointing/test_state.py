"""What a run consists of, in one process: names, objects of all kinds, stores that are no disk."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler

from shardwise.checkpointing.formats.sharded import read_manifest
from shardwise.checkpointing.manager import Checkpointer
from shardwise.checkpointing.state import RunObjects
from shardwise.checkpointing.weights import save_weights
from shardwise.errors import CheckpointError, ConfigError
from shardwise.progress import NoProgress
from shardwise.units import format_bytes


def a_run() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


SCHEDULES: dict[str, Any] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3]),
    "Cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "OneCycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20),
    "Lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda number: 0.9**number),
    "Sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_go_on(tmp_path: Path, kind: str):
    model, optimizer = a_run()
    schedule = SCHEDULES[kind](optimizer)
    rates = []
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        for number in range(6):
            step(model, optimizer)
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
            if number == 2:
                checkpointer.save(3, model=model, optimizers=optimizer, schedule=schedule)
        model, optimizer = a_run()
        schedule = SCHEDULES[kind](optimizer)
        checkpointer.load(model=model, optimizers=optimizer, schedule=schedule)
    for number in range(3, 6):
        step(model, optimizer)
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == rates[number]


@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_a_restored_schedule_goes_to_an_epoch_like_the_saved_one(tmp_path: Path):
    """MultiStepLR computes with the elements of its milestones, a Counter."""
    model, optimizer = a_run()
    schedule = lr_scheduler.MultiStepLR(optimizer, [1, 3])
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, model=model, optimizers=optimizer, schedule=schedule)
        other, fresh = a_run()
        restored = lr_scheduler.MultiStepLR(fresh, [2])
        checkpointer.load(model=other, optimizers=fresh, schedule=restored)
    for each, stepped in ((schedule, optimizer), (restored, fresh)):
        stepped.step()
        each.step(3)
    assert repr(restored.state_dict()) == repr(schedule.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_mappings_of_other_types_as_dictionaries(tmp_path: Path):
    model, extra = nn.Linear(1, 1), {"counts": Counter({1: 2}), "ordered": OrderedDict(a=1)}
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, model=model, extra=extra)
        found: dict[str, Any] = {"extra": {"counts": None, "ordered": {"a": None}}}
        dcp.load(found, checkpoint_id=tmp_path / "step-00000001", no_dist=True)
        checkpointer.load(model=model)
    assert repr(found["extra"]) == "{'counts': {1: 2}, 'ordered': {'a': 1}}"
    assert repr(checkpointer.extra) == repr(extra)


def test_scaler_and_names_of_wrapped_models(tmp_path: Path):
    model, optimizer = a_run()
    compiled: Any = torch.compile(model[0])
    wrapped = nn.Sequential(compiled, *model[1:])  # names get `_orig_mod.`
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(wrapped(torch.randn(8, 4)).sum())
    scaler.update(8.0)
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, model=wrapped, optimizers=optimizer, scaler=scaler)
        assert "model.0.weight" in read_manifest(tmp_path / "step-00000001").tensors
        other, fresh = a_run()
        new = torch.amp.GradScaler("cpu")
        checkpointer.load(model=other, optimizers=fresh, scaler=new)
    assert new.get_scale() == 8.0
    assert torch.equal(other[0].weight, model[0].weight)


def test_tied_weights_are_stored_once(tmp_path: Path):
    model = nn.ModuleDict({"in": nn.Embedding(5, 3), "out": nn.Linear(3, 5, bias=False)})
    model["out"].weight = model["in"].weight
    with Checkpointer(tmp_path, asynchronous=False, rng=False) as checkpointer:
        checkpointer.save(1, model=model)
        contents = read_manifest(tmp_path / "step-00000001")
        assert contents.tensors["model.out.weight"].chunks == contents.tensors["model.in.weight"].chunks
        untied = nn.ModuleDict({"in": nn.Embedding(5, 3), "out": nn.Linear(3, 5, bias=False)})
        checkpointer.load(model=untied)
    assert torch.equal(untied["out"].weight, model["in"].weight)
    assert torch.equal(untied["in"].weight, model["in"].weight)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "background"])
def test_object_store(tmp_path: Path, asynchronous: bool):
    # `local://` is fsspec's own view of the disk; a store in memory would not be seen by the writer process.
    url = f"local://{tmp_path}/runs" if asynchronous else "memory://runs/one"
    model, optimizer = a_run()
    step(model, optimizer)
    with Checkpointer(url, asynchronous=asynchronous, keep_last=2) as checkpointer:
        for number in (1, 2, 3):
            checkpointer.save(number, model=model, optimizers=optimizer, extra={"number": number})
        checkpointer.wait()
        assert checkpointer.latest() == 3
        other, fresh = a_run()
        assert checkpointer.load(model=other, optimizers=fresh, step=2) == 2
        assert checkpointer.extra == {"number": 2}
        with pytest.raises(CheckpointError, match="no checkpoint of step 1"):
            checkpointer.load(model=other, step=1)
        assert torch.equal(other[2].weight, model[2].weight)
        fs, inner = fsspec.core.url_to_fs(url)
        fs.rm(f"{inner}/step-00000003/manifest.json")  # as if it had been interrupted: the manifest is the mark
        assert checkpointer.latest() == 2
    if not asynchronous:
        fs.rm("/runs", recursive=True)


def test_what_is_there_already_is_not_written_over(tmp_path: Path):
    model, _ = a_run()
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, model=model)
        with pytest.raises(CheckpointError, match="step-00000001 already"):
            checkpointer.save(1, model=model)
        (tmp_path / "step-00000002.partial").mkdir()
        (tmp_path / "step-00000002.partial" / "junk").write_text("left over")
        checkpointer.save(2, model=model)
        assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_progress_hears_the_bytes(tmp_path: Path, asynchronous: bool):
    class Heard:
        def __init__(self) -> None:
            self.totals: list[int] = []
            self.done: list[int] = []
            self.notes: list[str] = []

        def start(self, total: int, label: str) -> None:
            self.totals.append(total)
            self.done.append(0)

        def advance(self, steps: int = 1, note: str = "") -> None:
            self.done[-1] += steps
            self.notes.append(note)

        def finish(self, note: str = "") -> None:
            self.notes.append(note)

    heard = Heard()
    model, _ = a_run()
    with Checkpointer(tmp_path, asynchronous=asynchronous, progress=heard) as checkpointer:
        checkpointer.save(1, model=model)
        checkpointer.wait()
        told = list(heard.notes)
        checkpointer.load(model=model)
    written, read = heard.done
    assert written >= heard.totals[0] >= sum(t.nbytes for t in model.state_dict().values())
    assert " of " in told[0]
    assert told[-1].startswith("writing: ")
    assert all(note.endswith("/s") for note in told)
    assert read == heard.totals[1] >= sum(t.nbytes for t in model.state_dict().values())


class Recorder:
    """Notes what a progress bar would show, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, str]] = []

    def start(self, total: int, label: str) -> None:
        self.heard.append(("start", total, label))

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.heard.append(("advance", steps, note))

    def finish(self, note: str = "") -> None:
        self.heard.append(("finish", 0, note))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("numels", [(5,), (40_000_000, 3_000_000, 7)], ids=["small", "large"])
def test_progress_of_a_save_goes_up_to_all_of_it(tmp_path: Path, asynchronous: bool, numels: tuple[int, ...]):
    """Also where another process writes: its news come as they happen, and once each."""
    model = nn.Module()
    for index, numel in enumerate(numels):
        model.register_parameter(f"p{index}", nn.Parameter(torch.zeros(numel, dtype=torch.int8), requires_grad=False))
    recorder = Recorder()
    with Checkpointer(tmp_path, asynchronous=asynchronous, fsync=False, progress=recorder) as checkpointer:
        for step in (1, 2):
            recorder.heard.clear()
            checkpointer.save(step, model=model)
            checkpointer.wait()
            kinds = [kind for kind, _, _ in recorder.heard]
            steps = [number for kind, number, _ in recorder.heard if kind == "advance"]
            assert (kinds[0], kinds[-1]) == ("start", "finish")
            assert set(kinds[1:-1]) == {"advance"}
            (_, total, label), *_ = recorder.heard
            assert label == "writing"
            assert total >= sum(numels)
            assert total - sum(numels) < 1 << 15, "the state of random generators, no more"
            assert all(number > 0 for number in steps), "it never goes back"
            written = (tmp_path / f"step-{step:08d}" / "__0_0.distcp").stat().st_size
            assert total <= sum(steps) <= written
            if sum(numels) > 100 and not asynchronous:  # the other process has news a few times a second
                assert len(steps) > 1, "it moves before the end"
            size = format_bytes(sum(steps))
            assert recorder.heard[-2][2].startswith(f"{size} of {format_bytes(total)}, ")
            assert recorder.heard[-1][2].startswith(f"writing: {size} in ")


def test_progress_of_a_save_that_fails_ends(tmp_path: Path):
    recorder = Recorder()
    model, _ = a_run()
    with Checkpointer(tmp_path, progress=recorder) as checkpointer:
        checkpointer.save(1, model=model)
        checkpointer.wait()
        recorder.heard.clear()
        with pytest.raises(CheckpointError):
            checkpointer.save(1, model=model)
        assert recorder.heard == []


def test_a_progress_that_fails_confuses_no_later_save(tmp_path: Path):
    class Failing(NoProgress):
        def advance(self, steps: int = 1, note: str = "") -> None:
            raise ValueError("no terminal")

    model, _ = a_run()
    with Checkpointer(tmp_path, progress=Failing()) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, model=model)
            with pytest.raises(CheckpointError, match="no terminal"):
                checkpointer.wait()
        assert checkpointer.latest() is None


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"model": 3}, "not a module"),
        ({"optimizers": [3]}, "not a torch.optim.Optimizer"),
        ({"objects": {"rng": nn.Identity()}}, "a reserved name"),
        ({"objects": {"a.b": lr_scheduler.LRScheduler}}, "contains a dot"),
        ({"model": {"a.b": nn.Identity()}}, "contains a dot"),
    ],
)
def test_wrong_objects_are_named(arguments: dict[str, Any], what: str):
    given = {"model": nn.Identity(), **arguments}
    if given["model"] == 3:
        given["model"] = {"x": 3}
    with pytest.raises(ConfigError, match=what):
        RunObjects(**given)


def test_on_meta_there_is_nothing_to_save(tmp_path: Path):
    with torch.device("meta"):
        model, _ = a_run()
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError, match="meta device"):
        checkpointer.save(1, model=model)


class Quantized(nn.Linear):
    """Writes a table into its state dict that is not a buffer."""

    table = torch.zeros(3)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "table"] = self.table


class Renaming(nn.Linear):
    """Writes its own weight under another name, and keeps extra state."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "kernel"] = destination.pop(prefix + "weight")

    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        pass


def with_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))

    def add(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        assert prefix + "0.weight" in state
        state[prefix + "scale"] = 3.0

    module.register_state_dict_post_hook(add)
    return module


@pytest.mark.parametrize(
    ("make", "name"), [(lambda: Quantized(2, 2), "table"), (with_hook, "scale")], ids=["own", "hook"]
)
def test_state_that_modules_write_themselves_is_refused(tmp_path: Path, make: Any, name: str):
    model = nn.Sequential(nn.Linear(2, 2), make())
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        with pytest.raises(CheckpointError, match="neither parameters nor buffers") as caught:
            checkpointer.save(1, model=model)
        assert f"1 ({type(model[1]).__name__}): {name}" in caught.value.where
        with pytest.raises(CheckpointError, match="neither parameters nor buffers"):
            save_weights(model, tmp_path / "weights.safetensors")
    assert os.listdir(tmp_path) == []


def test_frozen_modules_may_write_what_they_like_if_they_are_left_out(tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 2), Quantized(2, 2).requires_grad_(False))
    with Checkpointer(tmp_path, asynchronous=False, trainable_only=True) as checkpointer:
        checkpointer.save(1, model=model)
        assert checkpointer.load(model=model) == 1


def test_modules_that_rename_their_parameters_are_saved(tmp_path: Path):
    model = nn.Sequential(Renaming(2, 2), checkpoint_wrapper(nn.Linear(2, 2)))
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, model=model)
        other = nn.Sequential(Renaming(2, 2), nn.Linear(2, 2))
        checkpointer.load(model=other)
    assert torch.equal(other[0].weight, model[0].weight)
