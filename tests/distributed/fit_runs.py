"""Tiny runs for the tests of `fit`: a small Transformer on a text of numbered words, and objectives that watch it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config.run import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)
from shardwise.progress import Progress
from shardwise.training.loop import fit
from shardwise.training.metrics import read_records
from shardwise.training.objective import next_token_loss
from shardwise.training.run_folder import Training
from tests.ranks import ranks

MODEL_OPTIONS = {"width": 16, "num_layers": 2, "num_heads": 2, "max_sequence_length": 16}
POISON = 1  # a byte that no text has
LENGTH = 16

SEEN: list[list[int]] = []
"""Rows that `recorded` was called with on this rank, in order."""


def tiny(folder: Path, **training: Any) -> RunConfig:
    """A run of 6 steps on the text in `folder`, whose learning rate does not depend on their number."""
    return RunConfig(
        model="tutorial",
        model_options=MODEL_OPTIONS,
        data=DataConfig(source=str(write_text(folder)), sequence_length=LENGTH, workers=0),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        schedule=ScheduleConfig(name="constant", warmup_steps=2),
        training=TrainingConfig(**{"steps": 6, "batch_size": 4, "sample": None, **training}),
        checkpoint=CheckpointConfig(every=None),
        folder=str(folder / "run"),
    )


def write_text(folder: Path) -> Path:
    """One document of words of which no two are alike; the same text on every rank, written whole."""
    path = folder / "words.txt"
    if not path.exists():
        partial = folder / f"words-{os.getpid()}.part"
        partial.write_text(" ".join(f"w{number:05d}" for number in range(1400)))
        partial.replace(path)
    return path


def changed(config: RunConfig, **sections: Any) -> RunConfig:
    """The config with some settings of some sections changed: `changed(config, training={"steps": 3})`."""
    new = {name: replace(getattr(config, name), **v) if isinstance(v, dict) else v for name, v in sections.items()}
    return replace(config, **new)


def losses(config: RunConfig) -> dict[int, float]:
    """What the run's metrics hold."""
    records = read_records(Path(config.folder or "") / "metrics.jsonl")
    return {record["step"]: float(record["loss"]) for record in records if "loss" in record}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of this rank's parts."""
    return {name: parameter.detach().to_local().clone() for name, parameter in model.named_parameters()}


def fit_on(num_ranks: int, config: RunConfig) -> dict[int, float]:
    """Train on so many ranks of a pool; return the losses."""
    {1: _on_one, 2: _on_two, 4: _on_four}[num_ranks](config=config)
    return losses(config)


@ranks(1)
def _on_one(rank: int, config: RunConfig) -> None:
    _fit(rank, config)


@ranks(2)
def _on_two(rank: int, config: RunConfig) -> None:
    _fit(rank, config)


@ranks(4)
def _on_four(rank: int, config: RunConfig) -> None:
    _fit(rank, config)


def _fit(rank: int, config: RunConfig) -> Training:
    SEEN.clear()
    training = fit(config)
    if SEEN:
        path = Path(config.folder or "", f"seen-{training.resumed_step}-{training.num_ranks}-{rank}.json")
        path.write_text(json.dumps(SEEN))
    return training


def recorded(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The next token's loss; remembers the rows."""
    SEEN.extend(batch["input_ids"].tolist())
    return plain(model, batch)


def plain(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What `auto` computes, counted afterwards."""
    return next_token_loss(model(batch["input_ids"]), batch["labels"]), (batch["labels"] != -100).sum()


def poisoned(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Not a number for rows that hold the poisonous byte."""
    loss, count = plain(model, batch)
    return loss * (float("nan") if bool((batch["input_ids"] == POISON).any()) else 1.0), count


def logged(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The next token's loss; writes down the rows of each step, for runs that are killed."""
    name = f"seen-{torch.distributed.get_world_size()}-{torch.distributed.get_rank()}.jsonl"
    with open(Path(os.environ["SEEN_FOLDER"], name), "a") as file:
        file.write(json.dumps(batch["input_ids"].tolist()) + "\n")
    return plain(model, batch)


class Recorder:
    """Keeps what a progress bar would show."""

    def __init__(self, then: Progress | None = None) -> None:
        self.events: list[tuple[object, ...]] = []
        self.notes: list[str] = []

    def start(self, total: int, label: str) -> None:
        self.events.append(("start", total, label))

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.events.append(("advance", steps))
        self.notes.append(note)

    def finish(self, note: str = "") -> None:
        self.events.append(("finish",))


class _Breaking:
    """Forty samples, of which the twelfth cannot be read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 11:
            raise OSError("sample 11 is gone")
        row = torch.full((LENGTH,), index % 250)
        return {"input_ids": row, "labels": row}


def breaking(config: DataConfig) -> _Breaking:
    """A data source that fails in its third batch of four, on the rank that has the batch's second half."""
    return _Breaking()
