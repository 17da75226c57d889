"""A generative model with several ways in, ported from a single-GPU research repository."""

import copy

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.gate = nn.Parameter(torch.ones(width))

    def forward(self, x):
        if self.training:
            return self.forward_train(x) * self.gate
        return self.forward_inference(x)

    def forward_train(self, x):
        return self.proj(x)

    def forward_inference(self, x):
        return self.proj(x)


class Generator(nn.Module):
    def __init__(self, width=64, depth=4, vocab=100):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def encode(self, tokens):
        return self.norm(self.embed(tokens)).mean(1)

    def sample(self, tokens):
        return self(tokens).argmax(-1)


def main(batches):
    model = Generator()
    for layer in model.layers:
        fully_shard(layer)
        register_fsdp_forward_method(layer, "forward_train")  # expect: SW230
    fully_shard(model.embed)
    fully_shard(model.head)  # expect: SW213
    fully_shard(model)
    ema = copy.deepcopy(model)  # expect: SW227
    optimizer = torch.optim.AdamW(model.parameters())
    for tokens in batches:
        features = model.encode(tokens)  # expect: SW231
        loss = model(tokens).sum() + features.sum()
        loss.backward()
        total = 0.0
        for parameter in model.parameters():
            total += parameter.grad.detach().norm(2).item() ** 2  # expect: SW233
        optimizer.step()
        optimizer.zero_grad()
        for average, parameter in zip(ema.parameters(), model.parameters()):
            average.data.mul_(0.999).add_(parameter.data, alpha=0.001)
    print(model.sample(batches[0]), total**0.5)
