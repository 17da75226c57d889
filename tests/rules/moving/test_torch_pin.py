"""`migrate` reads the project's torch, and names what of the emitted code it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.findings import Status
from shardwise.fsdp1.codemod.migrate import migrate
from shardwise.fsdp1.codemod.torch_pin import newest_torch

TEXT = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nmodel = FSDP(build())\n"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("numpy\ntorch==2.4.1+cu121\n", (2, 4)),
        ("torch>=2.1,<2.6\n", (2, 5)),
        ("torch<=2.5\n", (2, 5)),
        ("torch~=2.5.0\n", (2, 5)),
        ('dependencies = ["torch>=2.0, <2.5", "torchvision==0.19"]\n', (2, 4)),
        ('torch = "2.5.1"\n', (2, 5)),
        ('torch = {version = "2.5.1", source = "cpu"}\n', (2, 5)),
        ("  - pytorch=2.4\n", (2, 4)),
        ("torch>=2.0\ntorchvision==0.19\npytorch-lightning==2.4\n# torch==2.4\n", None),
        ("torch>=2.4,<3.0\n", None),
    ],
)
def test_the_newest_torch_that_is_allowed(text: str, version: tuple[int, int] | None):
    assert newest_torch(text) == version


@pytest.mark.parametrize(("pin", "is_named"), [("torch==2.5.1", True), ("torch==2.6", False), ("torch", False)])
def test_emitted_names_that_the_pinned_torch_lacks_are_named(tmp_path: Path, pin: str, is_named: bool):
    (tmp_path / "src").mkdir()
    (tmp_path / "requirements.txt").write_text(pin + "\n")
    (tmp_path / "src" / "train.py").write_text(TEXT)
    (file,) = migrate([tmp_path / "src"], num_processes=1).files
    found = [one for one in file.findings if one.code == "SW137"]
    assert file.changed
    assert bool(found) is is_named
    for one in found:
        assert one.status is Status.NEEDS_DECISION
        assert "torch.distributed.fsdp.fully_shard (2.6)" in one.message
        assert "requirements.txt" in one.message
