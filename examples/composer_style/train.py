"""A Composer user's script: the model names its groups, the optimizer comes first, the config is Composer's run file.

`prepare_fully_shard` takes the file as it is; a dictionary, an `FSDPConfig` or a `ParallelismConfig` as well. Each
setting is carried out, explained in the plan as no longer needed, or refused with what to write instead. Embedding
and head are tied and both asked to be groups: the group around them holds the shared matrix.

    torchrun --nproc-per-node 2 examples/composer_style/train.py
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shardwise as sw
from shardwise.models.transformer import Block, Transformer, TransformerConfig
from shardwise.sharding.registry import sharded_state

RUN_FILE = Path(__file__).with_name("run.yaml")


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

    def loss(self, tokens: Tensor) -> Tensor:
        """Of naming each token's successor in the alphabet."""
        successors = (tokens + 1) % self.config.vocab_size
        return cross_entropy(self(tokens).float().flatten(0, 1), successors.flatten())


def main(num_steps: int = 20) -> list[float]:
    """Train; return the losses of this rank."""
    sw.init_distributed()
    torch.manual_seed(dist.get_rank())  # sync_module_states sends rank 0's weights to the others
    model = TiedModel(TransformerConfig(vocab_size=64, width=64, num_layers=4, num_heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    sw.prepare_fully_shard(model, optimizer, RUN_FILE)
    state = sharded_state(model)
    if dist.get_rank() == 0 and state is not None:
        print(state.plan)

    generator = torch.Generator().manual_seed(dist.get_rank())
    device = next(model.parameters()).device
    losses: list[float] = []
    for step in range(num_steps):
        tokens = torch.randint(0, 64, (8, 32), generator=generator).to(device)
        loss = model.loss(tokens)
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
    main()
