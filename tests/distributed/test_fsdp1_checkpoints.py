"""Checkpoints that real FSDP1 wrote convert offline, and training continues as FSDP1 would have continued."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy, fully_shard

from shardwise.checkpointing.convert import convert_checkpoint
from shardwise.checkpointing.inspecting import diff_checkpoints, verify_checkpoint
from shardwise.checkpointing.manager import Checkpointer
from shardwise.distributed.agreement import on_rank_zero
from shardwise.errors import CheckpointError
from shardwise.fsdp1 import record_flat_params
from tests.distributed.fsdp1_runs import SAVERS, Tied, adamw, build, train, wrap
from tests.ranks import ranks

# FSDP1 and FSDP2 sum the ranks' gradients in different orders; between two ranks there is only one order.
TOLERANCE = {2: 0.0, 4: 2e-6}
CASES = [
    ("full", False, False),
    ("dcp", False, False),
    ("dcp", True, True),
    ("accelerate", True, False),
    ("rank-files", True, False),
    ("rank-files", False, True),
    ("local", False, False),
    ("local", True, False),
]


def continue_from(source: Path, kind: str, rank: int, folder: Path, *, directly: bool = False) -> list[float]:
    """Convert, or not, load into FSDP2 and train two steps more."""
    run = folder / "run"
    if not directly:
        on_rank_zero(lambda: _convert(source, run / "step-00000003", kind))
    model = build()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = adamw(model)
    with Checkpointer(run, asynchronous=False) as checkpointer:
        checkpointer.load(model=model, optimizers=optimizer, path=source if directly else None)
    return train(model, optimizer, rank, range(3, 5))


def _convert(source: Path, target: Path, kind: str) -> None:
    with torch.device("meta"):
        model = Tied() if kind == "local" else None
    done = convert_checkpoint(source, target, "dcp", model=model)
    assert not done.left_out
    assert verify_checkpoint(target) == []


def check_continues(rank: int, folder: Path, kind: str, use_orig_params: bool, with_mesh: bool) -> None:
    wrapped = wrap(use_orig_params=use_orig_params, with_mesh=with_mesh)
    optimizer = adamw(wrapped)
    train(wrapped, optimizer, rank, range(3))
    source = SAVERS[kind](wrapped, optimizer, folder)
    dist.barrier()
    expected = train(wrapped, optimizer, rank, range(3, 5))
    for directly in (False, True):
        found = continue_from(source, kind, rank, folder, directly=directly)
        assert found == pytest.approx(expected, rel=0, abs=TOLERANCE[dist.get_world_size()])


@pytest.mark.parametrize(("kind", "use_orig_params", "with_mesh"), CASES)
@ranks(2)
def test_training_goes_on_as_fsdp1_would_have(
    rank: int, tmp_path: Path, kind: str, use_orig_params: bool, with_mesh: bool
):
    """Bitwise the same losses."""
    check_continues(rank, tmp_path, kind, use_orig_params, with_mesh)


@pytest.mark.parametrize(("kind", "use_orig_params", "with_mesh"), CASES)
@ranks(4)
def test_training_goes_on_as_fsdp1_would_have_on_four_ranks(
    rank: int, tmp_path: Path, kind: str, use_orig_params: bool, with_mesh: bool
):
    """More ranks than some tensors have rows, and padding in every flat parameter."""
    check_continues(rank, tmp_path, kind, use_orig_params, with_mesh)


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(4)
def test_replicas_of_hybrid_sharding_count_once(rank: int, tmp_path: Path, use_orig_params: bool):
    """Two by two ranks: every part is in two files, and the optimizers' own state is stored twice over."""
    shard, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    replicate, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    wrapped = wrap(
        use_orig_params=use_orig_params,
        with_mesh=False,
        process_group=(shard, replicate),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )
    optimizer = adamw(wrapped)
    train(wrapped, optimizer, rank, range(3))
    for name in ("shards", "numbered"):
        on_rank_zero((tmp_path / name).mkdir)
    source = SAVERS["rank-files"](wrapped, optimizer, tmp_path / "shards")
    torch.save(optimizer.state_dict(), tmp_path / "numbered" / f"optimizer.{rank}.pt")
    dist.barrier()
    if rank == 0:
        record_flat_params(wrapped, tmp_path / "numbered", optimizer)
        difference = diff_checkpoints(tmp_path / "numbered", source)
        assert (difference.num_equal, difference.tensors, difference.only_in_a) == (3 * 13, (), ()), str(difference)
    expected = train(wrapped, optimizer, rank, range(3, 5))
    found = continue_from(source, "rank-files", rank, tmp_path)
    assert found == pytest.approx(expected, rel=0, abs=TOLERANCE[4])
    del wrapped, optimizer
    for group in (shard, replicate):
        dist.destroy_process_group(group)


@ranks(2)
def test_every_way_to_save_gives_the_same_state(rank: int, tmp_path: Path):
    """Compared tensor by tensor, without a model but for LOCAL."""
    wrapped = wrap(use_orig_params=False, with_mesh=False)
    optimizer = adamw(wrapped)
    train(wrapped, optimizer, rank, range(2))
    sources = {}
    for kind, save in SAVERS.items():
        folder = tmp_path / kind
        on_rank_zero(folder.mkdir)
        sources[kind] = save(wrapped, optimizer, folder)
    dist.barrier()
    if rank == 0:
        with torch.device("meta"):
            model = Tied()
        for kind in ("dcp", "accelerate", "rank-files", "local"):
            difference = diff_checkpoints(sources["full"], sources[kind], model=model)
            assert difference.num_equal == 15 + 3 * 13, str(difference)
            assert not difference.tensors
            assert set(difference.only_in_a) <= {"extra.epoch"}
    dist.barrier()


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_local_checkpoint_converts_by_its_recorded_layout(rank: int, tmp_path: Path, use_orig_params: bool):
    """Without the model, and with parameter groups in an order that only the running optimizer knows."""
    wrapped = wrap(use_orig_params=use_orig_params, with_mesh=False)
    first, *others = wrapped.parameters()
    groups = [{"params": others, "weight_decay": 0.0}, {"params": [first]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    train(wrapped, optimizer, rank, range(2))
    for kind in ("local", "dcp"):
        on_rank_zero((tmp_path / kind).mkdir)
        SAVERS[kind](wrapped, optimizer, tmp_path / kind)
    dist.barrier()
    if rank == 0:
        with torch.device("meta"):
            model = Tied()
        with pytest.raises(CheckpointError, match="2 parameter groups"):
            convert_checkpoint(tmp_path / "local", tmp_path / "converted", model=model)
        convert_checkpoint(tmp_path / "local", tmp_path / "weights", "safetensors", model=model)
        record_flat_params(wrapped, tmp_path / "local", optimizer)
        difference = diff_checkpoints(tmp_path / "dcp" / "dcp", tmp_path / "local")
        assert difference.is_empty, str(difference)
    dist.barrier()


@ranks(2)
def test_local_checkpoint_needs_the_model_it_was_saved_from(rank: int, tmp_path: Path):
    """Nothing, another model, and a file too few: each says what is wrong."""
    wrapped = wrap(use_orig_params=True, with_mesh=False)
    SAVERS["local"](wrapped, adamw(wrapped), tmp_path)
    dist.barrier()
    if rank == 0:
        with pytest.raises(CheckpointError, match=r"3 flat parameters.*do not name"):
            convert_checkpoint(tmp_path, tmp_path / "converted")
        with torch.device("meta"):
            other = Tied()
            other.blocks[1].up = torch.nn.Linear(10, 24)
        with pytest.raises(CheckpointError, match="differ from those of this model") as error:
            convert_checkpoint(tmp_path, tmp_path / "converted", model=other)
        assert "blocks.1" in error.value.why
        (tmp_path / "model.00001-of-00002.pt").unlink()
        with pytest.raises(CheckpointError, match=r"ranks \[1\] are missing|are not of one checkpoint"):
            convert_checkpoint(tmp_path, tmp_path / "converted", model=other)
        assert not (tmp_path / "converted").exists()
    dist.barrier()


@ranks(2)
def test_lost_optimizer_state_is_refused(rank: int, tmp_path: Path):
    """FSDP1's FULL optimizer state on CPU with use_orig_params gathers every state into one buffer."""
    wrapped = wrap(use_orig_params=True, with_mesh=False)
    optimizer = adamw(wrapped)
    train(wrapped, optimizer, rank, range(2))
    source = SAVERS["full"](wrapped, optimizer, tmp_path)
    dist.barrier()
    if rank == 0:
        saved = torch.load(source)["optim"]["state"]["embed.weight"]
        assert torch.equal(saved["exp_avg"], saved["exp_avg_sq"]), "torch has mended it: drop this check"
        assert [finding.code for finding in verify_checkpoint(source)] == ["SW332"]
        with pytest.raises(CheckpointError, match="not whole"):
            convert_checkpoint(source, tmp_path / "converted")
        convert_checkpoint(source, tmp_path / "weights", "safetensors")
    dist.barrier()
