"""What ranks do in the GPU tests of the step; started by `shardwise.distributed.local_ranks.start_local`."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.config.run import OptimizerConfig
from shardwise.config.schema import PrecisionConfig, ShardConfig
from shardwise.models.transformer import Transformer, TransformerConfig
from shardwise.sharding.apply import shard
from shardwise.sharding.inventory import local_part
from shardwise.training.metrics import StepMetrics
from shardwise.training.microbatching import Batch, Microbatches
from shardwise.training.optimizers import build_optimizer, parameter_kinds
from shardwise.training.step import accumulate
from tests.gpu.jobs import loss_of, start_ranks

ROWS, LENGTH = 16, 256


def wide() -> nn.Module:
    torch.manual_seed(0)
    # Wide enough that the allocator's segments of 20 MiB are small beside half a batch.
    return Transformer(TransformerConfig(width=1024, num_layers=3, max_sequence_length=LENGTH))


def rows_of(rank: int) -> torch.Tensor:
    return torch.randint(0, 256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(rank)).cuda()


def sharded(reference: nn.Module, world_size: int) -> nn.Module:
    mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("shard",))
    return shard(copy.deepcopy(reference), ShardConfig(precision=PrecisionConfig(param_dtype="storage")), mesh=mesh)


def run_out_for_real() -> dict[str, float]:
    """Two ranks; the second may use so little memory that its batch fits only by halves."""
    rank, world_size = start_ranks()
    try:
        return _run_out(rank, world_size)
    finally:
        dist.destroy_process_group()


def _run_out(rank: int, world_size: int) -> dict[str, float]:
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = wide().cuda()
    model = sharded(reference, world_size)
    for other in range(world_size):
        (loss_of(reference, rows_of(other)) / world_size).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}

    def work(parts: list[Batch]) -> None:
        for number, part in enumerate(parts):
            with accumulate(model, number, len(parts), "memory"):
                (loss_of(model, part["ids"]) * len(part["ids"]) / ROWS).backward()

    batch = {"ids": rows_of(rank)}
    peaks = [_peak(model, work, batch, size) for size in (ROWS, ROWS, ROWS // 2)]
    before = torch.cuda.memory_allocated()
    if rank == 1:
        limit = (peaks[1] + peaks[2]) / 2
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    micro = Microbatches(model, ROWS, report=lambda _: None)
    micro.run(work, batch)
    size, halvings = micro.size, micro.num_halvings
    # Slices, not full_tensor(): DTensor's gather over gloo crashes on CUDA tensors.
    differences = [
        p.grad.to_local() - local_part(expected[name], p)
        for name, p in model.named_parameters()
        if p.to_local().numel()
    ]
    worst = max(difference.abs().max().item() for difference in differences)
    del differences
    model.zero_grad()
    left = torch.cuda.memory_allocated() - before
    return {"size": size, "halvings": halvings, "worst": worst, "left": left, "saved": peaks[1] - peaks[2]}


def _peak(model: nn.Module, work: Callable[[list[Batch]], None], batch: Batch, size: int) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    Microbatches(model, ROWS, size).run(work, batch)
    model.zero_grad()
    peak = torch.cuda.max_memory_allocated()  # what is reserved beyond it is given back before memory runs out
    torch.cuda.empty_cache()
    return peak


def read_metrics_without_waiting() -> dict[str, list[float]]:
    """Which step's metrics are there after each step, while every synchronising call is an error."""
    start_ranks()
    try:
        metrics = StepMetrics(init_device_mesh("cuda", (1,), mesh_dim_names=("shard",)))
        readings, read, loss = [], [], torch.ones((), device="cuda")
        for step in (1, 2, 3):
            loss = loss + 1
            torch.cuda.set_sync_debug_mode("error")
            metrics.count(torch.full((), 8.0, device="cuda"))
            readings += metrics.add(step, metrics.mean(loss), loss)
            torch.cuda.set_sync_debug_mode("default")
            read.append(readings[-1].step if readings else None)
        readings += metrics.flush()
        return {"read": [*read, readings[-1].step], "losses": [reading.loss for reading in readings]}
    finally:
        dist.destroy_process_group()


def muon_on_shards() -> dict[str, float]:
    """Muon in bfloat16 on two ranks against one, from the same gradients; how many elements differ at all."""
    _, world_size = start_ranks()
    try:
        return {"differing": _muon_differences(world_size)}
    finally:
        dist.destroy_process_group()


def _muon_differences(world_size: int) -> int:
    reference = wide().cuda()
    model = sharded(reference, world_size)
    optimizers = [build_optimizer(each, OptimizerConfig(name="muon")) for each in (model, reference)]
    for _ in range(2):
        for each in (model, reference):
            loss_of(each, rows_of(0)).backward()
        for (
            name,
            parameter,
        ) in model.named_parameters():  # the very same bits everywhere: backward adds in no fixed order
            gradient = reference.get_parameter(name).grad
            dist.broadcast(gradient, 0)
            parameter.grad.to_local().copy_(local_part(gradient, parameter))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    kinds = parameter_kinds(reference)
    pairs = [(p, reference.get_parameter(name)) for name, p in model.named_parameters()]
    return sum(
        (part.to_local() != local_part(whole.detach(), part)).sum().item()
        for part, whole in pairs
        if kinds[whole] == "blocks"
    )
