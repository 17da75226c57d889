"""What is said to be saved survives a crash of the machine: synced with all its bytes, then named, then the name."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.faults.disk_log import SITE, Disk, record
from tests.ranks import ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk.log"
    end = record(str(path))
    yield path
    end()


def a_run(width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_sharded(folder: Path) -> Path:
    model, optimizer = a_run()
    with sw.Checkpointer(folder, asynchronous=False) as checkpointer:
        checkpointer.save(3, model=model, optimizers=optimizer)
    return folder / "step-00000003"


def save_large(folder: Path) -> Path:
    """So large that it goes past the page cache; with a rest that fills no buffer."""
    model = nn.Linear(4096, 4099)
    with sw.Checkpointer(folder, asynchronous=False) as checkpointer:
        checkpointer.save(3, model=model)
    return folder / "step-00000003"


def save_one_file(folder: Path) -> Path:
    model, optimizer = a_run()
    sw.save_full(folder / "full.pt", model=model, optimizers=optimizer)
    return folder / "full.pt"


def save_large_file(folder: Path) -> Path:
    sw.save_full(folder / "full.pt", model=nn.Linear(4096, 4099))
    return folder / "full.pt"


def save_safetensors(folder: Path) -> Path:
    sw.save_weights(a_run()[0], folder / "model.safetensors")
    return folder / "model.safetensors"


def save_large_safetensors(folder: Path) -> Path:
    sw.save_weights(nn.Linear(4096, 4099), folder / "model.safetensors")
    return folder / "model.safetensors"


def save_shards(folder: Path) -> Path:
    sw.save_weights(a_run()[0], folder / "weights", max_shard_bytes=64)
    assert len(list((folder / "weights").iterdir())) > 2
    return folder / "weights"


def save_over_shards(folder: Path) -> Path:
    """Other files of the folder stay."""
    sw.save_weights(a_run()[0], folder / "weights")
    (folder / "weights" / "tokenizer.json").write_text("{}")
    (folder / "weights" / "more").mkdir()
    (folder / "weights" / "more" / "notes.txt").write_text("kept")
    sw.save_weights(a_run(16)[0], folder / "weights", max_shard_bytes=64, overwrite=True)
    assert (folder / "weights" / "tokenizer.json").read_text() == "{}"
    assert (folder / "weights" / "more" / "notes.txt").read_text() == "kept"
    return folder / "weights" / "model.safetensors.index.json"


def convert(folder: Path) -> Path:
    source = save_one_file(folder / "source")
    sw.convert_checkpoint(source, folder / "converted.safetensors", "safetensors")
    return folder / "converted.safetensors"


WAYS: dict[str, Callable[[Path], Path]] = {
    "checkpointer": save_sharded,
    "checkpointer-large": save_large,
    "full": save_one_file,
    "full-large": save_large_file,
    "safetensors": save_safetensors,
    "safetensors-large": save_large_safetensors,
    "hugging-face-shards": save_shards,
    "hugging-face-over-another": save_over_shards,
    "converted": convert,
}


@pytest.mark.parametrize("way", WAYS)
def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, log: Path, way: str):
    target = WAYS[way](tmp_path / "out")
    Disk(log).assert_published(target)


@pytest.mark.parametrize(("old_bytes", "new_bytes"), [(16, 16), (None, 16), (16, None), (None, None)])
def test_a_kill_at_any_point_leaves_the_old_weights_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_bytes: int | None, new_bytes: int | None
):
    """The folder is copied before every call that changes it, and after the last: a kill leaves one of the copies.

    Only shards of the same names cannot be replaced at once: between old and new is an incomplete set.
    """
    may_be_incomplete = old_bytes == new_bytes == 16
    folder, found = tmp_path / "weights", []

    def model_of(value: float) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        with torch.no_grad():
            return model.apply(lambda module: [parameter.fill_(value) for parameter in module.parameters()])

    def values_in(copy: Path) -> set[float]:
        loaded = model_of(0)
        sw.load_weights(loaded, copy)
        return {value for parameter in loaded.parameters() for value in parameter.flatten().tolist()}

    sw.save_weights(model_of(1), folder, max_shard_bytes=old_bytes)
    (folder / "tokenizer.json").write_text("mine")
    (folder / "vision.safetensors.index.json").write_text("mine")
    inode = folder.stat().st_ino

    def copied(change: Callable[..., Any]) -> Callable[..., Any]:
        def first_copy(*args: Any, **options: Any) -> Any:
            shutil.copytree(folder, tmp_path / f"copy{len(found)}")
            found.append(tmp_path / f"copy{len(found)}")
            return change(*args, **options)

        return first_copy

    with (folder / "train.log").open("w", buffering=1) as file, monkeypatch.context() as patch:
        for name in ("unlink", "rename", "replace", "fsync", "rmdir"):
            patch.setattr(os, name, copied(getattr(os, name)))
        sw.save_weights(model_of(2), folder, max_shard_bytes=new_bytes, overwrite=True)
        file.write("epoch 2")
    assert (folder.stat().st_ino, (folder / "train.log").read_text()) == (inode, "epoch 2")
    assert values_in(folder) == {2}
    for copy in found:
        with contextlib.suppress(*[sw.ShardwiseError] * may_be_incomplete):
            assert values_in(copy) in ({1}, {2})
        sw.save_weights(model_of(3), copy, max_shard_bytes=new_bytes, overwrite=True)
        assert values_in(copy) == {3}
        assert (copy / "tokenizer.json").read_text() == "mine"
    assert len(found) > 5
    mine = {"tokenizer.json", "vision.safetensors.index.json", "train.log"}
    assert mine < {item.name for item in folder.iterdir()}
    assert not list(tmp_path.rglob("*.partial*"))


def test_a_migrated_file_is_on_the_disk_before_it_replaces_the_old_one(tmp_path: Path, log: Path):
    script = tmp_path / "train.py"
    script.write_text(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "def build(model):\n    return FSDP(model, use_orig_params=True)\n"
    )
    before = script.read_text()
    sw.migrate([script], write=True)
    assert script.read_text() != before
    (move,) = [event for event in Disk(log).events if event["do"] == "rename"]
    synced = {event["inode"]: event["holds"] for event in Disk(log).events if event["do"] == "sync"}
    (was,) = move["was"]
    assert synced[was["inode"]] == was["holds"]


def test_without_fsync_nothing_waits_for_the_disk(tmp_path: Path, log: Path):
    model, optimizer = a_run()
    with sw.Checkpointer(tmp_path / "out", asynchronous=False, fsync=False) as checkpointer:
        checkpointer.save(3, model=model, optimizers=optimizer)
    assert Disk(log).num_syncs == 0
    assert checkpointer_holds(tmp_path / "out", model, optimizer)


def checkpointer_holds(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    other, fresh = a_run(8)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    with sw.Checkpointer(folder) as checkpointer:
        checkpointer.load(model=other, optimizers=fresh)
    return all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


BACKGROUND = """
import sys
from pathlib import Path
import shardwise as sw
from tests.faults.test_durability import a_run

if __name__ == "__main__":
    model, optimizer = a_run()
    with sw.Checkpointer(Path(sys.argv[1])) as checkpointer:
        checkpointer.save(3, model=model, optimizers=optimizer)
"""


def test_a_save_in_the_background_is_as_durable(tmp_path: Path):
    """Another process writes it: every process of the child notes what it does."""
    log, site = tmp_path / "disk.log", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE.format(root=str(ROOT), log=str(log)))
    paths = [str(site), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", BACKGROUND, str(tmp_path / "out")]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    Disk(log).assert_published(tmp_path / "out" / "step-00000003")


@ranks(2)
def on_two_ranks(rank: int, log: str, folder: Path, **settings: Any) -> None:
    end = record(log)
    try:
        model = sw.shard(a_run()[0])
        with sw.Checkpointer(folder, asynchronous=False, **settings) as checkpointer:
            checkpointer.save(3, model=model)
    finally:
        end()


def test_every_ranks_file_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path: Path):
    on_two_ranks(log=str(tmp_path / "disk.log"), folder=tmp_path / "out")
    Disk(tmp_path / "disk.log").assert_published(tmp_path / "out" / "step-00000003")
