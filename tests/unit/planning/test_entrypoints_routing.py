"""read_calls: which modules run only when the data says so, and which conditions do not count."""

import random

import pytest
import torch
from torch import nn

from shardwise.planning.planner import read_calls


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x))


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.top_k = 4, 2
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList([Expert() for _ in range(4)])
        self.shared = Expert()

    def route(self, x):
        weights, selected = torch.topk(self.gate(x).softmax(-1), self.top_k)
        return weights, selected

    def mask(self, selected):
        return torch.nn.functional.one_hot(selected, num_classes=self.num_experts).permute(2, 1, 0)


class OnlyHitExperts(Moe):
    def forward(self, x):
        weights, selected = self.route(x)
        mask = self.mask(selected)
        out = self.shared(x)
        for expert_idx in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            expert = self.experts[expert_idx]
            idx, top_x = torch.where(mask[expert_idx].squeeze(0))
            out.index_add_(0, top_x, expert(x[top_x]) * weights[top_x, idx, None])
        return out


class AnyThenCall(Moe):
    def forward(self, x):
        _, selected = self.route(x)
        out = self.shared(x)
        for i, expert in enumerate(self.experts):
            chosen = (selected == i).any(-1)
            if chosen.any():
                out[chosen] += expert(x[chosen])
        return out


class ContinueWhenEmpty(Moe):
    def forward(self, x):
        _, selected = self.route(x)
        mask = self.mask(selected)
        out = self.shared(x)
        for expert_idx in range(self.num_experts):
            expert_layer = self.experts[expert_idx]
            _, top_x = torch.where(mask[expert_idx])
            if top_x.shape[0] == 0:
                continue
            out.index_add_(0, top_x, expert_layer(x[None, top_x].reshape(-1, 8)))
        return out


class CountedTokens(Moe):
    def forward(self, x):
        _, selected = self.route(x)
        tokens_per_expert = selected.flatten().bincount(minlength=4).cpu().numpy()
        out = self.shared(x)
        start = 0
        for i, num_tokens in enumerate(tokens_per_expert):
            end = start + num_tokens
            if num_tokens == 0:
                continue
            out[start:end] = self.experts[i](x[start:end])
            start = end
        return out


class SplitByCounts(Moe):
    def forward(self, x):
        _, selected = self.route(x)
        order = selected.flatten().argsort()
        counts = torch.nn.functional.one_hot(selected, num_classes=4).sum((0, 1))
        out = self.shared(x)
        for expert, places in zip(self.experts, order.split(counts.tolist()), strict=True):
            if places.numel() == 0:
                continue
            out = out.index_add(0, places // 2, expert(x[places // 2]))
        return out


class SplitByFunction(Moe):
    def forward(self, x):
        _, selected = self.route(x)
        counts = selected.flatten().bincount(minlength=4).tolist()
        out = self.shared(x)
        parts = torch.split(x, counts)
        for i, expert in enumerate(self.experts):
            if len(parts[i]):
                out = out + expert(parts[i]).sum()
        return out


class PickedByItem(Moe):
    def forward(self, x):
        _, selected = self.route(x)
        return self.shared(x) + self.experts[selected[0, 0].item()](x)


class PickedByExpression(Moe):
    def forward(self, x):
        score = self.gate(x).mean()
        first, second, third, fourth = self.experts
        chosen = first if score > 0 else second
        other = third if score > 0 else fourth
        return self.shared(x) + chosen(x) + other(x)


class EarlyReturn(Moe):
    def forward(self, x):
        out = self.shared(x) + self.gate(x).sum()
        if not (x > 0).any():
            return out
        for expert in self.experts:
            out = out + expert(x)
        return out


ROUTERS = [
    OnlyHitExperts, AnyThenCall, ContinueWhenEmpty, CountedTokens, SplitByCounts, SplitByFunction, PickedByItem,
    PickedByExpression, EarlyReturn,
]  # fmt: skip


@pytest.mark.parametrize("kind", ROUTERS, ids=lambda kind: kind.__name__)
def test_experts_picked_by_the_data_are_conditional_with_all_inside(kind):
    calls = read_calls(kind())
    experts = {f"experts.{i}{part}" for i in range(4) for part in ("", ".up", ".down")}
    assert calls.conditional == experts
    assert experts | {"gate", "shared", "shared.up"} <= calls.called
    assert not calls.repeated
    assert not calls.bypassed


class Everyone(Moe):
    """Each condition here tests settings, shapes or what was passed, never a tensor's content."""

    def forward(self, x, mask=None, use_gate: bool = False, mode: str = "all", states=()):
        if self.training and self.num_experts > 1 and mask is not None:
            x = self.gate(x).sum() * x
        elif isinstance(x, torch.Tensor) and x.shape[0] > 1 and x.dtype == torch.float32:
            x = self.shared(x)
        if use_gate or mode == "all" or len(states) > 2 or torch.is_grad_enabled():
            x = x + self.shared(x)
        if torch.isnan(x).any():
            raise ValueError("nan")
        assert (x > 0).all() or True
        for i, expert in enumerate(self.experts):
            if i % 2 == 0 and i < self.top_k:
                continue
            x = x + expert(x)
        for expert, part in zip(self.experts, x.split(x.shape[0] // 4), strict=True):
            if part.numel() > 0:
                x = x + expert(part).sum()
        return x


def test_conditions_on_settings_shapes_and_arguments_do_not_count():
    calls = read_calls(Everyone())
    assert not calls.conditional
    assert {"experts.0", "experts.3", "shared", "gate"} <= calls.called


def test_a_module_also_called_without_a_condition_is_not_conditional():
    class Both(AnyThenCall):
        def forward(self, x):
            return super().forward(x) + self.experts[1](x)

    assert read_calls(Both()).conditional == {f"experts.{i}{part}" for i in (0, 2, 3) for part in ("", ".up", ".down")}


class LayerDrop(nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Expert(), Expert()])
        self.layerdrop = probability

    def forward(self, x):
        for layer in self.layers:
            if self.training:
                drawn = torch.rand([])
                if drawn < self.layerdrop:
                    continue
            x = layer(x)
        return x


def test_layerdrop_makes_layers_conditional_only_when_switched_on():
    assert not read_calls(LayerDrop(0.0)).conditional
    assert {"layers.0", "layers.1"} <= read_calls(LayerDrop(0.1)).conditional


class BranchOnInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.first(x) if x[0, -1] < 1 else self.second(x)


class BranchOnAnnotatedInput(BranchOnInput):
    def forward(self, x: torch.Tensor | None):
        if x[0] > 0:
            return self.first(x)
        return self.second(x)


@pytest.mark.parametrize("kind", [BranchOnInput, BranchOnAnnotatedInput])
def test_branches_on_the_content_of_an_input_are_conditional(kind):
    assert read_calls(kind()).conditional == {"first", "second"}


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for name in "abc"})
        self.e0, self.e1 = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
        self.names = {0: "a", 1: "b", 2: "c"}


class ByLetter(Named):
    def forward(self, x):
        return self.experts["abc"[int(x.sum()) % 3]](x)


class ByTable(Named):
    def forward(self, x):
        return self.experts[self.names[int(x.argmax())]](x)


class ByAttributeName(Named):
    def forward(self, x):
        return getattr(self, f"e{x.argmax().item()}")(x)


class ByFlag(Named):
    def forward(self, x):
        return {True: self.e0, False: self.e1}[bool(x.sum() > 0)](x)


class ByPythonRandom(Named):
    def forward(self, x):
        return (self.e0 if random.random() < 0.5 else self.e1)(x)


class ByMatch(Named):
    def forward(self, x):
        match int(x.sum()):
            case 0:
                return self.e0(x)
            case _:
                return self.e1(x)


class UntilLarge(Named):
    def forward(self, x):
        while x.norm() < 10:
            x = x * 2 + self.e0(x)
        return x


@pytest.mark.parametrize(
    ("kind", "picked"),
    [
        (ByLetter, {"experts.a", "experts.b", "experts.c"}),
        (ByTable, {"experts.a", "experts.b", "experts.c"}),
        (ByAttributeName, {"e0", "e1"}),
        (ByFlag, {"e0", "e1"}),
        (ByPythonRandom, {"e0", "e1"}),
        (ByMatch, {"e0", "e1"}),
        (UntilLarge, {"e0"}),
    ],
)
def test_modules_looked_up_by_the_data_are_conditional(kind, picked):
    """Missed, ranks would gather each other's experts in place of their own, and nothing would be raised."""
    found = read_calls(kind()).conditional
    assert picked <= found
