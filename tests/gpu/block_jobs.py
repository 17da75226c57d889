"""What ranks do in the GPU tests of recomputing and compiling blocks."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.models.transformer import Transformer, TransformerConfig
from tests.gpu.jobs import start_ranks


def build(dropout: float) -> Transformer:
    torch.manual_seed(0)
    return Transformer(
        TransformerConfig(width=512, num_layers=6, num_heads=8, max_sequence_length=512, dropout=dropout)
    ).cuda()


CONFIG = sw.ShardConfig(precision=sw.PrecisionConfig(param_dtype="storage"))


def join() -> tuple[int, DeviceMesh]:
    torch.backends.cuda.matmul.allow_tf32 = False
    rank, num_ranks = start_ranks()
    return rank, init_device_mesh("cuda", (num_ranks,), mesh_dim_names=("shard",))


def step(model: nn.Module, rank: int) -> tuple[dict[str, Tensor], int]:
    """This rank's gradients of a step, always with the same random numbers, and the bytes kept for backward."""
    tokens = torch.randint(0, 256, (8, 512), generator=torch.Generator().manual_seed(rank)).cuda()
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(100 + rank)
    loss = model(tokens).float().square().mean()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    return {name: p.grad.to_local().clone() for name, p in model.named_parameters()}, kept  # pyrefly: ignore


def recompute(policy: str) -> tuple[float, int, int]:
    """Largest relative difference of a gradient to those without recomputing, and the bytes kept by each."""
    rank, mesh = join()
    kept, bytes_kept = step(sw.shard(build(0.1), CONFIG, mesh=mesh), rank)
    model = sw.shard(sw.checkpoint_activations(build(0.1), policy), CONFIG, mesh=mesh)  # pyrefly: ignore
    step(model, rank)
    recomputed, bytes_recomputed = step(model, rank)
    torch.distributed.destroy_process_group()
    return difference(recomputed, kept), bytes_kept, bytes_recomputed


def offload(recompute: bool) -> tuple[float, int, int]:
    """As `recompute`, of blocks that keep in CPU memory what they keep, by Composer's settings."""
    rank, mesh = join()
    kept, bytes_kept = step(sw.shard(build(0.1), CONFIG, mesh=mesh), rank)
    settings = {"activation_cpu_offload": True, "activation_checkpointing": recompute, "mixed_precision": "FULL"}
    model = sw.prepare_fully_shard(build(0.1), None, {**settings, "device_mesh": mesh})
    step(model, rank)
    offloaded, bytes_offloaded = step(model, rank)
    torch.distributed.destroy_process_group()
    return difference(offloaded, kept), bytes_kept, bytes_offloaded


def compile_with_inductor(policy: str) -> float:
    """Largest relative difference of a gradient between compiled and plain blocks."""
    rank, mesh = join()
    plain, _ = step(sw.shard(build(0.0), CONFIG, mesh=mesh), rank)
    model = sw.compile_blocks(sw.checkpoint_activations(build(0.0), policy))  # pyrefly: ignore
    sw.shard(model, CONFIG, mesh=mesh)
    step(model, rank)
    compiled, _ = step(model, rank)
    torch.distributed.destroy_process_group()
    return difference(compiled, plain)


def difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((actual[n] - e).abs().max() / e.abs().max().clamp_min(1e-8)) for n, e in expected.items())
