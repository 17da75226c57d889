"""Batches reach the GPU from pinned memory, queued and not waited for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.config.run import DataConfig
from shardwise.training.data import Loader, open_data, open_evaluation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def open_on(device: str, config: DataConfig) -> Loader:
    return open_data(config, batch_size=8, rank=0, num_ranks=1, seed=0, vocab_size=257, device=device)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_cpu(workers: int):
    config = DataConfig(workers=workers)
    with open_on("cuda", config) as there, open_on("cpu", config) as here:
        for _ in range(5):
            batch, expected = next(there), next(here)
            assert {value.device for value in batch.values()} == {torch.device("cuda", 0)}
            assert all(torch.equal(batch[name].cpu(), expected[name]) for name in expected)


def test_batches_are_right_while_the_gpu_is_far_behind(tmp_path: Path):
    """The pinned memory of a batch may be used again only when its copy is done."""
    config = DataConfig(sequence_length=4096)
    busy = torch.randn(8192, 8192, device="cuda")
    with open_on("cuda", config) as there, open_on("cpu", config) as here:
        batches = []
        for _ in range(20):
            busy = busy @ busy * 1e-4
            batches.append(next(there))
        for batch in batches:
            expected = next(here)
            assert all(torch.equal(batch[name].cpu(), expected[name]) for name in expected)


def test_next_does_not_wait_for_the_gpu():
    with open_on("cuda", DataConfig()) as loader:
        next(loader)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second
        next(loader)
        assert not torch.cuda.current_stream().query(), "the GPU is still busy, and the batch is here"
    torch.cuda.synchronize()


def test_held_out_data_goes_there_too():
    held_out = open_evaluation(
        DataConfig(evaluation_fraction=0.001), batch_size=8, rank=0, num_ranks=1, vocab_size=257, device="cuda"
    )
    assert held_out is not None
    devices = [batch["labels"].device.type for batch in held_out]
    assert devices == ["cuda"] * len(held_out)
