"""Checkpoints that another torch wrote (`tests/stored/`), read by this one: by us, and by torch itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from shardwise.checkpointing.contents import ChunkSpec
from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.reading import read_chunk
from shardwise.checkpointing.storage import bytes_of
from tests.stored_checkpoints import STORED, VALUES, tensors

WRITERS = sorted(STORED.glob("torch-*"))
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def same_bytes(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit; torch compares no 8-bit floats."""
    is_alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return is_alike and bytes(bytes_of(found.contiguous())) == bytes(bytes_of(expected.contiguous()))


def test_this_is_not_empty():
    assert {path.name for path in WRITERS} >= {"torch-2.13.0"}


@pytest.mark.parametrize("writer", WRITERS, ids=lambda path: path.name)
@pytest.mark.parametrize("kind", ["sharded", "dcp", "full.pt", "our-full.pt", "weights.safetensors"])
def test_we_read_what_each_torch_wrote(writer: Path, kind: str):
    contents = open_checkpoint(writer / kind)
    prefix = "" if kind == "weights.safetensors" else "model."
    assert set(contents.tensors) == {prefix + name for name in tensors()}
    for name, expected in tensors().items():
        stored = contents.tensors[prefix + name]
        found = read_chunk(contents, stored, ChunkSpec.whole(stored.shape))
        assert same_bytes(found, expected), name
    if prefix:
        assert contents.values == {f"extra.{name}": value for name, value in VALUES.items()}


@pytest.mark.parametrize("writer", WRITERS, ids=lambda path: path.name)
@pytest.mark.parametrize("kind", ["sharded", "dcp"])
def test_this_torch_reads_what_each_torch_wrote(writer: Path, kind: str):
    state: dict[str, Any] = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in tensors().items()},
        "extra": dict.fromkeys(VALUES),
    }
    dcp.load(state, checkpoint_id=writer / kind)
    assert state["extra"] == VALUES
    for name, expected in tensors().items():
        assert same_bytes(state["model"][name], expected), name


@pytest.mark.parametrize("writer", WRITERS, ids=lambda path: path.name)
@pytest.mark.parametrize("kind", ["full.pt", "our-full.pt"])
def test_this_torch_reads_each_torchs_files(writer: Path, kind: str):
    full = torch.load(writer / kind, weights_only=True)
    assert full["extra"] == VALUES
    for found in (full["model"], load_file(writer / "weights.safetensors")):
        for name, expected in tensors().items():
            assert same_bytes(found[name], expected), name
