"""`fit`: a whole training run on one page. It owns the loop only; every part of it is public."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from shardwise.config.run import RunConfig
from shardwise.diagnosing.check import check, refuse_errors
from shardwise.diagnosing.explained import explained
from shardwise.diagnosing.guard import guard
from shardwise.errors import ConfigError
from shardwise.models.load import load_model
from shardwise.progress import NoProgress, Progress
from shardwise.sharding.apply import shard
from shardwise.sharding.materialize import materialize
from shardwise.sharding.mesh import data_parallel_mesh, init_distributed
from shardwise.training.corpus import byte_batches
from shardwise.training.step import accumulate, clip_grad_norm_, mean_over_ranks
from shardwise.units import format_count, format_seconds

_NUM_BYTES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What a run did. The same on every rank, but for the time."""

    model: str
    num_params: int
    """Parameters of the whole model, tied ones once."""
    num_ranks: int
    losses: tuple[float, ...]
    """Mean over ranks and micro-steps, step by step."""
    tokens: int
    """Trained on, over all ranks."""
    seconds: float
    """Steps only, without building the model."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        return (
            f"trained {self.model} ({format_count(self.num_params)} parameters) on {ranks}: "
            f"loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f} in {len(self.losses)} steps, "
            f"{format_seconds(self.seconds)}, {format_count(self.tokens / self.seconds)} tokens/s"
        )


def fit(config: RunConfig, *, progress: Progress | None = None) -> Training:
    """Build the model on meta, shard it, fill it, and train it on bytes of Python's standard library.

    Args:
        config: The run.
        progress: Hears of every step; rank 0's is usually the only one shown.

    Returns:
        The losses and the speed.

    Raises:
        ConfigError: The model does not take tokens, or too few of them.

    Ranks:
        Collective. Joins the launcher's process group, or the one that exists.
    """
    progress = progress or NoProgress()
    mesh = init_distributed(config.mesh)
    torch.manual_seed(config.seed)
    model = load_model(config.model)
    _check_takes_bytes(model, config)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    shard(model, config.shard, mesh=mesh)
    materialize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)
    batches = _batches(config, mesh)
    losses: list[float] = []
    start = time.perf_counter()
    refuse_errors(check(model, optimizer))
    progress.start(config.steps, f"training {config.model}")
    with guard(model), explained(model):
        for _ in range(config.steps):
            losses.append(_step(model, optimizer, batches, config, mesh))
            progress.advance(note=f"loss {losses[-1]:.3f}")
    progress.finish()
    ranks = data_parallel_mesh(mesh).size()
    return Training(
        model=config.model,
        num_params=num_params,
        num_ranks=mesh.size(),
        losses=tuple(losses),
        tokens=len(losses) * config.micro_steps * config.batch_size * config.sequence_length * ranks,
        seconds=time.perf_counter() - start,
    )


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Tensor],
    config: RunConfig,
    mesh: DeviceMesh,
) -> float:
    """One optimizer step; return the loss, averaged over micro-steps and ranks."""
    total = torch.zeros((), device=mesh.device_type)
    for micro_step in range(config.micro_steps):
        with accumulate(model, micro_step, config.micro_steps):
            loss = next_token_loss(model, next(batches)) / config.micro_steps
            loss.backward()
        total += loss.detach()
    clip_grad_norm_(model, config.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return mean_over_ranks(total, mesh=mesh).item()


def next_token_loss(model: nn.Module, passages: Tensor) -> Tensor:
    """Mean cross-entropy of each next token, in float32; (batch, length + 1) tokens in."""
    output = model(passages[:, :-1])
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, 1).float(), passages[:, 1:].flatten())


def _batches(config: RunConfig, mesh: DeviceMesh) -> Iterator[Tensor]:
    """This rank's batches on its device; ranks that share a layer's matrices share their batches too."""
    ranks = data_parallel_mesh(mesh)
    rank = 0
    for axis in range(ranks.ndim):
        rank = rank * ranks.size(axis) + ranks.get_local_rank(axis)
    batches = byte_batches(
        batch_size=config.batch_size, sequence_length=config.sequence_length, seed=config.seed, rank=rank
    )
    return (batch.to(mesh.device_type) for batch in batches)


def _check_takes_bytes(model: nn.Module, config: RunConfig) -> None:
    shape = getattr(model, "config", None)
    for name, least, unit in (
        ("vocab_size", _NUM_BYTES, "byte values"),
        ("max_sequence_length", config.sequence_length, "tokens in a sequence"),
    ):
        value = getattr(shape, name, least)
        if value < least:
            raise ConfigError(
                f"{config.model} has {name} {value}, but the data has {least} {unit}",
                where="model, sequence_length",
                why="every token and position needs a row in the model's tables",
                fix=f"choose a model with {name} of at least {least}"
                + (f", or set sequence_length = {value}" if name == "max_sequence_length" else ""),
            )
