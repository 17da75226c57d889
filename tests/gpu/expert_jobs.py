"""What ranks do in the GPU tests of experts."""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.models.moe import SHAPES, Moe
from tests.gpu.jobs import loss_of, start_ranks


def build() -> nn.Module:
    torch.manual_seed(0)
    return Moe(replace(SHAPES["moe-debug"], vocab_size=256)).cuda()


def tokens(rank: int, step: int) -> torch.Tensor:
    """Another number on each rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 256, (1, 3 + 20 * rank), generator=generator).cuda()


def divide_experts(compute: str) -> tuple[bool, str]:
    """Whether experts divided over the ranks train as in one process, and the report."""
    _, num_ranks = start_ranks()
    torch.backends.cuda.matmul.allow_tf32 = False
    mesh = init_device_mesh("cuda", (1, num_ranks), mesh_dim_names=("shard", "expert"))
    config = sw.ShardConfig(precision=sw.PrecisionConfig(param_dtype=compute))  # pyrefly: ignore[bad-argument-type]
    loss = lambda model, batch: loss_of(model, batch)  # noqa: E731
    result = sw.parity(build, tokens, loss, config, mesh=mesh)
    return result.equal, str(result)
