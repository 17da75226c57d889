"""Mixtral 8x7B's shapes with fused experts: one 3-D tensor a matrix for all eight of them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, INNER, NUM_EXPERTS, NUM_LAYERS, NUM_CHOSEN = 4096, 14_336, 8, 32, 2
KV_WIDTH, VOCAB_SIZE = 1024, 32_000


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(NUM_EXPERTS, 2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH, INNER))

    def forward(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        mixed = torch.zeros_like(x)
        for slot in range(NUM_CHOSEN):
            gate, up = torch.einsum("tw,tiw->ti", x, self.gate_up[chosen[:, slot]]).chunk(2, -1)
            mixed += weight[:, slot, None] * torch.einsum("ti,twi->tw", F.silu(gate) * up, self.down[chosen[:, slot]])
        return mixed


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, KV_WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, KV_WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = Experts()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        attended = self.norms[0](x)
        batch, length, _ = x.shape
        query, key, value = (
            proj(attended).view(batch, length, -1, 128).transpose(1, 2) for proj in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, -1))
        flat = self.norms[1](x).flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).topk(NUM_CHOSEN)
        return x + self.experts(flat, chosen, weight).view_as(x)


class Mixtral(nn.Module):
    def __init__(self, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
