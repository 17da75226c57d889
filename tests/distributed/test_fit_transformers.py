"""Fine-tuning a transformers Llama from its folder: weights go in, are trained, come out, and mean the same there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn import functional as F

from shardwise.config.load import load
from shardwise.config.run import RunConfig
from shardwise.training.data import open_evaluation
from shardwise.training.loop import fit
from shardwise.training.run_folder import Training
from tests.ranks import ranks

transformers = pytest.importorskip("transformers")

SETTINGS: dict[str, Any] = {
    "data": {"sequence_length": 48, "evaluation_fraction": 0.25},
    "training": {"steps": 6, "batch_size": 4, "sample": "def ", "sample_tokens": 4},
    "optimizer": {"learning_rate": 0.01},
    "checkpoint": {"export": True},
}


def write_llama(folder: Path, rank: int, *, tied: bool) -> None:
    """As `save_pretrained` writes it."""
    if rank == 0:
        config = transformers.LlamaConfig(
            vocab_size=260,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
        )
        torch.manual_seed(1)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
        lines = [{"text": f"def function_{i}(x):\n    return x + {i}\n" * (1 + i % 4)} for i in range(40)]
        (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    dist.barrier()


def fine_tune(folder: Path, *overrides: str) -> tuple[RunConfig, Training]:
    settings = {**SETTINGS, "model": str(folder / "llama"), "folder": str(folder / "run")}
    config = load(RunConfig, settings, [f"data.source={folder / 'text.jsonl'}", *overrides])
    return config, fit(config)


def loss_of_transformers(config: RunConfig, exported: Path) -> float:
    """The loss on the same held-out samples, in one process, of the model that transformers opens."""
    model = transformers.LlamaForCausalLM.from_pretrained(exported, local_files_only=True, dtype=torch.float32).eval()
    batches = open_evaluation(config.data, batch_size=1, rank=0, num_ranks=1, vocab_size=260, device="cpu")
    assert batches is not None
    total = count = 0.0
    with torch.no_grad():
        for batch in batches:
            # Each document by itself: nothing of ours says what attends to what.
            documents = batch.get("document_ids", torch.zeros_like(batch["input_ids"]))[0]
            for document in documents.unique():
                here = documents == document
                ids, labels = batch["input_ids"][:, here], batch["labels"][0, here]
                total += F.cross_entropy(model(ids).logits[0], labels, ignore_index=-100, reduction="sum").item()
                count += (labels != -100).sum().item()
    return total / count


@pytest.mark.filterwarnings("ignore")  # of transformers' own loading
@pytest.mark.parametrize(("pack", "tied"), [(True, True), pytest.param(False, False, marks=pytest.mark.slow)])
@ranks(2, timeout_s=240)
def test_from_pretrained_agrees_with_our_sharded_evaluation_loss(rank: int, pack: bool, tied: bool, tmp_path: Path):
    write_llama(tmp_path, rank, tied=tied)
    config, training = fine_tune(tmp_path, f"data.pack={str(pack).lower()}")
    assert training.exported is not None
    assert training.evaluation_loss is not None
    assert training.first_loss is not None
    assert training.evaluation_loss < training.first_loss - 0.1
    expected = loss_of_transformers(config, Path(training.exported))
    assert training.evaluation_loss == pytest.approx(expected, rel=1e-5)
    assert loss_of_transformers(config, tmp_path / "llama") > expected + 0.1  # the folder itself is as it was


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@ranks(2, timeout_s=240)
def test_weights_pass_through_unchanged_where_nothing_is_learnt(rank: int, tmp_path: Path):
    write_llama(tmp_path, rank, tied=False)
    _, training = fine_tune(tmp_path, "optimizer.learning_rate=0", "training.steps=1")
    before = load_file(tmp_path / "llama/model.safetensors")
    after = load_file(Path(training.exported or "") / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert training.evaluation_loss == pytest.approx(
        loss_of_transformers(load(RunConfig, Path(training.folder) / "config.yaml"), tmp_path / "llama"), rel=1e-5
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@ranks(2, timeout_s=240)
def test_new_weights_on_request(rank: int, tmp_path: Path):
    write_llama(tmp_path, rank, tied=False)
    _, training = fine_tune(tmp_path, "weights=none", "optimizer.learning_rate=0", "training.steps=1")
    before = load_file(tmp_path / "llama/model.safetensors")
    after = load_file(Path(training.exported or "") / "model.safetensors")
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
