"""torch.save files: read as data, and written record by record so that torch.load reads them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpointing.contents import ITEM_BYTES, ChunkSpec, Contents, StoredTensor
from shardwise.checkpointing.formats.full import FullWriter, read_full, tensors_in
from shardwise.checkpointing.reading import read_chunk
from shardwise.checkpointing.storage import BLOCK_BYTES, bytes_of
from shardwise.errors import CheckpointError
from shardwise.planning.settings import dtype_name


def info(name: str, tensor: torch.Tensor) -> StoredTensor:
    return StoredTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape))


def write(path: Path, tensors: dict[str, torch.Tensor], values: dict[str, Any] | None = None, **options: Any) -> None:
    infos = {name: info(name, tensor) for name, tensor in tensors.items()}
    tree = {"model": infos, **(values or {})}
    chunks = ((each, bytes_of(tensors[each.name])) for each in tensors_in(tree))
    FullWriter(path, tree, **options).write(chunks)


def interrupted(info: StoredTensor, data: bytes) -> Iterator[tuple[StoredTensor, memoryview]]:
    """Some bytes, and then an error."""
    yield info, memoryview(data)
    raise RuntimeError("stop")


def tensor_in(contents: Contents, name: str) -> torch.Tensor:
    stored = contents.tensors[name]
    return read_chunk(contents, stored, ChunkSpec.whole(stored.shape))


def read_all(path: Path) -> None:
    contents = read_full(path)
    for name in contents.tensors:
        tensor_in(contents, name)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(bytes_of(tensor.contiguous()))


@pytest.mark.parametrize("dtype", [name for name in ITEM_BYTES if name != "complex32"])
def test_torch_reads_every_dtype_that_we_write_and_we_those_of_torch(tmp_path: Path, dtype: str):
    kind = getattr(torch, dtype)
    tensor = (torch.arange(6 * kind.itemsize) % 2).to(torch.uint8).view(kind).view(2, 3)
    write(tmp_path / "ours.pt", {"t": tensor})
    loaded = torch.load(tmp_path / "ours.pt", weights_only=True)["model"]["t"]
    assert loaded.dtype == kind
    assert bits(loaded) == bits(tensor)
    torch.save({"t": tensor}, tmp_path / "theirs.pt")
    contents = read_full(tmp_path / "theirs.pt")
    assert contents.tensors["t"].dtype == dtype
    assert bits(tensor_in(contents, "t")) == bits(tensor)


def test_values_of_every_plain_kind(tmp_path: Path):
    values = {
        "step": 2**40, "small": -3, "rate": 1e-4, "name": "ü", "none": None, "yes": True, "bytes": b"\0\xff",
        "list": [1, [2.5, "x"]], "tuple": (1, (2,)), "deep": {"a": {"b": [1]}}, "set": {1, 2}, "empty": {},
    }  # fmt: skip
    write(tmp_path / "t.pt", {"t": torch.ones(2)}, values)
    loaded = torch.load(tmp_path / "t.pt", weights_only=True)
    assert {key: loaded[key] for key in values} == values


def test_tied_tensors_share_memory_and_are_stored_once(tmp_path: Path):
    tensor = torch.randn(1000)
    one = info("a", tensor)
    tree = {"a": one, "b": one}
    assert tensors_in(tree) == [one]
    FullWriter(tmp_path / "t.pt", tree).write(iter([(one, bytes_of(tensor)[:100]), (one, bytes_of(tensor)[100:])]))
    loaded = torch.load(tmp_path / "t.pt", weights_only=True)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert torch.equal(loaded["a"], tensor)
    assert os.path.getsize(tmp_path / "t.pt") < 2 * 4000


def test_views_transposes_and_parameters_of_torch_files(tmp_path: Path):
    base = torch.arange(24.0).view(4, 6)
    state = {
        "whole": base, "rows": base[1:3], "columns": base[:, 2:4], "turned": base.t(), "scalar": base[2, 3],
        "parameter": torch.nn.Parameter(base[:2].clone()), "expanded": torch.ones(1).expand(3),
    }  # fmt: skip
    torch.save(state, tmp_path / "t.pt")
    contents = read_full(tmp_path / "t.pt")
    for name, tensor in state.items():
        assert torch.equal(tensor_in(contents, name), tensor), name


def test_our_files_carry_checksums_and_every_flip_of_data_or_pickle_is_found(tmp_path: Path):
    tensors = {"a": torch.randn(5, 4), "b": torch.randn(BLOCK_BYTES // 4 + 3)}
    write(tmp_path / "t.pt", tensors)
    contents = read_full(tmp_path / "t.pt")
    assert [len(contents.tensors[f"model.{name}"].chunks[0].checksums) for name in tensors] == [1, 2]
    good = (tmp_path / "t.pt").read_bytes()
    places = [good.index(bits(tensors["a"])) + 3, good.index(bits(tensors["b"])) + BLOCK_BYTES + 1]
    places += range(good.index(b"\x80\x02"), good.index(b"\x80\x02") + 40)
    for at in places:
        bad = bytearray(good)
        bad[at] ^= 4
        (tmp_path / "t.pt").write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"t\.pt"):
            read_all(tmp_path / "t.pt")


def test_an_interrupted_write_leaves_nothing_and_the_old_file_alone(tmp_path: Path):
    write(tmp_path / "t.pt", {"t": torch.ones(2)})
    before = (tmp_path / "t.pt").read_bytes()
    one = StoredTensor("a", "int8", (2,))
    with pytest.raises(RuntimeError, match="stop"):
        FullWriter(tmp_path / "t.pt", {"a": one}, overwrite=True).write(interrupted(one, b"1"))
    assert os.listdir(tmp_path) == ["t.pt"]
    assert (tmp_path / "t.pt").read_bytes() == before
    with pytest.raises(CheckpointError, match="already"):
        FullWriter(tmp_path / "t.pt", {}).write(iter(()))


def test_tensors_out_of_turn_or_incomplete_are_no_file(tmp_path: Path):
    a, b = StoredTensor("a", "int8", (2,)), StoredTensor("b", "int8", (2,))
    for chunks in ([(b, memoryview(b"12"))], [(a, memoryview(b"1"))], [(a, memoryview(b"123"))]):
        with pytest.raises(AssertionError):
            FullWriter(tmp_path / "t.pt", {"a": a, "b": b}).write(iter(chunks))
    assert os.listdir(tmp_path) == []


def test_values_that_would_need_code_are_refused_before_anything_is_written(tmp_path: Path):
    with pytest.raises(CheckpointError, match="cannot store"):
        FullWriter(tmp_path / "t.pt", {"f": print}).write(iter(()))
    assert os.listdir(tmp_path) == []


def test_other_files_are_named(tmp_path: Path):
    (tmp_path / "t.pt").write_bytes(b"\x80\x02}.")
    with pytest.raises(CheckpointError, match="not a file of torch"):
        read_full(tmp_path / "t.pt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="state dict"):
        read_full(tmp_path / "list.pt")
