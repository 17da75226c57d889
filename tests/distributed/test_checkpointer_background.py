"""A save in the background: it holds the state at `save`, its errors reach every rank, and nothing is left behind."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from shardwise.checkpointing import staging
from shardwise.checkpointing.contents import ChunkSpec
from shardwise.checkpointing.formats.sharded import read_manifest
from shardwise.checkpointing.manager import Checkpointer
from shardwise.checkpointing.reading import read_chunk
from shardwise.errors import CheckpointError
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
def copies_held() -> Iterator[threading.Event]:
    """Copies in the background wait for the event, as if there were gigabytes of them."""
    copy, go = staging._copy_now, threading.Event()

    def copy_later(memory: torch.Tensor, target: torch.Tensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(30)
        copy(memory, target)

    small = staging._SMALL_BYTES
    staging._copy_now, staging._SMALL_BYTES = copy_later, 0  # pyrefly: ignore[bad-assignment]
    try:
        yield go
    finally:
        go.set()
        staging._copy_now, staging._SMALL_BYTES = copy, small


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The writer of this rank does nothing, as if the disk were slow."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@ranks(2)
def test_optimizer_step_and_average_wait_for_the_copy(rank: int, tmp_path: Path):
    run = Training(rank, mesh_1d(2))
    run.train(1)
    with Checkpointer(tmp_path) as checkpointer, copies_held() as go:
        before = everything(run)
        checkpointer.save(1, **run.parts)
        opener = threading.Timer(0.3, go.set)
        opener.start()
        start = time.monotonic()
        run.train(1)
        assert time.monotonic() - start >= 0.25
        opener.join()
        checkpointer.wait()
        assert everything(run)["model.gain"] != before["model.gain"]
        again = Training(rank, mesh_1d(2))
        checkpointer.load(**again.parts)
    assert_equal(everything(again), before)


@ranks(2)
def test_what_changes_before_the_step_is_copied_at_once(rank: int, tmp_path: Path):
    run = Training(rank, mesh_1d(2))
    extra = {"note": ["as it was"], "tensor": torch.ones(2)}
    with Checkpointer(tmp_path) as checkpointer, copies_held():
        checkpointer.save(1, **run.parts, extra=extra)
        run.model.scale.fill_(-1)
        run.data.next()
        extra["note"].append("changed")
        extra["tensor"].zero_()
        torch.rand(1)
        checked = torch.get_rng_state()
    run.model.scale.fill_(0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(**run.parts)
    assert run.model.scale.item() == 1.5
    assert run.data.position == 0
    assert checkpointer.extra["note"] == ["as it was"]
    assert checkpointer.extra["tensor"].tolist() == [1, 1]
    assert not torch.equal(torch.get_rng_state(), checked)


@ranks(2)
def test_change_during_the_copy_fails_the_save_on_every_rank(rank: int, tmp_path: Path):
    run = Training(rank, mesh_1d(2))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, **run.parts)
        checkpointer.wait()
        with copies_held():
            checkpointer.save(2, **run.parts)
            if rank == 1:
                with torch.no_grad():
                    run.model.embedding.weight.mul_(2)
        with pytest.raises(CheckpointError, match="1 tensors were modified while they were being saved") as caught:
            checkpointer.wait()
        assert "model.embedding.weight" in caught.value.where
        checkpointer.wait()  # an error is raised once
        assert checkpointer.latest() == 1
        assert os.listdir(tmp_path) == ["step-00000001"]
        dist.barrier()  # the next save makes a folder
        checkpointer.save(2, **run.parts)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


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
    assert not staging._active
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
