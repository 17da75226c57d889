"""Fine-tunes a small transformer; the optimizer was moved up while tidying."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=64, depth=4, vocab=1000):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelize(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # expect: SW211
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = Net().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)  # expect: SW201
    model = parallelize(model, mesh)
    for step in range(100):
        tokens = torch.randint(0, 1000, (4, 128), device="cuda")
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if local_rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.3f} norm {norm.item():.3f}")  # expect: SW233
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")  # expect: SW221
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
