"""What ranks do in the GPU tests of compositions."""

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.models.load import load_model
from shardwise.sharding.float8 import import_torchao
from tests.gpu.jobs import loss_of, start_ranks


def llama() -> nn.Module:
    torch.manual_seed(0)
    return load_model("llama3-debug", device="cuda", options={"num_layers": 2})


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank)).cuda()


def compose(names: list[str]) -> dict[str, str]:
    """How each composition ended on these ranks: `equal`, or what differs."""
    _, num_ranks = start_ranks()
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        return {name: CASES[name](num_ranks) for name in names}
    finally:
        dist.destroy_process_group()


def on_mesh(second: str) -> Callable[[int], str]:
    """Two axes, of which the other one shards."""

    def run(num_ranks: int) -> str:
        axes = ("replicate", "shard") if second == "replicate" else ("shard", second)
        mesh = init_device_mesh("cuda", (2, num_ranks // 2), mesh_dim_names=axes)
        config = sw.ShardConfig(precision=sw.PrecisionConfig(param_dtype="storage"))
        result = sw.parity(llama, batch, lambda model, batch: loss_of(model, batch), config, mesh=mesh)
        return "equal" if result.equal else str(result)

    return run


def in_float8(num_ranks: int) -> str:
    """Losses of three steps against one process with torchao's layers, each rank's batch in turn."""
    float8, rank = import_torchao(), dist.get_rank()
    mesh = init_device_mesh("cuda", (num_ranks,), mesh_dim_names=("shard",))
    precision = sw.PrecisionConfig(param_dtype="storage")
    model = sw.shard(llama(), sw.ShardConfig(precision=precision, float8=sw.Float8Config()), mesh=mesh)
    recipe = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name("tensorwise"))
    reference = float8.convert_to_float8_training(
        llama(), config=recipe, module_filter_fn=lambda _, name: "layers." in name
    )
    worst = 0.0
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, reference)]
    for step in range(3):
        loss = loss_of(model, batch(rank, step))
        losses = [loss_of(reference, batch(other, step)) for other in range(num_ranks)]
        worst = max(worst, abs(loss.item() - losses[rank].item()))
        loss.backward()
        (sum(losses) / num_ranks).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Of losses near 4.5; an element of float8 may round to its neighbour where sums were added in another order.
    return "equal" if worst < 2e-2 else f"losses differ by {worst}"


class Towers(nn.Module):
    """Two towers, of which one may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2)))
        self.language = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2)))

    def forward(self, x: Tensor, *, sees: bool) -> Tensor:
        return self.language(self.vision(x) if sees else x)


def skip_tower(num_ranks: int) -> str:
    """Rank 1 skips a tower in the second step: every rank raises before the update."""
    mesh = init_device_mesh("cuda", (num_ranks,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    config = sw.ShardConfig(block_patterns=("vision.*", "language.*"))
    model = sw.shard(Towers().cuda(), config, mesh=mesh)
    optimizer, updates = torch.optim.SGD(model.parameters(), lr=0.1), 0
    try:
        for step in range(3):
            model(torch.ones(2, 64, device="cuda"), sees=step == 0 or dist.get_rank() != 1).sum().backward()
            optimizer.step()
            updates += 1
    except sw.ShardwiseError as error:
        is_named = "ranks diverge" in str(error) and "vision" in str(error)
        return "equal" if is_named and updates == 1 else f"after {updates} updates: {error}"
    return "nothing was raised"


CASES = {"replicate": on_mesh("replicate"), "tensor": on_mesh("tensor"), "float8": in_float8, "guard": skip_tower}
