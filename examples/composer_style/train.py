"""A Composer user's script: the model names its groups, the optimizer comes first, the config is Composer's run file.

`prepare_fully_shard` takes the file as it is; a dictionary, an `FSDPConfig` or a `ParallelismConfig` as well. Each
setting is carried out, explained in the plan as no longer needed, or refused with what to write instead. Embedding
and head of the model in `run.yaml` are tied and both asked to be groups: the group around them holds the shared matrix.
`tensor.yaml` and `experts.yaml` divide other models over two ranks as well; name one as the script's argument.

    torchrun --nproc-per-node 2 examples/composer_style/train.py
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shardwise as sw
from shardwise.models.load import load_model
from shardwise.models.transformer import Block, Transformer, TransformerConfig
from shardwise.sharding.registry import sharded_state

VOCABULARY = 64


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
    if name == "tied_transformer":
        return TiedModel(TransformerConfig(vocab_size=VOCABULARY, width=64, num_layers=4, num_heads=4))
    return load_model(name, device="cpu")


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of naming each token's successor in the alphabet."""
    successors = (tokens + 1) % VOCABULARY
    return cross_entropy(model(tokens).float().flatten(0, 1), successors.flatten())


def main(run_file: str = "run.yaml", num_steps: int = 20) -> list[float]:
    """Train; return the losses of this rank."""
    sw.init_distributed()
    path = Path(__file__).with_name(run_file)
    settings: dict[str, Any] = yaml.safe_load(path.read_text())
    # sync_module_states in run.yaml sends rank 0's weights to the others.
    torch.manual_seed(dist.get_rank() if run_file == "run.yaml" else 0)
    model = build(settings["model"]["name"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    sw.prepare_fully_shard(model, optimizer, path)
    state = sharded_state(model)
    assert state is not None
    if dist.get_rank() == 0:
        print(state.plan)

    # Ranks that share matrix products, which are neighbours, get the same batch; all others get their own.
    num_sharing = state.mesh["tensor"].size() if "tensor" in (state.mesh.mesh_dim_names or ()) else 1
    generator = torch.Generator().manual_seed(dist.get_rank() // num_sharing)
    device = next(model.parameters()).device
    losses: list[float] = []
    for step in range(num_steps):
        tokens = torch.randint(0, VOCABULARY, (8, 32), generator=generator).to(device)
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
    main(*sys.argv[1:])
