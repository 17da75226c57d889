"""Parts of stored tensors, read into memory of any kind, and every way in which that must fail."""

import os
import random
import re
from pathlib import Path

import pytest
import torch

from shardwise.checkpointing import reading
from shardwise.checkpointing.contents import ChunkSpec, Contents, StoredChunk, StoredTensor
from shardwise.checkpointing.formats.sharded import read_manifest
from shardwise.checkpointing.reading import Request, check_requests, read_chunk, read_requests
from shardwise.errors import CheckpointError
from tests.sharded_checkpoints import write_checkpoint

TENSORS = {
    "cube": torch.randn(7, 5, 6, generator=torch.Generator().manual_seed(0)),
    "half": torch.randn(11, 3, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "flags": torch.arange(23) % 3 == 0,
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
}


@pytest.fixture
def contents(tmp_path: Path) -> Contents:
    """`cube` is cut along dim 1 and `half` along dim 0, over three files, with tiny blocks."""
    write_checkpoint(tmp_path / "step-00000007", TENSORS, num_files=3, dims={"cube": 1})
    return read_manifest(tmp_path / "step-00000007")


def random_box(shape: tuple[int, ...], chance: random.Random) -> ChunkSpec:
    starts = tuple(chance.randint(0, max(size - 1, 0)) for size in shape)
    return ChunkSpec(starts, tuple(chance.randint(min(1, n - a), n - a) for a, n in zip(starts, shape, strict=True)))


def part(tensor: torch.Tensor, spec: ChunkSpec) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(spec.starts, spec.sizes, strict=True))]


def targets_for(spec: ChunkSpec, dtype: torch.dtype) -> list[torch.Tensor]:
    """Contiguous, of another dtype, transposed, and with gaps."""
    turned = torch.ones(tuple(reversed(spec.sizes)), dtype=dtype).permute(tuple(reversed(range(len(spec.sizes)))))
    gaps = torch.ones((*spec.sizes, 2), dtype=dtype)[..., 0]
    return [torch.ones(spec.sizes, dtype=dtype), torch.ones(spec.sizes, dtype=torch.float64), turned, gaps]


@pytest.mark.parametrize(("chunk_bytes", "min_run_bytes"), [(16 << 20, 64 << 10), (64, 1), (32, 8), (16, 1)])
def test_any_part_into_any_memory(
    contents: Contents, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, min_run_bytes: int
):
    """Small chunks and runs, so that small tensors take every path that large ones take."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(reading, "_MIN_RUN_BYTES", min_run_bytes)
    chance = random.Random(chunk_bytes)
    for _ in range(60):
        name = chance.choice(list(TENSORS))
        spec = random_box(tuple(TENSORS[name].shape), chance)
        wanted = part(TENSORS[name], spec)
        for target in targets_for(spec, wanted.dtype):
            requests = [Request(name, target, spec)]
            assert not check_requests(contents, requests)
            verify = chance.choice([True, False])
            read_requests(contents, requests, verify=verify, num_threads=chance.choice([1, 3]))
            assert torch.equal(target, wanted.to(target.dtype)), (name, spec, verify)
        assert torch.equal(read_chunk(contents, contents.tensors[name], spec), wanted)


def test_a_parameter_that_needs_gradients(contents: Contents):
    parameter = torch.nn.Parameter(torch.zeros(11, 3, dtype=torch.bfloat16))
    read_requests(contents, [Request("half", parameter, ChunkSpec.whole((11, 3)))])
    assert torch.equal(parameter, TENSORS["half"])


def test_bytes_that_are_already_in_memory(tmp_path: Path):
    """Formats that store no usable order hand the bytes over themselves."""
    data = torch.arange(12, dtype=torch.int32)
    chunk = StoredChunk(ChunkSpec.whole((3, 4)), data=memoryview(data.numpy()).cast("B"))
    contents = Contents(tmp_path, "full", {"x": StoredTensor("x", "int32", (3, 4), (chunk,))})
    spec = ChunkSpec((1, 1), (2, 2))
    assert read_chunk(contents, contents.tensors["x"], spec).tolist() == [[5, 6], [9, 10]]


def flip(folder: Path, contents: Contents, name: str, at: int) -> str:
    chunk = contents.tensors[name].chunks[0]
    path = folder / chunk.file
    data = bytearray(path.read_bytes())
    data[chunk.offset + at] ^= 1
    path.write_bytes(data)
    return chunk.file


@pytest.mark.parametrize("at", [0, 63, 64, 100, 7 * 2 * 6 * 4 - 1])
@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_flipped_byte_is_found_and_named(contents: Contents, at: int, write: bool, dtype: torch.dtype):
    file = flip(contents.folder, contents, "cube", at)
    target = torch.full((7, 5, 6), -1.0, dtype=dtype)
    with pytest.raises(CheckpointError, match="cube") as caught:
        read_requests(contents, [Request("cube", target, ChunkSpec.whole((7, 5, 6)))], write=write)
    assert file in caught.value.where
    if not write:
        assert (target == -1).all(), "written although it should only be verified"


def test_a_flip_beside_the_part_but_in_its_block_is_found(contents: Contents):
    """A block is verified as a whole, so that what was wanted is never trusted half checked."""
    flip(contents.folder, contents, "half", 5)
    with pytest.raises(CheckpointError, match="half"):
        read_chunk(contents, contents.tensors["half"], ChunkSpec((0, 0), (1, 2)))
    assert torch.equal(read_chunk(contents, contents.tensors["half"], ChunkSpec((0, 0), (1, 2)), verify=False), part(
        TENSORS["half"], ChunkSpec((0, 0), (1, 2))))  # fmt: skip


def test_a_flip_before_the_part_but_in_its_block_is_found(contents: Contents):
    flip(contents.folder, contents, "half", 1)
    with pytest.raises(CheckpointError, match="half"):
        read_chunk(contents, contents.tensors["half"], ChunkSpec((1, 0), (2, 3)))


def test_verifying_alone_touches_no_target(contents: Contents):
    requests = [
        Request(name, tensor.to("meta"), ChunkSpec.whole(tuple(tensor.shape))) for name, tensor in TENSORS.items()
    ]
    read_requests(contents, requests, write=False)
    flip(contents.folder, contents, "cube", 9)
    with pytest.raises(CheckpointError, match="cube"):
        read_requests(contents, requests, write=False)


def test_problems_are_found_before_anything_is_read(contents: Contents):
    def problems(*requests: Request) -> str:
        return "\n".join(check_requests(contents, requests))

    whole = ChunkSpec.whole((7, 5, 6))
    assert problems(Request("cube", torch.empty(7, 5, 6), whole)) == ""
    assert "not in the checkpoint" in problems(Request("other", torch.empty(3), ChunkSpec.whole((3,))))
    assert "has shape" in problems(Request("cube", torch.empty(8, 5, 6), ChunkSpec.whole((8, 5, 6))))
    assert "memory of shape" in problems(Request("cube", torch.empty(7, 5), whole))
    path = contents.folder / "__1_0.distcp"
    good = path.read_bytes()
    for bad in (good[:-1], good + b"x"):
        path.write_bytes(bad)
        assert "__1_0.distcp: has" in problems(Request("cube", torch.empty(7, 5, 6), whole))
    path.unlink()
    assert "__1_0.distcp: is missing" in problems(Request("cube", torch.empty(7, 5, 6), whole))
    # The part that lies in another file can still be read.
    assert problems(Request("cube", torch.empty(7, 2, 6), ChunkSpec((0, 0, 0), (7, 2, 6)))) == ""


def test_a_file_that_shrinks_after_the_check(contents: Contents):
    path = contents.folder / contents.tensors["cube"].chunks[0].file
    path.write_bytes(path.read_bytes()[:200])
    for threads in (1, 3):
        with pytest.raises(CheckpointError, match="ends before byte") as caught:
            read_requests(
                contents, [Request("cube", torch.empty(7, 5, 6), ChunkSpec.whole((7, 5, 6)))], num_threads=threads
            )
        assert path.name in caught.value.where


def test_files_are_closed_while_others_are_read(contents: Contents, monkeypatch: pytest.MonkeyPatch):
    """With room for one open file, threads read from three; none is closed under a thread, and none stays open."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", 16)
    monkeypatch.setattr(reading, "_MAX_FILES", 1)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        targets = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
        requests = [Request(name, each, ChunkSpec.whole(tuple(each.shape))) for name, each in targets.items()]
        read_requests(contents, requests, num_threads=4)
        assert all(torch.equal(targets[name], TENSORS[name]) for name in TENSORS)
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer: the garbage of an earlier test


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_on_one_thread_ends_them_all(contents: Contents, monkeypatch: pytest.MonkeyPatch, threads: int):
    monkeypatch.setattr(reading, "CHUNK_BYTES", 64)
    flip(contents.folder, contents, "cube", 3)
    requests = [
        Request(name, torch.empty_like(tensor), ChunkSpec.whole(tuple(tensor.shape)))
        for name, tensor in TENSORS.items()
    ]
    with pytest.raises(CheckpointError, match="cube"):
        read_requests(contents, requests, num_threads=threads)


class Heard:
    """Records what a progress bar would show."""

    def __init__(self) -> None:
        self.total = self.done = self.finished = 0
        self.notes: list[str] = []

    def start(self, total: int, label: str) -> None:
        self.total += total

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.done += steps
        self.notes.append(note)

    def finish(self, note: str = "") -> None:
        self.finished += 1
        self.notes.append(note)


def test_progress_hears_every_byte(contents: Contents):
    heard = Heard()
    read_requests(contents, [Request("cube", torch.empty(7, 5, 6), ChunkSpec.whole((7, 5, 6)))], progress=heard)
    assert heard.total == heard.done == 7 * 5 * 6 * 4
    assert heard.finished == 1
    assert re.fullmatch(r"840 B of 840 B, [\d.]+ \w+/s", heard.notes[-2])
    assert re.fullmatch(r"loading: 840 B in [\d.]+ \w+, [\d.]+ \w+/s", heard.notes[-1])


def test_coverage():
    whole = ChunkSpec.whole((4, 6))
    halves = [ChunkSpec((0, 0), (4, 3)), ChunkSpec((0, 3), (4, 3))]
    assert whole.coverage_problem(halves) == ""
    assert whole.coverage_problem([whole]) == ""
    assert "12 of 24 elements are not stored" in whole.coverage_problem(halves[:1])
    assert "twice" in whole.coverage_problem([*halves, ChunkSpec((1, 1), (1, 1))])
    # As many elements as there should be, but not the right ones.
    assert "twice" in whole.coverage_problem([halves[0], halves[0]])
    assert ChunkSpec((0, 0), (4, 3)).coverage_problem([halves[0], ChunkSpec((0, 3), (1, 1))]) == ""
    assert ChunkSpec((), ()).coverage_problem([ChunkSpec((), ())]) == ""
    assert ChunkSpec((), ()).coverage_problem([]) != ""
    assert ChunkSpec.whole((0, 3)).coverage_problem([]) == ""
