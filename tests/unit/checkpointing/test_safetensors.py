"""safetensors read and written by us and by the library, and every way in which a file can be wrong."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardwise.checkpointing.contents import DTYPES, ChunkSpec, StoredTensor
from shardwise.checkpointing.formats.safetensors import (
    SafetensorsWriter,
    is_safetensors,
    read_safetensors,
)
from shardwise.checkpointing.reading import read_chunk
from shardwise.checkpointing.storage import BLOCK_BYTES, bytes_of, checksum
from shardwise.errors import CheckpointError
from shardwise.planning.settings import dtype_name


def tensor_of(dtype: str) -> torch.Tensor:
    """Some bytes as a tensor of that dtype."""
    kind = getattr(torch, dtype)
    raw = (torch.arange(3 * 4 * kind.itemsize) % (2 if dtype == "bool" else 120)).to(torch.uint8)
    return raw.view(kind).view(3, 4)


def write(path: Path, tensors: dict[str, torch.Tensor], portions: int = 1, **options: Any) -> None:
    infos = [StoredTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]

    def chunks() -> Iterator[tuple[StoredTensor, memoryview]]:
        for info in writer.order:
            data = bytes_of(tensors[info.name])
            step = -(-len(data) // portions) or 1
            for start in range(0, len(data), step):
                yield info, data[start : start + step]

    writer = SafetensorsWriter(path, infos, **options)
    writer.write(chunks())


def interrupted(info: StoredTensor, data: bytes) -> Iterator[tuple[StoredTensor, memoryview]]:
    """Some bytes, and then an error."""
    yield info, memoryview(data)
    raise RuntimeError("stop")


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    return bytes(bytes_of(ours.contiguous())) == bytes(bytes_of(theirs.contiguous()))


def read_all(path: Path) -> None:
    contents = read_safetensors(path)
    for tensor in contents.tensors.values():
        read_chunk(contents, tensor, ChunkSpec.whole(tensor.shape))


def raw_file(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("dtype", [dtype for dtype, names in DTYPES.items() if names[1] and dtype != "float8_e8m0fnu"])
def test_every_dtype_round_trips_between_us_and_the_library(tmp_path: Path, dtype: str):
    tensor = tensor_of(dtype)
    write(tmp_path / "ours.safetensors", {"t": tensor})
    assert same_bits(load_file(tmp_path / "ours.safetensors")["t"], tensor)
    save_file({"t": tensor}, tmp_path / "theirs.safetensors")
    contents = read_safetensors(tmp_path / "theirs.safetensors")
    assert contents.tensors["t"].dtype == dtype
    assert same_bits(read_chunk(contents, contents.tensors["t"], ChunkSpec.whole((3, 4))), tensor)


def test_scalars_empty_tensors_strange_names_and_unaligned_sizes(tmp_path: Path):
    tensors = {
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        'ü "quoted" \n': torch.ones(1, dtype=torch.int8),
        "odd": torch.arange(2, dtype=torch.uint8),
        "wide": torch.arange(3, dtype=torch.float64),
    }
    write(tmp_path / "t.safetensors", tensors)
    loaded = load_file(tmp_path / "t.safetensors")
    assert loaded.keys() == tensors.keys()
    contents = read_safetensors(tmp_path / "t.safetensors")
    for name, tensor in tensors.items():
        assert same_bits(loaded[name], tensor), name
        stored = contents.tensors[name]
        assert stored.chunks[0].offset % tensor.element_size() == 0, "every tensor is aligned"
        assert same_bits(read_chunk(contents, stored, ChunkSpec.whole(stored.shape)), tensor)


@pytest.mark.parametrize("portions", [1, 3, 7])
def test_checksums_are_those_of_the_blocks_however_the_bytes_come(tmp_path: Path, portions: int):
    tensor = torch.randn(2 * BLOCK_BYTES // 4 + 5)
    write(tmp_path / "t.safetensors", {"t": tensor, "u": tensor[:7].clone()}, portions)
    contents = read_safetensors(tmp_path / "t.safetensors")
    assert len(contents.tensors["t"].chunks[0].checksums) == 3
    assert same_bits(read_chunk(contents, contents.tensors["t"], ChunkSpec.whole(tensor.shape)), tensor)


def test_transformers_metadata_is_there(tmp_path: Path):
    write(tmp_path / "t.safetensors", {"t": torch.ones(2)})
    with safe_open(tmp_path / "t.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_shards_respect_the_limit_and_keep_the_order(tmp_path: Path):
    tensors = {f"t{index}": torch.full((10,), float(index)) for index in range(7)}
    write(tmp_path / "out", tensors, max_shard_bytes=90, sidecars={"config.json": b"{}"})
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "config.json",
        *(f"model-{index:05d}-of-00004.safetensors" for index in range(1, 5)),
        "model.safetensors.index.json",
    ]
    contents = read_safetensors(tmp_path / "out")
    for name, tensor in tensors.items():
        assert same_bits(read_chunk(contents, contents.tensors[name], ChunkSpec.whole((10,))), tensor)


def test_a_tensor_larger_than_the_limit_has_a_file_of_its_own(tmp_path: Path):
    write(tmp_path / "out", {"a": torch.ones(2), "b": torch.ones(100), "c": torch.ones(2)}, max_shard_bytes=50)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == 3


def test_an_interrupted_write_leaves_nothing(tmp_path: Path):
    info = StoredTensor("t", "float32", (2,))
    for path in (tmp_path / "t.safetensors", tmp_path / "out"):
        with pytest.raises(RuntimeError, match="stop"):
            SafetensorsWriter(path, [info]).write(interrupted(info, bytes(4)))
        assert os.listdir(tmp_path) == []


def test_what_a_killed_writer_left_is_in_nobodys_way(tmp_path: Path):
    (tmp_path / ".t.safetensors.partial").write_bytes(bytes(4))
    write(tmp_path / "t.safetensors", {"t": torch.ones(2)})
    assert os.listdir(tmp_path) == ["t.safetensors"]


def test_missing_bytes_are_no_file(tmp_path: Path):
    with pytest.raises(AssertionError):
        SafetensorsWriter(tmp_path / "t.safetensors", [StoredTensor("t", "int8", (2,))]).write(iter(()))
    assert os.listdir(tmp_path) == []


def test_dtypes_that_the_format_lacks_are_refused_before_writing(tmp_path: Path):
    with pytest.raises(CheckpointError, match="dtype"):
        SafetensorsWriter(tmp_path / "t.safetensors", [StoredTensor("t", "complex128", (2,))]).write(iter(()))
    assert os.listdir(tmp_path) == []


def signed(checksums: str) -> bytes:
    """A header with the right checksum of itself, and those of its tensor as given."""
    metadata = {"shardwise.header": "0" * 16, "shardwise": checksums}
    header = json.dumps({"__metadata__": metadata, "t": entry()}).encode()
    return header.replace(b"0" * 16, f"{checksum(header):016x}".encode(), 1)


HEADERS: dict[str, tuple[Any, bytes]] = {
    "no json": (b"{", b""),
    "an array": ([1, 2], b""),
    "no text": (b"\xff\xfe", b""),
    "nested without end": (b"[" * 100_000, b""),
    "a number that takes for ever": (b'{"t": ' + b"9" * 100_000 + b"}", b""),
    "a name twice": (b'{"t": %s, "t": %s}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
    "an unknown dtype": ({"t": entry("F31")}, bytes(8)),
    "no dtype": ({"t": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "a negative size": ({"t": entry(shape=[-2])}, bytes(8)),
    "a fractional size": ({"t": entry(shape=[2.0])}, bytes(8)),
    "a size that is a truth value": ({"t": entry(shape=[True, 2])}, bytes(8)),
    "a huge size": ({"t": entry(shape=[2**62, 4], offsets=[0, 8])}, bytes(8)),
    "other bytes than the shape": ({"t": entry(shape=[3])}, bytes(8)),
    "bytes beyond the end": ({"t": entry(shape=[4], offsets=[0, 16])}, bytes(8)),
    "bytes of nobody at the end": ({"t": entry()}, bytes(12)),
    "bytes of nobody at the start": ({"t": entry(offsets=[4, 12])}, bytes(12)),
    "two tensors over the same bytes": ({"t": entry(), "u": entry()}, bytes(8)),
    "a hole": ({"t": entry(), "u": entry(offsets=[12, 20])}, bytes(20)),
    "offsets backwards": ({"t": entry(offsets=[8, 0])}, bytes(8)),
    "a reversed range": ({"t": entry(shape=[0], offsets=[8, 8])}, b""),
    "metadata that is no text": ({"__metadata__": {"a": 1}, "t": entry()}, bytes(8)),
    "an entry that is a text": ({"t": "F32"}, bytes(8)),
    "a shape that is a text": ({"t": entry(shape="22")}, bytes(8)),
    "checksums of strange blocks": (signed('{"block_bytes": 0, "xxh3": {"t": "0000000000000001"}}'), bytes(8)),
    "checksums that are no numbers": (signed('{"block_bytes": 1024, "xxh3": {"t": "000000000000000g"}}'), bytes(8)),
    "checksums missing": (signed('{"block_bytes": 1024, "xxh3": {}}'), bytes(8)),
    "checksums that are no json": (signed("{"), bytes(8)),
    "only one of the two kinds of checksum": ({"__metadata__": {"shardwise": "{}"}, "t": entry()}, bytes(8)),
    "a wrong checksum of the header": (signed("{}").replace(b"F32", b"I32"), bytes(8)),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_wrong_header_is_one_clear_error(tmp_path: Path, name: str):
    path = raw_file(tmp_path / "t.safetensors", *HEADERS[name])
    with pytest.raises(CheckpointError, match="header is damaged") as caught:
        read_safetensors(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("data", [b"", b"1234", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 100) + b"{}"])
def test_files_that_are_no_such_file_or_cut_short(tmp_path: Path, data: bytes):
    (tmp_path / "t.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"not a safetensors file|cut short"):
        read_safetensors(tmp_path / "t.safetensors")


def test_every_flipped_bit_of_our_own_file_is_found(tmp_path: Path):
    write(tmp_path / "t.safetensors", {"a": torch.randn(5), "b": torch.arange(4)})
    good = (tmp_path / "t.safetensors").read_bytes()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        (tmp_path / "t.safetensors").write_bytes(bad)
        with pytest.raises(CheckpointError):
            read_all(tmp_path / "t.safetensors")


def folder_of(tmp_path: Path, index: Any) -> Path:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index if isinstance(index, str) else json.dumps(index))
    return tmp_path


GOOD = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def test_an_index_is_followed(tmp_path: Path):
    contents = read_safetensors(folder_of(tmp_path, {"weight_map": GOOD}))
    assert contents.tensors.keys() == {"a", "b"}
    assert is_safetensors(tmp_path)
    assert is_safetensors(str(tmp_path / "model.safetensors.index.json"))


def test_shards_without_an_index_are_complete_or_refused(tmp_path: Path):
    folder_of(tmp_path, {})
    (tmp_path / "model.safetensors.index.json").unlink()
    assert read_safetensors(tmp_path).tensors.keys() == {"a", "b"}
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing") as caught:
        read_safetensors(tmp_path)
    assert "model-00001-of-00002" in caught.value.where


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "index cannot be read"),
        ({"weights": {}}, "index cannot be read"),
        ({"weight_map": {"a": 1}}, "index cannot be read"),
        ({"weight_map": {"a": "../secret.safetensors"}}, "outside"),
        ({"weight_map": {"a": "/etc/passwd"}}, "outside"),
        ({"weight_map": {"a": "x/../../y.safetensors"}}, "outside"),
        ({"weight_map": {**GOOD, "a": "model-00002-of-00002.safetensors"}}, "not in its file"),
        ({"weight_map": {**GOOD, "c": "model-00002-of-00002.safetensors"}}, "not in its file"),
        ({"weight_map": {**GOOD, "c": "model-00003-of-00002.safetensors"}}, "missing"),
    ],
)
def test_a_wrong_index_is_one_clear_error(tmp_path: Path, index: Any, message: str):
    with pytest.raises(CheckpointError, match=message):
        read_safetensors(folder_of(tmp_path, index))


def test_a_copy_of_a_tensor_in_another_shard_is_decided_by_the_index(tmp_path: Path):
    folder_of(tmp_path, {"weight_map": GOOD})
    save_file({"a": torch.zeros(2), "b": torch.ones(3)}, tmp_path / "model-00002-of-00002.safetensors")
    contents = read_safetensors(tmp_path)
    assert contents.tensors["a"].chunks[0].file == "model-00001-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="two files"):
        read_safetensors(tmp_path)


def test_links_as_the_hub_cache_has_them_are_followed(tmp_path: Path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    contents = read_safetensors(tmp_path / "snapshot")
    assert torch.equal(read_chunk(contents, contents.tensors["a"], ChunkSpec.whole((2,))), torch.ones(2))


def test_a_folder_in_which_the_choice_is_not_clear(tmp_path: Path):
    for name in ("first", "second"):
        save_file({"a": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="cannot tell"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize("make", [lambda path: path / "no.safetensors", lambda path: path / "nowhere"])
def test_nothing_there(tmp_path: Path, make: Callable[[Path], Path]):
    with pytest.raises(CheckpointError):
        read_safetensors(make(tmp_path))
