"""What ranks do in the GPU tests; started by `shardwise.distributed.local_ranks.start_local`."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.config.schema import PrecisionConfig, ShardConfig
from shardwise.models.transformer import Transformer, TransformerConfig
from shardwise.planning.plan import Plan
from shardwise.sharding.apply import shard
from shardwise.sharding.inventory import local_part
from shardwise.sharding.registry import sharded_state
from shardwise.training.step import clip_grad_norm_


def start_ranks() -> tuple[int, int]:
    """Join the group; ranks that share a card talk over gloo, which NCCL refuses to do."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    shared = torch.cuda.device_count() < world_size
    dist.init_process_group("cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl")
    return rank, world_size


def small() -> nn.Module:
    torch.manual_seed(0)
    return Transformer(TransformerConfig(width=64, num_layers=3, max_sequence_length=32))


def tokens(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 256, (4, 32), generator=generator)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def train_and_compare(settings: dict[str, object]) -> dict[str, float]:
    """Three steps sharded on the GPU against one process on the same GPU; the worst differences."""
    rank, world_size = start_ranks()
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        reference = small().cuda()
        model = copy.deepcopy(reference).cpu() if settings.get("offload") else copy.deepcopy(reference)
        precision = PrecisionConfig(param_dtype=settings.pop("param_dtype", "auto"))
        mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("shard",))
        shard(model, ShardConfig(precision=precision, **settings), mesh=mesh)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        worst = {"loss": 0.0, "norm": 0.0, "parameter": 0.0}
        for step in range(3):
            mine = 0.0
            for other in range(world_size):
                expected = loss_of(reference, tokens(other, step).cuda())
                (expected / world_size).backward()
                if other == rank:
                    mine = expected.item()
            loss = loss_of(model, tokens(rank, step).cuda())
            loss.backward()
            norms = [clip_grad_norm_(model.parameters(), 1.0), nn.utils.clip_grad_norm_(reference.parameters(), 1.0)]
            worst["loss"] = max(worst["loss"], abs(loss.item() - mine))
            worst["norm"] = max(worst["norm"], abs(norms[0].item() - norms[1].item()))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            # Slices, not full_tensor(): DTensor's gather over gloo crashes on CUDA tensors.
            difference = p.to_local().cuda() - local_part(q.detach(), p)
            worst["parameter"] = max(worst["parameter"], difference.abs().max().item() if difference.numel() else 0.0)
        compute = {group.param_dtype for group in _plan_of(model).groups}
        return {**worst, "computes_in_bfloat16": float(compute == {"bfloat16"})}
    finally:
        dist.destroy_process_group()


def _plan_of(model: nn.Module) -> Plan:
    state = sharded_state(model)
    assert state is not None
    return state.plan
