"""A save in the background: it holds the state at `save`, its errors reach every rank, and nothing is left behind."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardwise.checkpointing.contents import ChunkSpec
from shardwise.checkpointing.formats.sharded import read_manifest
from shardwise.checkpointing.manager import Checkpointer
from shardwise.checkpointing.reading import read_chunk
from shardwise.errors import CheckpointError
from shardwise.sharding.inventory import local_tensor
from shardwise.training.ema import EMA
from tests.by_hand import mesh_1d, mesh_2d
from tests.distributed.checkpointed_run import Training, assert_equal, everything
from tests.ranks import ranks


def pid_of_writer(checkpointer: Checkpointer) -> int:
    writer = checkpointer._saver._writer
    assert writer is not None
    return writer.pid


def stored(folder: Path, step: int, name: str) -> torch.Tensor:
    contents = read_manifest(folder / f"step-{step:08d}")
    tensor = contents.tensors[name]
    return read_chunk(contents, tensor, ChunkSpec.whole(tensor.shape))


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The writer of this rank does nothing, as if the disk were slow."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@ranks(2)
def test_nothing_that_is_written_after_the_save_is_in_it(rank: int, tmp_path: Path):
    run = Training(rank, mesh_1d(2))
    run.train(1)
    extra = {"note": ["as it was"], "tensor": torch.ones(2)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare(**run.parts)
        before, position = everything(run), run.data.position
        with stopped(pid_of_writer(checkpointer)):
            checkpointer.save(1, **run.parts, extra=extra)
            for parameter in run.model.parameters():
                parameter.data.add_(1)  # which torch does not count
            run.model.scale.fill_(-1)
            run.data.next()
            extra["note"].append("changed")
            extra["tensor"].zero_()
            run.train(1)
            after = torch.get_rng_state()
        checkpointer.wait()
        again = Training(rank, mesh_1d(2))
        checkpointer.load(**again.parts)
    assert_equal(everything(again), before)
    assert again.data.position == position
    assert checkpointer.extra["note"] == ["as it was"]
    assert checkpointer.extra["tensor"].tolist() == [1, 1]
    assert not torch.equal(torch.get_rng_state(), after)


@ranks(2)
@pytest.mark.parametrize("is_sharded", [True, False], ids=["sharded", "plain"])
def test_large_tensors_are_of_one_moment(rank: int, tmp_path: Path, is_sharded: bool):
    """As long as a copy takes, writes that torch does not count are not in it, nor those of an averaged model."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(4096, 2048)) for _ in range(3)])
    if is_sharded:
        fully_shard(model, mesh=mesh_1d(2))
    average = EMA(model, 0.9)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare(model=model)
        checkpointer.save(1, model=model)
        for parameter in model.parameters():
            local_tensor(parameter).data.add_(1)
        with average.swap():
            checkpointer.save(2, model=model)
        for step in (1, 2):
            checkpointer.load(model=model, step=step)
            assert not any(local_tensor(parameter).any() for parameter in model.parameters())


@ranks(2)
def test_full_disk_of_one_rank_fails_all_and_costs_nothing(rank: int, tmp_path: Path):
    run = Training(rank, mesh_1d(2))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, **run.parts)
        checkpointer.wait()
        limits = resource.prlimit(pid_of_writer(checkpointer), resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.prlimit(pid_of_writer(checkpointer), resource.RLIMIT_FSIZE, (1000, limits[1]))
        checkpointer.save(2, **run.parts)
        with pytest.raises(CheckpointError, match=r"cannot .* the file") as caught:
            checkpointer.save(3, **run.parts)  # the next call
        assert "__1_0.distcp" in caught.value.where
        assert os.listdir(tmp_path) == ["step-00000001"]
        dist.barrier()  # the next save makes a folder
        resource.prlimit(pid_of_writer(checkpointer), resource.RLIMIT_FSIZE, limits)
        checkpointer.save(3, **run.parts)
        checkpointer.wait()
        assert checkpointer.latest() == 3
        checkpointer.load(**run.parts, step=1)


@ranks(2)
def test_killed_writer_fails_the_save_and_the_next_has_a_new_one(rank: int, tmp_path: Path):
    run = Training(rank, mesh_1d(2))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare(**run.parts)
        pid = pid_of_writer(checkpointer)
        os.kill(pid, signal.SIGSTOP)
        checkpointer.save(1, **run.parts)
        os.kill(pid, signal.SIGKILL if rank == 0 else signal.SIGCONT)
        with pytest.raises(CheckpointError, match="the background writer process died"):
            checkpointer.wait()
        assert checkpointer.latest() is None
        checkpointer.save(1, **run.parts)
        checkpointer.wait()
        assert checkpointer.latest() == 1
        assert (pid_of_writer(checkpointer) == pid) == (rank == 1)


@ranks(2)
def test_second_save_waits_or_is_skipped_on_all_ranks(rank: int, tmp_path: Path):
    run = Training(rank, mesh_1d(2))
    with Checkpointer(tmp_path, on_busy="skip") as checkpointer:
        finish, go = checkpointer._saver.finish, threading.Event()

        def finish_late(*arguments: Any, **settings: Any) -> None:
            finish(*arguments, **settings)
            assert go.wait(30)

        if rank == 1:
            checkpointer._saver.finish = finish_late
        assert checkpointer.save(1, **run.parts)
        if rank == 0:
            checkpointer.wait()  # for this rank there is nothing left to wait for
        assert not checkpointer.save(2, **run.parts)
        go.set()
        checkpointer.wait()
        assert checkpointer.latest() == 1
        assert checkpointer.save(3, **run.parts)
    with Checkpointer(tmp_path, on_busy="wait") as checkpointer:
        checkpointer.prepare(**run.parts)
        with stopped(pid_of_writer(checkpointer)):
            assert checkpointer.save(4, **run.parts)
            waker = threading.Timer(0.3, os.kill, (pid_of_writer(checkpointer), signal.SIGCONT))
            waker.start()
            assert checkpointer.save(5, **run.parts)
            waker.join()
        checkpointer.wait()
        assert checkpointer.latest() == 5


@ranks(4)
def test_replicas_share_the_writing(rank: int, tmp_path: Path):
    """Under HSDP each byte is written once, and no rank writes much more than another."""
    run = Training(rank, mesh_2d())
    run.train(1)
    with Checkpointer(tmp_path, rng=False) as checkpointer:
        checkpointer.save(1, **run.shared_parts)
    contents = read_manifest(tmp_path / "step-00000001")
    per_file: dict[str, int] = {}
    for name, tensor in contents.tensors.items():
        if name not in contents.details["aliases"]:
            item = tensor.num_bytes // max(1, torch.Size(tensor.shape).numel())
            assert sum(chunk.spec.numel for chunk in tensor.chunks) == torch.Size(tensor.shape).numel(), name
            for chunk in tensor.chunks:
                per_file[chunk.file] = per_file.get(chunk.file, 0) + chunk.spec.numel * item
    assert len(per_file) == 4
    assert max(per_file.values()) < 1.3 * min(per_file.values()), per_file


@ranks(2)
def test_nothing_stays_behind(rank: int, tmp_path: Path):
    run = Training(rank, mesh_1d(2))
    run.train(1)
    descriptors = psutil.Process().num_fds()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, **run.parts)
    checkpointer.wait()
    writer = psutil.Process(pid_of_writer(checkpointer))
    assert "shardwise.checkpointing.background_writer" in " ".join(writer.cmdline())
    assert not any("libtorch" in mapped.path for mapped in writer.memory_maps())
    checkpointer.close()
    checkpointer.close()
    assert not writer.is_running()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert psutil.Process().num_fds() <= descriptors
    with pytest.raises(CheckpointError, match="closed"):
        checkpointer.save(2, **run.parts)


@ranks(2)
def test_retention_over_saves(rank: int, tmp_path: Path):
    run = Training(rank, mesh_1d(2))
    losses = {1: 5.0, 2: 0.5, 3: 4.0, 4: 3.0, 5: float("nan"), 6: 2.0}
    settings: dict[str, Any] = {"keep_last": 2, "keep_every": 3, "keep_best": 1}
    for steps in ((1, 2, 3), (4, 5, 6)):  # a second run reads the metrics of the first
        with Checkpointer(tmp_path, **settings) as checkpointer:
            for step in steps:
                checkpointer.save(step, model=run.model, metric=losses[step])
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:08d}" for step in (2, 3, 5, 6)]
