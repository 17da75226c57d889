"""One rank's file: what is in it, how it gets to the disk, and what happens when the disk refuses."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwise.checkpointing.contents import ChunkSpec, LocalChunk
from shardwise.checkpointing.formats.sharded import write_rank_file
from shardwise.checkpointing.pickles.torch_files import value_stream
from shardwise.checkpointing.storage import FileWriter, bytes_of, checksum
from shardwise.errors import CheckpointError


def item(name: str, tensor: torch.Tensor) -> LocalChunk:
    spec = ChunkSpec.whole(tuple(tensor.shape))
    return LocalChunk(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), spec, tensor)


@pytest.mark.parametrize("fsync", [False, True])
def test_every_item_is_a_stream_that_torch_reads(tmp_path: Path, fsync: bool):
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.tensor(2.5).bfloat16(),
        "c": torch.empty(0, 3),
        "d": torch.arange(999),
    }
    path = tmp_path / "__0_0.distcp"
    record = write_rank_file(
        path, [item(*each) for each in tensors.items()], {"v": value_stream((1, "x"))}, fsync=fsync, block_bytes=128
    )
    data = path.read_bytes()
    assert record.num_bytes == len(data)
    for written, item_stream in record.tensors:
        stream = data[item_stream.offset : item_stream.offset + item_stream.num_bytes]
        assert torch.equal(torch.load(io.BytesIO(stream), weights_only=True), tensors[written.name])
        raw = bytes_of(tensors[written.name])
        assert data[written.chunks[0].offset : written.chunks[0].offset + len(raw)] == raw
        assert written.chunks[0].checksums == tuple(checksum(raw[at : at + 128]) for at in range(0, len(raw), 128))
    (value,) = record.values
    stream = data[value.offset : value.offset + value.num_bytes]
    assert torch.load(io.BytesIO(stream), weights_only=True) == (1, "x")


def test_items_may_be_made_when_their_turn_comes(tmp_path: Path):
    """A conversion has no memory for all of them; the file must be the same."""
    alive: list[int] = []

    def items() -> Iterator[LocalChunk]:
        for number in range(5):
            alive.append(number)
            yield item(str(number), torch.full((1000,), float(number)))

    streamed = write_rank_file(tmp_path / "a", items(), total=20_000)
    at_once = write_rank_file(tmp_path / "b", [item(str(n), torch.full((1000,), float(n))) for n in range(5)])
    assert alive == list(range(5))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (streamed.frame, streamed.num_bytes) == (at_once.frame, at_once.num_bytes)


def test_a_file_is_never_written_over(tmp_path: Path):
    (tmp_path / "there").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    for name in ("there", "link"):
        with pytest.raises(CheckpointError, match="cannot create"):
            FileWriter(tmp_path / name)
    assert (tmp_path / "there").read_text() == "precious"


FULL_DISK = """
import resource, sys
from pathlib import Path
from shardwise.checkpointing.contents import ChunkSpec, LocalChunk
from shardwise.checkpointing.formats.sharded import write_rank_file
from shardwise.errors import CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, 10 << 20))
data = bytearray(40 << 20)
try:
    item = LocalChunk("x", "uint8", (len(data),), ChunkSpec.whole((len(data),)), data)
    write_rank_file(Path(sys.argv[1]), [item], fsync=sys.argv[2] == "True")
except CheckpointError as error:
    print(error.where, "|", error.why)
assert "torch" not in sys.modules, "the writer must not need torch"
"""


@pytest.mark.parametrize("fsync", [False, True])
def test_a_disk_that_takes_no_more_is_one_clear_error(tmp_path: Path, fsync: bool):
    path = tmp_path / "f"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, path, str(fsync)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{path} | File too large"
    assert path.stat().st_size <= 10 << 20


@pytest.mark.parametrize("failing", ["writev", "fsync"])
def test_an_error_of_the_disk_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str):
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    data = torch.zeros(40 << 20, dtype=torch.uint8)
    monkeypatch.setattr(os, failing, refuse)
    with pytest.raises(CheckpointError, match="cannot") as caught:
        write_rank_file(tmp_path / "f", [item("x", data)])
    assert caught.value.why == "No space left on device"
    assert "free space" in caught.value.fix


def test_a_folder_that_may_not_be_written(tmp_path: Path):
    with pytest.raises(CheckpointError, match="cannot create") as caught:
        write_rank_file(tmp_path / "absent" / "f", [])
    assert "absent" in caught.value.where


def test_tensor_memory_is_seen_as_it_is():
    tensor = torch.arange(5, dtype=torch.int16)
    view = bytes_of(tensor)
    view[0] = 9
    assert tensor[0] == 9
    assert bytes_of(torch.empty(0)) == b""
    with pytest.raises(ValueError, match="not a contiguous CPU tensor"):
        bytes_of(torch.zeros(3, 4).t())
    with pytest.raises(ValueError, match="not a contiguous CPU tensor"):
        bytes_of(torch.zeros(3, device="meta"))
    del tensor
    assert view[0] == 9, "the view must keep the tensor's memory"
