"""The `torch.save` streams that we build and take apart."""

import contextlib
import io
import math
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpointing.contents import ITEM_BYTES
from shardwise.checkpointing.pickles.torch_files import (
    ZipIndex,
    ZipStream,
    dumps,
    is_torch_file,
    tensor_call,
    tensor_frame,
    value_stream,
)
from shardwise.checkpointing.storage import bytes_of
from shardwise.errors import CheckpointError

SHAPES = [(), (1,), (3, 4), (0, 5), (2, 1, 3)]
DTYPES = sorted(set(ITEM_BYTES) - {"complex32"})  # torch warns whenever it makes one


def index_of(data: bytes) -> ZipIndex:
    def read(offset: int, count: int) -> bytes:
        assert 0 <= offset <= offset + count <= len(data), "reads beyond the stream"
        return data[offset : offset + count]

    return ZipIndex(read, len(data), where="test.pt")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_reads_the_stream_around_a_tensors_bytes(dtype: str, shape: tuple[int, ...]):
    raw = os.urandom(math.prod(shape) * ITEM_BYTES[dtype]) if dtype != "bool" else bytes([1, 0] * 6)[: math.prod(shape)]
    head, tail = tensor_frame(dtype, shape, start=100)
    tensor = torch.load(io.BytesIO(head + raw + tail), weights_only=True)
    assert tensor.dtype == getattr(torch, dtype)
    assert tuple(tensor.shape) == shape
    assert bytes(bytes_of(tensor)) == raw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensors_bytes_are_found_in_what_torch_writes(dtype: str, shape: tuple[int, ...]):
    stream = io.BytesIO()
    tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
    torch.save(tensor, stream)
    data = stream.getvalue()
    offset, num_bytes = index_of(data).locate("data/0")
    assert data[offset : offset + num_bytes] == bytes(bytes_of(tensor))


@pytest.mark.parametrize("start", [0, 1, 63, 64, 4095, 12345])
def test_tensor_bytes_are_aligned_in_the_file(start: int):
    small, _ = tensor_frame("float32", (10,), start=start)
    large, _ = tensor_frame("float32", (1 << 18,), start=start)
    assert (start + len(small)) % 64 == 0
    assert (start + len(large)) % 4096 == 0


def test_tensors_beyond_four_gigabytes(tmp_path: Path):
    """Sizes and offsets then need 64 bits; the file is a hole, so it costs no space."""
    num_bytes = (1 << 32) + 4096
    head, tail = tensor_frame("uint8", (num_bytes,))
    assert struct.pack("<QQ", num_bytes, num_bytes) in head, "other zip readers look at the local header"
    path = tmp_path / "large.pt"
    with path.open("wb") as file:
        file.write(head)
        file.seek(num_bytes - 3, os.SEEK_CUR)
        file.write(b"end" + tail)
    tensor = torch.load(path, mmap=True, weights_only=True)
    assert tensor.shape == (num_bytes,)
    assert bytes(tensor[-3:].tolist()) == b"end"
    with path.open("rb") as file:

        def read(offset: int, count: int) -> bytes:
            file.seek(offset)
            return file.read(count)

        index = ZipIndex(read, path.stat().st_size, where=str(path))
        assert index.locate("data/0") == (len(head), num_bytes)


def test_a_record_that_claims_more_bytes_than_there_are():
    head, tail = tensor_frame("int32", (3,))
    sizes = struct.pack("<II", 12, 12)
    assert tail.count(sizes) == 1
    data = head + bytes(12) + tail.replace(sizes, struct.pack("<II", 9999, 9999))
    with pytest.raises(CheckpointError, match=r"test\.pt"):
        index_of(data).locate("data/0")


def test_a_stream_of_several_tensors_and_values():
    """As a full checkpoint has them: one pickle, a record for each tensor."""
    tensors = {"a": torch.randn(3, 2), "b": torch.arange(5)}
    tree = {"step": 3, "nested": [1, ("x", None)]} | {
        name: tensor_call(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), name)
        for name, tensor in tensors.items()
    }
    stream = ZipStream()
    data = stream.opening(dumps(tree))
    for name, tensor in tensors.items():
        data += stream.record(f"data/{name}", tensor.nbytes) + bytes(bytes_of(tensor))
    data += stream.close()
    assert stream.num_bytes == len(data)
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert (loaded["step"], loaded["nested"]) == (3, [1, ("x", None)])
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=40),
    lambda children: (
        st.lists(children, max_size=4)
        | st.tuples(children, children)
        | st.dictionaries(st.text() | st.integers(), children, max_size=4)
    ),
    max_leaves=20,
)


@given(plain_values)
@settings(max_examples=100, deadline=None)
def test_torch_reads_plain_values_back(value: object):
    assert torch.load(io.BytesIO(value_stream(value)), weights_only=True) == value


def test_a_value_that_would_need_code_is_refused():
    with pytest.raises(CheckpointError, match=r"cannot store a value of type .*Path"):
        value_stream({"path": [Path("x")]})


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_stream_is_one_clear_error(data: st.DataObject):
    """Or none: then the record still lies inside the stream. Never another exception, never a read beyond it."""
    head, tail = tensor_frame("int32", (3,))
    whole = head + bytes(12) + tail
    broken = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if broken:
            broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointError):
        offset, num_bytes = index_of(bytes(broken)).locate("data/0")
        assert 0 <= offset <= offset + num_bytes <= len(broken)


@pytest.mark.parametrize(
    ("data", "is_one"), [(b"", False), (b"PK\x03", False), (b"PK\x03\x04", True), (b"PK\x03\x05x", False)]
)
def test_a_file_is_known_by_its_first_bytes(tmp_path: Path, data: bytes, is_one: bool):
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    assert is_torch_file(path) is is_one
    assert not is_torch_file(tmp_path / "absent.pt")
