"""The chunked loss of sharded models of transformers is that of their whole logits, also on parts of sequences."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.config.schema import MeshConfig, PipelineConfig, ShardConfig
from shardwise.distributed.mesh import make_mesh
from shardwise.sharding.parallel.pipeline import pipeline
from shardwise.training import objective as chunked_loss
from shardwise.training.objective import Objective, logits_of, next_token_loss
from tests.decoders import VOCAB, make_batch, num_tokens
from tests.ranks import ranks

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "Llama": ({}, True),
    "Qwen3": ({"tie_word_embeddings": True}, True),
    "Mixtral": ({"num_local_experts": 4}, True),
    "Phi3": ({"pad_token_id": 0}, True),
    "GPTNeoX": ({"hidden_dropout": 0.0}, True),
    "Gemma2": ({"final_logit_softcapping": 5.0}, False),
    "Granite": ({"logits_scaling": 4.0}, False),
}
"""Settings, and whether the logits are returned as the output matrix makes them."""
_QUICK = ("Qwen3", "Granite")


def build(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name][0])
    return getattr(transformers, f"{name}ForCausalLM")(config)


def small_chunks() -> None:
    vars(chunked_loss).update(_CHUNK_NUMEL=7 * VOCAB, _MIN_CHUNK_ROWS=1)


def whole_loss(model: nn.Module, step: int, num_rows: int) -> torch.Tensor:
    batch = make_batch(step, num_rows)
    return next_token_loss(logits_of(model(input_ids=batch["input_ids"], use_cache=False)), batch["labels"])


def assert_gradients(model: nn.Module, alone: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        expected = alone.get_parameter(name).grad
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.full_tensor(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in _QUICK else [pytest.mark.slow]) for name in MODELS]
)
@ranks(2)
def test_models_of_transformers_equal_one_process(rank: int, name: str):
    small_chunks()
    model = build(name)
    alone, objective = copy.deepcopy(model), Objective(model)
    sw.shard(model, mesh=make_mesh(MeshConfig(shard=2, device="cpu")))
    for step in range(2):
        loss, _ = objective(model, make_batch(10 * step + rank, 2))
        loss.backward()
        expected = [whole_loss(alone, 10 * step + other, 2) for other in range(2)]
        (sum(expected) / 2).backward()
        torch.testing.assert_close(loss, expected[rank], rtol=1e-5, atol=1e-4)
    assert_gradients(model, alone)
    assert (objective._head is not None) == MODELS[name][1]


@ranks(2)
def test_parts_of_sequences_and_stages_equal_one_process(rank: int):
    small_chunks()
    for name in ("Qwen3", "Granite"):
        alone = build(name)
        whole_loss(alone, 0, 4).backward()
        model = build(name)
        objective, mesh = Objective(model), make_mesh(MeshConfig(shard=1, context=2, device="cpu"))
        sw.shard(model, mesh=mesh)
        loss, _ = objective(model, sw.split_sequences(make_batch(0, 4), mesh=mesh))
        (2 * loss).backward()  # averaged over two ranks, whose losses are summed in one process
        assert_gradients(model, alone)

        model, batch = build(name), make_batch(0, 4)
        objective, mesh = Objective(model), make_mesh(MeshConfig(shard=1, pipeline=2, device="cpu"))
        config = ShardConfig(pipeline=PipelineConfig(microbatches=2))
        pipe = pipeline(model, config, mesh=mesh, loss=objective, example_inputs=batch)
        pipe.forward_and_backward(batch)
        assert_gradients(pipe.model, alone)
        assert num_tokens(batch) == pipe.evaluate(batch)[1]
