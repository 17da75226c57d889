"""What the rules' pages say of torch is true of the torch that is installed: the mistakes, made on real ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from shardwise.training.step import token_mean
from tests.ranks import ranks, shut_down_pools

ONES = torch.ones(2, 8)
MIXED = r"mixed torch\.Tensor and DTensor"


@pytest.fixture(scope="module", autouse=True)
def ranks_with_plain_torch() -> None:
    """Start new ranks: `shard` changes operators of DTensors in the whole process."""
    shut_down_pools()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gate = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.gate

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def sharded() -> Net:
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


@ranks(2)
def test_calls_that_the_rules_call_errors_raise(rank: int):
    with pytest.raises(AttributeError, match="no_sync"):  # SW192
        sharded().no_sync()
    with pytest.raises(TypeError, match="device_id"):  # SW193
        fully_shard(Net(), device_id=0)  # pyrefly: ignore
    model = Net()
    fully_shard(model)
    with pytest.raises((TypeError, AssertionError, ValueError)):  # SW203
        fully_shard(model.blocks[0])(ONES)
    with pytest.raises(
        (AssertionError, RuntimeError, ValueError), match="fully_shard has already been applied"
    ):  # SW204
        fully_shard(model)
    with pytest.raises(ValueError, match="containers that do not implement forward"):  # SW205
        fully_shard(Net().blocks)
    scalar = Net()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="scalar parameters"):  # SW214
        fully_shard(scalar)
    with pytest.raises(TypeError, match="positional"):  # SW215
        fully_shard(Net(), init_device_mesh("cpu", (2,)))  # pyrefly: ignore
    with pytest.raises(AttributeError, match="param_dtype"):  # SW215
        fully_shard(Net(), mp_policy=None)(ONES)  # pyrefly: ignore
    with pytest.raises(AssertionError, match="mesh_dim_names"):  # SW219
        fully_shard(Net(), mesh=init_device_mesh("cpu", (1, 2)))
    with pytest.raises(AssertionError, match="deepcopy"):  # SW227
        copy.deepcopy(sharded())


@ranks(2)
def test_ways_in_that_the_rules_call_wrong_raise(rank: int):
    with pytest.raises(RuntimeError, match=MIXED):  # SW229
        sharded().forward(ONES)
    with pytest.raises(RuntimeError, match=MIXED):  # SW231
        sharded().encode(ONES)
    registered = sharded()
    register_fsdp_forward_method(registered, "encode")
    assert registered.encode(ONES).shape == (2, 8)
    gated = Gated()
    whole = nn.Sequential(gated, nn.Linear(8, 8))
    fully_shard(gated)
    fully_shard(whole)
    assert whole(ONES).shape == (2, 8)
    register_fsdp_forward_method(gated, "inner")
    with pytest.raises(RuntimeError, match=MIXED):  # SW230
        whole(ONES)
    model = sharded()
    model.blocks[0](ONES)
    with pytest.raises(RuntimeError, match="lazily initialized"):  # SW217
        model(ONES)


@ranks(2)
def test_loads_that_the_rules_call_wrong_raise_or_load_nothing(rank: int, tmp_path):
    whole = Net().state_dict()
    with pytest.raises(RuntimeError, match=MIXED):  # SW223
        sharded().load_state_dict(whole)
    with pytest.raises(RuntimeError, match=MIXED):  # SW223
        set_model_state_dict(sharded(), whole)
    with pytest.raises(TypeError, match="broadcast_from_rank0"):  # SW224
        set_model_state_dict(sharded(), whole, broadcast_from_rank0=True)
    with pytest.raises(ValueError, match="full_state_dict must be True"):  # SW224
        set_model_state_dict(sharded(), whole, options=StateDictOptions(broadcast_from_rank0=True))

    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    model(ONES).sum().backward()
    optimizer.step()
    folder = str(tmp_path / "checkpoint")
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    fresh = torch.optim.AdamW(sharded().parameters())
    state = {"optimizer": fresh.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    assert state["optimizer"]["state"] == {}, "torch has begun to fill it"  # SW226


@ranks(2)
def test_mistakes_that_the_rules_call_silent_are_silent(rank: int):
    model = sharded()
    assert isinstance(model, FSDPModule)
    assert not isinstance(model, FullyShardedDataParallel)  # SW194

    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert model(ONES).abs().sum() > 0  # SW228: with zero weights it would be zero

    model = sharded()
    with torch.no_grad():
        model(ONES)
    assert not isinstance(model.head.weight, DTensor)  # SW216: the root's parameters are plain now
    model.reshard()
    assert isinstance(model.head.weight, DTensor)

    state = sharded().state_dict()
    assert state["head.weight"].to_local().shape == (4, 8)  # SW221: half of the weight
    assert state["head.weight"].numel() == 64  # SW234: of the whole


@ranks(2)
def test_zero_grad_of_the_model_after_forward_leaves_gradients_and_that_of_the_optimizer_does_not(rank: int):
    def grad_after(
        clear: Callable[[Net, torch.optim.Optimizer], object], *, trains: bool = True
    ) -> torch.Tensor | None:
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(ONES).sum().backward()
        with torch.set_grad_enabled(trains):
            model(ONES)
        clear(model, optimizer)
        model.reshard()
        return model.head.weight.grad

    assert grad_after(lambda model, _: model.zero_grad()) is not None  # SW240
    assert grad_after(lambda model, _: model.zero_grad(), trains=False) is not None  # SW240
    assert grad_after(lambda model, optimizer: optimizer.zero_grad()) is None


@ranks(2)
def test_means_over_the_tokens_of_a_rank_are_not_the_mean_over_all(rank: int):
    labels = torch.tensor([1, -100, -100, -100] if rank == 0 else [2, 3, 4, 5])
    inputs = torch.arange(32.0).view(4, 8).sin() + rank

    def gradient(loss_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        model = sharded()
        loss_of(model(inputs)).backward()
        return model.head.weight.grad.full_tensor()  # pyrefly: ignore

    by_sum = gradient(lambda logits: cross_entropy(logits, labels, reduction="sum") * 2 / 5)
    assert not torch.allclose(by_sum, gradient(lambda logits: cross_entropy(logits, labels)), rtol=0.1)  # SW239
    torch.testing.assert_close(
        by_sum, gradient(lambda logits: token_mean(cross_entropy(logits, labels, reduction="sum"), 4 if rank else 1))
    )


@ranks(2)
def test_norms_are_as_the_rule_says(rank: int):
    model = sharded()
    model(ONES).sum().backward()
    true = torch.stack([p.grad.full_tensor().norm() for p in model.parameters()]).norm().item()
    by_hand = sum(p.grad.norm().to_local().item() ** 2 for p in model.parameters()) ** 0.5
    assert by_hand < 0.95 * true  # SW233
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert norm.full_tensor().item() == pytest.approx(true, rel=1e-5)
    with pytest.raises(TypeError, match="format"):
        f"{norm:.3f}"


@ranks(2)
def test_tied_weights_in_two_groups_come_apart_or_are_refused(rank: int):
    model = Net()
    model.head.weight = model.blocks[0].weight  # pyrefly: ignore
    with suppress(ValueError):  # SW213; newer versions refuse some of these
        fully_shard(model.blocks[0])
        fully_shard(model.head)
    assert model.head.weight is not model.blocks[0].weight
    model = Net()
    model.head.weight = model.blocks[0].weight  # pyrefly: ignore
    fully_shard([model.blocks[0], model.head])
    assert model.head.weight is model.blocks[0].weight
