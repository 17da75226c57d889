"""Checkpoints of GPU training: copied beside the training, exact, pinned; large tensors in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.checkpointing.manager import Checkpointer
from shardwise.launching import start_local

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("asynchronous", [True, False], ids=["background", "waiting"])
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_run_on_gpu_resumes_exactly(tmp_path: Path, num_ranks: int, asynchronous: bool, offload: bool):
    arguments = (str(tmp_path), asynchronous, offload)
    for result in start_local("tests.gpu.checkpoint_jobs:save_and_resume", num_ranks, arguments):
        assert result["same names"]
        assert [name for name, equal in result["equal"].items() if not equal] == []
        assert result["numbers"]
        assert result["pinned"] or offload  # offloaded shards lie in CPU memory already
        losses, again = result["losses"]
        assert again == pytest.approx(losses, rel=1e-3)


def test_large_tensor_that_changes_right_after_the_save(tmp_path: Path):
    """The step waits on the GPU, not in Python, and the copy holds what was there before it."""
    model = nn.Linear(8192, 8192, bias=False, device="cuda")  # 256 MiB: several pieces
    expected = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare(model=model, optimizers=optimizer)
        checkpointer.save(1, model=model, optimizers=optimizer)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        checkpointer.wait()
        assert not torch.equal(model.weight, expected)
        checkpointer.load(model=model, optimizers=optimizer)
    assert torch.equal(model.weight, expected)
