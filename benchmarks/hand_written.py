"""A training loop as a careful engineer writes it by hand: FSDP2, a group a block, clipping, fused AdamW, no more."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from shardwise.models.load import load_model


def by_hand(name: str, options: dict[str, Any], mesh: DeviceMesh) -> nn.Module:
    """A reference model on meta, sharded block by block, the root last, then given memory and values."""
    model = load_model(name, options=options)
    dtype = torch.bfloat16 if mesh.device_type == "cuda" else None
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for block in blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)  # embedding and output matrix are one tensor in some models: they stay with the root
    model.to_empty(device=mesh.device_type)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # pyrefly: ignore[not-callable]
    return model


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give a model the weights of another one that is sharded over the same ranks, perhaps along other dims."""
    weights = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(weights[name].redistribute(placements=parameter.placements))


class HandWritten:
    """A model with its optimizer, and batches that lie in memory already."""

    def __init__(self, model: nn.Module, batches: Sequence[dict[str, Tensor]], *, lr: float) -> None:
        self.model, self.batches = model, batches
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
        self.loss = torch.zeros(())
        self._next = 0

    def steps(self, count: int) -> None:
        """So many optimizer steps."""
        for _ in range(count):
            batch = self.batches[self._next % len(self.batches)]
            self._next += 1
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            tokens = inputs.pop("input_ids")
            logits = self.model(tokens, **inputs)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.loss = loss.detach()
