"""A Composer user's script: the model names its groups, the optimizer comes first, the config is Composer's run file.

`prepare_fully_shard` takes the file as it is; a dictionary, an `FSDPConfig` or a `ParallelismConfig` as well. Each
setting is carried out, explained in the plan as no longer needed, or refused with what to write instead. Embedding
and head are tied and both asked to be groups: the group around them holds the shared matrix.

Composer's other degrees are carried out too: `tensor_parallel.yaml` divides matrices over two ranks,
`expert_parallel.yaml` the experts of a mixture. Name the file after the command:

    torchrun --nproc-per-node 2 examples/composer_style/train.py
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from yaml import safe_load

import shardwise as sw
from shardwise.distributed.mesh import data_parallel_rank
from shardwise.models.moe import SHAPES, Moe
from shardwise.models.transformer import Block, Transformer, TransformerConfig
from shardwise.sharding.registry import sharded_state

VOCAB_SIZE = 64


class TiedModel(Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.output.weight = self.token_embedding.weight

    def fsdp_wrap_fn(self, module: nn.Module) -> bool | dict[str, Any]:
        """Composer asks it about every module."""
        if module is self.blocks[-1]:
            return {"reshard_after_forward": False}  # backward starts with it
        return isinstance(module, Block) or module in (self.token_embedding, self.output)

    def activation_checkpointing_fn(self, module: nn.Module) -> bool:
        """Composer asks it too, where `activation_checkpointing` is on."""
        return isinstance(module, Block)


def build(name: str) -> nn.Module:
    """The model of that name in a run file."""
    if name == "moe":
        return Moe(replace(SHAPES["moe-debug"], vocab_size=VOCAB_SIZE))
    return TiedModel(TransformerConfig(vocab_size=VOCAB_SIZE, width=64, num_layers=4, num_heads=4))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of naming each token's successor in the alphabet."""
    return cross_entropy(model(tokens).float().flatten(0, 1), ((tokens + 1) % VOCAB_SIZE).flatten())


def main(num_steps: int = 20, file_name: str = "run.yaml") -> list[float]:
    """Train; return the losses of this rank."""
    run_file = Path(__file__).with_name(file_name)
    sw.init_distributed()
    torch.manual_seed(dist.get_rank())  # sync_module_states sends rank 0's weights to the others
    model = build(safe_load(run_file.read_text())["model"]["name"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    sw.prepare_fully_shard(model, optimizer, run_file)
    state = sharded_state(model)
    assert state is not None
    if dist.get_rank() == 0:
        print(state.plan)

    generator = torch.Generator().manual_seed(data_parallel_rank(state.mesh))  # the same within a tensor group
    device = next(model.parameters()).device
    losses: list[float] = []
    for step in range(num_steps):
        tokens = torch.randint(0, VOCAB_SIZE, (8, 32), generator=generator).to(device)
        loss = loss_of(model, tokens)
        loss.backward()
        sw.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step:2} loss {losses[-1]:.4f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(20, *sys.argv[1:])
