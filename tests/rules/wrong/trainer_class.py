"""A trainer class that does each thing in a method of its own."""

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Trainer:
    def __init__(self, config, model: nn.Module, loader):
        self.config = config
        self.loader = loader
        self.model = model
        self.optimizer = self.build_optimizer()
        self.setup_fsdp()
        self.step = 0

    def build_optimizer(self):
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.config.lr)  # expect: SW201

    def setup_fsdp(self):
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)

    def cast(self, dtype):
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)  # expect: SW228

    def train(self):
        for batch in self.loader:
            loss = self.model.forward(batch).mean()  # expect: SW229
            loss.backward()
            self.optimizer.step()
            self.step += 1

    def save(self, path):
        torch.save(  # expect: SW221
            {"step": self.step, "model": {k: v.cpu() for k, v in self.model.state_dict().items()}},
            path,
        )
