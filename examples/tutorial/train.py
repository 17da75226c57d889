"""PyTorch's FSDP2 tutorial, as a user of shardwise writes it.

A Transformer is built on the meta device, sharded with bfloat16 compute, float32 reduction and explicit
prefetching two blocks ahead, filled with values shard by shard, and trained to repeat its input. What the
tutorial checks by hand (placements, dtypes) is checked here too.

    torchrun --nproc-per-node 2 examples/tutorial/train.py
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy

import shardwise as sw
from shardwise.models.transformer import Transformer, TransformerConfig

CONFIG = sw.ShardConfig(
    precision=sw.PrecisionConfig(param_dtype="bfloat16", reduce_dtype="float32"),
    prefetch=sw.PrefetchConfig(forward=2, backward=2),
)


def main(num_steps: int = 20) -> list[float]:
    """Train; return the losses of this rank."""
    mesh = sw.init_distributed()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer(TransformerConfig(vocab_size=64, width=64, num_layers=4, num_heads=4))
    plan = sw.plan(model, CONFIG, mesh=mesh)
    sw.shard(model, mesh=mesh, plan=plan)
    sw.materialize(model)
    check(model)
    if dist.get_rank() == 0:
        print(plan)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own data
    losses: list[float] = []
    for step in range(num_steps):
        tokens = torch.randint(0, 64, (8, 32), generator=generator).to(mesh.device_type)
        loss = cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        loss.backward()
        sw.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step:2} loss {losses[-1]:.4f}")
    dist.destroy_process_group()
    return losses


def check(model: torch.nn.Module) -> None:
    """Every parameter is a float32 shard of its rows, or of its columns where those divide better."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert isinstance(parameter.placements[0], Shard), name
        assert parameter.dtype is torch.float32, name


if __name__ == "__main__":
    main()
