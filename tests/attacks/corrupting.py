"""Ways in which files go bad, and checkpoints of every format to try them on."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st

from shardwise.checkpointing.contents import ChunkSpec
from shardwise.checkpointing.convert import convert_checkpoint
from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.reading import read_chunk
from tests.unit.checkpointing.every_format import FORMATS, model_state, run_state, save_full

Files = dict[str, bytes]
Damage = Callable[[Files], None]


def _converted(folder: Path, format: str) -> Path:
    with tempfile.TemporaryDirectory() as source:
        path = folder / ("run.pt" if format == "full" else "weights")
        convert_checkpoint(save_full(Path(source)), path, format, max_shard_bytes=200)
    return path


def _rank_files(folder: Path) -> Path:
    """What FSDP1 with LOCAL state dicts leaves of an optimizer: flat state, a file a rank."""
    for rank in range(3):
        state = {0: {"step": torch.tensor(1.0), "exp_avg": torch.arange(5.0) + 5 * rank}}
        groups = [{"lr": 0.1, "params": [0]}]
        torch.save({"state": state, "param_groups": groups}, folder / f"optimizer.{rank}.pt")
        torch.save(model_state(), folder / f"model.{rank}.pt")
    return folder


def _as_accelerate(folder: Path) -> Path:
    state = run_state()
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.save({"model": state["model"]}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
        dcp.save({"optimizer": state["optim"]}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    **FORMATS,
    "our full": lambda folder: _converted(folder, "full"),
    "our safetensors": lambda folder: _converted(folder, "safetensors"),
    "rank files": _rank_files,
    "accelerate": _as_accelerate,
}
CHECKSUMMED = ("sharded", "our full", "our safetensors")
"""Formats in which no changed byte of a tensor may go unseen."""
CRC = ("full", "dcp", "bin-shards", "rank files", "accelerate")
"""torch's own, whose records carry a CRC-32; their indexes carry nothing."""


@cache
def pristine(format: str) -> tuple[str, Files, dict[str, torch.Tensor]]:
    """Where the checkpoint lies in its folder, the folder's files, and what is in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = MAKERS[format](folder)
        files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        return str(path.relative_to(folder)), files, read_all(path)


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor, read as loading reads it."""
    contents = open_checkpoint(path)
    return {
        name: read_chunk(contents, tensor, ChunkSpec.whole(tensor.shape)) for name, tensor in contents.tensors.items()
    }


@contextmanager
def written(files: Files, path: str) -> Iterator[Path]:
    """The files in a folder of their own."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        for file, data in files.items():
            target = Path(name) / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        yield Path(name) / path


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8))
        for name in a
    )


@st.composite
def damage(draw: st.DrawFn, format: str) -> tuple[str, Files]:
    """A way to damage a checkpoint, in words, and its files after that."""
    _, files, _ = pristine(format)
    files = dict(files)
    names = sorted(files)
    name = draw(st.sampled_from(names))
    data = files[name]
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    kind = draw(
        st.sampled_from(["flip", "flip", "flip", "zeros", "cut", "extend", "insert", "delete", "swap", "empty"])
    )
    match kind:
        case "flip":
            bit = 1 << draw(st.integers(0, 7))
            files[name] = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        case "zeros":
            length = draw(st.sampled_from([1, 8, 64, 512]))
            files[name] = data[:at] + bytes(len(data[at : at + length])) + data[at + length :]
        case "cut":
            files[name] = data[:at]
        case "extend":
            files[name] = data + draw(st.binary(min_size=1, max_size=64))
        case "insert":
            files[name] = data[:at] + draw(st.binary(min_size=1, max_size=8)) + data[at:]
        case "delete":
            del files[name]
        case "swap":
            other = draw(st.sampled_from(names))
            files[name], files[other] = files[other], files[name]
        case _:
            files[name] = b""
    return f"{kind} {name} at {at}", files
