"""`migrate` reads the project's torch, and names what of the emitted code it lacks."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from shardwise.findings import Status
from shardwise.fsdp1.codemod.migrate import migrate
from shardwise.linting.lint import lint
from shardwise.source.torch_pin import GONE, newest_torch, oldest_torch

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


@pytest.mark.parametrize(
    ("text", "version"),
    [("torch>=2.4\n", (2, 4)), ("torch==2.6\n", (2, 6)), ("torch>2.1,<2.9\n", (2, 1)), ("torch<2.5\n", None)],
)
def test_the_oldest_torch_that_is_allowed(text: str, version: tuple[int, int] | None):
    assert oldest_torch(text) == version


@pytest.mark.parametrize(("pin", "is_found"), [("torch>=2.4", False), ("torch==2.5.1", False), ("torch>=2.6", True)])
def test_private_import_is_right_for_projects_with_an_older_torch(tmp_path: Path, pin: str, is_found: bool):
    (tmp_path / "requirements.txt").write_text(pin + "\n")
    (tmp_path / "train.py").write_text("from torch.distributed._composable.fsdp import fully_shard\n")
    assert [one.code for one in lint(tmp_path)] == ["SW190"] * is_found


def test_imports_that_no_torch_with_fsdp2_has_are_named(tmp_path: Path):
    more = "from torch._six import inf\nfrom torch.distributed.fsdp.wrap import default_auto_wrap_policy as policy\n"
    (tmp_path / "train.py").write_text(TEXT.replace("\n", "\n" + more, 1))
    (file,) = migrate([tmp_path], num_processes=1).files
    found = [(one.line, one.status) for one in file.findings if one.code == "SW137"]
    assert found == [(2, Status.NEEDS_DECISION), (3, Status.NEEDS_DECISION)]


@pytest.mark.parametrize("name", GONE)
def test_what_is_called_gone_is_not_in_torch(name: str):
    module, _, last = name.rpartition(".")
    with pytest.raises(ImportError):
        importlib.import_module(name)
    assert not hasattr(importlib.import_module(module), last)


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
