"""FSDP2's silent failures, in pairs: torch alone goes wrong without a word, shardwise prevents it or raises."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import shardwise as sw
from shardwise.checkpointing.manager import Checkpointer
from shardwise.checkpointing.weights import load_weights, save_weights
from tests.ranks import ranks

# Raw FSDP2 warns about outputs that are views; ours has no need to.
VIEWS = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


class Net(nn.Module):
    """An embedding, two blocks and a head; the root holds the embedding and the head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 12, bias=False)
        self.register_buffer("scale", torch.full((8,), 1.5), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)


def seeded(**options: bool) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def mesh_of(num_ranks: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (num_ranks,))


def by_hand(model: Net) -> Net:
    mesh = mesh_of()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tokens_of(rank: int) -> Tensor:
    return torch.randint(12, (2, 5), generator=torch.Generator().manual_seed(rank))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 2) -> None:
    for _ in range(steps):
        model(tokens_of(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in values(model).items() if not torch.equal(value, before[name])}


@ranks(2)
@VIEWS
def test_optimizer_built_before_sharding(rank: int):
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_hand(model)
    before = values(model)
    train(model, optimizer, rank)
    assert changed(model, before) == set(), "torch: nothing moves, and nothing is said"

    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sw.shard(model)
    with pytest.raises(sw.ShardError, match="no longer uses"):
        train(model, optimizer, rank)
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sw.shard(model, optimizers=optimizer)
    before = values(model)
    train(model, optimizer, rank)
    assert changed(model, before) == set(before)


@ranks(2)
@VIEWS
def test_optimizer_built_after_a_forward_without_gradients(rank: int):
    model = by_hand(seeded())
    with torch.no_grad():
        model(tokens_of(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.reshard()
    before = values(model)
    train(model, optimizer, rank)
    assert {"embed.weight", "head.weight"}.isdisjoint(changed(model, before)), "torch: the root never trains"

    model = sw.shard(seeded())
    with torch.no_grad():
        model(tokens_of(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = values(model)
    train(model, optimizer, rank)
    assert changed(model, before) == set(before)


@ranks(2)
@VIEWS
def test_forward_without_gradients_between_backward_and_step(rank: int):
    def run(model: nn.Module) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(tokens_of(rank)).square().mean().backward()
            with torch.no_grad():
                model(tokens_of(rank))
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    plain = by_hand(seeded())
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), rank, steps=3)
    right = values(plain)
    stale, ours = run(by_hand(seeded())), run(sw.shard(seeded()))
    assert any(not torch.equal(stale[name], right[name]) for name in right), "torch: the next forward uses old weights"
    assert all(torch.equal(ours[name], right[name]) for name in right)


@ranks(2)
@VIEWS
def test_buffers_that_no_checkpoint_holds(rank: int):
    with torch.device("meta"):
        model = by_hand(Net())
    model.to_empty(device="cpu")
    model.scale.fill_(float("nan"))  # what memory holds by chance; any value would do
    model.load_state_dict(by_hand(seeded()).state_dict())
    assert model.scale.isnan().all(), "torch: loading everything there is leaves the buffer as it was"

    with torch.device("meta"):
        model = sw.shard(Net())
    with pytest.raises(sw.ShardError, match="got no values"):
        sw.materialize(model)  # nothing in the model says how the table is made again
    with torch.device("meta"):
        model = sw.shard(Net())
    sw.materialize(model, lambda module: module.scale.fill_(1.5) if isinstance(module, Net) else None)
    assert torch.equal(model.scale, torch.full((8,), 1.5))


@ranks(2)
@VIEWS
def test_weights_stored_in_16_bits(rank: int):
    model = by_hand(seeded().bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    before = values(model)
    train(model, optimizer, rank)
    assert changed(model, before) != set(before), "torch: updates too small for 16 bits are lost"

    assert any("16" in warning for warning in sw.plan(seeded().bfloat16(), mesh=mesh_of()).warnings)
    assert {finding.code for finding in sw.check(model)} == {"SW403"}


@ranks(2)
@VIEWS
def test_shards_saved_as_if_they_were_the_model(rank: int, tmp_path: Path):
    place = tmp_path
    model = by_hand(seeded())
    if rank == 0:
        torch.save({name: p.to_local() for name, p in model.state_dict().items()}, place / "shards.pt")
        torch.save(model.state_dict(), place / "dtensors.pt")
    dist.barrier()
    other = sw.shard(seeded())
    with pytest.raises(sw.CheckpointError, match=r"embed\.weight"):
        load_weights(other, place / "shards.pt")
    with pytest.raises(sw.CheckpointError):
        load_weights(other, place / "dtensors.pt")
    save_weights(model, place / "whole.safetensors")
    right = values(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    load_weights(other, place / "whole.safetensors")
    assert all(torch.equal(value, right[name]) for name, value in values(other).items())


@ranks(2)
@VIEWS
def test_optimizer_state_that_loads_as_nothing(rank: int, tmp_path: Path):
    model = by_hand(seeded())
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"optim": optimizer.state_dict()}, checkpoint_id=f"{tmp_path}/dcp")
        fresh = torch.optim.AdamW(model.parameters())
        state = fresh.state_dict()
        dcp.load({"optim": state}, checkpoint_id=f"{tmp_path}/dcp")
    fresh.load_state_dict(state)
    assert not fresh.state, "torch: loads nothing, says nothing"

    with Checkpointer(f"{tmp_path}/ours", asynchronous=False) as saved:
        saved.save(2, model=model, optimizers=optimizer)
        assert saved.load(model=model, optimizers=fresh) == 2
    assert len(fresh.state) == len(optimizer.state) > 0
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            theirs = fresh.state[parameter][key]
            both = (value, theirs) if not isinstance(value, DTensor) else (value.to_local(), theirs.to_local())
            assert torch.equal(*both)


@ranks(4)
@VIEWS
def test_replicas_that_start_differently(rank: int):
    def build() -> Net:
        torch.manual_seed(rank // 2)
        return Net()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(tokens_of(rank))  # torch: runs
    assert "SW433" in {finding.code for finding in sw.check(model)}
    with pytest.raises(sw.ShardError, match="weights"):
        sw.shard(build(), mesh=mesh)


@ranks(2)
@VIEWS
def test_ignored_parameters_that_drift_apart(rank: int):
    def head_after(model: Net) -> list[Tensor]:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), rank)
        heads = [torch.empty_like(model.head.weight) for _ in range(2)]
        dist.all_gather(heads, model.head.weight.detach().contiguous())
        return heads

    model = seeded()
    fully_shard(model, mesh=mesh_of(), ignored_params={model.head.weight})  # pyrefly: ignore[no-matching-overload]
    first, second = head_after(model)
    assert not torch.equal(first, second), "torch: each rank trains its own"
    first, second = head_after(sw.shard(seeded(), sw.ShardConfig(ignored=("head",))))
    assert torch.equal(first, second)


@ranks(2)
@VIEWS
def test_gradient_reduction_left_off(rank: int):
    model = by_hand(seeded())
    model.set_requires_gradient_sync(False)
    model(tokens_of(rank)).square().mean().backward()
    assert all(p.grad is None for p in model.parameters()), "torch: no gradient arrives, and a step does nothing"
    assert "SW416" in {finding.code for finding in sw.check(model)}

    model = sw.shard(seeded())
    for micro_step in range(2):
        with sw.accumulate(model, micro_step, 2):
            model(tokens_of(rank)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert sw.check(model) == []


@ranks(2)
@VIEWS
def test_mean_over_tokens_is_not_the_mean_of_means(rank: int):
    def losses(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="none")

    counts = (3, 9)  # tokens of rank 0 and rank 1
    batches = [torch.randint(12, (1, count), generator=torch.Generator().manual_seed(count)) for count in counts]
    reference = seeded()
    torch.cat([losses(reference, batch) for batch in batches]).mean().backward()
    right = {name: p.grad for name, p in reference.named_parameters()}

    def gradients(model: nn.Module, *, by_tokens: bool) -> dict[str, Tensor]:
        own = losses(model, batches[rank])
        loss = sw.token_mean(own.sum(), own.numel(), mesh=mesh_of()) if by_tokens else own.mean()
        loss.backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    naive, ours = gradients(by_hand(seeded()), by_tokens=False), gradients(sw.shard(seeded()), by_tokens=True)
    assert any((naive[name] - right[name]).abs().max() > 1e-3 for name in right), "torch: tokens weigh differently"
    for name, gradient in right.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-7)  # another order of summation


@ranks(2)
@VIEWS
def test_gradient_norm_of_a_shard_is_not_the_norm(rank: int):
    model = sw.shard(seeded())
    model(tokens_of(rank)).square().mean().backward()
    whole = torch.stack([p.grad.full_tensor().norm() for p in model.parameters()]).norm()
    local = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()
    assert local < 0.95 * whole, "the norm of what a rank holds under-reports"
    torch.testing.assert_close(sw.clip_grad_norm_(model, 1e9), whole, rtol=1e-6, atol=0.0)


@ranks(2)
@VIEWS
def test_tie_that_loading_breaks(rank: int, tmp_path: Path):
    state = copy.deepcopy(seeded(tied=True).state_dict())
    state["head.weight"] = state["embed.weight"].clone()  # as files hold them: each on its own
    model = seeded(tied=True)
    model.load_state_dict(state, assign=True)
    assert model.head.weight is not model.embed.weight, "torch: they go their own ways from here"

    if rank == 0:
        torch.save(state, f"{tmp_path}/state.pt")
    dist.barrier()
    ours = sw.shard(seeded(tied=True))
    load_weights(ours, f"{tmp_path}/state.pt")
    assert ours.head.weight is ours.embed.weight
    assert sw.check(ours) == []
