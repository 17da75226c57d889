"""The embedded default, whole: it learns more than which byte follows which, and what it writes looks like Python."""

import re
import statistics
from pathlib import Path

import pytest
import torch

from shardwise.config.load import load
from shardwise.config.run import RunConfig
from shardwise.training.data.reading import standard_library_files
from shardwise.training.loop import fit
from shardwise.training.metrics import read_records
from tests.ranks import ranks

_END = 256


def bigram_entropy(files: list[Path]) -> float:
    """Nats that the next byte still holds for who knows the one before: the best loss of a table of pairs."""
    counts = torch.zeros(257 * 257, dtype=torch.float64)
    for file in files:
        tokens = torch.tensor([*file.read_bytes(), _END])
        counts += torch.bincount(tokens[:-1] * 257 + tokens[1:], minlength=257 * 257)
    pairs = counts.view(257, 257) / counts.sum()
    before = pairs.sum(1, keepdim=True).expand_as(pairs)
    return -(pairs[pairs > 0] * (pairs / before)[pairs > 0].log()).sum().item()


def test_bigram_entropy_of_a_known_text(tmp_path: Path):
    (tmp_path / "even").write_bytes(b"ab" * 500)  # only the end is a surprise, once
    assert bigram_entropy([tmp_path / "even"]) < 0.02
    generator = torch.Generator().manual_seed(0)
    (tmp_path / "coin").write_bytes(bytes(torch.randint(97, 99, (50_000,), generator=generator).tolist()))
    assert bigram_entropy([tmp_path / "coin"]) == pytest.approx(0.6931, abs=1e-3)


@pytest.mark.slow
@ranks(2, timeout_s=1500)
def test_default_run_learns_python(rank: int, tmp_path: Path):
    config = load(RunConfig, None, [f"folder={tmp_path / 'run'}", "mesh.device=cpu", "data.evaluation_fraction=0.001"])
    training = fit(config)
    entropy = bigram_entropy(standard_library_files())
    assert training.evaluation_loss is not None
    assert training.evaluation_loss < entropy - 0.4
    last = [record["loss"] for record in read_records(Path(training.metrics)) if "loss" in record][-50:]
    assert statistics.fmean(last) < entropy - 0.4
    assert training.sample is not None
    assert training.sample.startswith("def ")
    assert re.search(r"\n {4,}\w", training.sample)  # indented lines
    assert re.search(r"\b(self|return|def|if|import|for|not|None|raise|class)\b", training.sample[4:])
