"""Reads past the page cache give the same bytes, notice the same damage, and are left out where they are no use."""

import contextlib
import os
import random
import threading
from pathlib import Path

import pytest
import torch

from shardwise.checkpointing import reading
from shardwise.checkpointing.contents import Box
from shardwise.checkpointing.formats.sharded import read_manifest
from shardwise.checkpointing.reading import Request, read_requests
from shardwise.checkpointing.storage import direct_io
from shardwise.checkpointing.storage.direct_io import DirectReader
from shardwise.checkpointing.storage.files import LocalReader, open_reader
from shardwise.errors import CheckpointError
from tests.sharded_checkpoints import write_checkpoint

NUM_BYTES = (1 << 20) + 12345


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short reads go past the page cache too, through a buffer of a few pages."""
    monkeypatch.setattr(direct_io, "_MIN_BYTES", 1)
    monkeypatch.setattr(direct_io, "_BUFFER_BYTES", 3 * 4096)
    monkeypatch.setattr(direct_io, "_of_thread", threading.local())
    monkeypatch.setattr(direct_io, "_SLOW_BYTES_PER_S", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(random.Random(0).randbytes(NUM_BYTES))
    evict(tmp_path / "file")
    return tmp_path / "file"


def evict(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read_directly(path: Path, offset: int, length: int) -> int:
    """How many bytes do not come from the page cache."""
    with path.open("rb") as file:
        reader = DirectReader(file.fileno())
        count = reader.read_into(offset, [memoryview(bytearray(length))])
        reader.close()
    return count


def need_direct_reads(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        with path.open("rb") as file, contextlib.suppress(BlockingIOError):
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError:
        pytest.skip("this file system reads through the page cache only, or does not tell what it holds")
    evict(path)


@pytest.mark.usefixtures("small_steps")
def test_any_bytes_into_any_buffers(path: Path):
    data, chance = path.read_bytes(), random.Random(1)
    reader = LocalReader(path)
    for turn in range(200):
        if turn % 3 == 0:
            evict(path)  # some of the reads find a part of theirs in the page cache
        offset = chance.choice([0, 4096, NUM_BYTES - 1, chance.randrange(NUM_BYTES)])
        buffers = [bytearray(chance.choice([0, 1, 511, 4096, chance.randrange(30_000)])) for _ in range(3)]
        count = reader.read_into(offset, [memoryview(buffer) for buffer in buffers])
        wanted = data[offset : offset + sum(map(len, buffers))]
        assert count == len(wanted)
        assert b"".join(buffers)[:count] == wanted
    reader.close()


def test_only_what_is_not_cached_is_read_directly(path: Path, monkeypatch: pytest.MonkeyPatch):
    need_direct_reads(path)
    monkeypatch.setattr(direct_io, "_SLOW_BYTES_PER_S", 0.0)
    assert read_directly(path, 3, NUM_BYTES - 3) == NUM_BYTES - 3
    evict(path)
    assert read_directly(path, 0, 1000) == 0  # too short
    assert read_directly(path, NUM_BYTES, 1 << 21) == 0  # beyond the end
    path.read_bytes()
    assert read_directly(path, 3, NUM_BYTES - 3) == 0


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_slow_disk_is_left_to_the_page_cache(path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool):
    need_direct_reads(path)
    monkeypatch.setattr(direct_io, "_SLOW_BYTES_PER_S", 1e18 if is_slow else 0.0)
    assert read_directly(path, 0, NUM_BYTES) == (8 * 3 * 4096 if is_slow else NUM_BYTES)
    evict(path)
    found = bytearray(NUM_BYTES)
    reader = LocalReader(path)
    assert reader.read_into(5, [memoryview(found)[5:]]) == NUM_BYTES - 5
    assert found[5:] == path.read_bytes()[5:]
    evict(path)
    rest = reader._direct.read_into(0, [memoryview(found)])
    assert rest == (0 if is_slow else NUM_BYTES)
    reader.close()


@pytest.mark.parametrize("refused", ["open", "read"])
def test_file_systems_without_direct_reads(path: Path, monkeypatch: pytest.MonkeyPatch, refused: str):
    need_direct_reads(path)
    system_open, system_preadv = os.open, os.preadv
    direct: list[int] = []

    def refusing_open(where, flags, *args, **kwargs):
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(22, "Invalid argument")
        descriptor = system_open(where, flags, *args, **kwargs)
        if flags & os.O_DIRECT:
            direct.append(descriptor)
        return descriptor

    def refusing_read(descriptor, buffers, offset, flags=0):
        if descriptor in direct:
            raise OSError(22, "Invalid argument")
        return system_preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "open", refusing_open)
    monkeypatch.setattr(os, "preadv", refusing_read)
    found = bytearray(NUM_BYTES)
    reader = LocalReader(path)
    assert reader.read_into(0, [memoryview(found)]) == NUM_BYTES
    reader.close()
    assert bool(direct) == (refused == "read")
    monkeypatch.undo()
    assert found == path.read_bytes()


def test_a_file_that_ends_too_early_is_one_clear_error(path: Path):
    reader = open_reader(path)
    with pytest.raises(CheckpointError, match=r"ends before byte 2,097,152"):
        reader.read_into(0, [memoryview(bytearray(2 << 20))])
    reader.close()


@pytest.mark.parametrize("at", [0, 1_500_000, (4 << 20) - 1])
def test_a_flipped_byte_on_the_disk_is_found(tmp_path: Path, at: int):
    weight = torch.randn(1024, 1024)
    write_checkpoint(tmp_path / "step-00000001", {"w": weight}, num_files=1, block_bytes=1 << 20)
    contents = read_manifest(tmp_path / "step-00000001")
    piece = contents.tensors["w"].pieces[0]
    file = tmp_path / "step-00000001" / piece.file
    request = Request("w", torch.zeros(1024, 1024), Box.whole((1024, 1024)))
    evict(file)
    read_requests(contents, [request])
    assert torch.equal(request.target, weight)
    with file.open("r+b") as opened:
        opened.seek(piece.offset + at)
        byte = opened.read(1)[0]
        opened.seek(piece.offset + at)
        opened.write(bytes([byte ^ 1]))
    evict(file)
    with pytest.raises(CheckpointError, match="the checkpoint is damaged: bytes of w"):
        read_requests(contents, [request])


@pytest.mark.usefixtures("small_steps")
def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "_MAX_OPEN", 3)
    weight = torch.randn(40, 1000)
    write_checkpoint(tmp_path / "step-00000001", {"w": weight}, num_files=40)
    contents = read_manifest(tmp_path / "step-00000001")
    before, most = len(os.listdir("/proc/self/fd")), 0

    class Counting:
        def start(self, total: int, label: str) -> None: ...
        def finish(self, note: str = "") -> None: ...

        def advance(self, steps: int = 1, note: str = "") -> None:
            nonlocal most
            most = max(most, len(os.listdir("/proc/self/fd")) - before)

    request = Request("w", torch.zeros(40, 1000), Box.whole((40, 1000)))
    read_requests(contents, [request], progress=Counting(), num_threads=2)
    assert torch.equal(request.target, weight)
    assert 0 < most <= 3 * (3 + 2)  # a file is up to three descriptors; each thread may hold one more
    assert len(os.listdir("/proc/self/fd")) <= before
