"""An FSDP1 script on FSDP2: only the lines that import from `shardwise.fsdp1` said `torch.distributed.fsdp` before.

Blocks are wrapped by a policy, computed in bfloat16 and recomputed in backward; gradients are accumulated over two
micro-steps and clipped. At the end model and optimizer are saved as FSDP1 saves them, loaded into a new model, and
training continues from there.

    torchrun --nproc-per-node 2 examples/from_fsdp1/train.py
"""

import functools
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.functional import cross_entropy

from shardwise.fsdp1 import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from shardwise.fsdp1 import FullyShardedDataParallel as FSDP
from shardwise.fsdp1.wrap import transformer_auto_wrap_policy
from shardwise.models.transformer import Block, Transformer, TransformerConfig

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)


def build(device: torch.device) -> tuple[FSDP, torch.optim.Optimizer]:
    """A wrapped model and its optimizer."""
    torch.manual_seed(0)
    model = FSDP(
        Transformer(TransformerConfig(vocab_size=64, width=64, num_layers=4, num_heads=4)),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        mixed_precision=BF16,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=device,
        use_orig_params=True,
    )
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=checkpoint_wrapper,
        check_fn=lambda module: isinstance(module, Block),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def loss_of(model: FSDP, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """How well the model repeats tokens of this rank."""
    tokens = torch.randint(0, 64, (8, 32), generator=generator).to(device)
    return cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def run(model: FSDP, optimizer: torch.optim.Optimizer, generator: torch.Generator, steps: range) -> list[float]:
    """Train; return the losses of this rank."""
    losses: list[float] = []
    for step in steps:
        with model.no_sync():
            (loss_of(model, generator, model.compute_device) / 2).backward()
        loss = loss_of(model, generator, model.compute_device)
        (loss / 2).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step:2} loss {losses[-1]:.4f}")
    return losses


def save(model: FSDP, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Rank 0 writes whole tensors; every rank takes part."""
    configs = FullStateDictConfig(True, rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        states = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    if dist.get_rank() == 0:
        torch.save(states, path)
    dist.barrier()


def load(model: FSDP, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Every rank reads the file and keeps its part."""
    states = torch.load(path, map_location="cpu")
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states["optimizer"]))


def main(num_steps: int = 20) -> list[float]:
    """Train, save, load, continue; return the losses of this rank."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank(0))
    generator = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own data
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared, src=0)
    path = Path(shared[0]) / "checkpoint.pt"

    model, optimizer = build(device)
    if dist.get_rank() == 0:
        print(model.plan)
    losses = run(model, optimizer, generator, range(num_steps // 2))
    save(model, optimizer, path)

    model, optimizer = build(device)
    load(model, optimizer, path)
    losses += run(model, optimizer, generator, range(num_steps // 2, num_steps))
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
