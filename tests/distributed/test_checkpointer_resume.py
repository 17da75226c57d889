"""A run that was stopped and resumed is the run that was never stopped, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpointing.manager import Checkpointer
from shardwise.errors import CheckpointError
from shardwise.training.ema import EMA
from tests.by_hand import mesh_1d, mesh_2d, shard_module
from tests.distributed.checkpointed_run import Model, Training, assert_equal, everything
from tests.ranks import ranks


@ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "background"])
@pytest.mark.parametrize("statistics", [False, True], ids=["", "own statistics"])
def test_resumed_run_equals_uninterrupted_one(rank: int, tmp_path: Path, asynchronous: bool, statistics: bool):
    run = Training(rank, mesh_1d(2), statistics=statistics)
    with Checkpointer(tmp_path, asynchronous=asynchronous) as checkpointer:
        run.train(3)
        checkpointer.save(3, **run.parts, extra={"epoch": 1, "sizes": (2, 3)})
        losses = run.train(3)
        expected, draws, position = everything(run), run.draws[3:], run.data.position

    resumed = Training(rank, mesh_1d(2), statistics=statistics, seed=99)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load(**resumed.parts) == 3
        assert checkpointer.extra == {"epoch": 1, "sizes": (2, 3)}
        assert resumed.data.seen == {1: "used", 2: "used", 3: "used"}
        assert resumed.train(3) == losses
    assert_equal(everything(resumed), expected)
    assert resumed.draws == draws
    assert resumed.data.position == position


@ranks(4)
def test_same_state_on_other_meshes(rank: int, tmp_path: Path):
    """1-D, HSDP and back: what was saved is what is loaded, and the next save is the same again."""
    run = Training(rank, mesh_1d(4))
    run.train(2)
    expected = everything(run)
    with Checkpointer(tmp_path, keep_last=None) as checkpointer:
        checkpointer.save(1, **run.shared_parts)
        hsdp = Training(rank, mesh_2d(), seed=5)
        hsdp.train(1)  # what is there is replaced
        checkpointer.load(**hsdp.shared_parts)
        assert_equal(everything(hsdp), expected)
        checkpointer.save(2, **hsdp.shared_parts)
        back = Training(rank, mesh_1d(4), seed=6)
        checkpointer.load(**back.shared_parts)
    assert_equal(everything(back), expected)


def hop(rank: int, num_ranks: int, folder: Path) -> None:
    """Load the latest checkpoint, compare it with what was first saved, save it again."""
    mesh = None if num_ranks == 1 else mesh_1d(num_ranks)
    run = Training(rank, mesh, seed=num_ranks)
    with Checkpointer(folder, keep_last=None) as checkpointer:
        step = checkpointer.load(**run.shared_parts)
        assert_equal(everything(run), torch.load(folder / "expected.pt"))
        checkpointer.save(step + 1, **run.shared_parts)


@ranks(4)
def first_save(rank: int, folder: Path) -> None:
    run = Training(rank, mesh_1d(4))
    run.train(2)
    expected = everything(run)
    if rank == 0:
        torch.save(expected, folder / "expected.pt")
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(2, **run.parts)


@ranks(2)
def hop_on_two(rank: int, folder: Path) -> None:
    hop(rank, 2, folder)


@ranks(3)
def hop_on_three(rank: int, folder: Path) -> None:
    hop(rank, 3, folder)


@ranks(1)
def hop_on_one(rank: int, folder: Path) -> None:
    hop(rank, 1, folder)


@ranks(2)
def load_own_data(rank: int, folder: Path) -> None:
    run = Training(rank, mesh_1d(2))
    before = everything(run)
    with Checkpointer(folder) as checkpointer:
        with pytest.raises(CheckpointError, match=r"(?s)data: its state differed between the 4 ranks") as caught:
            checkpointer.load(**run.parts)
        assert "omit it from load()" in str(caught.value)
        assert_equal(everything(run), before)
        checkpointer.load(**run.shared_parts)
        assert checkpointer.notes == ()  # both ranks had random numbers in it
        rank_of_torch = torch.get_rng_state()
        checkpointer.load(**run.shared_parts)
        assert torch.equal(torch.get_rng_state(), rank_of_torch)


@ranks(4)
def load_on_more_ranks(rank: int, folder: Path) -> None:
    run = Training(rank, mesh_1d(4))
    with Checkpointer(folder) as checkpointer:
        checkpointer.load(**run.shared_parts)
        assert [("derived from rank 0" in note) for note in checkpointer.notes] == ([] if rank < 1 else [True])
    draws = torch.stack([torch.rand(4), torch.randn(4)]).flatten()
    all_draws = [torch.empty_like(draws) for _ in range(4)]
    dist.all_gather(all_draws, draws)
    assert len({tuple(each.tolist()) for each in all_draws}) == 4


def test_the_state_survives_every_number_of_ranks(tmp_path: Path):
    """4 -> 2 -> 3 -> 1 -> 4, bitwise; what belongs to single ranks is refused, and random numbers are never shared."""
    first_save(folder=tmp_path)
    load_own_data(folder=tmp_path)
    hop_on_two(folder=tmp_path)
    hop_on_three(folder=tmp_path)
    hop_on_one(folder=tmp_path)
    load_on_more_ranks(folder=tmp_path)


@ranks(2)
def test_into_a_model_on_meta_whose_optimizer_is_already_built(rank: int, tmp_path: Path):
    run = Training(rank, mesh_1d(2))
    run.train(2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, model=run.model, optimizers=run.optimizer)
        expected = everything(run)
        with torch.device("meta"):
            model = Model()
        for block in model.blocks:
            shard_module(block, mesh_1d(2))
        shard_module(model, mesh_1d(2))
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW([{"params": trained[:3]}, {"params": trained[3:]}])
        checkpointer.load(model=model, optimizers=optimizer)
    assert torch.equal(model.table, torch.arange(3.0))  # in no checkpoint, built again
    run.model, run.optimizer = model, optimizer
    assert_equal(everything(run), expected)
    assert model.head.weight is model.embedding.weight
    run.schedule, run.ema = torch.optim.lr_scheduler.ConstantLR(optimizer), EMA(model, 0.9)
    run.train(1)
