"""A robot policy trained natively: transformers' PI0 with bfloat16 weights and float32 norms, as openpi stores it.

- Rank 0 alone reads the pretrained safetensors file; the others get their shards from it.
- Weights of two dtypes, both trained, which FSDP1 and one group of FSDP2 refuse: the plan splits groups by dtype.
- Observations arrive in a frozen dataclass; PI0 hands its language tower's keys and values on in a cache.
- The optimizer is built before the model is sharded.
- Halfway the run is saved to one file, loaded into a new policy, and continues.

    torchrun --nproc-per-node 2 -m examples.robotics_policy.train
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from examples.robotics_policy.policy import Policy, build, sample, write_pretrained

import shardwise as sw


def start(mesh: dist.DeviceMesh) -> tuple[Policy, torch.optim.Optimizer]:
    """A sharded policy and its optimizer."""
    policy = build(seed=0, bfloat16=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3)
    config = sw.ShardConfig(allow_16bit_storage=True)  # a choice of the policy's authors, not an accident
    plan = sw.plan(policy, config, mesh=mesh)
    if dist.get_rank() == 0:
        print(plan)
    return sw.shard(policy, mesh=mesh, plan=plan, optimizers=optimizer), optimizer


def train(policy: Policy, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The losses of this rank."""
    losses = []
    for step in steps:
        batch = sample(step, dist.get_rank(), dist.get_world_size())
        loss = policy(*sw.cast_inputs(batch, torch.bfloat16, next(policy.parameters()).device.type))
        loss.backward()
        sw.clip_grad_norm_(policy.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step:2} loss {losses[-1]:.4f}")
    return losses


def main(num_steps: int = 30, *, resume: bool = True) -> list[float]:
    """Train, save, load, continue; return the losses of this rank."""
    mesh = sw.init_distributed()
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared, src=0)
    weights, checkpoint = Path(shared[0]) / "pretrained.safetensors", Path(shared[0]) / "checkpoint.pt"
    if dist.get_rank() == 0:
        write_pretrained(weights, bfloat16=True)

    policy, optimizer = start(mesh)
    sw.load_weights(policy, weights, broadcast=True)  # only rank 0 opens the file
    half = num_steps // 2 if resume else num_steps
    losses = train(policy, optimizer, range(half))
    if resume:
        sw.save_full(checkpoint, model=policy, optimizers=optimizer, extra={"step": half})
        policy, optimizer = start(mesh)
        extra = sw.load_full(checkpoint, model=policy, optimizers=optimizer)
        losses += train(policy, optimizer, range(extra["step"], num_steps))
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
