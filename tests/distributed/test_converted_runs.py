"""A whole run, saved, converted to every format that can carry it, and loaded: it continues as it would have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.checkpointing.convert import convert_checkpoint
from shardwise.checkpointing.inspecting import verify_checkpoint
from shardwise.checkpointing.manager import Checkpointer
from shardwise.checkpointing.weights import load_weights
from shardwise.distributed.agreement import on_rank_zero
from tests.by_hand import full, mesh_1d
from tests.distributed.checkpointed_run import Training, assert_equal, everything
from tests.ranks import ranks


@pytest.mark.parametrize("chain", [["dcp"], ["full"], ["full", "dcp"], ["dcp", "full"]])
@ranks(2)
def test_a_converted_run_is_the_run_that_was_saved(rank: int, tmp_path: Path, chain: list[str]):
    """Model, optimizer, schedule, averages, data and random numbers, bit by bit."""
    run = Training(rank, mesh_1d(2))
    run.train(2)
    with Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        checkpointer.save(2, **run.parts)
        source = Path(str(checkpointer.path(2)))
        for number, format in enumerate(chain):
            target = tmp_path / f"{number}.{'pt' if format == 'full' else format}"
            on_rank_zero(lambda source=source, target=target, format=format: convert(source, target, format))
            source = target
        saved, draws = everything(run), run.draws
        run.train(2)
        other = Training(rank, mesh_1d(2), seed=3)
        other.train(1)
        checkpointer.load(**other.parts, path=source)  # the random numbers, too
        assert_equal(everything(other), saved)
        other.train(2)
        assert_equal(everything(other), everything(run))
        assert other.draws[-2:] == draws[-2:]


def convert(source: Path, target: Path, format: str) -> None:
    convert_checkpoint(source, target, format)
    assert verify_checkpoint(target) == []


@ranks(2)
def test_weights_of_a_run_load_from_safetensors(rank: int, tmp_path: Path):
    run = Training(rank, mesh_1d(2))
    run.train(1)
    with Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        checkpointer.save(1, **run.parts)
    on_rank_zero(lambda: convert(tmp_path / "run", tmp_path / "weights", "safetensors"))
    other = Training(rank, mesh_1d(2), seed=3)
    report = load_weights(other.model, tmp_path / "weights")
    assert report.is_exact
    for (name, ours), (_, theirs) in zip(run.model.named_parameters(), other.model.named_parameters(), strict=True):
        assert full(ours).equal(full(theirs)), name
    dist.barrier()
