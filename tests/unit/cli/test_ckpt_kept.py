"""`shardwise ckpt` on checkpoints kept in the repository, and on damaged ones: JSON and text to the letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shardwise.cli.ckpt import ckpt
from tests.golden import same_as_kept
from tests.stored_checkpoints import STORED
from tests.unit.checkpointing.every_format import FORMATS, RUNS

STORED_PATHS = sorted(path for version in STORED.iterdir() for path in version.iterdir())


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(ckpt, [str(argument) for argument in arguments], catch_exceptions=False)
    return result.exit_code, result.stdout


def named(value: Any, folder: Path) -> Any:
    """Without the place of this machine, and without prose."""
    text = json.dumps(value).replace(str(folder), "FOLDER")
    return json.loads(text)


def without_prose(found: dict[str, Any]) -> dict[str, Any]:
    rows = [f"{row['code']} {row['severity']} {row['where']}" for row in found.get("findings", ())]
    return {**found, "findings": rows}


@pytest.mark.parametrize("path", STORED_PATHS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_stored_checkpoints(path: Path):
    status, text = run("inspect", path, "--format", "json")
    found = without_prose(json.loads(text))
    found.pop("disk_bytes", None)
    verified, told = run("verify", path, "--format", "json")
    checked = without_prose(json.loads(told))
    kept = named([status, found, verified, checked], path.parent)
    same_as_kept("stored", f"{path.parent.name}/{path.name}", kept)


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_every_format(format: str, tmp_path: Path):
    path = FORMATS[format](tmp_path)
    status, text = run("inspect", path, "--format", "json")
    found = without_prose(json.loads(text))
    found.pop("disk_bytes", None)
    verified, told = run("verify", path, "--format", "json")
    same_as_kept("stored", format, named([status, found, verified, without_prose(json.loads(told))], tmp_path))
    assert run("diff", path, path)[0] == 0


@pytest.mark.parametrize(("first", "second"), [("full", "dcp"), ("dcp", "sharded"), ("sharded", "full")])
def test_the_same_run_in_two_formats_differs_in_nothing(first: str, second: str, tmp_path: Path):
    paths = [RUNS[format](tmp_path / format) for format in (first, second) if not (tmp_path / format).mkdir()]
    status, text = run("diff", *paths, "--format", "json")
    assert status == 0, text
    same_as_kept("stored", f"{first} and {second}", named(json.loads(text), tmp_path))


@pytest.mark.parametrize("to", ["dcp", "full", "safetensors"])
def test_what_convert_says(to: str, tmp_path: Path):
    source = RUNS["sharded"](tmp_path)
    target = tmp_path / f"out-{to}"
    status, text = run("convert", source, target, "--to", to, "--format", "json")
    assert status == 0
    same_as_kept("stored", f"converted to {to}", named(json.loads(text), tmp_path))
    status, text = run("diff", source, target, "--format", "json")
    same_as_kept("stored", f"converted to {to}, compared", [status, named(json.loads(text), tmp_path)])


def test_differences_to_the_letter(tmp_path: Path):
    base = {"a": torch.zeros(4), "b": torch.ones(2, 3), "c": torch.tensor([1, 2]), "gone": torch.zeros(1)}
    other = {
        "a": torch.tensor([0.0, 0.5, 0.0, -2.0]), "b": torch.ones(3, 2), "c": torch.tensor([1, 2], dtype=torch.int32),
        "new": torch.zeros(2),
    }  # fmt: skip
    torch.save(base, tmp_path / "base.pt")
    torch.save(other, tmp_path / "other.pt")
    status, text = run("diff", tmp_path / "base.pt", tmp_path / "other.pt", "--format", "json")
    assert status == 1
    same_as_kept("stored", "differences", named(json.loads(text), tmp_path))
