"""Two expert stacks with joint attention: the root calls the parts of both stacks' layers, never a layer."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.config.schema import ShardConfig
from tests.zoo.case import Case, normal, tokens

DIM, HEADS = 32, 4


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return (scaled * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.head_dim = DIM // HEADS
        self.q_proj = nn.Linear(dim, DIM, bias=False)
        self.k_proj = nn.Linear(dim, DIM, bias=False)
        self.v_proj = nn.Linear(dim, DIM, bias=False)
        self.o_proj = nn.Linear(DIM, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the joint model never calls an attention by itself")


class GatedMlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.up_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(dim)
        self.self_attn = Attention(dim)
        self.post_attention_layernorm = Norm(dim)
        self.mlp = GatedMlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the joint model never calls a layer by itself")


class Stack(nn.Module):
    def __init__(self, dim: int, num_layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(96, dim)
        self.layers: Any = nn.ModuleList([Layer(dim) for _ in range(num_layers)])
        self.norm = Norm(dim)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the joint model never calls a stack by itself")


class PairOfExperts(nn.Module):
    """A language expert and a smaller action expert that attend to each other."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.language = Stack(32, num_layers)
        self.action = Stack(16, num_layers)
        self.num_layers = num_layers

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        models = [self.language, self.action]

        def compute_layer(layer_idx: int, inputs: list[Tensor]) -> list[Tensor]:
            queries, keys, values = [], [], []
            for i, hidden in enumerate(inputs):
                layer = models[i].layers[layer_idx]
                hidden = layer.input_layernorm(hidden)
                shape = (*hidden.shape[:-1], -1, layer.self_attn.head_dim)
                hidden = hidden.to(layer.self_attn.q_proj.weight.dtype)
                queries.append(layer.self_attn.q_proj(hidden).view(shape).transpose(1, 2))
                keys.append(layer.self_attn.k_proj(hidden).view(shape).transpose(1, 2))
                values.append(layer.self_attn.v_proj(hidden).view(shape).transpose(1, 2))
            joint = functional.scaled_dot_product_attention(
                torch.cat(queries, 2), torch.cat(keys, 2), torch.cat(values, 2)
            )
            joint = joint.transpose(1, 2).flatten(2)
            outputs, start = [], 0
            for i, hidden in enumerate(inputs):
                layer = models[i].layers[layer_idx]
                end = start + hidden.shape[1]
                attended = layer.self_attn.o_proj(joint[:, start:end])
                hidden = hidden + attended
                residual = hidden.clone()
                hidden = layer.post_attention_layernorm(hidden)
                outputs.append(residual + layer.mlp(hidden.to(layer.mlp.up_proj.weight.dtype)))
                start = end
            return outputs

        for layer_idx in range(self.num_layers):
            inputs = compute_layer(layer_idx, inputs)
        return [models[i].norm(hidden) for i, hidden in enumerate(inputs)]


class Policy(nn.Module):
    """A flow-matching policy around the pair: prefix tokens for one expert, noisy actions for the other."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.experts = PairOfExperts(num_layers)
        self.action_in_proj = nn.Linear(6, 16)
        self.time_mlp = nn.Linear(1, 16)
        self.action_out_proj = nn.Linear(16, 6)

    def forward(self, prefix: Tensor, actions: Tensor, time: Tensor) -> Tensor:
        dtype = self.experts.language.layers[0].self_attn.q_proj.weight.dtype
        noise = torch.randn_like(actions)
        noisy = time * noise + (1 - time) * actions
        suffix = self.action_in_proj(noisy) + self.time_mlp(time)
        embedded = self.experts.language.embed_tokens(prefix)
        _, suffix = self.experts([embedded.to(dtype), suffix.to(dtype)])
        return functional.mse_loss(self.action_out_proj(suffix.float()), noise - actions)


def openpi() -> nn.Module:
    return Policy()


def openpi_bfloat16() -> nn.Module:
    """The published recipe: bfloat16 weights, but norms and projections around the experts in float32."""
    model = Policy()
    model.experts.to(torch.bfloat16)
    for name, parameter in model.experts.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    return model


def openpi_batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        tokens(seed, length=6),
        normal(seed, 2, 4, 6),
        torch.rand(2, 1, 1, generator=torch.Generator().manual_seed(seed)),
    )


CASES = [
    Case(name="openpi", build=openpi, make_batch=openpi_batch, four_ranks=True),
    Case(
        name="openpi_bfloat16",
        build=openpi_bfloat16,
        make_batch=openpi_batch,
        config=ShardConfig(allow_16bit_storage=True),
        four_ranks=True,
    ),
]
