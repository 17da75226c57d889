"""Record how FSDP1 laid a model's parameters out, while the model is there: for LOCAL checkpoints that outlive it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpointing.formats.fsdp1 import LAYOUT_FILE
from shardwise.checkpointing.state.names import canonical_name
from shardwise.compat import flat_param_entries, flat_param_numel, flat_param_ties, fsdp1_flat_params
from shardwise.errors import CheckpointError


def record_flat_params(model: nn.Module, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> Path:
    """Write `fsdp1_layout.json` beside a LOCAL checkpoint, so that it can be converted without the model.

    Args:
        model: Wrapped in FSDP1's `FullyShardedDataParallel`.
        folder: Where the ranks' files are.
        optimizer: Made after wrapping; tells which parameter has which number in its state.

    Returns:
        The file.

    Ranks:
        Local: call it on rank 0; all ranks have the same layout.
    """
    path = Path(folder) / LAYOUT_FILE
    path.write_text(json.dumps(describe_flat_params(model, optimizer), indent=1))
    return path


def describe_flat_params(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """What `record_flat_params` writes: every flat parameter, what is in it, and the optimizer's order.

    Raises:
        CheckpointError: The model is not wrapped by FSDP1.
    """
    units, ties = [], {}
    names: dict[int, str] = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}
    for wrapped, flat_param in fsdp1_flat_params(model):
        module = canonical_name(wrapped)
        names[id(flat_param)] = module
        entries = [
            {"name": _join(module, name), "shape": list(shape), "start": start}
            for name, shape, start in flat_param_entries(flat_param)
        ]
        ties |= {_join(module, also): _join(module, stored) for also, stored in flat_param_ties(flat_param)}
        units.append({"module": module, "numel": flat_param_numel(flat_param), "params": entries})
    if not units:
        raise CheckpointError(
            "the model has no flat parameters",
            why="only what FSDP1's FullyShardedDataParallel wraps has them",
            fix="pass the wrapped model",
        )
    params = [{"name": entry["name"], "shape": entry["shape"]} for unit in units for entry in unit["params"]]
    layout: dict[str, Any] = {"units": units, "params": params, "ties": ties}
    if optimizer is not None:
        layout["optimizer"] = [names[id(each)] for group in optimizer.param_groups for each in group["params"]]
    return layout


def _join(module: str, name: str) -> str:
    return canonical_name(f"{module}.{name}" if module else name)
