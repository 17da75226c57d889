"""A whole run inside plain `dcp.save` and `dcp.load`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from shardwise.checkpointing.run_state import RunState
from tests.by_hand import mesh_1d, mesh_2d
from tests.distributed.checkpointed_run import Training, assert_equal, everything
from tests.ranks import ranks


def state_of(run: Training) -> RunState:
    parts: dict[str, Any] = run.shared_parts
    return RunState(parts.pop("model"), parts.pop("optimizers"), **parts)


@ranks(4)
def test_dcp_saves_and_loads_it_on_another_mesh(rank: int, tmp_path: Path):
    run = Training(rank, mesh_1d(4))
    run.train(3)
    run.model(run.data.next()).sum().backward()  # gradients exist: torch would return an empty optimizer
    dcp.save({"app": state_of(run)}, checkpoint_id=tmp_path)
    expected = everything(run)
    other = Training(rank, mesh_2d(), seed=5)
    dcp.load({"app": state_of(other)}, checkpoint_id=tmp_path)
    assert_equal(everything(other), expected)
    other.train(1)


@ranks(2)
def test_looking_at_a_new_optimizer_changes_nothing(rank: int):
    run = Training(rank, mesh_1d(2))
    run.model(run.data.next()).sum().backward()
    gradients = [None if p.grad is None else p.grad.to_local().clone() for p in run.model.parameters()]
    before = everything_without_state(run)
    shown = state_of(run).state_dict()["optim"]["state"]
    assert set(shown["blocks.0.up.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert not shown["blocks.0.up.weight"]["step"].any()
    assert not run.optimizer.state
    assert_equal(everything_without_state(run), before)
    for parameter, gradient in zip(run.model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad.to_local(), gradient)


def everything_without_state(run: Training) -> dict[str, Any]:
    found = {f"model.{name}": tensor.full_tensor() for name, tensor in run.model.named_parameters()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in run.optimizer.param_groups]
    return {**found, "groups": groups}
