"""Whoever saved it and however: the model is under `model.`, the optimizer under `optim.`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpointing.contents import Contents
from shardwise.checkpointing.formats.full import read_full
from shardwise.checkpointing.names import only_model, with_our_names
from shardwise.errors import CheckpointError

MODEL = {"a.weight": torch.ones(2, 2), "a.bias": torch.zeros(2)}
WRAPPED = {f"module._orig_mod.{name}": tensor for name, tensor in MODEL.items()}
OPTIMIZER = {
    "state": {name: {"step": torch.tensor(3.0), "exp_avg": tensor} for name, tensor in MODEL.items()},
    "param_groups": [{"lr": 0.1, "params": list(MODEL)}],
}
WRAPPED_OPTIMIZER = {
    "state": {f"module._orig_mod.{name}": state for name, state in OPTIMIZER["state"].items()},
    "param_groups": [{"lr": 0.1, "params": list(WRAPPED)}],
}
OURS = {
    "model.a.weight", "model.a.bias",
    "optim.state.a.weight.step", "optim.state.a.weight.exp_avg", "optim.state.a.bias.step",
    "optim.state.a.bias.exp_avg",
}  # fmt: skip


def saved(state: dict[str, Any], folder: Path) -> Contents:
    torch.save(state, folder / "state.pt")
    return with_our_names(read_full(folder / "state.pt"))


@pytest.mark.parametrize(
    "state",
    [
        {"model": MODEL, "optim": OPTIMIZER},
        {"state_dict": MODEL, "optimizer": OPTIMIZER},
        {"model_state_dict": WRAPPED, "optimizer_state_dict": WRAPPED_OPTIMIZER},
        {"net": MODEL, "train": {"optimizer": OPTIMIZER}},
        {"anything": MODEL, "optimizer": OPTIMIZER},
    ],
)
def test_common_ways_to_save_get_one_spelling(state: dict[str, Any], tmp_path: Path):
    contents = saved({**state, "epoch": 3, "global_step": 17}, tmp_path)
    assert set(contents.tensors) == OURS
    assert contents.values["optim.param_groups.0.params"] == ["a.weight", "a.bias"]
    assert (contents.values["extra.epoch"], contents.step) == (3, 17)
    assert contents.structure["optim.state.a.weight.step"] == ("optim", "state", "a.weight", "step")


@pytest.mark.parametrize("state", [MODEL, WRAPPED])
def test_a_bare_state_dict_is_the_model(state: dict[str, Any], tmp_path: Path):
    assert set(saved(state, tmp_path).tensors) == {"model.a.weight", "model.a.bias"}
    assert set(only_model(saved(state, tmp_path)).tensors) == {"a.weight", "a.bias"}


@pytest.mark.parametrize(("key", "prefix"), [("model", "module."), ("anything", ""), ("", "_fsdp_wrapped_module.")])
def test_extra_state_of_modules_belongs_to_the_model(key: str, prefix: str, tmp_path: Path):
    state = {prefix + name: tensor for name, tensor in MODEL.items()}
    state[f"{prefix}a._extra_state"] = {"mask": torch.ones(1), "count": 3}
    contents = saved({key: state} if key else state, tmp_path)
    assert set(contents.tensors) == {"model.a.weight", "model.a.bias", "model.a._extra_state.mask"}
    assert contents.values == {"model.a._extra_state.count": 3}
    assert set(only_model(contents).tensors) == {"a.weight", "a.bias"}


def test_a_module_that_is_really_called_module_keeps_its_name(tmp_path: Path):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.head = nn.Linear(1, 1), nn.Linear(1, 1)

    assert "model.module.weight" in saved(Named().state_dict(), tmp_path).tensors


def test_several_models_and_optimizers_stay_apart(tmp_path: Path):
    state = {"model": {"generator": MODEL, "critic": MODEL}, "opt_g": OPTIMIZER, "opt_c": OPTIMIZER}
    contents = saved(state, tmp_path)
    assert "model.generator.a.weight" in contents.tensors
    assert {"optim.opt_g.state.a.bias.step", "optim.opt_c.state.a.bias.step"} <= set(contents.tensors)
    with pytest.raises(CheckpointError, match="holds 2 models: critic, generator"):
        only_model(contents)


def test_names_that_become_the_same_are_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"model\.a\.bias, which already exists"):
        saved({"a.bias": torch.ones(1), "_orig_mod.a.bias": torch.ones(1)}, tmp_path)


def test_no_model_is_said_so(tmp_path: Path):
    with pytest.raises(CheckpointError, match="the file holds no model"):
        only_model(saved({"optimizer": OPTIMIZER}, tmp_path))
