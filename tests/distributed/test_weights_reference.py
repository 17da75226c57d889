"""Exported reference models: transformers opens the folder and computes the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.models import llama, moe
from tests.ranks import ranks

transformers = pytest.importorskip("transformers")

SLOW = pytest.mark.slow
DEBUG = llama.SHAPES["llama3-debug"]
SHAPES = {
    "llama": DEBUG,
    "stretched-tied": replace(DEBUG, rope_factor=8.0, tie_embeddings=True, max_sequence_length=9000),
    "moe": moe.SHAPES["moe-debug"],
}


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    shape = SHAPES[name]
    return moe.Moe(shape) if isinstance(shape, moe.MoeConfig) else llama.Llama(shape)


@pytest.mark.filterwarnings("ignore")  # of transformers' own loading
@pytest.mark.parametrize("name", [pytest.param("llama", marks=SLOW), "stretched-tied", pytest.param("moe", marks=SLOW)])
@ranks(2)
def test_transformers_opens_the_folder_and_computes_the_same(rank: int, name: str, tmp_path: Path):
    sw.save_weights(sw.shard(build(name)), tmp_path)
    dist.barrier()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    tokens = torch.randint(0, DEBUG.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, build(name)(tokens), rtol=1e-4, atol=1e-5)
