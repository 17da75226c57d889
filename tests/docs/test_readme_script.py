"""The README's promise: a few lines shard a plain script, and it is the same training."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

import shardwise
from tests.docs.test_snippets import ROOT, run_in, run_on_ranks

README = (ROOT / "README.md").read_text()
# Sixteen samples in batches of eight: one process makes two steps, two ranks make one of sixteen.
MY_PROJECT = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        make_block = lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.blocks = nn.ModuleList(make_block() for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

features = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
dataset = [(feature, feature.sum()) for feature in features]

def loss_of(model, batch):
    features, targets = batch
    return F.mse_loss(model(features).squeeze(-1), targets)
"""
SHOW = """
for name, parameter in sorted(model.named_parameters()):
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(name, *(f"{value:.4f}" for value in whole.detach().flatten().tolist()))
"""


def sides_of_diff() -> tuple[str, str]:
    """The script before and after, from the README's diff."""
    diff = re.search(r"```diff\n(.*?)```", README, re.DOTALL)
    assert diff is not None
    lines = diff[1].splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before) + "\n", "\n".join(after) + "\n"


def test_sharded_script_trains_like_the_plain_one(tmp_path: Path):
    # Adam's first step only sees signs; this one shows a gradient or a norm that is off.
    adam, sgd = "AdamW(model.parameters(), lr=3e-4)", "SGD(model.parameters(), lr=0.3)"
    before, after = (side.replace(adam, sgd) for side in sides_of_diff())
    assert sgd in before
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    # The same global batch in both: all of the data, in one step.
    (tmp_path / "plain.py").write_text(before.replace("batch_size=8", "batch_size=16") + SHOW)
    end = "torch.distributed.destroy_process_group()"
    assert end in after
    expected = run_in(tmp_path, [sys.executable, "plain.py"])
    actual = run_on_ranks(after.replace(end, SHOW + end), tmp_path, num_ranks=2)
    assert "head.weight" in expected
    for theirs, ours in zip(expected.splitlines(), actual.splitlines(), strict=True):
        assert ours.split()[0] == theirs.split()[0]
        wanted = [float(value) for value in theirs.split()[1:]]
        assert [float(value) for value in ours.split()[1:]] == pytest.approx(wanted, abs=2e-4), theirs.split()[0]


def test_few_lines_change():
    before, after = sides_of_diff()
    added = set(after.splitlines()) - set(before.splitlines())
    assert len(added) <= 6, "the README says that a few lines change"


def test_readme_names_every_public_function_and_nothing_else():
    table = re.findall(r"^\| (`[^|]*`) \|", README, re.MULTILINE)
    named = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    named |= set(re.findall(r"`([A-Z]\w+(?:Config|Error|Override|Problem)|Plan|Parity|Guard)`", README))
    named |= set(re.findall(r"`(KeyReport|Inspection|Explanation|Migration)`", README))
    public = set(shardwise.__all__) - {"__version__"}
    assert named - public == set(), "the README names what is not public"
    assert public - named == set(), "the README leaves out what is public"
    for name in public:
        value = getattr(shardwise, name)
        assert inspect.isclass(value) or callable(value)
