"""`shardwise ckpt` as a user runs it: output, JSON and exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from shardwise.cli.ckpt import ckpt
from shardwise.errors import CheckpointError, ConfigError
from tests.unit.checkpointing.every_format import RUNS, model_state


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(ckpt, [str(argument) for argument in arguments], catch_exceptions=False)
    return result.exit_code, result.stdout


def test_inspect_prints_what_is_in_it(tmp_path: Path):
    status, text = run("inspect", RUNS["full"](tmp_path), "--tensors")
    assert status == 0
    assert "model.block.weight  bfloat16 [4, 3, 2]" in text
    status, text = run("inspect", tmp_path / "run.pt", "--format", "json")
    assert json.loads(text)["sections"]["model"]["tensors"] == 7


def test_verify_exits_with_one_when_something_is_wrong(tmp_path: Path):
    folder = RUNS["sharded"](tmp_path)
    assert run("verify", folder) == (0, f"{folder}: nothing wrong\n")
    (folder / "__1_0.distcp").write_bytes(b"")
    status, text = run("verify", folder, "--format", "json")
    assert status == 1
    assert json.loads(text)["findings"][0]["where"] == str(folder / "__1_0.distcp")


def test_convert_says_what_it_wrote_and_left_out(tmp_path: Path):
    source = RUNS["full"](tmp_path)
    status, text = run("convert", source, tmp_path / "w", "--to", "safetensors", "--max-shard-size", "150")
    assert status == 0
    assert "7 tensors" in text
    assert "left out 15 names" in text
    assert (tmp_path / "w" / "model.safetensors.index.json").exists()
    status, text = run("convert", source, tmp_path / "b.pt", "--to", "full", "--dtype", "bfloat16", "--format", "json")
    assert json.loads(text)["source_format"] == "full"
    assert torch.load(tmp_path / "b.pt")["model"]["embed.weight"].dtype == torch.bfloat16


def test_diff_exits_with_one_when_they_differ(tmp_path: Path):
    source = RUNS["full"](tmp_path)
    assert run("diff", source, source)[0] == 0
    torch.save({**model_state(), "block.count": torch.tensor(13)}, tmp_path / "other.pt")
    status, text = run("diff", source, tmp_path / "other.pt")
    assert status == 1
    assert "model.block.count: 1 elements differ, by at most 1" in text
    assert json.loads(run("diff", source, tmp_path / "other.pt", "--format", "json")[1])["num_equal"] == 6


def test_wrong_input_is_ours_to_say(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        run("inspect", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not an amount of memory"):
        run("convert", RUNS["full"](tmp_path), tmp_path / "x", "--max-shard-size", "much")
