"""A checkpoint is there or it is not: killed at any point, on a disk or in a store, the one before stays."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from shardwise.checkpointing import storage
from shardwise.checkpointing.contents import ChunkSpec, LocalChunk
from shardwise.checkpointing.formats.dcp import read_dcp
from shardwise.checkpointing.formats.sharded import (
    Header,
    begin_checkpoint,
    commit_checkpoint,
    committed_steps,
    file_name,
    is_committed,
    partial_of,
    read_manifest,
    remove_checkpoint,
    rewind,
    step_folder,
    sweep,
    write_rank_file,
)
from shardwise.checkpointing.reading import read_chunk
from shardwise.checkpointing.storage import FileWriter, Place, exists, join, names_in
from shardwise.errors import CheckpointError
from tests.faults.kill_points import POINTS, watch
from tests.sharded_checkpoints import write_checkpoint

SAVE = """
import sys
from pathlib import Path
from shardwise.checkpointing.formats.sharded import *
from shardwise.checkpointing.contents import ChunkSpec, LocalChunk
from shardwise.checkpointing.formats.sharded import Header
from shardwise.checkpointing.formats.sharded import file_name, write_rank_file
from tests.faults.kill_points import kill_at
root, step, point = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if point:
    kill_at(point)
data = bytes([step]) * (20 << 20)
partial = begin_checkpoint(step_folder(root, step))
item = LocalChunk("x", "uint8", (len(data),), ChunkSpec.whole((len(data),)), data)
record = write_rank_file(partial / file_name(0), [item])
commit_checkpoint(step_folder(root, step), [record], Header(step=step, world_size=1))
for old in committed_steps(root)[:-1]:
    remove_checkpoint(step_folder(root, old))
assert "torch" not in sys.modules, "committing must not need torch"
"""


def save_in_another_process(root: Path, step: int, kill_at: str = "") -> int:
    command = [sys.executable, "-c", SAVE, str(root), str(step), kill_at]
    return subprocess.run(command, timeout=60, check=False).returncode


def first_byte(folder: Place) -> int:
    contents = read_manifest(folder)
    (size,) = contents.tensors["x"].shape
    whole = read_chunk(contents, contents.tensors["x"], ChunkSpec((0,), (size,)))
    assert (whole == whole[0]).all()
    return int(whole[0])


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_a_whole_checkpoint_remains(tmp_path: Path, point: str):
    assert save_in_another_process(tmp_path, 1) == 0
    assert save_in_another_process(tmp_path, 2, kill_at=point) == -9
    steps = committed_steps(tmp_path)
    assert steps, "no checkpoint is left"
    is_saved = POINTS.index(point) >= POINTS.index("renamed")
    assert steps[-1] == (2 if is_saved else 1)
    for step in steps:
        assert first_byte(step_folder(tmp_path, step)) == step
    # Whatever was left over is in nobody's way and can be swept.
    assert save_in_another_process(tmp_path, 3) == 0
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.fixture(params=["disk", "store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A local folder, and a store without rename."""
    if request.param == "disk":
        return tmp_path
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    return "memory://bucket/run"


def save(root: Place, step: int, value: float = 1.0, *, commit: bool = True) -> Place:
    folder = step_folder(root, step)
    partial = begin_checkpoint(folder)
    tensor = torch.full((10,), value)
    item = LocalChunk("x", "float32", (10,), ChunkSpec.whole((10,)), tensor)
    record = write_rank_file(join(partial, file_name(0)), [item], block_bytes=16)
    if commit:
        commit_checkpoint(folder, [record], Header(step=step))
    return folder


def test_only_what_was_committed_is_listed(root: Place):
    assert committed_steps(root) == []
    save(root, 20)
    save(root, 3)
    unfinished = save(root, 30, commit=False)
    assert committed_steps(root) == [3, 20]
    assert not is_committed(unfinished)
    assert not is_committed(partial_of(unfinished))
    assert first_byte(step_folder(root, 20)) == 1


def test_sweeping_removes_leftovers_and_nothing_else(root: Place):
    save(root, 1)
    save(root, 2, commit=False)
    if isinstance(root, Path):
        (root / "notes").mkdir()
        (root / "step-00000009.removing").mkdir()
        (root / "step-7").mkdir()  # none of ours
    swept = sweep(root)
    assert len(swept) == (2 if isinstance(root, Path) else 1)
    assert committed_steps(root) == [1]
    assert names_in(root) == (["notes", "step-00000001", "step-7"] if isinstance(root, Path) else ["step-00000001"])


def test_a_partial_folder_is_no_checkpoint_even_with_its_manifest(tmp_path: Path):
    """Between the manifest and the rename a crash of the machine may still take files away."""
    folder = save(tmp_path, 5)
    for suffix in (".partial", ".removing"):
        other = folder.rename(folder.with_name("step-00000005" + suffix))
        assert not is_committed(other)
        assert committed_steps(tmp_path) == []
        other.rename(folder)
    assert is_committed(folder)


def test_an_interrupted_save_can_be_repeated(root: Place):
    save(root, 5, 1.0, commit=False)
    save(root, 5, 2.0)
    assert first_byte(step_folder(root, 5)) == 2


def test_a_committed_checkpoint_is_never_written_over(root: Place):
    save(root, 5, 1.0)
    with pytest.raises(CheckpointError, match="already"):
        save(root, 5, 2.0)
    assert first_byte(step_folder(root, 5)) == 1


def test_removing(root: Place):
    save(root, 1)
    save(root, 2)
    remove_checkpoint(step_folder(root, 1))
    assert committed_steps(root) == [2]
    assert names_in(root) == ["step-00000002"]
    remove_checkpoint(step_folder(root, 1))


def test_a_removal_that_stops_midway_leaves_no_checkpoint(root: Place, monkeypatch: pytest.MonkeyPatch):
    folder = save(root, 1)
    removed: list[str] = []
    remove = MemoryFileSystem.rm

    def remove_some(store: MemoryFileSystem, path: str, **options: Any) -> None:
        if removed:
            raise KeyboardInterrupt
        removed.append(path)
        remove(store, path, **options)

    def remove_none(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryFileSystem, "rm", remove_some)
    monkeypatch.setattr("shutil.rmtree", remove_none)
    with pytest.raises(KeyboardInterrupt):
        remove_checkpoint(folder)
    monkeypatch.undo()
    assert committed_steps(root) == []


def test_a_store_holds_the_same_checkpoint(root: Place):
    folder = save(root, 4, 3.0)
    contents = read_dcp(folder)
    assert torch.equal(read_chunk(contents, contents.tensors["x"], ChunkSpec((2,), (5,))), torch.full((5,), 3.0))


def test_points_are_reached_in_their_order(tmp_path: Path):
    reached: list[str] = []
    end = watch(reached.append)
    try:
        write_checkpoint(tmp_path / "step-00000007", {"x": torch.zeros(10)}, num_files=1, fsync=True)
        remove_checkpoint(tmp_path / "step-00000007")
    finally:
        end()
    assert tuple(reached) == POINTS


def test_ranks_that_disagree_on_a_tensor_are_refused(tmp_path: Path):
    folder = step_folder(tmp_path, 1)
    partial = begin_checkpoint(folder)
    records = []
    for rank, size in enumerate([4, 5]):
        item = LocalChunk("x", "float32", (size,), ChunkSpec((0,), (2,)), torch.zeros(2))
        records.append(write_rank_file(join(partial, file_name(rank)), [item]))
    with pytest.raises(CheckpointError, match="x: the ranks wrote different dtypes or shapes"):
        commit_checkpoint(folder, records, Header())
    assert not is_committed(folder)


@pytest.mark.parametrize(
    ("starts", "problem"),
    [((0, 0), "some elements are stored twice"), ((0, 3), "1 of 4 elements are not stored")],
    ids=["twice", "not at all"],
)
def test_nothing_is_committed_that_is_not_stored_once(tmp_path: Path, starts: tuple[int, int], problem: str):
    folder = step_folder(tmp_path, 1)
    partial = begin_checkpoint(folder)
    records = []
    for rank, (start, size) in enumerate(zip(starts, (2, 1), strict=True)):
        items = [LocalChunk("x", "float32", (4,), ChunkSpec((start,), (size,)), torch.zeros(size))]
        items += [LocalChunk("fine", "float32", (2,), ChunkSpec((rank,), (1,)), torch.zeros(1))]
        records.append(write_rank_file(join(partial, file_name(rank)), items))
    with pytest.raises(CheckpointError, match="1 tensors or values would not be stored completely") as caught:
        commit_checkpoint(folder, records, Header())
    assert f"x: {problem}" in caught.value.where
    assert not is_committed(folder)
    assert committed_steps(tmp_path) == []


@pytest.fixture
def store() -> Iterator[str]:
    """The URL of an empty store without rename."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield "memory://bucket/run"
    files.store.clear()


def put(*places: str, data: bytes = b"precious") -> None:
    for place in places:
        with fsspec.open(place, "wb") as file:
            file.write(data)


OF_OTHERS = [
    ["notes.txt"],
    [".metadata"],
    [".metadata", "__0_0.distcp"],  # of torch's own Distributed Checkpoint
    [".metadata", "__0_0.distcp", "manifest.json"],
]


@pytest.mark.parametrize("names", OF_OTHERS, ids="+".join)
def test_files_of_others_in_a_store_are_never_removed(store: str, names: list[str]):
    folder = step_folder(store, 7)
    put(*(join(folder, name) for name in names))
    assert sweep(store) == []
    assert committed_steps(store) == []
    with pytest.raises(CheckpointError, match="files that are not remains of an interrupted save"):
        begin_checkpoint(folder)
    assert names_in(folder) == names


def test_what_others_add_to_an_interrupted_save_is_kept(store: str):
    folder = save(store, 7, commit=False)
    put(join(folder, "notes.txt"))
    assert sweep(store) == []
    assert "notes.txt" in names_in(folder)


@pytest.mark.parametrize("names", [[], [file_name(3)], [file_name(0), ".metadata"]], ids="+".join)
def test_what_an_interrupted_save_left_in_a_store_is_removed(store: str, names: list[str]):
    folder = begin_checkpoint(step_folder(store, 7))
    put(*(join(folder, name) for name in names), data=b"half")
    save(store, 7, 2.0)
    assert first_byte(folder) == 2
    assert names_in(folder) == [".metadata", file_name(0), "manifest.json"]
    begin_checkpoint(step_folder(store, 8))
    assert sweep(store) == [step_folder(store, 8)]
    assert names_in(store) == ["step-00000007"]


@pytest.mark.parametrize("num_bytes", [0, 5, 33, 100, -1], ids=str)
def test_a_half_written_manifest_in_a_store_is_no_commit(store: str, num_bytes: int, caplog: pytest.LogCaptureFixture):
    save(store, 1)
    folder = save(store, 2)
    whole = fsspec.filesystem("memory").cat_file(join(folder, "manifest.json"))
    put(join(folder, "manifest.json"), data=whole[:num_bytes])
    assert committed_steps(store) == [1]
    assert "step-00000002 is skipped: its manifest is incomplete" in caplog.text
    save(store, 2, 3.0)
    assert committed_steps(store) == [1, 2]
    assert first_byte(folder) == 3


def write_half(url: str, error: BaseException) -> None:
    with FileWriter(url) as writer:
        writer.append(b"half of it")
        raise error


@pytest.mark.parametrize("scheme", ["memory", "local"])
def test_a_writer_that_fails_publishes_nothing(scheme: str, tmp_path: Path):
    url = f"{scheme}://{tmp_path}/file"
    with pytest.raises(OSError, match="lost"):
        write_half(url, OSError("connection lost"))
    assert not exists(url)


class Uploads(AbstractBufferedFile):
    """A file of a store that publishes what is uploaded when it is closed."""

    done: ClassVar[list[str]] = []

    def _initiate_upload(self) -> None:
        self.done.append("begun")

    def _upload_chunk(self, final: bool = False) -> None:
        self.done.append("published" if final else "part")

    def discard(self) -> None:
        self.done.append("discarded")


def test_a_writer_that_fails_discards_its_upload(store: str, monkeypatch: pytest.MonkeyPatch):
    def opened(files: Any, path: str, *_: object) -> Uploads:
        return Uploads(files, path, "wb", block_size=4)

    monkeypatch.setattr(MemoryFileSystem, "open", opened)
    monkeypatch.setattr(Uploads, "done", [])
    with pytest.raises(KeyboardInterrupt):
        write_half(f"{store}/file", KeyboardInterrupt())
    gc.collect()
    assert Uploads.done == ["begun", "part", "discarded"]


def test_rewind_renames_later_checkpoints_and_loses_none(root: Place):
    for value in (1.0, 2.0):  # twice
        for step in (10, 20, 30):
            if not is_committed(step_folder(root, step)):
                save(root, step, value)
        assert rewind(root, 30) == []
        moved = rewind(root, 10)
        assert committed_steps(root) == [10]
        assert len(moved) == 2
        assert first_byte(moved[0]) == value
    assert names_in(root) == [
        "step-00000010",
        *(f"step-000000{step}.abandoned{suffix}" for step in (20, 30) for suffix in ("", "-2")),
    ]
    assert sweep(root) == []


def test_interrupted_rewind_abandons_all_at_once(root: Place, monkeypatch: pytest.MonkeyPatch):
    for step in (10, 20, 30):
        save(root, step)
    move = storage.move
    for num_moves in (0, 1):

        def move_then_fail(path: Place, target: Place, left: list[int] = [num_moves]) -> None:  # noqa: B006
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            move(path, target)

        monkeypatch.setattr(storage, "move", move_then_fail)
        with pytest.raises(KeyboardInterrupt):
            rewind(root, 10) if num_moves == 0 else sweep(root)
        assert committed_steps(root) == [10]
    monkeypatch.undo()
    sweep(root)  # before the next save
    assert names_in(root) == ["step-00000010", "step-00000020.abandoned", "step-00000030.abandoned"]
