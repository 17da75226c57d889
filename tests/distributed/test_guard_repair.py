"""guard(model, repair=...): ranks that take different branches train as one process would on all their batches."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwise.config.schema import ShardConfig
from shardwise.diagnosing.guard import guard
from shardwise.errors import ShardError
from shardwise.sharding.apply import shard
from shardwise.sharding.registry import recover
from tests.by_hand import FP32, full
from tests.faults.diverging import Model
from tests.ranks import ranks


class Towers(nn.Module):
    """A tower of two groups that reads the input itself, and one that a rank may use instead."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleDict({"stem": nn.Linear(8, 8), "blocks": nn.ModuleList([nn.Linear(8, 8)])})
        self.audio = nn.Linear(8, 8)
        self.text, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, which: str) -> Tensor:
        if which == "vision":
            x = self.vision["blocks"][0](self.vision["stem"](x).relu())  # pyrefly: ignore[bad-index]
        elif which == "audio":
            x = self.audio(x)
        return self.head(self.text(x).relu())


def by_hand(model: nn.Module, parts: list[str], mesh_shape: tuple[int, ...] = (2,)) -> nn.Module:
    axes = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=axes)
    for part in parts:
        fully_shard(model.get_submodule(part), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def built(make: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def assert_trains_alike(model: nn.Module, reference: nn.Module, branches: list[list[str]], rank: int) -> None:
    """`branches[step][rank]` is what a rank's forward is told."""
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.05, weight_decay=0.1) for each in (model, reference))
    for step, by_rank in enumerate(branches):
        model(batch(rank, step), by_rank[rank]).square().mean().backward()
        with torch.no_grad():  # must leave nothing gathered: the optimizer steps on shards
            model(batch(rank, step), by_rank[rank])
        losses = [reference(batch(other, step), told).square().mean() for other, told in enumerate(by_rank)]
        torch.stack(losses).mean().backward()
        for (name, parameter), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
            if wanted.grad is None:
                assert parameter.grad is None, f"{name}: nobody used it"
            else:
                assert parameter.grad is not None, name
                torch.testing.assert_close(full(parameter.grad), wanted.grad, **FP32)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(parameter), wanted, **FP32)


TOWER_PARTS = ["vision.stem", "vision.blocks.0", "audio", "text", "head"]
TOWER_BRANCHES = [["vision", "text"], ["audio", "vision"], ["text", "text"], ["text", "audio"], ["vision", "vision"]]


@ranks(2)
def test_a_tower_that_one_rank_skips(rank: int):
    """The tower is the only thing between the input and the rest: with it `text` gets an input that has a gradient."""
    model, reference = built(Towers)
    by_hand(model, TOWER_PARTS)
    with guard(model, repair=["vision", "audio"]):
        assert_trains_alike(model, reference, TOWER_BRANCHES, rank)


@ranks(4)
@pytest.mark.slow
def test_towers_with_replicas(rank: int):
    model, reference = built(Towers)
    by_hand(model, TOWER_PARTS, (2, 2))
    with guard(model, repair=["vision", "audio"]):
        assert_trains_alike(model, reference, [[*two, *reversed(two)] for two in TOWER_BRANCHES], rank)


@ranks(2)
def test_another_branch_and_an_expert_that_one_rank_leaves_out(rank: int):
    """`experts` always runs: there only zeros are missing."""
    model, reference = built(Model)
    by_hand(model, ["embed", "vision", "left", "right", "experts", "blocks.0", "blocks.1"])
    branches = [["", "branch"], ["expert", ""], ["expert", "expert"], ["", "skipped-tower"], ["branch", "expert"]]
    with guard(model, repair=["left", "right", "vision"]):
        assert_trains_alike(model, reference, branches, rank)


@ranks(2)
def test_a_model_that_shardwise_sharded(rank: int):
    model, reference = built(Towers)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    shard(model, ShardConfig(unused_parameters="skip"), mesh=mesh)
    with guard(model, repair=["vision", "audio"]):
        assert_trains_alike(model, reference, TOWER_BRANCHES, rank)


@ranks(2)
def test_names_are_checked_on_every_rank(rank: int):
    model, _ = built(Model)
    by_hand(model, ["left", "right"])
    with pytest.raises(ShardError, match="there is no module `lefft` below the root"):
        guard(model, repair=["lefft"])
    with pytest.raises(ShardError, match="ranks have different values of the modules to repair"):
        guard(model, repair=["left"] if rank else ["right"])


class Fuse(torch.autograd.Function):
    """Blows in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        raise FloatingPointError("in backward")


MODEL_PARTS = ["embed", "vision", "left", "right", "experts", "blocks.0", "blocks.1"]


def repaired(how: str) -> tuple[nn.Module, nn.Module]:
    model, reference = built(Model)
    if how == "by-hand":
        by_hand(model, MODEL_PARTS)
    else:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        shard(model, ShardConfig(unused_parameters="skip"), mesh=mesh)
    return model, reference


@ranks(2)
@pytest.mark.parametrize("how", ["by-hand", "shard"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_failed_is_forgotten_by_repaired_towers_too(rank: int, how: str, where: str):
    """What the lost step had used counts for nothing: nobody uses it in the next one, so it has no gradient."""
    model, reference = repaired(how)

    def fail(*_: object) -> None:
        raise FloatingPointError("in forward")

    with guard(model, repair=["left", "right", "vision"]):
        for _ in range(2):
            module = model.get_submodule("blocks.0" if where == "forward" else "embed")
            handle = (
                module.register_forward_pre_hook(fail)
                if where == "forward"
                else module.register_forward_hook(lambda module, args, output: Fuse.apply(output))
            )
            with pytest.raises(FloatingPointError):
                model(batch(rank, 9)).square().mean().backward()
            handle.remove()
            recover(model)
            assert all(parameter.grad is None for parameter in model.parameters())
        branches = [["expert", "expert"], ["skipped-tower", "skipped-tower"], ["", "branch"], ["", ""]]
        assert_trains_alike(model, reference, branches, rank)


OLDER_NAMES = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}


@ranks(2, timeout_s=40)
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_a_collective_that_fails_by_itself_leaves_with_its_own_error(rank: int, collective: str):
    """No other rank is to blame: nobody waits for one that is, and the model can continue."""
    model, reference = built(Model)
    by_hand(model, MODEL_PARTS)
    said: list[str] = []
    name = f"{collective}_single" if hasattr(dist, f"{collective}_single") else OLDER_NAMES[collective]
    real = getattr(dist, name)

    def failing(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the cable is out")

    with guard(model, report=said.append):
        setattr(dist, name, failing)
        try:
            with pytest.raises(RuntimeError, match="the cable is out") as caught:
                model(batch(rank, 9)).square().mean().backward()
        finally:
            setattr(dist, name, real)
        assert not isinstance(caught.value, ShardError)
        recover(model)
        assert_trains_alike(model, reference, [["", ""]] * 2, rank)
    assert said == []
