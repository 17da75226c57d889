"""Small runs of `shardwise train` that tests start, kill and stop, and what such a run is made of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn

from shardwise.distributed.launchers import read_launch
from shardwise.training.objective import next_token_loss

ROOT = Path(__file__).parents[2]
STEPS = 40
SHARDWISE = [sys.executable, "-m", "shardwise"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def write_run(folder: Path, *, pause_s: float = 0.0, **settings: Any) -> Path:
    """A run file for a tiny model, with a checkpoint every five steps; its steps take at least `pause_s`."""
    config: dict[str, Any] = {
        "model": "llama3-bytes",
        "model_options": {
            "num_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1
        },
        "data": {"source": str(ROOT / "LICENSE"), "sequence_length": 32},
        "training": {
            "steps": STEPS,
            "batch_size": 4,
            "sample": None,
            "objective": f"{__name__}:next_token_at_leisure",
        },
        "checkpoint": {"every": 5},
        "mesh": {"device": "cpu"},
        "folder": str(folder / "run"),
    }  # fmt: skip
    for name, value in settings.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (folder / "pause").write_text(str(pause_s))
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def next_token_at_leisure(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The usual loss, slowly; says which process each rank is, in the folder of the run file."""
    folder = Path(os.environ["RUN_FILES"])
    _say_who(folder / f"rank-{read_launch().rank}")
    time.sleep(float((folder / "pause").read_text()))
    labels = batch["labels"]
    return next_token_loss(model(batch["input_ids"]), labels), (labels != -100).sum()


def _say_who(file: Path) -> None:
    if not file.exists() or file.read_text() != str(os.getpid()):
        new = file.with_name(f"new-{os.getpid()}")
        new.write_text(str(os.getpid()))
        new.rename(file)  # a reader never finds it empty


def environment(folder: Path, **more: str) -> dict[str, str]:
    """What a run needs to find the tests and its folder."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "RUN_FILES": str(folder), "PYTHONPATH": path, **more}


class Running:
    """A command in a session of its own, its output in a file."""

    def __init__(self, command: Sequence[str], folder: Path, name: str = "output", **more: str) -> None:
        self.output_file = folder / f"{name}.txt"
        with open(self.output_file, "w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment(folder, **more),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def wait(self, timeout_s: float = 300.0) -> int:
        """Its exit status."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end:\n{self.output[-4000:]}") from None

    def end(self) -> None:
        """Kill what is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running(command: Sequence[str], folder: Path, name: str = "output", **more: str) -> Iterator[Running]:
    """Start a command; nothing of it is left afterwards, nor of the ranks that it started."""
    run = Running(command, folder, name, **more)
    try:
        yield run
    finally:
        run.end()
        for rank in rank_pids(folder).values():  # torchrun gives ranks sessions of their own
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)


def rank_pids(folder: Path) -> dict[int, int]:
    """The process of each rank that has made a step."""
    return {int(file.name.removeprefix("rank-")): int(file.read_text()) for file in folder.glob("rank-*")}


def losses(folder: Path) -> dict[int, float]:
    """The loss of each recorded step; a step that was recorded twice fails the test."""
    found: dict[int, float] = {}
    file = folder / "run/metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        with suppress(json.JSONDecodeError):  # the last line may be half written
            record = json.loads(line)
            if "loss" in record:
                assert record["step"] not in found, f"step {record['step']} is recorded twice"
                found[record["step"]] = record["loss"]
    return found


def committed(folder: Path) -> list[int]:
    """Steps whose checkpoint is whole."""
    from shardwise.training.run_folder import find_checkpoints

    return [found.step for found in find_checkpoints(folder / "run/checkpoints")]


def wait_until(condition: Callable[[], object], run: Running, timeout_s: float = 180.0) -> None:
    """Until something is so, while the run lives."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain:\n{run.output[-4000:]}"
        assert run.process.poll() is None, f"it ended with {run.process.returncode}:\n{run.output[-4000:]}"
        time.sleep(0.05)


def past(folder: Path, step: int) -> Callable[[], bool]:
    """Whether a run is past a step and has a checkpoint to go back to."""
    return lambda: max(losses(folder), default=0) > step and bool(committed(folder))
