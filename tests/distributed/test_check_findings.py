"""check(): each finding with its code, its weight, the module it names and the numbers it gives; none at the limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW, Optimizer

import shardwise as sw
from tests.by_hand import mesh_1d, shard_module
from tests.ranks import ranks

Case = Callable[[int], tuple[nn.Module, Any]]
Found = tuple[str, str, str, str]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)


class Net(nn.Module):
    """14 parameters in 4 groups."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 16, bias=False)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("other", torch.arange(2.0))
        self.register_buffer("counts", torch.tensor([2**62, 3]))
        self.register_buffer("none", torch.empty(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block.second(block.first(x))
        return self.head(x)


class Sizes(nn.Module):
    """A group for each parameter."""

    def __init__(self, *shapes: Sequence[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for shape in shapes:
            part = nn.Module()
            part.weight = nn.Parameter(torch.zeros(*shape))
            self.parts.append(part)


def by_hand(model: Any) -> Any:
    for part in getattr(model, "blocks", None) or model.parts:
        shard_module(part, mesh_1d(2))
    return shard_module(model, mesh_1d(2))


def net(change: Callable[[Any], object] = lambda model: None) -> Any:
    torch.manual_seed(0)
    model = Net()
    change(model)
    return model


def told(model: nn.Module, optimizers: Any = None) -> list[tuple[str, str, str, str]]:
    return [(each.code, each.severity.value, each.where, each.message) for each in sw.check(model, optimizers)]


def assert_told(found: list[Found], expected: list[Found]) -> None:
    """The last of each expected finding is a part of its message."""
    assert [each[:3] for each in found] == [each[:3] for each in expected], found
    for each, (*_, part) in zip(found, expected, strict=True):
        assert part in each[3], each


def late_optimizer(rank: int) -> tuple[nn.Module, Any]:
    model = net()
    optimizer = AdamW(model.parameters())
    return by_hand(model), optimizer


def half_an_optimizer(rank: int) -> tuple[nn.Module, Any]:
    model = by_hand(net(lambda model: model.embed.requires_grad_(False)))
    return model, SGD([*model.blocks[0].parameters(), nn.Parameter(torch.ones(2))], lr=0.1)


def two_optimizers(rank: int) -> tuple[nn.Module, Any]:
    model = by_hand(net())
    again = SGD([model.head.weight, model.blocks[2].first.bias], lr=0.1)
    return model, (SGD(model.parameters(), lr=0.1), again)


def sync_off_in_one(rank: int) -> tuple[nn.Module, Any]:
    model = by_hand(net())
    model.blocks[1].set_requires_gradient_sync(False, recurse=False)
    return model, None


def gathered(rank: int) -> tuple[nn.Module, Any]:
    model = by_hand(net())
    model.blocks[1].unshard()
    model.blocks[2].unshard()
    return model, None


def replaced(rank: int) -> tuple[nn.Module, Any]:
    model = by_hand(net())
    for leaf in (model.blocks[0].first, model.head):
        leaf.weight = nn.Parameter(leaf.weight.detach().clone())
    return model, None


def bfloat16(rank: int) -> tuple[nn.Module, Any]:
    model = net(lambda model: (model.bfloat16(), model.embed.requires_grad_(False)))
    return by_hand(model), None


def two_dtypes(rank: int) -> tuple[nn.Module, Any]:
    return by_hand(net(lambda model: model.blocks[1].first.double())), None


def frozen_dtype(rank: int) -> tuple[nn.Module, Any]:
    return by_hand(net(lambda model: model.blocks[1].first.half().requires_grad_(False))), None


def ignored(rank: int, *, frozen: bool = False, apart: float = 0.0) -> tuple[nn.Module, Any]:
    model = net(lambda model: model.head.requires_grad_(not frozen))
    shard_module(model.blocks[0], mesh_1d(2))
    shard_module(model, mesh_1d(2), ignored_params={model.head.weight, model.embed.weight})
    with torch.no_grad():
        model.head.weight.add_(rank * apart)
        model.embed.weight.add_(rank * apart)
    model.embed.requires_grad_(not frozen)
    return model, None


def averaged(rank: int) -> tuple[nn.Module, Any]:
    return sw.shard(net(), sw.ShardConfig(ignored=("head.weight",))), None


def on_meta(rank: int) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        model = Net()
    model.register_buffer("table", torch.arange(4.0))
    return by_hand(model), None


def buffers(rank: int, *names: str) -> tuple[nn.Module, Any]:
    model = by_hand(net())
    for name in names:
        model.get_buffer(name).add_(rank)
    return model, None


def replicas(rank: int, *, same: bool = False) -> tuple[nn.Module, Any]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0 if same else rank)
    model = Net()
    for block in model.blocks:
        shard_module(block, mesh)
    return shard_module(model, mesh), None


class Tied(Net):
    """Says about its ends what transformers' models say."""

    def __init__(self, says: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=says)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class Undecided(Tied):
    def get_output_embeddings(self) -> nn.Module:
        raise NotImplementedError


def broken_tie(rank: int) -> tuple[nn.Module, Any]:
    model = net(lambda model: setattr(model.head, "weight", model.embed.weight))
    model = sw.shard(model)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    return model, None


def root_only(rank: int) -> tuple[nn.Module, Any]:
    return shard_module(net(), mesh_1d(2)), None


def sync_off(rank: int) -> tuple[nn.Module, Any]:
    model = by_hand(net())
    model.set_requires_gradient_sync(False)
    return model, None


CASES: dict[str, tuple[Case, list[Found]]] = {
    "right": (lambda rank: (by_hand(net()), None), []),
    "optimizer-before-sharding": (
        late_optimizer,
        [
            ("SW421", "error", "AdamW", "AdamW holds 14 tensors"),
            ("SW422", "warning", "embed.weight", "14 trainable parameters are in no optimizer"),
        ],
    ),
    "optimizer-of-a-part": (
        half_an_optimizer,
        [
            ("SW421", "error", "SGD", "SGD holds 1 tensors"),
            ("SW422", "warning", "blocks.1.first.weight", "9 trainable parameters are in no optimizer"),
        ],
    ),
    "two-optimizers": (two_optimizers, [("SW423", "error", "blocks.2.first.bias", "2 parameters are in two")]),
    "root-only": (root_only, [("SW412", "warning", "(root)", "with 3 blocks")]),
    "sync-off": (sync_off, [("SW416", "error", "(root)", "in 4 of 4 groups")]),
    "sync-off-in-one": (sync_off_in_one, [("SW416", "error", "blocks.1", "in 1 of 4 groups")]),
    "gathered": (gathered, [("SW417", "warning", "blocks.1", "2 groups are unsharded")]),
    "replaced": (
        replaced,
        [
            ("SW402", "error", "head.weight", "replaced after sharding"),
            ("SW402", "error", "blocks.0.first.weight", "replaced after sharding"),
        ],
    ),
    "bfloat16": (
        bfloat16,
        [("SW403", "warning", "blocks.0.first.weight", "13 trainable parameters are stored in bfloat16")],
    ),
    "two-dtypes": (
        two_dtypes,
        [("SW404", "error", "blocks.1", "parameters of torch.float32, torch.float64: FSDP2 refuses")],
    ),
    "frozen-dtype": (frozen_dtype, []),
    "ignored": (
        ignored,
        [
            ("SW401", "error", "embed.weight", "its gradient is not averaged"),
            ("SW401", "error", "head.weight", "its gradient is not averaged"),
        ],
    ),
    "ignored-frozen": (lambda rank: ignored(rank, frozen=True), []),
    "ignored-frozen-apart": (
        lambda rank: ignored(rank, frozen=True, apart=1.0),
        [("SW432", "error", "embed.weight", "drifted apart (and 1 more)")],
    ),
    "averaged-by-shardwise": (averaged, []),
    "on-meta": (on_meta, [("SW405", "error", "embed.weight", "17 tensors have no values yet")]),
    "buffer-differs": (lambda rank: buffers(rank, "table"), [("SW431", "warning", "table", "a buffer differs")]),
    "buffers-differ": (
        lambda rank: buffers(rank, "other", "counts"),
        [("SW431", "warning", "other", "a buffer differs between ranks (and 1 more)")],
    ),
    "replicas-differ": (
        replicas,
        [
            (
                "SW433",
                "error",
                "embed.weight",
                "replicas differ: 14 parameters are not the same on rank 0 and rank 1",
            )
        ],
    ),
    "replicas-alike": (lambda rank: replicas(rank, same=True), []),
    "broken-tie": (
        broken_tie,
        [("SW406", "error", "head.weight", "head.weight should be the same tensor as embed.weight")],
    ),
    "untied-ends": (
        lambda rank: (by_hand(Tied(True)), None),
        [("SW406", "error", "head.weight", "head.weight should be the same tensor as embed.weight")],
    ),
    "ends-that-need-not-be-tied": (lambda rank: (by_hand(Tied(False)), None), []),
    "ends-that-are-not-known": (lambda rank: (by_hand(Undecided(True)), None), []),
}


@ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_findings_are_exact(rank: int, case: str):
    make, expected = CASES[case]
    torch.manual_seed(0)
    model, optimizers = make(rank)
    assert_told(told(model, optimizers), expected)


MIB = 1 << 18
"""Elements of a MiB."""
GROUPS: dict[str, tuple[list[int], str]] = {
    "four-times": ([MIB // 2, MIB // 2, MIB // 2, 2 * MIB], ""),
    "over-four-times": ([MIB // 2, MIB // 2, MIB // 2, 2 * MIB + 2], "it gathers 2 MiB, 4 times the usual group"),
    "one-mib": ([1000, 1000, MIB], ""),
    "over-one-mib": ([1000, 1000, MIB + 2], "it gathers 1 MiB, 262 times the usual group"),
    "half-of-the-model": ([MIB] * 5 + [5 * MIB], ""),
    "over-half": ([MIB] * 5 + [5 * MIB + 2], "it gathers 5 MiB, 5 times the usual group"),
    "two-groups": ([1000, 2 * MIB], ""),
    "first": ([3 * MIB, 1000, 1000], "it gathers 3 MiB, 786 times the usual group"),
}


@ranks(2)
@pytest.mark.parametrize("case", GROUPS)
def test_a_group_is_too_large_from_here_on(rank: int, case: str):
    sizes, message = GROUPS[case]
    findings = told(by_hand(Sizes(*[(size,) for size in sizes])))
    largest = sizes.index(max(sizes))
    expected = [("SW414", "warning", f"parts.{largest}", message)] if message else []
    assert [each[:3] for each in findings] == [each[:3] for each in expected], findings
    assert all(message in each[3] for each in findings), findings


@ranks(2)
@pytest.mark.parametrize(
    ("shape", "share"),
    [((1, MIB), ""), ((1, MIB + 2), "50%"), ((3, 2 * MIB), ""), ((2, 2 * MIB), ""), ((1, 2), "")],
    ids=["one-mib", "over-one-mib", "a-quarter", "none", "small"],
)
def test_padding_counts_where_it_is_much(rank: int, shape: tuple[int, int], share: str):
    findings = told(by_hand(Sizes(shape)))
    assert [each[:3] for each in findings] == ([("SW415", "warning", "parts.0.weight")] if share else [])
    assert all(each[3].startswith(f"{share} of what the ranks hold of it is padding") for each in findings)


@ranks(2)
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, ""), (2e-30, ""), (9e-31, "9e-31"), (-9e-31, "9e-31"), (9e29, ""), (2e30, "2e+30"),
        (float("inf"), ""), (float("-inf"), ""), (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_buffers_that_look_unwritten(rank: int, value: float, shown: str):
    model = by_hand(net())
    model.table[1:] = 0.0
    model.table[:1] = value
    findings = told(model)
    assert [each[:3] for each in findings if each[0] == "SW434"] == ([("SW434", "error", "table")] if shown else [])
    assert all(f"(largest {shown})" in each[3] for each in findings)


def test_one_process_without_a_group_is_told_the_worst_first():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)).bfloat16()
    model.register_buffer("table", torch.full((2,), float("nan")))
    optimizer: Optimizer = SGD(model[0].parameters(), lr=0.1)
    found = sw.check(model, optimizer)
    assert [(each.code, each.severity.value, each.where) for each in found] == [
        ("SW411", "error", "(root)"),
        ("SW401", "error", "0.weight"),
        ("SW401", "error", "0.bias"),
        ("SW401", "error", "1.weight"),
        ("SW434", "error", "table"),
        ("SW403", "warning", "0.weight"),
        ("SW422", "warning", "1.weight"),
    ]
    assert "1 trainable parameters are in no optimizer" in found[-1].message
    assert all(each.fix for each in found)
