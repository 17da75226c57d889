"""The two models that are compared, the careful way to shard them by hand, and a loop that trains them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from shardwise.models.llama import Llama, LlamaConfig
from shardwise.models.transformer import Transformer, TransformerConfig

LLAMA = {
    "toy": LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=256,
        max_sequence_length=64,
    ),
    "cpu": LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        vocab_size=4096,
        max_sequence_length=256,
    ),
    "cuda": LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=16,
        num_heads=16,
        num_kv_heads=8,
        vocab_size=32_000,
        max_sequence_length=2048,
    ),
}
TUTORIAL = {
    "toy": TransformerConfig(num_layers=2, max_sequence_length=64),
    "cpu": TransformerConfig(width=256, num_layers=8),
    "cuda": TransformerConfig(width=1024, num_layers=16, num_heads=16, max_sequence_length=1024),
}
BATCH = {"toy": (2, 32), "cpu": (4, 128), "cuda": (8, 1024)}


def build(model: str, size: str, device: str) -> nn.Module:
    """The unsharded model, the same on every rank."""
    torch.manual_seed(0)
    with torch.device(device):
        return Llama(LLAMA[size]) if model == "llama" else Transformer(TUTORIAL[size])


def shard_by_hand(model: nn.Module, mesh: DeviceMesh, device: str) -> nn.Module:
    """What a careful engineer writes: a group per block, large embedding and head apart, the root last."""
    compute = torch.bfloat16 if device == "cuda" else None
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
    }
    if isinstance(model, Llama):
        fully_shard(model.model.embed_tokens, **settings)
        for layer in model.model.layers:
            fully_shard(layer, **settings)
        fully_shard(model.lm_head, **settings)
    else:
        assert isinstance(model, Transformer)
        for block in model.blocks:  # as in torch's tutorial: its embeddings are small and stay with the root
            fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model


class Trainer:
    """A sharded model with its optimizer and its own stream of batches, other ones on every rank."""

    def __init__(self, model: nn.Module, size: str, device: str) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.generator = torch.Generator(device).manual_seed(dist.get_rank())
        self.vocab_size: int = model.config.vocab_size  # pyrefly: ignore[bad-assignment, missing-attribute]
        self.shape, self.device = BATCH[size], device
        self.loss = torch.zeros(())

    def steps(self, count: int) -> None:
        for _ in range(count):
            batch = self._batch()
            logits = self.model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.loss = loss.detach()

    def _batch(self) -> Tensor:
        return torch.randint(0, self.vocab_size, self.shape, generator=self.generator, device=self.device)
