"""The loss per token: ranks and micro-steps of any length train as one batch would."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.errors import ConfigError
from shardwise.training.step import AccumulationMode, accumulate, mean_over_ranks, token_mean
from tests.by_hand import assert_same, full_gradients, mesh_1d, mesh_2d, shard_module
from tests.ranks import ranks

# Rows of each micro-step on each rank: very different lengths, and none at all.
LENGTHS = [[5, 1], [2, 9], [0, 3], [7, 4]]


def data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + step)
    rows = LENGTHS[rank][step]
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 3, generator=generator)


def summed_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = data(rank, step)
    return (model(inputs) - targets).pow(2).sum()


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def reference(num_ranks: int) -> tuple[float, dict[str, torch.Tensor]]:
    model = build()
    total = sum(sum(lengths) for lengths in LENGTHS[:num_ranks])
    loss = sum(summed_loss(model, rank, step) for rank in range(num_ranks) for step in range(2)) / total
    loss.backward()  # pyrefly: ignore[missing-attribute]
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}  # pyrefly: ignore


def train(rank: int, num_ranks: int, mode: AccumulationMode, mesh, num_tokens) -> None:
    model = shard_module(build(), mesh)
    logged = torch.zeros(())
    for step in range(2):
        with accumulate(model, step, 2, mode):
            loss = token_mean(summed_loss(model, rank, step), num_tokens, mesh=mesh)
            loss.backward()
        logged += loss.detach()
    value, gradients = reference(num_ranks)
    assert_same(full_gradients(model), gradients)
    torch.testing.assert_close(mean_over_ranks(logged, mesh=mesh).item(), value)


@ranks(2)
@pytest.mark.parametrize("mode", ["comm", "memory"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_every_token_counts_the_same_on_one_axis(rank: int, mode: AccumulationMode, as_tensor: bool):
    num_tokens = sum(LENGTHS[rank])
    train(rank, 2, mode, mesh_1d(2), torch.tensor(num_tokens) if as_tensor else num_tokens)


@ranks(4)
@pytest.mark.parametrize("mode", ["comm", "memory", "hsdp"])
def test_every_token_counts_the_same_on_two_axes(rank: int, mode: AccumulationMode):
    train(rank, 4, mode, mesh_2d(), sum(LENGTHS[rank]))


@ranks(4)
def test_axes_that_share_their_data_do_not_count(rank: int):
    """Two tensor-parallel ranks see the same tokens: four ranks, two of them data parallel."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    row = mesh.get_local_rank("shard")
    num_tokens = torch.tensor([30, 10])[row]
    loss = token_mean(torch.tensor(60.0), num_tokens, mesh=mesh)
    assert loss.item() == 60.0 * 2 / 40
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    assert token_mean(torch.tensor(60.0), num_tokens, mesh=cube).item() == 3.0
    assert num_tokens.item() in (30, 10), "the caller's count is not summed in place"
    assert mean_over_ranks(torch.tensor(float(row)), mesh=mesh).item() == 0.5


@ranks(2)
def test_no_mesh_means_all_ranks(rank: int):
    assert token_mean(torch.tensor(8.0), [1, 3][rank]).item() == 4.0
    assert token_mean(torch.tensor(0.0), 0).item() == 0.0, "no tokens anywhere is no loss, not NaN"


@ranks(4)
def test_mesh_without_a_known_data_axis_is_refused(rank: int):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    with pytest.raises(ConfigError, match="rows"):
        token_mean(torch.tensor(1.0), 1, mesh=mesh)
    assert token_mean(torch.tensor(1.0), 1, mesh=mesh["rows"]).item() == 1.0
    half_known = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "shard"))
    with pytest.raises(ConfigError, match="rows"):  # counting over one axis of two would be silently wrong
        token_mean(torch.tensor(1.0), 1, mesh=half_known)


@ranks(4)
def test_replicas_are_counted_by_whatever_name(rank: int):
    for name in ("replicate", "replica", "dp_replicate"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(name, "shard"))
        assert token_mean(torch.tensor(5.0), [1, 2, 3, 4][rank], mesh=mesh).item() == 2.0


def test_single_process_needs_no_process_group():
    weight = torch.tensor(2.0, requires_grad=True)
    loss = token_mean(weight * 12, 4)
    loss.backward()
    assert (loss.item(), weight.grad.item()) == (6.0, 3.0)  # pyrefly: ignore
    assert mean_over_ranks(loss).item() == 6.0
