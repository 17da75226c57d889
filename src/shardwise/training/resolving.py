"""A run's settings as they will be used, with the reason for each that is decided and not given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from shardwise.config.load import to_yaml
from shardwise.config.run import RunConfig
from shardwise.models.load import load_model
from shardwise.planning.plan import Plan
from shardwise.training.filling import weights_of
from shardwise.training.folders import with_folder
from shardwise.training.requirements import (
    Problems,
    check_disk,
    check_length,
    check_settings,
    checkpoint_bytes,
    plan_run,
)
from shardwise.training.resuming import CHECKPOINTS, find_resumed
from shardwise.training.saving import Found
from shardwise.units import format_count

_MAX_LINES = 40


def resolved_yaml(config: RunConfig, num_ranks: int) -> str:
    """The run as YAML that `shardwise train` reads, with reasons as comments.

    Args:
        config: The run.
        num_ranks: That it would have.

    Raises:
        ConfigError: With everything that is wrong and can be seen without reading the data.

    Ranks:
        Local. Nothing is written, no rank is started.
    """
    problems = Problems()
    with problems.collecting():
        sizes = config.mesh.sizes(num_ranks)
    problems.raise_any(is_joined=False)
    check_settings(config, num_ranks, problems)
    with problems.collecting():
        model = load_model(config.model, options=config.model_options)
        check_length(model, config)
        shape = replace(config.mesh, shard=sizes["shard"])
        made = plan_run(model, config.shard, shape)
    notes: dict[str, list[str]] = {}
    with problems.collecting():
        resolved = with_folder(config, reserve=False)
        found = find_resumed(Path(resolved.folder or "") / CHECKPOINTS, config.checkpoint.resume)
        notes |= _folder_notes(config, found)
    problems.raise_any(is_joined=False)
    notes["checkpoint"] = check_disk(resolved, checkpoint_bytes(model, made, config), found)
    notes |= _batch_notes(config, num_ranks)
    notes["model"] = [f"{format_count(sum(p.numel for p in made.parameters))} parameters"]
    notes["mesh"] = [f"{num_ranks} ranks: " + ", ".join(f"{name} {size}" for name, size in sizes.items())]
    notes["mesh.device"] = [f"auto is {_device()} here"] if config.mesh.device == "auto" else []
    notes["shard"] = _plan_notes(made)
    weights = weights_of(config)
    notes["weights"] = [f"read from {weights}" if weights is not None else "drawn anew, from the seed"]
    used = {path: lines for path, lines in notes.items() if lines}
    return to_yaml(resolved, used)


def _folder_notes(config: RunConfig, found: Found | None) -> dict[str, list[str]]:
    start = f"goes on from step {found.step}: {found.path}" if found is not None else "starts afresh"
    chosen = ["the next free name in `runs`; chosen anew for every run"] if config.folder is None else []
    return {"folder": chosen, "checkpoint.resume": [start]}


def _batch_notes(config: RunConfig, num_ranks: int) -> dict[str, list[str]]:
    training = config.training
    rows = training.batch_size // num_ranks
    tokens = training.batch_size * config.data.sequence_length
    at_once = min(training.micro_batch_size or rows, rows)
    parts = -(-rows // at_once)
    micro = f"{at_once} of a rank's {rows} sequences at once: {parts} micro-step{'s' if parts > 1 else ''} a step"
    if training.micro_batch_size is None:
        micro += "; halved on all ranks when one runs out of memory"
    return {
        "training.steps": [f"{format_count(training.steps * tokens)} tokens in all"],
        "training.batch_size": [f"{rows} sequences on each of {num_ranks} ranks, {format_count(tokens)} tokens a step"],
        "training.micro_batch_size": [micro],
    }


def _plan_notes(made: Plan) -> list[str]:
    lines = str(made).splitlines()
    hidden = len(lines) - _MAX_LINES
    return lines[:_MAX_LINES] + ([f"... and {hidden} more lines"] if hidden > 0 else [])


def _device() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else "cpu"
