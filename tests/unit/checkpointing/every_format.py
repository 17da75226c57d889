"""One small training state, written in every format by those who define it: torch, safetensors, and us."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from tests.sharded_checkpoints import write_checkpoint


def model_state() -> dict[str, torch.Tensor]:
    """Many dtypes and shapes, one pair of tied names."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(7, 5, generator=generator)
    return {
        "embed.weight": weight,
        "block.weight": torch.randn(4, 3, 2, generator=generator).to(torch.bfloat16),
        "block.bias": torch.randn(9, generator=generator).to(torch.float16),
        "block.count": torch.tensor(12),
        "block.mask": torch.tensor([True, False, True]),
        "block.empty": torch.zeros(0, 4),
        "head.weight": weight,
    }


def optimizer_state() -> dict[str, Any]:
    """As `get_optimizer_state_dict` gives it."""
    names = ["embed.weight", "block.weight", "block.bias"]
    weights = model_state()
    state = {
        name: {"step": torch.tensor(5.0), "exp_avg": weights[name] * 2, "exp_avg_sq": weights[name].float() ** 2}
        for name in names
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "amsgrad": False, "params": names}]}


def run_state() -> dict[str, Any]:
    return {"model": model_state(), "optim": optimizer_state(), "extra": {"epoch": 3, "note": "hello"}}


def flat_tensors(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors by flat name."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            flat[prefix + key] = value
        elif isinstance(value, dict):
            flat |= flat_tensors(value, f"{prefix}{key}.")
    return flat


def save_full(folder: Path) -> Path:
    torch.save(run_state(), folder / "run.pt")
    return folder / "run.pt"


def save_dcp(folder: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.save(run_state(), checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def save_ours(folder: Path) -> Path:
    tensors, structure = flatten_state_dict(run_state())
    values = {name: value for name, value in tensors.items() if not isinstance(value, torch.Tensor)}
    aliases = {"model.head.weight": "model.embed.weight"}
    stored = {name: value for name, value in tensors.items() if name not in values and name not in aliases}
    target = folder / "step-00000007"
    write_checkpoint(target, stored, values=values, aliases=aliases, structure=structure)
    return target


def save_safetensors(folder: Path) -> Path:
    tensors = {name: tensor.clone() for name, tensor in model_state().items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_safetensors_shards(folder: Path) -> Path:
    weight_map = {}
    tensors = {name: tensor.clone() for name, tensor in model_state().items()}
    for number, names in enumerate((list(tensors)[:3], list(tensors)[3:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        safetensors.torch.save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def save_bin_shards(folder: Path) -> Path:
    weight_map = {}
    tensors = model_state()
    for number, names in enumerate((list(tensors)[:3], list(tensors)[3:]), start=1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


WEIGHTS: dict[str, Callable[[Path], Path]] = {
    "safetensors": save_safetensors,
    "safetensors-shards": save_safetensors_shards,
    "bin-shards": save_bin_shards,
}
RUNS: dict[str, Callable[[Path], Path]] = {"full": save_full, "dcp": save_dcp, "sharded": save_ours}
FORMATS = {**RUNS, **WEIGHTS}
