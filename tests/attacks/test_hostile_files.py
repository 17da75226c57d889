"""Files that lie about names, sizes and places: one clear error that names the file, quickly and in little memory."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpointing.convert import convert_checkpoint
from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.formats.sharded import MANIFEST_NAME
from shardwise.checkpointing.pickles.torch_files import Call, Global, Persistent, dumps
from shardwise.checkpointing.storage import checksum, to_hex
from shardwise.errors import CheckpointError
from tests.attacks.test_hostile_pickles import with_pickle
from tests.unit.checkpointing.every_format import (
    save_bin_shards,
    save_dcp,
    save_full,
    save_ours,
    save_safetensors,
    save_safetensors_shards,
)

OUTSIDE = [
    "../outside",
    "../../../../../../etc/passwd",
    "/etc/passwd",
    "~/.ssh/id_rsa",
    "a/../../outside",
    "..\\outside",
    "C:\\Windows\\x",
    "file:///etc/passwd",
    "http://example.com/x",
    "s3://bucket/x",
    "x\0y",
    "",
    ".",
    "..",
    "./model.safetensors/..",
]


def refused(path: Path, where: Path, match: str | None = None) -> None:
    """Reading it in any way is one error of ours that names the file."""
    for doing in (lambda: open_checkpoint(path), lambda: convert_checkpoint(path, where.parent / "converted", "full")):
        with pytest.raises(CheckpointError, match=match) as error:
            doing()
        assert str(where) in error.value.where
        assert error.value.fix
    assert not (where.parent / "converted").exists()


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_cannot_point_outside_its_folder(name: str, tmp_path: Path):
    for save, suffix in ((save_safetensors_shards, "safetensors"), (save_bin_shards, "bin")):
        folder = tmp_path / suffix
        folder.mkdir()
        (index,) = save(folder).glob("*.index.json")
        content = json.loads(index.read_text())
        content["weight_map"]["block.mask"] = name
        index.write_text(json.dumps(content))
        refused(folder, index, "names a file outside its folder")


@pytest.mark.parametrize("name", ["../../passwd", "/etc/passwd0", "a/../../pass"])
def test_dcp_metadata_cannot_point_outside_its_folder(name: str, tmp_path: Path):
    """Of the length of the real name, so that the pickle stays one."""
    folder = save_dcp(tmp_path)
    metadata = folder / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", name.encode()))
    refused(folder, metadata, "names a file outside its folder")


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and give it a right checksum: an attacker can do that, too."""
    path = folder / MANIFEST_NAME
    body = json.loads(path.read_bytes())
    del body["checksum"]
    change(body)
    rest = json.dumps(body).removeprefix("{").encode() + b"\n"
    path.write_bytes(b'{"checksum": "' + to_hex([checksum(rest)]).encode() + b'",\n' + rest)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_cannot_point_outside_its_folder(name: str, tmp_path: Path):
    folder = save_ours(tmp_path)
    rewrite_manifest(folder, lambda body: body["files"].update({name: body["files"].pop("__0_0.distcp")}))
    refused(folder, folder / MANIFEST_NAME)


MANIFEST_LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a chunk beyond its file": lambda body: chunk(body).update(offset=1 << 40),
    "a chunk before its file": lambda body: chunk(body).update(offset=-8),
    "a chunk of no integer": lambda body: chunk(body).update(offset=1e3),
    "a chunk outside the tensor": lambda body: chunk(body).update(starts=[100, 0]),
    "a chunk of another shape": lambda body: chunk(body).update(sizes=[1]),
    "too few checksums": lambda body: chunk(body).update(checksums=""),
    "checksums that are none": lambda body: chunk(body).update(checksums="zz" * 8),
    "a file that is not listed": lambda body: chunk(body).update(file="other"),
    "a shape of 2**62": lambda body: tensor(body).update(shape=[1 << 62, 4]),
    "a negative shape": lambda body: tensor(body).update(shape=[-1, 5]),
    "a shape of true": lambda body: tensor(body).update(shape=[True, 5]),
    "a dtype of code": lambda body: tensor(body).update(dtype="load"),
    "no blocks": lambda body: body.update(block_bytes=0),
    "an alias of nothing": lambda body: body["aliases"].update(other="nothing"),
    "a later version": lambda body: body.update(version=99),
    "no tensors": lambda body: body.pop("tensors"),
    "a list of tensors": lambda body: body.update(tensors=[]),
    "a value of no kind": lambda body: body["values"].update({"extra.epoch": {"$": "eval", "of": "1"}}),
}


def tensor(body: dict[str, Any]) -> dict[str, Any]:
    return body["tensors"]["model.embed.weight"]


def chunk(body: dict[str, Any]) -> dict[str, Any]:
    return tensor(body)["pieces"][0]


@pytest.mark.parametrize("lie", MANIFEST_LIES)
def test_a_manifest_that_lies_is_refused(lie: str, tmp_path: Path):
    folder = save_ours(tmp_path)
    rewrite_manifest(folder, MANIFEST_LIES[lie])
    refused(folder, folder)


HEADERS: dict[str, bytes] = {
    "longer than the file": struct.pack("<Q", 1 << 40) + b"{}",
    "of 2**63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "of no bytes": struct.pack("<Q", 0),
    "no JSON": struct.pack("<Q", 4) + b"\xff\xfe{}",
    "a list": struct.pack("<Q", 2) + b"[]",
    "endlessly nested": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "cut off": b"\x01\x00",
    "nothing": b"",
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_strange_safetensors_header_is_refused(header: str, tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(HEADERS[header])
    refused(path, path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 60]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]},
        {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": [1] * 100, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        "F32",
        None,
    ],
)
def test_a_safetensors_entry_that_lies_is_refused(entry: object, tmp_path: Path):
    path = tmp_path / "model.safetensors"
    header = json.dumps({"x": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    refused(path, path)


def test_a_safetensors_name_that_stands_twice_is_refused(tmp_path: Path):
    """Readers that take the first and readers that take the last would see different weights."""
    path = tmp_path / "model.safetensors"
    entry = '"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    header = f"{{{entry}, {entry}}}".encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    refused(path, path)


def test_a_compressed_record_is_refused_before_it_is_unpacked(tmp_path: Path):
    """A zip bomb: a thousand times as large as its file."""
    path = save_full(tmp_path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("run/data/99", bytes(64 << 20))
    refused(path, path, "not a torch.save file, or a damaged one")


def test_two_records_of_one_name_are_refused(tmp_path: Path):
    """What is checked must be what is read."""
    path = save_full(tmp_path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("run/data.pkl", b"\x80\x02}.")
    refused(path, path)


TENSOR_LIES = {
    "beyond its storage": (0, (1000,), (1,)),
    "an offset beyond its storage": (1 << 40, (1,), (1,)),
    "a negative offset": (-1, (1,), (1,)),
    "a negative stride": (5, (5,), (-1,)),
    "an expanded terabyte": (0, (1 << 40,), (0,)),
    "a shape of 2**80": (0, (1 << 40, 1 << 40), (1, 1)),
    "more strides than sizes": (0, (2,), (1, 1)),
    "a hundred dimensions": (0, (1,) * 100, (1,) * 100),
}


@pytest.mark.parametrize("lie", TENSOR_LIES)
def test_a_tensor_that_lies_about_its_storage_is_refused(lie: str, tmp_path: Path):
    offset, shape, strides = TENSOR_LIES[lie]
    path = tmp_path / "x.pt"
    torch.save({"x": torch.ones(10)}, path)
    storage = Persistent(("storage", Global("torch", "FloatStorage"), "0", "cpu", 10))
    hooks = Call(Global("collections", "OrderedDict"), ())
    call = Call(Global("torch._utils", "_rebuild_tensor_v2"), (storage, offset, shape, strides, False, hooks))
    with_pickle(path, dumps({"x": call}))
    refused(path, path)


def test_a_storage_that_is_larger_than_its_record_is_refused(tmp_path: Path):
    path = tmp_path / "x.pt"
    torch.save({"x": torch.ones(10)}, path)
    storage = Persistent(("storage", Global("torch", "FloatStorage"), "0", "cpu", 1 << 40))
    hooks = Call(Global("collections", "OrderedDict"), ())
    rebuild = Global("torch._utils", "_rebuild_tensor_v2")
    with_pickle(path, dumps({"x": Call(rebuild, (storage, 0, (1 << 40,), (1,), False, hooks))}))
    refused(path, path, "missing or cut short")


@pytest.mark.parametrize("what", ["pipe", "device", "loop", "folder"])
def test_what_is_no_plain_file_is_not_waited_for(what: str, tmp_path: Path):
    """Reading a pipe would hang, `/dev/zero` never ends."""
    path = save_safetensors(tmp_path) / "model.safetensors"
    path.unlink()
    match what:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
        case _:
            path.mkdir()
    refused(tmp_path, path)


def test_a_link_within_a_cache_of_weights_is_followed(tmp_path: Path):
    """Hugging Face's cache is made of links: what they point to is read as data, whatever it is."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_safetensors(tmp_path / "blobs")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/model.safetensors")
    assert "embed.weight" in open_checkpoint(tmp_path / "snapshot").tensors


def test_companions_of_weights_are_small_files(tmp_path: Path):
    save_safetensors(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="more than") as error:
        convert_checkpoint(tmp_path, tmp_path / "out", "safetensors")
    assert error.value.where == str(tmp_path / "config.json")
