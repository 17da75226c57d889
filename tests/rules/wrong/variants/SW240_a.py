"""A trainer that clears gradients by the model, after its forward."""

import torch
from torch.distributed.fsdp import fully_shard


class Trainer:
    def __init__(self, model, loader):
        for block in model.blocks:
            fully_shard(block)
        self.model = fully_shard(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.loader = loader

    def run(self):
        self.model.train()
        for x, y in self.loader:
            logits, loss = self.model(x, y)
            self.model.zero_grad(set_to_none=True)  # expect: SW240
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.validate(x)
            self.model.zero_grad()  # expect: SW240
            loss = self.model(x, y)[1]
            loss.backward()
            self.optimizer.step()
            self.validate(x)
            self.model.reshard()
            self.model.zero_grad()

    @torch.no_grad()
    def validate(self, x):
        return self.model(x)
