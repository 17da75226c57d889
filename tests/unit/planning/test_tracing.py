"""trace_calls: what one forward on fake tensors shows, and that it leaves no mark."""

import copy
import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.planning.tracing import trace_calls


class Block(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.linear(self.norm(x))

    def forward_train(self, x):
        return self._inner(x)

    def _inner(self, x):
        return self.linear(x) * self.norm.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.batch_norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.seen = []
        self.steps = 0

    def forward(self, ids):
        x = self.embed(ids)
        x = self.blocks[0](self.blocks[0](x))
        x = self.blocks[1].linear(x.to(self.blocks[3].linear.weight.dtype))
        x = self.blocks[2].forward_train(x)
        x = x @ self.blocks[3].linear.weight
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        x = self.batch_norm(self.dropout(x).transpose(1, 2)).transpose(1, 2)
        self.last = x
        self.seen.append(x)
        self.steps += 1
        return self.head(x)


IDS = torch.arange(6).reshape(2, 3)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_calls_bypasses_methods_reads_and_repeats_are_seen(device):
    with torch.device(device):
        model = Model()
    calls = trace_calls(model, IDS)
    assert calls.complete, calls.notes
    assert calls.bypassed == {"blocks.1": {"blocks.1.linear"}}
    assert calls.methods == {"blocks.2": {"forward_train"}}
    assert calls.foreign_reads == {"blocks.3.linear.weight": {""}, "blocks.2.norm.weight": {"blocks.2"}}
    assert calls.repeated == {"blocks.0", "blocks.0.norm", "blocks.0.linear", "blocks.1.linear"}
    assert {"blocks.1", "blocks.2.linear", "head"} <= calls.called
    assert not calls.called & {"blocks.2", "blocks.3", "blocks.3.linear"}


def everything(model: nn.Module) -> dict:
    """All that a trace might disturb, by identity and by value."""
    return {
        "identities": {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)},
        "buffers": {name: id(b) for name, b in model.named_buffers()},
        "values": copy.deepcopy({name: value.clone() for name, value in model.state_dict().items()}),
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()},
        "training": {name: module.training for name, module in model.named_modules()},
        "grads": [parameter.grad for parameter in model.parameters()],
        "plain": (list(model.seen), model.steps),
    }


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_model_or_the_random_state_changes(fails):
    model = Model()
    model.blocks[3].eval()
    model.blocks[0].register_forward_hook(lambda module, args, output: output)
    before, states = everything(model), (torch.get_rng_state(), random.getstate())
    calls = trace_calls(model, (None,) if fails else IDS)
    assert calls.complete is not fails
    after = everything(model)
    for what in before:
        assert same(before[what], after[what]), what
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert model.head.weight is model.embed.weight
    assert not hasattr(model, "last")
    model(IDS).sum().backward()  # and it still trains


def test_a_failure_says_where_and_why():
    calls = trace_calls(Model(), (None,))
    assert "embed" in calls.notes[0]
    assert "TypeError" in calls.notes[0]
    assert "" in calls.called


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return self.second(x) if self.first(x).sum() > 0 else x


def test_a_forward_that_looks_at_the_data_is_reported_as_incomplete():
    calls = trace_calls(Routed(), torch.ones(2, 8))
    assert not calls.complete
    assert "tracing stopped in the root: DataDependentOutputException" in calls.notes[0]


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float


class Flexible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, first, second=None):
        if isinstance(first, Batch):
            return self.block(first.x) * first.scale
        if isinstance(first, list):
            return self.block(first[0]["x"])
        return self.block(first + second)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("inputs", ["tuple", "dict", "dataclass", "list"])
def test_inputs_come_as_a_tuple_a_dict_or_a_single_object(inputs, device):
    x = torch.ones(2, 8, device=device)
    given = {
        "tuple": (x, x), "dict": {"first": x, "second": x}, "dataclass": Batch(x, 2.0), "list": [{"x": x}]
    }[inputs]  # fmt: skip
    calls = trace_calls(Flexible(), given)
    assert calls.complete, calls.notes
    assert "block.linear" in calls.called


def test_internals_of_opaque_modules_are_not_reads_of_others():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

        def forward(self, x):
            return F.linear(self.attention(x, x, x)[0], self.normed.weight)

    calls = trace_calls(Attends(), torch.ones(2, 3, 8))
    assert calls.complete, calls.notes
    assert "attention.out_proj" not in calls.called
    assert set(calls.foreign_reads) == {
        "normed.parametrizations.weight.original0", "normed.parametrizations.weight.original1"
    }  # fmt: skip


def test_a_model_without_forward_cannot_be_traced():
    calls = trace_calls(nn.ModuleList([Block()]), torch.ones(1))
    assert not calls.complete
    assert "no forward" in calls.notes[0]
