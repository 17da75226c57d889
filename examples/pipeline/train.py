"""A decoder in two pipeline stages, each on a rank of its own.

The model is built on the meta device, and each rank fills its stage only. All stages together save one checkpoint,
which a run without a pipeline loads.

    torchrun --nproc-per-node 2 examples/pipeline/train.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shardwise as sw
from shardwise.models.llama import SHAPES, Llama

CONFIG = sw.ShardConfig(pipeline=sw.PipelineConfig(schedule="1f1b", microbatches=4))


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a micro-batch, summed over its tokens."""
    return cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens, and themselves as labels."""
    tokens = torch.randint(0, 64, (8, 32), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def main(num_steps: int = 20) -> list[float]:
    """Train; return the losses, the same on both ranks."""
    mesh = sw.init_distributed(sw.MeshConfig(shard=1, pipeline=2))
    with torch.device("meta"):
        model = Llama(SHAPES["llama3-debug"])
    generator = torch.Generator().manual_seed(0)  # the ranks of a pipeline get the same batch
    pipe = sw.pipeline(model, CONFIG, mesh=mesh, loss=loss_sum, example_inputs=make_batch(generator))
    torch.manual_seed(dist.get_rank())  # stages draw weights of their own
    sw.materialize(pipe.model)
    if dist.get_rank() == 0:
        print(pipe.plans[0])

    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    losses: list[float] = []
    for step in range(num_steps):
        loss = pipe.step(make_batch(generator))
        sw.clip_grad_norm_(pipe.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step:2} loss {losses[-1]:.4f}")
    _save(pipe, optimizer, num_steps)
    dist.destroy_process_group()
    return losses


def _save(pipe: sw.Pipeline, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save all stages into one checkpoint, of which rank 0 counts the parameters."""
    folders: list[str | None] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0] or "")
    with sw.Checkpointer(folder, asynchronous=False) as checkpointer:
        checkpointer.save(step, model=pipe.model, optimizers=optimizer)
    if dist.get_rank() == 0:
        names = [each.name for each in sw.inspect_checkpoint(folder).tensors if each.name.startswith("model.")]
        print(f"{len(names)} parameters of both stages in {folder}")


if __name__ == "__main__":
    main()
