"""After sharding: second derivatives are those of one process; tied, replaced and added parameters are refused."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

import shardwise as sw
from shardwise.errors import PlanError, ShardError
from shardwise.fsdp1 import FullyShardedDataParallel
from tests.ranks import ranks
from tests.toy_models import PlainBlock
from tests.zoo.case import normal
from tests.zoo.checking import mesh_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def linear() -> nn.Module:
    """Its second derivatives reach no node of the first forward."""
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))


def penalty(model: nn.Module, seed: int) -> Tensor:
    x = normal(seed, 4, 16).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=-1) - 1).square().mean()


def penalty_and_loss(model: nn.Module, seed: int) -> Tensor:
    """The critic of a GAN: its groups are called again between the two backwards."""
    return penalty(model, seed) + model(normal(seed + 7, 4, 16)).mean()


def penalty_on_activations(model: nn.Module, seed: int) -> Tensor:
    """As of a path's length: the blocks before them are met by the second backward only."""
    linears, kept = [module for module in model.modules() if isinstance(module, nn.Linear)], []
    handle = linears[-3:][0].register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    out = model(normal(seed, 4, 16).requires_grad_())
    handle.remove()
    (gradient,) = torch.autograd.grad(out.sum(), kept, create_graph=True)
    return (gradient.norm(dim=-1) - 1).square().mean()


@ranks(2)
@pytest.mark.parametrize("loss", [penalty, penalty_and_loss, penalty_on_activations])
@pytest.mark.parametrize("build", [Net, linear])
def test_the_penalty_on_a_gradient_trains_as_in_one_process(
    rank: int, build: Callable[[], nn.Module], loss: Callable[[nn.Module, int], Tensor]
):
    """FSDP2 alone ends by a segmentation fault: the second backward reads parameters that were freed."""
    scattered = [bytearray(rank * size) for size in range(500)]  # objects have other addresses on other ranks
    del scattered[::2]
    torch.manual_seed(0)
    whole = build()
    model = sw.shard(copy.deepcopy(whole), mesh=mesh_of(2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (whole, model)]
    for step in range(2):
        for seed in range(2):
            (loss(whole, 10 * step + seed) / 2).backward()
        loss(model, 10 * step + rank).backward()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), whole.get_parameter(name), rtol=1e-5, atol=1e-6)


@ranks(2)
def test_gradients_with_a_graph_are_refused(rank: int):
    model = sw.shard(Net(), mesh=mesh_of(2))
    loss = model(normal(rank, 4, 16)).mean()
    with pytest.raises(ShardError, match="create_graph"):
        loss.backward(create_graph=True)


def tie(model: Net) -> None:
    model.blocks[2].up.weight = model.blocks[0].up.weight


def replace(model: Net) -> None:
    model.blocks[2].up.weight = nn.Parameter(torch.zeros(32, 16))


def parametrize(model: Net) -> None:
    parametrizations.weight_norm(model.blocks[2].up)


@ranks(2)
@pytest.mark.parametrize("change", [tie, replace, parametrize])
def test_a_parameter_that_is_replaced_between_steps_is_refused(rank: int, change: Callable[[Net], None]):
    model = sw.shard(Net(), mesh=mesh_of(2))
    model(normal(rank, 4, 16)).mean().backward()
    change(model)
    with pytest.raises(ShardError, match=r"'weight' of a sharded .*Linear is not the parameter that was sharded"):
        model(normal(rank, 4, 16))


@ranks(2)
@pytest.mark.parametrize("name", ["head", "second_head"])
def test_a_module_that_is_added_after_sharding_is_not_stepped_unaveraged(rank: int, name: str):
    model = sw.shard(Net(), mesh=mesh_of(2))
    setattr(model, name, nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ShardError, match=f"{name}.weight.*added to Net after sharding"):
        optimizer.step()


@ranks(2)
@pytest.mark.parametrize("wrap", [sw.shard, FullyShardedDataParallel], ids=["shard", "fsdp1"])
def test_parameters_listed_before_sharding_are_clipped(rank: int, wrap: Callable[[nn.Module], nn.Module]):
    model = Net()
    listed = list(model.parameters())
    model = wrap(model)
    model(normal(rank, 4, 16)).sum().backward()
    torch.nn.utils.clip_grad_norm_(listed, 0.5)
    assert float(sw.clip_grad_norm_(model, 1.0)) == pytest.approx(0.5, rel=1e-3)


@ranks(2)
def test_a_view_and_a_model_made_before_sharding_are_refused(rank: int):
    model, other = Net(), Net()
    other.head.weight, view = model.head.weight, model.blocks[0].up.weight[:16]
    sw.shard(model, mesh=mesh_of(2))
    x = normal(rank, 4, 16)
    with pytest.raises(ShardError, match=r"replaced is used\n.*Linear\.weight"):
        (model(x) + x @ view).sum().backward()
    sw.recover(model)
    with pytest.raises(PlanError, match=r"'head\.weight' is also a parameter of a model that has been sharded"):
        sw.shard(other, mesh=mesh_of(2))


@ranks(2)
@pytest.mark.parametrize("wrap", [sw.shard, FullyShardedDataParallel], ids=["shard", "fsdp1"])
def test_a_model_is_moved_and_cast_after_sharding(rank: int, wrap: Callable[[nn.Module], nn.Module]):
    """In `_apply` torch swaps DTensors, which fails while anything refers to one weakly."""
    expected = Net()
    model, old = copy.deepcopy(expected), torch.optim.SGD(expected.parameters(), lr=0.1)
    early = torch.optim.SGD(model.parameters(), lr=0.1)  # keeps the parameters before sharding alive
    model = wrap(model)
    assert all(parameter.data.numel() for parameter in model.parameters())
    model.to("cpu").double()
    expected.double()
    optimizer = early if wrap is not sw.shard else torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for each, stepped in ((expected, old), (model, optimizer)):
            each(normal(0, 4, 16).double()).sum().backward()
            stepped.step()
            stepped.zero_grad()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
