"""Checkpoints of GPU training: copied beside the training, exact, pinned; large tensors in chunks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.checkpointing import staging
from shardwise.checkpointing.contents import ChunkSpec, LocalChunk
from shardwise.checkpointing.manager import Checkpointer
from shardwise.distributed.local_ranks import start_local
from shardwise.planning.settings import dtype_name

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


@pytest.mark.parametrize("has_room", [True, False], ids=["copied on the GPU first", "the GPU waits"])
def test_large_tensor_that_changes_right_after_the_save(
    tmp_path: Path, has_room: bool, monkeypatch: pytest.MonkeyPatch
):
    """The GPU waits, not Python, or nothing does; the copy holds what was there before it, whatever writes later."""
    if not has_room:
        monkeypatch.setattr(staging, "_MARGIN_BYTES", 1 << 60)
    model = nn.Linear(8192, 8192, bias=False, device="cuda")  # 256 MiB: several chunks
    expected = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare(model=model, optimizers=optimizer)
        checkpointer.save(1, model=model, optimizers=optimizer)
        model.weight.data.mul_(2)  # which torch does not count
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        checkpointer.wait()
        assert not torch.equal(model.weight, expected)
        checkpointer.load(model=model, optimizers=optimizer)
    assert torch.equal(model.weight, expected)


def held(tensor: torch.Tensor, name: str = "t") -> staging.StagedTensor:
    shape = tuple(tensor.shape)
    spec = LocalChunk(name, dtype_name(tensor.dtype), shape, ChunkSpec.whole(shape))
    return staging.StagedTensor(spec, tensor, "plain")


def test_copies_on_the_gpu_lie_as_in_the_arena_and_their_memory_goes_back():
    tensors = [torch.full((16 << 20, 4), float(index), device="cuda") for index in range(4)]
    tensors[1] = tensors[1].t()  # strides of its own
    tensors[3] = tensors[3].bfloat16()
    holdings = [held(tensor, f"t{index}") for index, tensor in enumerate(tensors)]
    for before, after in pairwise(holdings):
        after.offset = before.end
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    aside = staging.copy_on_device(holdings)
    assert free - torch.cuda.mem_get_info()[0] >= 896 << 20
    for tensor in tensors:
        tensor.fill_(-1)
    for index, holding in enumerate(holdings):
        values = aside[-1][holding.offset : holding.offset + holding.memory.nbytes].view(holding.memory.dtype)
        assert (values == index).all()
        del values
    while aside:
        aside.pop()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)


def test_no_copies_on_the_gpu_without_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(staging, "_MARGIN_BYTES", 1 << 60)
    assert staging.copy_on_device([held(torch.ones(1024, device="cuda"))]) == []
