"""The manifest: all that a checkpoint of ours says about itself, and that none of it can be changed unseen."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpointing.contents import ChunkSpec
from shardwise.checkpointing.formats.sharded import MANIFEST_NAME, read_manifest
from shardwise.checkpointing.storage import checksum, to_hex
from shardwise.errors import CheckpointError
from tests.sharded_checkpoints import write_checkpoint

TENSORS = {"model.weight": torch.arange(40.0).reshape(10, 4), "model.bias": torch.arange(3)}
VALUES = {"extra.lr": 0.1, "extra.pair": (1, "two"), "extra.nan": float("inf")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "step-00000007"
    write_checkpoint(folder, TENSORS, values=VALUES, aliases={"model.tied": "model.weight"})
    return folder


def test_a_manifest_says_what_was_written(folder: Path):
    contents = read_manifest(folder)
    assert (contents.format, contents.step, contents.world_size, contents.block_bytes) == ("sharded", 7, 2, 64)
    assert contents.values == VALUES
    assert set(contents.tensors) == {"model.weight", "model.bias", "model.tied"}
    weight = contents.tensors["model.weight"]
    assert (weight.dtype, weight.shape) == ("float32", (10, 4))
    assert [chunk.spec for chunk in weight.chunks] == [ChunkSpec((0, 0), (5, 4)), ChunkSpec((5, 0), (5, 4))]
    assert contents.tensors["model.tied"].chunks == weight.chunks
    assert contents.structure["model.weight"] == ("model", "weight")
    assert contents.file_bytes == {
        path.name: path.stat().st_size for path in folder.iterdir() if path.suffix != ".json"
    }


def test_bytes_lie_where_the_manifest_says(folder: Path):
    for tensor in read_manifest(folder).tensors.values():
        whole = TENSORS["model.weight" if tensor.name == "model.tied" else tensor.name]
        for chunk in tensor.chunks:
            rows = whole[chunk.spec.starts[0] : chunk.spec.starts[0] + chunk.spec.sizes[0]]
            data = (folder / chunk.file).read_bytes()[chunk.offset :][: rows.nbytes]
            assert data == rows.numpy().tobytes()
            assert chunk.checksums == tuple(checksum(data[at : at + 64]) for at in range(0, len(data), 64))


def test_frames_are_the_checksums_of_all_other_bytes(folder: Path):
    contents = read_manifest(folder)
    frames = contents.details["frames"]
    assert set(frames) == set(contents.file_bytes)
    for name, frame in frames.items():
        data = bytearray((folder / name).read_bytes())
        spans = sorted(
            (chunk.offset, chunk.spec.numel * (4 if tensor.dtype == "float32" else 8))
            for tensor in contents.tensors.values()
            if tensor.name != "model.tied"
            for chunk in tensor.chunks
            if chunk.file == name
        )
        for offset, num_bytes in reversed(spans):
            del data[offset : offset + num_bytes]
        assert checksum(data) == frame


def test_every_flipped_byte_is_found(folder: Path):
    path = folder / MANIFEST_NAME
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CheckpointError, match="manifest is damaged") as caught:
            read_manifest(folder)
        assert str(path) in caught.value.where
    path.write_bytes(good[:-10])
    with pytest.raises(CheckpointError, match="damaged"):
        read_manifest(folder)


def rewrite(folder: Path, change: Any) -> None:
    """Change the manifest as somebody would who knows how its checksum is made."""
    path = folder / MANIFEST_NAME
    body = json.loads(path.read_text())
    del body["checksum"]
    change(body)
    rest = json.dumps(body).removeprefix("{").encode()
    path.write_bytes(b'{"checksum": "' + to_hex([checksum(rest)]).encode() + b'",\n' + rest)


def test_a_rewritten_manifest_can_be_read(folder: Path):
    rewrite(folder, lambda body: body["details"].update(note="fine"))
    assert read_manifest(folder).details["note"] == "fine"


def _piece(body: Any) -> Any:
    return body["tensors"]["model.weight"]["pieces"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(version=2),
        lambda body: body.update(format="other"),
        lambda body: body.pop("tensors"),
        lambda body: body.update(tensors=[]),
        lambda body: body.update(block_bytes=0),
        lambda body: body.update(block_bytes="64"),
        lambda body: body.update(step=-1),
        lambda body: body.update(step=True),
        lambda body: body.update(values=3),
        lambda body: body["values"].update(x={"$": "code"}),
        lambda body: body["aliases"].update(other="model.nothing"),
        lambda body: body["structure"].update({"model.weight": [{}]}),
        lambda body: body["files"].update({"../outside": {"bytes": 1, "frame": "0" * 16}}),
        lambda body: body["files"].update({"/etc/passwd": {"bytes": 1, "frame": "0" * 16}}),
        lambda body: body["tensors"]["model.weight"].update(dtype="object"),
        lambda body: body["tensors"]["model.weight"].update(shape=[1 << 70]),
        lambda body: body["tensors"]["model.weight"].update(shape=[10, -4]),
        lambda body: body["tensors"]["model.weight"].update(shape=[10.0, 4]),
        lambda body: _piece(body).update(file="../../etc/passwd"),
        lambda body: _piece(body).update(file="not-listed"),
        lambda body: _piece(body).update(offset=1 << 40),
        lambda body: _piece(body).update(offset=-1),
        lambda body: _piece(body).update(starts=[8, 0]),
        lambda body: _piece(body).update(starts=[0]),
        lambda body: _piece(body).update(checksums="00"),
        lambda body: _piece(body).update(checksums=""),
        lambda body: _piece(body).update(checksums="z" * 32),
    ],
)
def test_a_hostile_manifest_is_one_clear_error(folder: Path, change: Any):
    rewrite(folder, change)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(folder)
    assert MANIFEST_NAME in caught.value.where


def test_a_folder_without_a_manifest(tmp_path: Path):
    with pytest.raises(CheckpointError, match="missing"):
        read_manifest(tmp_path)
