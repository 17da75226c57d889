"""What is a mistake after `fully_shard` can be right after `shardwise.shard`, which takes care of it."""

import torch
from torch import nn

import shardwise as sw


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, 8)

    def encode(self, x):
        return self.head(x)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


mesh = sw.init_distributed()
with torch.device("meta"):
    model = Model()
early = torch.optim.AdamW(model.parameters())
sw.shard(model, mesh=mesh, optimizers=[early])
sw.materialize(model)
with torch.no_grad():
    model(torch.ones(1, 8))
late = torch.optim.AdamW(model.parameters())
model.forward(torch.ones(1, 8)).sum().backward()
model.encode(torch.ones(1, 8))
norm = sw.clip_grad_norm_(model, 1.0)
print(f"{norm:.3f}", norm.item())
for parameter in model.parameters():
    parameter.data = parameter.data * 0.5
sw.save_weights(model, "model.safetensors")
