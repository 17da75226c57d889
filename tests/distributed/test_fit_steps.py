"""`fit` when memory runs out on one rank, and with each optimizer: the losses of a run without trouble, or alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.training.loop import fit
from tests.distributed.fit_runs import changed, fit_on, losses, plain, tiny
from tests.ranks import ranks


class _Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        raise torch.OutOfMemoryError("in backward")


def hungry_in_forward(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Rank 1 cannot hold two rows."""
    if dist.get_rank() == 1 and len(batch["input_ids"]) > 1:
        raise torch.OutOfMemoryError("in forward")
    return plain(model, batch)


def hungry_in_backward(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Rank 1 cannot hold the gradients of two rows."""
    loss, count = plain(model, batch)
    return (_Fuse.apply(loss) if dist.get_rank() == 1 and len(batch["input_ids"]) > 1 else loss), count


@ranks(2)
@pytest.mark.parametrize("where", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_a_run_goes_on_when_memory_runs_out(rank: int, where: str, tmp_path: Path):
    calm = tiny(tmp_path, steps=3, batch_size=8, objective="tests.distributed.fit_runs:plain")
    objective = f"tests.distributed.test_fit_steps:hungry_in_{where}"
    trouble = replace(changed(calm, training={"objective": objective}), folder=str(tmp_path / "trouble"))
    fit(calm)
    fit(trouble)
    assert losses(trouble) == pytest.approx(losses(calm), abs=1e-5)
    assert len(losses(calm)) == 3


class HostReads(TorchDispatchMode):
    """Functions of shardwise in the loop's steps in which the host reads a tensor, and would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        is_masked = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        if is_masked or name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2"):
            frame, names = sys._getframe(1), []
            while frame is not None:
                names += [frame.f_code.co_name] * ("/shardwise/" in frame.f_code.co_filename)
                frame = frame.f_back
            if "_train_until_bad" in names and not {"prefetched", "_try"} & {*names}:  # the loader; the first steps
                self.places.add(names[0])
        return func(*args, **(kwargs or {}))


@ranks(2)
def test_steps_read_no_tensor_of_a_gpu(rank: int, tmp_path: Path):
    """Whether there is a batch is known on the CPU; labels and losses are read in the step if they are there."""
    options = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2}
    with HostReads() as reads:
        fit(replace(tiny(tmp_path, steps=3), model="llama3-bytes", model_options=options))
    assert reads.places == {"lockstep", "_check_labels", "allows_step"}


@pytest.mark.parametrize("most", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["muon", pytest.param("sgd", marks=pytest.mark.slow)])
def test_each_optimizer_learns_the_same_on_any_number_of_ranks(tmp_path: Path, name: str, most: int):
    seen = {}
    for num_ranks in (1, most):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        config = changed(tiny(folder, steps=5, batch_size=4), optimizer={"name": name, "learning_rate": 1e-2})
        seen[num_ranks] = fit_on(num_ranks, config)
    assert seen[most] == pytest.approx(seen[1], abs=2e-5)
    assert seen[1][5] < seen[1][1] - 0.05
