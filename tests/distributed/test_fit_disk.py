"""The disk of a run: a first checkpoint that does not fit is told before anything is built, with its true size."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from shardwise.config.run import RunConfig
from shardwise.distributed.agreement import agree_on
from shardwise.errors import EnvironmentProblem
from shardwise.training.loop import fit
from shardwise.training.run import resolved_yaml
from shardwise.units import parse_bytes
from tests.distributed.fit_runs import changed, tiny
from tests.ranks import ranks

WIDE = {"width": 256, "num_layers": 2, "num_heads": 2, "max_sequence_length": 16}


def free(num_bytes: int) -> Any:
    """A disk with so much left, whichever it is."""
    return mock.patch.object(shutil, "disk_usage", return_value=SimpleNamespace(free=num_bytes))


def told(error: EnvironmentProblem) -> int:
    """The size that the error names."""
    found = re.search(r"takes ([\d.]+ \w+), and its disk has ", error.what)
    assert found, error
    return parse_bytes(found[1])


def written(config: RunConfig) -> int:
    """Bytes of the one checkpoint of a run."""
    (newest,) = Path(config.folder or "", "checkpoints").iterdir()
    return sum(file.stat().st_size for file in [newest, *newest.rglob("*")] if file.is_file())


@ranks(2)
@pytest.mark.parametrize(
    ("optimizer", "format", "training"),
    [
        ({"name": "adamw"}, "sharded", {}),
        ({"name": "sgd"}, "sharded", {}),
        ({"name": "sgd", "momentum": 0.0}, "sharded", {"ema_decay": 0.9}),
        ({"name": "muon"}, "sharded", {}),
        ({"name": "adamw"}, "full", {"ema_decay": 0.9}),
        ({"name": "adamw"}, "dcp", {}),
    ],
    ids=["adamw", "sgd", "sgd-plain-ema", "muon", "full-ema", "dcp"],
)
def test_size_that_is_told_is_the_size_that_is_written(
    rank: int, tmp_path: Path, optimizer: dict[str, Any], format: str, training: dict[str, Any]
):
    config = replace(tiny(tmp_path, steps=1, **training), model_options=WIDE)
    config = changed(config, optimizer=optimizer, checkpoint={"format": format})
    with free(1000), pytest.raises(EnvironmentProblem) as failure:
        fit(config)
    assert not list(Path(config.folder or "").iterdir()), "nothing of the run is there"
    error = failure.value
    agree_on(str(error), "the error")
    assert (error.exit_code, "1000 B free" in error.what) == (3, True)
    assert str(Path(config.folder or "") / "checkpoints") in error.where
    assert "set folder to a disk with more space" in error.fix
    assert ("training.ema_decay = null" in error.fix) == bool(training)
    with free(int(1.05 * told(error))):
        fit(config)
    assert 0.95 < written(config) / told(error) < 1.05


@ranks(2)
@pytest.mark.parametrize("format", ["sharded", "full", "dcp"])
def test_tied_weights_are_told_as_each_format_writes_them(rank: int, tmp_path: Path, format: str):
    options = {"hidden_size": 128, "num_layers": 1, "vocab_size": 8192, "tie_embeddings": True}
    config = replace(tiny(tmp_path, steps=1), model="llama3-debug", model_options=options)
    config = changed(config, optimizer={"name": "sgd", "momentum": 0.0}, checkpoint={"format": format})
    with free(1000), pytest.raises(EnvironmentProblem) as failure:
        fit(config)
    fit(config)
    assert 0.95 < written(config) / told(failure.value) < 1.05


@ranks(2)
def test_finished_run_needs_no_space(rank: int, tmp_path: Path):
    config = tiny(tmp_path, steps=1)
    fit(config)
    with free(0):
        assert fit(config).steps == 1
        with pytest.raises(EnvironmentProblem, match="0 B free"):
            fit(changed(config, training={"steps": 2}))


def test_resolved_run_says_when_later_checkpoints_will_not_fit(tmp_path: Path):
    config = changed(tiny(tmp_path), checkpoint={"every": 2, "keep_last": 2})
    with free(10), pytest.raises(EnvironmentProblem) as failure:
        resolved_yaml(config, 2)
    size = told(failure.value)
    with free(2 * size):
        assert "there will be 3 at a time" in " ".join(resolved_yaml(config, 2).replace("#", " ").split())
    with free(4 * size):
        assert "at a time" not in resolved_yaml(config, 2)


def may_mount() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not may_mount(), reason="no file system may be mounted here")
def test_command_on_a_small_disk_says_so_before_the_first_step(tmp_path: Path):
    """A real one of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    train = [
        sys.executable, "-m", "shardwise.cli.main", "train", "--nproc", "2", "--set", "model=tutorial",
        "--set", f"folder={disk}/deep/run", "--set", "training.steps=2", "--set", "data.sequence_length=32",
    ]  # fmt: skip
    mount = f'mount -t tmpfs -o size=2m tmpfs {disk} && "$@"; status=$?; find {disk} -type f; exit $status'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *train]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=180, env=dict(os.environ))
    assert result.returncode == 3, result.stderr
    assert re.search(r"error: a checkpoint of this run takes [\d.]+ MiB, and its disk has 2 MiB free", result.stderr)
    assert f"folder ({disk}/deep/run/checkpoints)" in result.stderr
    assert "loss" not in result.stderr
    assert result.stdout == "", "no file was written"
