"""Wherever a pickle is read, one that would run code is refused by name of the file, and runs nothing."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardwise.checkpointing.convert import convert_checkpoint
from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.inspecting import inspect_checkpoint, verify_checkpoint
from shardwise.checkpointing.weights import load_weights
from shardwise.errors import CheckpointError
from tests.attacks.exploits import EXPLOITS, disassembles
from tests.unit.checkpointing.every_format import save_bin_shards, save_dcp, save_full


def with_pickle(path: Path, pickled: bytes) -> None:
    """Put another pickle into a `torch.save` file."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(name, pickled if name.endswith("/data.pkl") else data)


def in_a_full_file(folder: Path, pickled: bytes) -> Path:
    path = save_full(folder)
    with_pickle(path, pickled)
    return path


def in_a_shard_of_weights(folder: Path, pickled: bytes) -> Path:
    with_pickle(save_bin_shards(folder) / "pytorch_model-00002-of-00002.bin", pickled)
    return folder


def in_a_rank_file(folder: Path, pickled: bytes) -> Path:
    for rank in range(2):
        torch.save({"model": {"w": torch.ones(2)}}, folder / f"rank{rank}.pt")
    with_pickle(folder / "rank1.pt", pickled)
    return folder


def in_dcp_metadata(folder: Path, pickled: bytes) -> Path:
    path = save_dcp(folder)
    (path / ".metadata").write_bytes(pickled)
    return path


def in_a_dcp_tensor(folder: Path, pickled: bytes) -> Path:
    """The item's stream replaced by one of the same length, so that `.metadata` stays right."""
    path = save_dcp(folder)
    chunk = open_checkpoint(path).tensors["model.embed.weight"].chunks[0]
    file = path / chunk.file
    data = bytearray(file.read_bytes())
    start = data.rfind(b"PK\x03\x04", 0, data.rfind(b"data.pkl", 0, chunk.offset))
    original = io.BytesIO()
    with zipfile.ZipFile(original, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    end = data.find(b"PK\x05\x06", chunk.offset) + 22
    stream = original.getvalue()
    room = end - start - len(stream)
    assert room >= 0, "the exploit is longer than the item"
    # Zip readers look for the end of the directory at the end: what is left over goes to the front.
    shifted = _shift(stream, room)
    data[start:end] = bytes(room) + shifted
    file.write_bytes(data)
    return path


def _shift(stream: bytes, by: int) -> bytes:
    """The same zip stream, `by` bytes further from the start of its file."""
    data = bytearray(stream)
    end = data.rfind(b"PK\x05\x06")
    (begin,) = struct.unpack_from("<I", data, end + 16)
    struct.pack_into("<I", data, end + 16, begin + by)
    struct.pack_into("<I", data, begin + 42, struct.unpack_from("<I", data, begin + 42)[0] + by)
    return bytes(data)


PLACES: dict[str, Callable[[Path, bytes], Path]] = {
    "full file": in_a_full_file,
    "shard of weights": in_a_shard_of_weights,
    "rank file": in_a_rank_file,
    "DCP metadata": in_dcp_metadata,
    "DCP tensor": in_a_dcp_tensor,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("name", [name for name in EXPLOITS if name != "by_import_side_effect"])
def test_the_exploits_work_on_python_itself(name: str, tmp_path: Path):
    """In a process of its own; else the tests below would prove nothing."""
    mark = tmp_path / "pwned"
    data = EXPLOITS[name](mark)
    assert disassembles(data)
    code = "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1]))"
    if name == "by_nested_load":
        code = "import pickle, sys, types; " + (
            "module = types.ModuleType('torch.storage'); module._load_from_bytes = pickle.loads; "
            "sys.modules['torch'] = types.ModuleType('torch'); sys.modules['torch.storage'] = module; "
            "pickle.loads(bytes.fromhex(sys.argv[1]))"
        )
    subprocess.run([sys.executable, "-c", code, data.hex()], capture_output=True, timeout=60, check=False)
    for _ in range(50):
        if mark.exists():
            return
        subprocess.run(["sleep", "0.1"], check=True)
    pytest.fail("the exploit does nothing")


@pytest.mark.parametrize("exploit", EXPLOITS)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_runs_and_the_file_is_named(place: str, exploit: str, folder: Path, tmp_path: Path):
    mark = tmp_path / "pwned"
    path = PLACES[place](folder, EXPLOITS[exploit](mark))
    target = torch.nn.Linear(2, 2)
    doings = [
        lambda: open_checkpoint(path),
        lambda: inspect_checkpoint(path),
        lambda: convert_checkpoint(path, tmp_path / "out", "dcp"),
        lambda: load_weights(target, path),
    ]
    for doing in doings:
        with pytest.raises(CheckpointError) as error:
            doing()
        assert str(folder) in error.value.where
    (found,) = verify_checkpoint(path)
    assert found.code == "SW330"
    assert str(folder) in found.where
    assert not mark.exists()
    assert not (tmp_path / "out").exists()
    assert "antigravity" not in sys.modules


def test_a_hostile_value_of_a_dcp_folder_is_left_out_and_runs_nothing(folder: Path, tmp_path: Path):
    """The tensors of the folder can still be read; who asks for the value gets the reason."""
    mark = tmp_path / "pwned"

    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {mark}",)

    path = folder / "dcp"
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": {"w": torch.ones(2)}, "other": Hostile()}, checkpoint_id=path, no_dist=True)
    contents = open_checkpoint(path)
    assert set(contents.tensors) == {"model.w"}
    assert "system" in contents.details["left_out"]["other"]
    assert not mark.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_state_dicts_of_every_protocol_are_still_read(protocol: int, tmp_path: Path):
    """Refusing everything would be safe, too."""
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt", pickle_protocol=protocol)
    assert set(open_checkpoint(tmp_path / "x.pt").tensors) == {"w"}
