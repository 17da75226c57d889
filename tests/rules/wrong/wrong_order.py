"""A vision transformer whose modules are sharded in whatever order they came to mind."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Encoder(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(depth):
            self.layers.append(nn.TransformerEncoderLayer(width, 8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class ViT(nn.Module):
    def __init__(self, width=256, depth=6):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.encoder = Encoder(width, depth)
        self.heads = nn.ModuleDict({"cls": nn.Linear(width, 10), "aux": nn.Linear(width, 4)})

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        return self.heads["cls"](self.encoder(x).mean(1))


mesh = init_device_mesh("cuda", (8,))
model = ViT()
fully_shard(model.heads, mesh=mesh)  # expect: SW205
fully_shard(model.encoder, mesh=mesh)
for layer in model.encoder.layers:
    fully_shard(layer, mesh=mesh)  # expect: SW203
fully_shard(model.encoder.layers, mesh=mesh)  # expect: SW203, SW205
fully_shard(model, mesh=mesh)
fully_shard(model, mesh=mesh)  # expect: SW204

teacher = ViT()
for module in teacher.modules():
    fully_shard(module, mesh=mesh)  # expect: SW203

student = ViT()
for module in student.modules():
    if isinstance(module, (Encoder, nn.TransformerEncoderLayer)):
        fully_shard(module, mesh=mesh)  # expect: SW203
fully_shard(student, mesh=mesh)

nested = nn.Sequential(nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 8), 6), nn.Linear(256, 10))
for module in nested.modules():
    if isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
        fully_shard(module, mesh=mesh)  # expect: SW203
fully_shard(nested, mesh=mesh)

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
