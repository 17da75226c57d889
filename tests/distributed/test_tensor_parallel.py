"""Matrices divided over the tensor axis: losses, gradients and weights are those of one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.distributed.mesh import make_mesh
from shardwise.models import llama, moe, multimodal, transformer

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip


def of_transformers(name: str, head: str = "ForCausalLM", **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}{head}")(config)


def t5() -> nn.Module:
    return of_transformers(
        "T5", "ForConditionalGeneration", d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=48, vocab_size=96,
        dropout_rate=0.0,
    )  # fmt: skip


def reference(kind: Any, shape: Any, **sizes: Any) -> nn.Module:
    with torch.device("meta"):
        return kind(replace(shape, **sizes))


MODELS = {
    "llama": lambda: reference(llama.Llama, llama.SHAPES["llama3-debug"], hidden_size=32, vocab_size=96, num_layers=2),
    "llama-tied": lambda: reference(llama.Llama, llama.SHAPES["llama3-bytes"], vocab_size=96, num_layers=2),
    "moe": lambda: reference(moe.Moe, moe.SHAPES["moe-debug"], hidden_size=32, vocab_size=96, num_layers=2),
    "tutorial": lambda: reference(transformer.Transformer, transformer.SHAPES["tutorial"], width=32, num_layers=2),
    "multimodal": lambda: reference(
        multimodal.Multimodal, multimodal.SHAPES["multimodal-debug"], vocab_size=96, num_layers=2
    ),
    "transformers-llama": lambda: of_transformers("Llama", **SIZES),
    "qwen3": lambda: of_transformers("Qwen3", **SIZES, head_dim=8, tie_word_embeddings=True),
    "mixtral": lambda: of_transformers("Mixtral", **SIZES, num_local_experts=4),
    "t5": t5,
}


def batch_of(name: str, rank: int, step: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 96, (2, 8), generator=generator)
    if name == "multimodal":
        pictures = torch.randn(2, 2, 3, 16, 16, generator=generator)
        noise, times = torch.randn(2, 16, 16, generator=generator), torch.rand(2, generator=generator)
        return {
            "input_ids": tokens, "pixel_values": pictures[0], "target_pixels": pictures[1], "noise": noise,
            "times": times,
        }  # fmt: skip
    return {"input_ids": tokens, "labels": tokens} if name == "t5" else {"input_ids": tokens}


def loss_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
    if isinstance(output, dict) and output.get("loss") is not None:
        return output["loss"]
    logits = getattr(output, "logits", output)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def check_parity(name: str, mesh: sw.MeshConfig, config: sw.ShardConfig | None = None, steps: int = 3) -> None:
    def batch(rank: int, step: int, seed: int) -> dict[str, Tensor]:
        return batch_of(name, rank, step, seed)

    result = sw.parity(MODELS[name], batch, loss_of, config, steps=steps, mesh=make_mesh(mesh))
    assert result.equal, f"{name} on {mesh}: {result}"
