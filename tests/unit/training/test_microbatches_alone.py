"""Micro-batches in one process: how a batch is cut, how parts are halved, what is put back and what is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.errors import TrainingError
from shardwise.models.llama import SHAPES, Llama
from shardwise.planning.planner import plan
from shardwise.sharding.blocks import AdaptiveActivations
from shardwise.training.microbatching import Batch, Microbatches


def batch(rows: int) -> Batch:
    return {"ids": torch.arange(rows), "pairs": torch.arange(2 * rows).view(rows, 2)}


@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [(7, 3, [3, 3, 1]), (7, None, [7]), (4, 9, [4]), (4, 2, [2, 2]), (1, 1, [1]), (3, 1, [1, 1, 1])],
)
def test_parts(rows: int, size: int | None, expected: list[int]):
    micro = Microbatches(nn.Linear(1, 1), rows, size)
    assert micro.size == expected[0]
    parts = micro.run(lambda parts: parts, batch(rows))
    assert [len(part["ids"]) for part in parts] == expected
    assert torch.equal(torch.cat([part["ids"] for part in parts]), batch(rows)["ids"])
    assert torch.equal(torch.cat([part["pairs"] for part in parts]), batch(rows)["pairs"])


def test_tensors_of_different_lengths_are_never_cut_apart():
    images = {"ids": torch.arange(4), "pixel_values": torch.arange(3)}
    assert Microbatches(nn.Linear(1, 1), 4).split(images) == [images]
    with pytest.raises(TrainingError, match=r"different numbers of rows: \{'ids': 4, 'pixel_values': 3\}"):
        Microbatches(nn.Linear(1, 1), 4, 2).split(images)


OUT = {
    "python": MemoryError("full"),
    "device": torch.OutOfMemoryError("full"),
    "cpu": RuntimeError("[enforce] DefaultCPUAllocator: can't"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}


@pytest.mark.parametrize("error", OUT.values(), ids=OUT)
def test_parts_are_halved_until_they_fit(error: Exception):
    model, said, drawn = nn.Linear(1, 1), [], []
    torch.manual_seed(3)

    def work(parts: list[Batch]) -> list[int]:
        drawn.append(torch.rand(()).item())
        model(torch.ones(1)).sum().backward()
        if len(parts[0]["ids"]) > 2:
            raise error
        return [len(part["ids"]) for part in parts]

    micro = Microbatches(model, 7, report=said.append)
    assert micro.run(work, batch(7)) == [2, 2, 2, 1]
    assert (micro.size, micro.num_halvings) == (2, 2)
    assert micro.run(lambda parts: len(parts), batch(7)) == 4
    assert len(set(drawn)) == 1, "every attempt draws the same numbers"
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 1.0, "what the failed attempts summed is gone"
    assert said == [
        "out of memory on rank 0: micro-batches of 4 rows from now on, not 7. "
        "Set training.micro_batch_size = 4 to start with that.",
        "out of memory on rank 0: micro-batches of 2 rows from now on, not 4. "
        "Set training.micro_batch_size = 2 to start with that.",
    ]


def test_a_single_row_that_does_not_fit(capsys: pytest.CaptureFixture[str]):
    def work(parts: list[Batch]) -> None:
        raise MemoryError("no room")

    micro = Microbatches(nn.Linear(1, 1), 2)
    with pytest.raises(TrainingError) as caught:
        micro.run(work, batch(2))
    assert caught.value.what == "rank 0 ran out of memory with a single sequence: no room"
    assert capsys.readouterr().err.startswith("out of memory on rank 0: micro-batches of 1 rows from now on, not 2.")


@pytest.mark.parametrize(
    ("size", "error"),
    [(2, MemoryError("full")), (None, RuntimeError("shapes")), (None, ValueError("DefaultCPUAllocator"))],
    ids=["size-given", "another-error", "not-the-allocator"],
)
def test_other_errors_leave_as_they_are(size: int | None, error: Exception):
    calls = []

    def work(parts: list[Batch]) -> None:
        calls.append(len(parts))
        raise error

    micro = Microbatches(nn.Linear(1, 1), 4, size)
    with pytest.raises(type(error)) as caught:
        micro.run(work, batch(4))
    assert caught.value is error
    assert len(calls) == 1
    assert micro.num_halvings == 0


def test_less_is_kept_for_backward_before_a_row_does_not_fit():
    """Selectively at first, then in host memory; with smaller micro-batches once more; then whole blocks recompute."""
    model, said, tried = Llama(SHAPES["llama3-debug"]), [], []
    activations = AdaptiveActivations(model, plan(model))
    layers = [layer.forward for layer in model.model.layers]

    def work(parts: list[Batch]) -> None:
        modes = [forward.__wrapped__.mode for forward in layers]
        assert [mode == "offload" for mode in modes] == [forward.is_enabled for forward in layers]
        tried.append((len(parts), *modes))
        model(parts[0]["ids"][None]).sum().backward()
        if modes != ["full"] * 4:
            raise MemoryError("full")

    micro = Microbatches(model, 2, report=said.append, activations=activations)
    micro.run(work, batch(2))
    some, most, none, full = "selective", "offload", "none", "full"
    levels = [
        (none,) * 4, (some,) * 4, (most, some, most, some), (most, some, most, some), (most, most, most, some)
    ]  # fmt: skip
    recomputed = [(full, some, full, some), (full, full, full, some), (full,) * 4]
    assert tried == [(1, *level) for level in levels] + [(2, *level) for level in [*levels, *recomputed]]
    assert "micro-batches of 1 rows from now on, not 2" in said[4]
    assert [text.rpartition("activations = ")[2].split()[0] for text in said[5:]] == [some, *[most] * 3, *[full] * 3]
    assert activations.keep_less(recompute_blocks=True) is None
