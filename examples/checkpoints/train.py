"""A run that is stopped halfway and continues as if it had not been.

The first half trains, saving every five steps in the background. The second half starts from nothing: a model on the
meta device, a new optimizer and schedule, all filled from the last checkpoint. At the end the weights are written as a
safetensors file that any other tool opens. Stop it anywhere and start it again, on any number of ranks: it resumes.

    torchrun --nproc-per-node 2 examples/checkpoints/train.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR

import shardwise as sw
from shardwise.models.transformer import Transformer, TransformerConfig


class Batches:
    """Random tokens, with a position that is saved: `state_dict` and `load_state_dict` are all it takes."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def next(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.rank + self.position)
        self.position += 1
        return torch.randint(0, 64, (8, 32), generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def main(num_steps: int = 20, folder: str | None = None) -> list[float]:
    """Train in two halves; return the losses of this rank."""
    mesh = sw.init_distributed()
    shared: list[Any] = [folder or tempfile.mkdtemp(prefix="checkpoints-")]
    dist.broadcast_object_list(shared)
    losses = train(mesh, shared[0], num_steps // 2, show_plan=True)
    losses += train(mesh, shared[0], num_steps)
    dist.destroy_process_group()
    return losses


def train(mesh: DeviceMesh, folder: str, until: int, *, show_plan: bool = False) -> list[float]:
    """Resume from the last checkpoint, where there is one, and train until a step."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer(TransformerConfig(vocab_size=64, width=64, num_layers=4, num_heads=4))
    plan = sw.plan(model, mesh=mesh)
    sw.shard(model, mesh=mesh, plan=plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = LinearLR(optimizer, total_iters=5)
    batches = Batches(dist.get_rank())
    losses: list[float] = []
    with sw.Checkpointer(folder, keep_last=2) as checkpointer:
        if checkpointer.latest() is None:
            sw.materialize(model)
            start = 0
        else:
            start = checkpointer.load(model=model, optimizers=optimizer, schedule=schedule, batches=batches)
        if dist.get_rank() == 0:
            print(plan if show_plan else f"resumed at step {start}")
        for step in range(start, until):
            tokens = batches.next().to(mesh.device_type)
            loss = cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            loss.backward()
            sw.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
            if dist.get_rank() == 0:
                print(f"step {step:2} loss {losses[-1]:.4f}")
            if (step + 1) % 5 == 0:
                checkpointer.save(step + 1, model=model, optimizers=optimizer, schedule=schedule, batches=batches)
    sw.save_weights(model, Path(folder) / f"weights-{until}.safetensors")
    return losses


if __name__ == "__main__":
    main()
