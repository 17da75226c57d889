"""check(): each silent mistake is found on a live model, by name; a model that is right gives no finding."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw
from shardwise.diagnosing.check import check
from shardwise.models.llama import SHAPES, Llama
from tests.ranks import ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 16, bias=False)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by_hand(model: Net) -> Net:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def codes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> set[str]:
    return {finding.code for finding in check(model, optimizer)}


@ranks(2)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_a_model_that_is_right_gives_no_finding(rank: int):
    torch.manual_seed(0)
    for model in (sw.shard(Net()), by_hand(Net()), sw.shard(Llama(SHAPES["llama3-debug"]))):
        optimizer = torch.optim.AdamW(model.parameters())
        assert check(model, optimizer) == []
        model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert check(model, optimizer) == []


@ranks(2)
def test_optimizer_built_before_sharding(rank: int):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    assert codes(by_hand(model), optimizer) == {"SW421", "SW422"}


@ranks(2)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_optimizer_built_after_a_forward_without_gradients(rank: int):
    torch.manual_seed(0)
    model = by_hand(Net())
    with torch.no_grad():
        model(torch.zeros(2, 4, dtype=torch.long))
    assert "SW417" in codes(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model.reshard()
    assert {"SW421", "SW422"} <= codes(model, optimizer)


@ranks(2)
def test_sharded_by_the_root_alone(rank: int):
    torch.manual_seed(0)
    assert codes(fully_shard(Net(), mesh=init_device_mesh("cpu", (2,)))) == {"SW412"}


@ranks(2)
def test_not_sharded_at_all(rank: int):
    assert "SW411" in codes(Net())


@ranks(2)
def test_weights_stored_in_16_bits(rank: int):
    torch.manual_seed(0)
    assert codes(by_hand(Net().bfloat16())) == {"SW403"}


@ranks(2)
def test_two_dtypes_in_one_group(rank: int):
    torch.manual_seed(0)
    model = Net()
    model.blocks[1].first.bfloat16()
    findings = {finding.code: finding.where for finding in check(by_hand(model))}
    assert findings["SW404"] == "blocks.1"


@ranks(2)
def test_gradient_reduction_left_off(rank: int):
    torch.manual_seed(0)
    model = by_hand(Net())
    model.set_requires_gradient_sync(False)
    assert codes(model) == {"SW416"}


@ranks(2)
def test_parameter_replaced_behind_its_group(rank: int):
    torch.manual_seed(0)
    model = by_hand(Net())
    model.blocks[0].first.weight = nn.Parameter(model.blocks[0].first.weight.detach().clone())
    findings = {finding.code: finding.where for finding in check(model)}
    assert findings == {"SW402": "blocks.0.first.weight"}


@ranks(2)
def test_assignment_to_data_is_ignored_by_torch_and_arrives_here(rank: int):
    torch.manual_seed(0)
    reference = Net()
    new = torch.randn_like(reference.head.weight)
    raw = by_hand(copy.deepcopy(reference))
    raw.head.weight.data = distribute_tensor(new, raw.head.weight.device_mesh, [Shard(0)])
    assert torch.equal(raw.head.weight.full_tensor(), reference.head.weight), "torch ignores it, silently"

    model = sw.shard(copy.deepcopy(reference))
    model.head.weight.data = distribute_tensor(new, model.head.weight.device_mesh, [Shard(0)])
    assert torch.equal(model.head.weight.full_tensor(), new)
    model.head.weight.data = reference.head.weight.data  # the whole tensor will do as well
    assert torch.equal(model.head.weight.full_tensor(), reference.head.weight)
    with pytest.raises(sw.ShardError, match="bfloat16"):
        model.head.weight.data = model.head.weight.data.to(torch.bfloat16)


@ranks(2)
def test_ignored_parameter_that_drifts_apart(rank: int):
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, ignored_params={model.head.weight})  # pyrefly: ignore[no-matching-overload]
    assert "SW401" in codes(model)
    with torch.no_grad():
        model.head.weight.add_(rank)
    findings = {finding.code: finding.where for finding in check(model)}
    assert findings["SW432"] == "head.weight"


@ranks(2)
def test_buffers_that_differ_or_were_never_written(rank: int):
    torch.manual_seed(0)
    model = by_hand(Net())
    model.table += rank
    assert codes(model) == {"SW431"}
    model.table.fill_(-3.6e-37)
    assert codes(model) == {"SW434"}
    model.table.fill_(torch.finfo(torch.float32).min)  # an attention mask
    assert codes(model) == set()
    model.table.fill_(float("nan"))
    assert "SW434" in codes(model)


@ranks(4)
def test_replicas_that_differ(rank: int):
    torch.manual_seed(rank // 2)  # each replica draws its own weights
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    assert "SW433" in codes(fully_shard(model, mesh=mesh))


@ranks(2)
def test_tie_that_was_broken(rank: int):
    torch.manual_seed(0)
    model = Net()
    model.head.weight = model.embed.weight
    model = sw.shard(model)
    assert codes(model) == set()
    model.head.weight = nn.Parameter(copy.copy(model.embed.weight.detach()))
    assert "SW406" in codes(model)


@ranks(2)
def test_model_left_on_meta(rank: int):
    with torch.device("meta"):
        model = sw.shard(Net())
    assert "SW405" in codes(model)


@ranks(2)
def test_parameter_in_two_groups_of_the_optimizer(rank: int):
    torch.manual_seed(0)
    model = by_hand(Net())
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    second = torch.optim.SGD([model.head.weight], lr=0.1)
    assert {finding.code for finding in check(model, [first, second])} == {"SW423"}


def test_an_unsharded_model_in_one_process_is_told():
    assert {finding.code for finding in check(nn.Linear(2, 2))} >= {"SW411"}


@pytest.mark.parametrize("kind", ["same", "turned", "swapped", "other"])
@ranks(2)
def test_optimizer_groups_that_differ_between_ranks(rank: int, kind: str):
    torch.manual_seed(0)
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    named = dict(model.named_parameters())
    weights = [name for name in named if name.endswith("weight")]
    rest = [name for name in named if name not in weights]
    if rank == 1:
        if kind == "turned":  # a set: harmless, state goes by names
            weights = weights[::-1]
        if kind == "swapped":
            weights, rest = rest, weights
        if kind == "other":
            rest.append(weights.pop())
    optimizer = torch.optim.AdamW([{"params": [named[name] for name in names]} for names in (weights, rest)])
    found = [finding for finding in check(model, optimizer) if finding.code == "SW437"]
    assert [finding.severity.name for finding in found] == {"swapped": ["WARNING"], "other": ["ERROR"]}.get(kind, [])
    if found:
        told = {"swapped": "in another order on rank 1 than on rank 0", "other": "differ between rank 1 and rank 0"}
        assert told[kind] in found[0].message
