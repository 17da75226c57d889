"""Containers of networks, as GANs are kept: each network is a root of its own."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.config.schema import MeshConfig
from shardwise.errors import PlanError
from shardwise.planning.planner import plan
from shardwise.sharding.apply import shard
from tests.ranks import ranks
from tests.zoo.checking import mesh_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Network(nn.Module):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale

    def features(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


class Pair(nn.Module):
    def __init__(self, networks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.generator, self.discriminator = networks.values()

    def __getitem__(self, name: str) -> nn.Module:
        return getattr(self, name)


def networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"generator": Network(8, 8), "discriminator": Network(8, 1)}


def train(gan, noise: list[Tensor], real: list[Tensor]) -> list[float]:
    """Three steps of both; the discriminator is frozen while the generator learns."""
    generator, discriminator = gan["generator"], gan["discriminator"]
    optimizers = [torch.optim.AdamW(network.parameters(), lr=1e-2) for network in (generator, discriminator)]
    losses = []
    for z, x in zip(noise, real, strict=True):
        discriminator.requires_grad_(True)
        judged = functional.softplus(discriminator(generator(z).detach())) + functional.softplus(-discriminator(x))
        matched = (discriminator.features(x) ** 2).mean()
        (judged.mean() + matched).backward()
        optimizers[1].step()
        gan.zero_grad()
        discriminator.requires_grad_(False)
        functional.softplus(-discriminator(generator(z))).mean().backward()
        assert all(p.grad is None for p in discriminator.parameters())
        optimizers[0].step()
        gan.zero_grad()
        losses.append(judged.mean().item())
    return losses


@pytest.mark.parametrize("kind", [nn.ModuleDict, Pair], ids=["ModuleDict", "nn.Module"])
@ranks(2)
def test_networks_in_a_container_train_as_in_one_process(rank: int, kind):
    gan = kind(networks())
    reference = copy.deepcopy(gan)
    draws = torch.Generator().manual_seed(1)
    noise, real = torch.randn(2, 3, 4, 8, generator=draws)
    sharded = shard(gan, mesh=mesh_of(2))
    assert all(len(parameter.to_local()) < len(parameter) for parameter in sharded["generator"].blocks.parameters())
    train(reference, [*noise], [*real])
    rows = slice(2 * rank, 2 * rank + 2)
    train(sharded, [*noise[:, rows]], [*real[:, rows]])
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), reference.get_parameter(name), msg=name)


def test_each_network_of_a_list_is_planned_as_if_alone():
    alone = plan(Network(8, 1), mesh=MeshConfig(shard=2))
    both = plan(nn.ModuleList([Network(8, 1), Network(8, 1)]), mesh=MeshConfig(shard=2))
    names = {group.modules: group.entry_points for group in both.groups}
    for group in alone.groups:
        for index in "01":
            modules = tuple(f"{index}.{module}".rstrip(".") for module in group.modules)
            assert set(names.pop(modules)) == {f"{index}{entry}" for entry in group.entry_points}
    assert not names


def test_a_parameter_of_two_networks_is_refused():
    first, second = Network(8, 1), Network(8, 1)
    second.head = first.head
    with pytest.raises(PlanError, match=r"first\.head\.weight.* two networks"):
        plan(nn.ModuleDict({"first": first, "second": second}), mesh=MeshConfig(shard=2))


def test_a_parameter_of_the_container_is_refused():
    container = nn.ModuleDict(
        {"actor": Network(8, 1), "extra": nn.ParameterDict({"log_alpha": nn.Parameter(torch.ones(()))})}
    )
    with pytest.raises(PlanError, match=r"extra\.log_alpha"):
        plan(container, mesh=MeshConfig(shard=2))


@pytest.mark.parametrize("model", [nn.ModuleList(), nn.ModuleDict(), nn.ModuleList([nn.ReLU()])], ids=repr)
def test_a_container_without_parameters_is_refused(model: nn.Module):
    with pytest.raises(PlanError, match="without parameters"):
        plan(model, mesh=MeshConfig(shard=2, device="cpu"))
