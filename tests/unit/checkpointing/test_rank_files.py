"""One file a rank: found by name, put together in the ranks' order, refused when they do not belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpointing.contents import ChunkSpec
from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.formats.rank_files import find_series, read_rank_files
from shardwise.checkpointing.reading import read_chunk
from shardwise.checkpointing.storage import names_in
from shardwise.errors import CheckpointError


def optimizer_of(rank: int, *, lr: float = 0.1) -> dict[str, Any]:
    state = {"step": torch.tensor(2.0), "exp_avg": torch.arange(4.0) + 10 * rank}
    return {"state": {0: state}, "param_groups": [{"lr": lr, "params": [0]}]}


@pytest.mark.parametrize(
    "pattern",
    [
        "rank{rank}.pt",
        "model_world_size_12_rank_{rank}.pt",
        "optimizer.{rank:05d}-of-00012.pt",
        "pytorch_model_fsdp_rank{rank}.bin",
        "step_500_rank_{rank}.ckpt",
    ],
)
def test_files_are_ordered_by_rank_whatever_they_are_called(pattern: str, tmp_path: Path):
    """Twelve ranks, so that 10 does not come before 2."""
    for rank in range(12):
        torch.save(optimizer_of(rank), tmp_path / pattern.format(rank=rank))
    (series,) = find_series(tmp_path)
    assert series == [pattern.format(rank=rank) for rank in range(12)]
    contents = read_rank_files(tmp_path)
    assert (contents.format, contents.world_size) == ("fsdp1-local", 12)
    tensor = contents.tensors["optim.state.0.exp_avg"]
    expected = torch.cat([optimizer_of(rank)["state"][0]["exp_avg"] for rank in range(12)])
    assert torch.equal(read_chunk(contents, tensor, ChunkSpec.whole(tensor.shape)), expected)


def test_a_file_that_is_missing_is_named_by_its_rank(tmp_path: Path):
    for rank in (0, 1, 3):
        torch.save(optimizer_of(rank), tmp_path / f"rank{rank}.pt")
    with pytest.raises(CheckpointError, match=r"ranks \[2\] are missing") as error:
        find_series(tmp_path)
    assert str(tmp_path) in error.value.where


def test_files_of_several_checkpoints_are_refused(tmp_path: Path):
    for step in (100, 200):
        for rank in range(2):
            torch.save(optimizer_of(rank), tmp_path / f"step_{step}_rank_{rank}.pt")
    with pytest.raises(CheckpointError, match="are not of one checkpoint") as error:
        read_rank_files(tmp_path)
    assert "several checkpoints" in error.value.why


def swap_ranks(folder: Path) -> None:
    (folder / "rank0.pt").rename(folder / "other")
    (folder / "rank1.pt").rename(folder / "rank0.pt")
    (folder / "other").rename(folder / "rank1.pt")


def use_other_groups(folder: Path) -> None:
    torch.save(optimizer_of(1, lr=0.2), folder / "rank1.pt")


def put_a_model_in_its_place(folder: Path) -> None:
    torch.save({"weight": torch.ones(2)}, folder / "rank1.pt")


def make_the_state_of_one_rank_a_matrix(folder: Path) -> None:
    state = optimizer_of(1)
    state["state"][0]["exp_avg"] = torch.ones(2, 2)
    torch.save(state, folder / "rank1.pt")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (swap_ranks, "was written as rank1.pt"),
        (use_other_groups, "rank1.pt holds something else than rank0.pt"),
        (put_a_model_in_its_place, "rank1.pt holds something else than rank0.pt"),
        (make_the_state_of_one_rank_a_matrix, "is not flat on every rank"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(change: Any, why: str, tmp_path: Path):
    for rank in range(2):
        torch.save(optimizer_of(rank), tmp_path / f"rank{rank}.pt")
    change(tmp_path)
    with pytest.raises(CheckpointError, match="are not of one checkpoint") as error:
        read_rank_files(tmp_path)
    assert why in error.value.why


def test_files_may_be_renamed_all_alike(tmp_path: Path):
    for rank in range(2):
        torch.save(optimizer_of(rank), tmp_path / f"rank{rank}.pt")
        (tmp_path / f"rank{rank}.pt").rename(tmp_path / f"state-{rank}.pt")
    assert names_in(tmp_path) == ["state-0.pt", "state-1.pt"]
    assert read_rank_files(tmp_path).world_size == 2


@pytest.mark.parametrize(
    "names",
    [
        ("epoch0.pt", "epoch1.pt", "epoch2.pt"),
        ("step-10.pt", "step-20.pt"),
        ("epoch=0-step=10.ckpt", "epoch=1-step=20.ckpt"),
        ("best.pt", "epoch1.pt"),
        ("ckpt0.pt", "ckpt1.pt"),
    ],
)
def test_whole_checkpoints_side_by_side_are_not_the_files_of_ranks(names: tuple[str, ...], tmp_path: Path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for name in names:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / name)
    with pytest.raises(CheckpointError, match=f"which of {len(names)} torch files") as error:
        open_checkpoint(tmp_path)
    assert ", ".join(names) in error.value.where
    assert str(tmp_path / names[-1]) in error.value.fix
    assert open_checkpoint(tmp_path / names[-1]).format == "full"


def test_optimizer_shards_of_several_epochs_are_not_the_files_of_ranks(tmp_path: Path):
    for epoch in range(2):
        torch.save(optimizer_of(0), tmp_path / f"optimizer_epoch{epoch}.pt")
    with pytest.raises(CheckpointError, match="which of 2 torch files"):
        open_checkpoint(tmp_path)


def test_shards_that_do_not_say_where_they_belong_are_refused(tmp_path: Path):
    """What `{name: p.to_local()}` saves: rank 0's part is not the model."""
    for rank, rows in enumerate((4, 3)):
        torch.save({"model": {"weight": torch.ones(rows, 2)}}, tmp_path / f"rank{rank}.pt")
    with pytest.raises(CheckpointError, match="plain tensor of shape") as error:
        read_rank_files(tmp_path)
    assert "to_local" in error.value.why


def test_a_tensor_that_one_rank_lacks_is_refused(tmp_path: Path):
    torch.save({"model": {"weight": torch.ones(2), "bias": torch.ones(2)}}, tmp_path / "rank0.pt")
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / "rank1.pt")
    with pytest.raises(CheckpointError, match="are not of one checkpoint") as error:
        read_rank_files(tmp_path)
    assert "model.bias is not in it" in error.value.why


def test_a_model_and_an_optimizer_lie_side_by_side(tmp_path: Path):
    for rank in range(2):
        torch.save(optimizer_of(rank), tmp_path / f"optimizer.{rank}.pt")
        torch.save({"weight": torch.ones(2)}, tmp_path / f"model.{rank}.pt")
    assert set(read_rank_files(tmp_path).tensors) == {
        "model.weight", "optim.state.0.step", "optim.state.0.exp_avg",
    }  # fmt: skip
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.2.pt")
    with pytest.raises(CheckpointError, match="are not of one checkpoint") as error:
        read_rank_files(tmp_path)
    assert "3 of model.#.pt, 2 of optimizer.#.pt" in error.value.why
