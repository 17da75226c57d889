"""Damaged checkpoints, full disks and forbidden folders: one clear error on every rank, and nothing lost."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpointing.formats.sharded import read_manifest
from shardwise.checkpointing.manager import Checkpointer
from shardwise.errors import CheckpointError
from tests.by_hand import mesh_1d
from tests.distributed.checkpointed_run import Training, assert_equal, everything
from tests.ranks import ranks


def flip(folder: Path, tensor: str, chunk: int) -> str:
    """Turn one bit of a stored tensor; return its file's name."""
    contents = read_manifest(folder)
    place = contents.tensors[tensor].chunks[chunk]
    with open(folder / place.file, "r+b") as file:
        file.seek(place.offset)
        byte = file.read(1)[0]
        file.seek(place.offset)
        file.write(bytes([byte ^ 1]))
    return place.file


@ranks(2)
@pytest.mark.parametrize("name", ["model.embedding.weight", "optim.state.embedding.weight.exp_avg", "ema.shadow.gain"])
def test_flipped_bit_is_found_and_the_model_refuses_to_run(rank: int, tmp_path: Path, name: str):
    run = Training(rank, mesh_1d(2))
    run.train(1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, **run.parts)
        checkpointer.save(2, **run.parts)
        checkpointer.wait()
        dist.barrier()
        files = [flip(checkpointer.path(2), name, 0)] if rank == 0 else [""]
        dist.broadcast_object_list(files)
        other = Training(rank, mesh_1d(2), seed=3)
        before = everything(other)
        with pytest.raises(CheckpointError) as caught:
            checkpointer.load(**other.parts, verify="before")
        assert files[0] in str(caught.value)
        assert name in str(caught.value)
        assert_equal(everything(other), before)
        other.train(1)
        with pytest.raises(CheckpointError) as caught:
            checkpointer.load(**other.parts)
        assert files[0] in str(caught.value)
        with pytest.raises(CheckpointError, match="holds corrupt values"):
            other.train(1)
        with pytest.raises(CheckpointError, match="holds corrupt values"):
            checkpointer.save(3, **other.parts)
        assert checkpointer.load(**other.parts, step=1) == 1
        other.train(1)


@ranks(2)
def test_missing_and_short_files_are_found_before_anything_changes(rank: int, tmp_path: Path):
    run = Training(rank, mesh_1d(2))
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, **run.parts)
        before = everything(run)
        file = checkpointer.path(1) / "__1_0.distcp"
        dist.barrier()
        if rank == 0:
            os.truncate(file, file.stat().st_size - 1)
        dist.barrier()
        with pytest.raises(CheckpointError, match=r"(?s)__1_0\.distcp"):
            checkpointer.load(**run.parts)
        if rank == 0:
            file.unlink()
        dist.barrier()
        with pytest.raises(CheckpointError, match=r"(?s)__1_0\.distcp"):
            checkpointer.load(**run.parts)
        assert_equal(everything(run), before)
        with pytest.raises(CheckpointError, match="no checkpoint of step 7") as caught:
            checkpointer.load(**run.parts, step=7)
        assert "load step 1" in caught.value.fix


@ranks(2)
def test_empty_folder(rank: int, tmp_path: Path):
    run = Training(rank, mesh_1d(2))
    with Checkpointer(tmp_path / "not there") as checkpointer:
        assert checkpointer.latest() is None
        with pytest.raises(CheckpointError, match="there is no checkpoint to load"):
            checkpointer.load(**run.parts)
    assert not (tmp_path / "not there").exists()


@contextmanager
def limited_files(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow larger, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


@ranks(2)
@pytest.mark.parametrize("full_rank", [0, 1])
def test_disk_that_fills_up(rank: int, tmp_path: Path, full_rank: int):
    run = Training(rank, mesh_1d(2))
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, **run.parts)
        before = everything(run)
        run.train(1)
        large = {"of each rank": torch.full((1 << 23,), float(rank))}  # the store of the ranks is a file, too
        with limited_files(1 << 24 if rank == full_rank else 1 << 30), pytest.raises(CheckpointError) as caught:
            checkpointer.save(2, **run.parts, extra=large)
        assert f"__{full_rank}_0.distcp" in caught.value.where
        assert os.listdir(tmp_path) == ["step-00000001"]
        checkpointer.load(**run.parts)
        assert_equal(everything(run), before)


@contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    """A disk of that size, where this user may mount one."""
    folder = Path(tempfile.mkdtemp())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        folder.rmdir()
        pytest.skip("this user may not mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "background"])
def test_small_disk(asynchronous: bool):
    model = torch.nn.Linear(300, 300)
    with small_disk(1) as folder, Checkpointer(folder, asynchronous=asynchronous, keep_last=None) as checkpointer:
        checkpointer.save(1, model=model)
        checkpointer.save(2, model=model)
        checkpointer.wait()
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            checkpointer.wait() if checkpointer.save(3, model=model) else None
        assert "free space" in caught.value.fix
        assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002"]
        assert checkpointer.load(model=model) == 2


@ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "background"])
def test_folder_that_may_not_be_written(rank: int, asynchronous: bool):
    run = Training(rank, mesh_1d(2))
    made = [tempfile.mkdtemp()] if rank == 0 else [""]
    dist.broadcast_object_list(made)
    folder = Path(made[0])
    with Checkpointer(folder, asynchronous=asynchronous) as checkpointer:
        checkpointer.save(1, **run.parts)
        checkpointer.wait()
        dist.barrier()
        folder.chmod(0o555)
        dist.barrier()
        if os.getuid() == 0:
            os.seteuid(65534)  # root may write everywhere
        try:
            with pytest.raises(CheckpointError, match="cannot make the folder") as caught:
                checkpointer.save(2, **run.parts)
        finally:
            if os.getuid() == 0:
                os.seteuid(0)
            dist.barrier()
            folder.chmod(0o755)
        assert "step-00000002" in caught.value.where
        assert "writable" in caught.value.fix
        assert checkpointer.load(**run.parts) == 1
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
