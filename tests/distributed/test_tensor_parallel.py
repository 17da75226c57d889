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
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip


def reference(kind: Any, shape: Any, **sizes: Any) -> nn.Module:
    with torch.device("meta"):
        return kind(replace(shape, **sizes))


class ByShape(nn.Module):
    """Attention whose sizes come from its input."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.mix = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (
            f(x).view(b, t, self.heads, c // self.heads).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v)
        )
        scores = (q @ k.transpose(-2, -1)) / (c // self.heads) ** 0.5
        scores = scores.masked_fill(torch.ones(t, t).tril() == 0, -1e9)
        return self.mix((scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(b, t, c))


class ByNumber(nn.Module):
    """Attention that reads its number of heads for a view with -1, and for a bias that it makes."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.count, self.size = heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.memory = nn.ModuleDict({"key": nn.Linear(width, width // 2), "value": nn.Linear(width, width // 2)})
        self.scale = nn.LayerNorm(self.size)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query = self.scale(self.query(x).view(len(x), -1, self.count, self.size))
        key, value = (f(x).unflatten(-1, (-1, self.size)).repeat_interleave(2, 2) for f in self.memory.values())
        bias = torch.zeros((1, self.count, x.shape[1], 1))
        mixed = torch.einsum("bhqk,bkhd->bqhd", (torch.einsum("bqhd,bkhd->bhqk", query, key) + bias).softmax(-1), value)
        return self.out(mixed.reshape(x.shape))


class Fused(nn.Module):
    """All projections of attention in one, and both of a gated feed-forward."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = [each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.c_attn(x).split(self.width, 2)]
        x = x + self.c_proj(
            nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        )
        gate, up = self.wide(self.norm(x)).chunk(2, -1)
        return x + self.narrow(gate.sigmoid() * up)


class Mixing(nn.Module):
    """What is between the layers looks at the input, at a parameter, or at other features."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e, self.f = (nn.Linear(width, width) for _ in range(6))
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(self.a(x) * x.mean(-1, keepdim=True).tanh())
        x = x + self.d(self.c(x).relu() * self.gain)
        return x + self.f(self.e(x).softmax(-1))


class Own(nn.Module):
    """A language model around other people's layers."""

    def __init__(self, *parts: type[nn.Module], width: int = 32) -> None:
        super().__init__()
        self.table, self.read_out = nn.Embedding(96, width), nn.Linear(width, 96)
        self.stack = nn.ModuleList(self._layer(parts, width) for _ in range(2))

    def _layer(self, parts: tuple[type[nn.Module], ...], width: int) -> nn.Module:
        feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width), nn.Dropout(0.0)
        )
        return Layer([nn.Sequential(nn.LayerNorm(width), part()) for part in parts] + [feed])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for layer in self.stack:
            x = layer(x)
        return self.read_out(x)


class Layer(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)
        return x


MODELS = {
    "by-shape": lambda: Own(ByShape),
    "by-number": lambda: Own(ByNumber),
    "fused": lambda: Own(Fused),
    "mixing": lambda: Own(Mixing),
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
    "qwen3-double": lambda: of_transformers("Qwen3", **SIZES, head_dim=8, tie_word_embeddings=True).double(),
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
