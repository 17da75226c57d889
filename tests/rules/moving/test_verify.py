"""`migrate --verify`: a program is run before and after its rewrite, and the losses that it prints are compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardwise.fsdp1.codemod import verifying
from shardwise.fsdp1.codemod.migrate import migrate
from shardwise.fsdp1.codemod.verifying import first_difference, read_losses, verify_migration
from tests.contract.command_line import run

SCRIPT = """\
import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
torch.manual_seed(0)
model = FSDP(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.ones(2, 8) * (dist.get_rank() + 1)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {dist.get_rank()} step {step} loss {loss.item():.6f}", flush=True)
dist.destroy_process_group()
"""
PLAIN = """\
is_moved = "import fully" + "_shard" in open(__file__).read()
for step in range(3):
    loss = 1 / (step + 1) + CHANGE
    print(f"step {step} loss {loss:.4f}")


def wrap(model):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    return FSDP(model)


if __name__ != "__main__":
    import torch
"""


@pytest.mark.slow
def test_a_real_program_on_two_ranks_is_verified_and_written(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 train.py"
    ran = run("migrate", "train.py", "--write", "--verify", command, folder=tmp_path)
    assert "verified: 6 losses are the same" in ran.output, ran.output + ran.errors
    assert ran.status == 0
    assert "fully_shard(" in (tmp_path / "train.py").read_text()


@pytest.mark.parametrize(
    ("change", "said", "status"),
    [
        ("0", "verified: 3 losses are the same", 0),
        ("(step == 1) * is_moved", "step 1 loss differs first: 0.5000 before, 1.5000 after", 1),
        ("0 / (not is_moved)", "the rewritten program fails (status 1); its last lines:", 1),
    ],
    ids=["same", "other", "fails"],
)
def test_what_differs_first_is_named_and_nothing_is_written(tmp_path: Path, change: str, said: str, status: int):
    text = PLAIN.replace("CHANGE", change)
    (tmp_path / "train.py").write_text(text)
    command = f"{sys.executable} train.py"
    ran = run("migrate", "train.py", "--write", "--verify", command, folder=tmp_path)
    assert said in ran.output, ran.output + ran.errors
    assert ("ZeroDivisionError" in ran.output) is ("fails" in said)
    assert ran.status == status
    assert ((tmp_path / "train.py").read_text() == text) is (status == 1)
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]


def test_a_rewritten_program_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifying, "_MIN_TIMEOUT_S", 0.5)
    monkeypatch.setattr(verifying, "_SLOWER", 0)
    (tmp_path / "train.py").write_text(PLAIN)
    waits = "grep -q fully_shard train.py && sleep 1000; echo step 1 loss 0.5"
    verification = verify_migration(migrate([tmp_path / "train.py"]), waits, tmp_path)
    assert "the rewritten program does not end in 0 s" in verification.difference


@pytest.mark.parametrize(("command", "said"), [("exit 3", "fails (status 3)"), ("echo hello", "prints no loss")])
def test_a_command_that_cannot_be_compared_is_wrong_input(tmp_path: Path, command: str, said: str):
    (tmp_path / "train.py").write_text(PLAIN)
    ran = run("migrate", "train.py", "--verify", command, folder=tmp_path)
    assert said in ran.errors
    assert ran.status == 2


def test_losses_are_read_by_their_place_whatever_rank_prints_first():
    one = read_losses("rank 0 step 1 loss: 0.5\nepoch 2, step=7 | train_loss = tensor(1e-3) lr 0.1\n{'loss': nan}\n")
    assert one == {"rank 0 step 1 loss": ["0.5"], "epoch 2 step 7 train_loss": ["1e-3"], "loss": ["nan"]}
    before, after = read_losses("step 1 loss 2.0\nstep 1 loss 1.0\n"), read_losses("step 1 loss 1.0\nstep 1 loss 2.0\n")
    assert first_difference(before, after) == ""
    assert first_difference({"loss": ["0.50", "0.40"]}, {"loss": ["0.51", "0.30"]}) == (
        "loss number 2 differs first: 0.40 before, 0.30 after"
    )


def test_lines_of_ranks_that_run_into_each_other_are_told_apart():
    printed = "rank 0 step 2 loss 0.125rank 1 step 2 loss 0.5\n\nrank 0 step 3 loss 1e-3\n"
    assert read_losses(printed) == {
        "rank 0 step 2 loss": ["0.125"],
        "rank 1 step 2 loss": ["0.5"],
        "rank 0 step 3 loss": ["1e-3"],
    }
