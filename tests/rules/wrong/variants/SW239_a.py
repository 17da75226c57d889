"""A masked mean in a method of a trainer, and a criterion that ignores padding."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


class Trainer:
    def __init__(self, model: nn.Module, pad: int):
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        self.model = model
        self.criterion = torch.nn.NLLLoss(ignore_index=pad)  # expect: SW239
        self.pad = pad

    def loss(self, tokens, targets):
        per_token = nn.functional.cross_entropy(self.model(tokens).transpose(1, 2), targets, reduction="none")
        loss_mask = targets != self.pad
        count = loss_mask.float().sum()
        loss = (per_token * loss_mask).sum()
        loss /= count + 1e-8  # expect: SW239
        return loss

    def evaluate(self, losses, targets):
        return losses.sum() / (targets != self.pad).sum()

    def train(self, loader):
        for tokens, targets in loader:
            self.loss(tokens, targets).backward()
