"""Mixtures of experts whose experts are modules, in three routing styles; ranks choose different experts."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.case import Case, normal

DIM, EXPERTS = 16, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.up(x)))


class Routed(nn.Module):
    """Router and experts; subclasses differ in how they walk the chosen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # The last input feature names the expert, so that the batch decides who is left out.
        weight = self.router(x).softmax(-1)
        chosen = x[..., -1].long().clamp(0, EXPERTS - 1)
        return chosen, weight.gather(-1, chosen[..., None])


class ByIndex(Routed):
    """Only the experts that were hit are indexed."""

    def forward(self, x: Tensor) -> Tensor:
        chosen, weight = self.route(x)
        out = torch.zeros_like(x)
        expert_hit = chosen.unique()
        for expert_idx in expert_hit:
            rows = torch.where(chosen == expert_idx)
            out[rows] = self.experts[expert_idx](x[rows]) * weight[rows]
        return out


class ByMask(Routed):
    """Every expert is looked at; those without a token are skipped."""

    def forward(self, x: Tensor) -> Tensor:
        chosen, weight = self.route(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if not mask.any():
                continue
            out[mask] = expert(x[mask]) * weight[mask]
        return out


class ByAll(Routed):
    """Every expert is called, possibly on no rows at all."""

    def forward(self, x: Tensor) -> Tensor:
        chosen, weight = self.route(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero(as_tuple=True)
            out[rows] = expert(x[rows]) * weight[rows]
        return out


class Layer(nn.Module):
    def __init__(self, routed: type[Routed]) -> None:
        super().__init__()
        self.mix, self.moe = nn.Linear(DIM, DIM), routed()

    def forward(self, x: Tensor) -> Tensor:
        keep = x[..., -1:]  # the routing feature passes through
        mixed = self.mix(x)
        x = torch.cat([mixed[..., :-1], keep], -1)
        routed = self.moe(x)
        return torch.cat([(x + routed)[..., :-1], keep], -1)


class Model(nn.Module):
    def __init__(self, routed: type[Routed]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(routed) for _ in range(2)])
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def routed_batch(rank: int, seed: int) -> Tensor:
    """Rank 0 uses experts 0 and 1, rank 1 experts 1 and 2, and so on; the last is never used on two ranks."""
    x = normal(seed, 6, DIM)
    x[:, -1] = torch.tensor([rank % 3, rank % 3 + 1] * 3).float() + 0.5
    return x


def by_index() -> nn.Module:
    return Model(ByIndex)


def by_mask() -> nn.Module:
    return Model(ByMask)


def by_all() -> nn.Module:
    return Model(ByAll)


class ByBranch(nn.Module):
    """Two branches; the data of a rank decide which one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Expert(), Expert()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) if x[0, -1] < 1 else self.second(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class ByName(nn.Module):
    """Experts under names; the data of a rank spell the name. All are of one size, so a mix-up would be silent."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: Expert() for name in "abc"})
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts["abc"[int(x[:, -1].max()) % 3]](x))


class LayerDrop(nn.Module):
    """Skips layers at random, differently on every rank, as speech models do in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Expert() for _ in range(4)])
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                continue
            x = x + layer(x)
        return self.head(x)


class EarlyExit(nn.Module):
    """Stops when the input says so: ranks run different numbers of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Expert() for _ in range(4)])
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        depth = int(x[:, -1].max())
        for i, layer in enumerate(self.layers):
            if i > depth:
                break
            x = x + layer(x)
        return self.head(x)


class BySlice(EarlyExit):
    """The same, as a slice of the list."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: int(x[:, -1].max()) + 1]:
            x = x + layer(x)
        return self.head(x)


CASES = [
    Case(name="experts_by_index", build=by_index, make_batch=routed_batch, four_ranks=True),
    Case(name="experts_by_mask", build=by_mask, make_batch=routed_batch, four_ranks=True),
    Case(name="experts_by_all", build=by_all, make_batch=routed_batch, four_ranks=True),
    Case(name="experts_by_name", build=ByName, make_batch=routed_batch, kept=("experts.*",)),
    Case(name="layer_drop", build=LayerDrop, make_batch=routed_batch, kept=("layers.*",), four_ranks=True),
    Case(name="early_exit", build=EarlyExit, make_batch=routed_batch, kept=("layers.*",)),
    Case(name="layers_by_slice", build=BySlice, make_batch=routed_batch, kept=("layers.*",)),
    Case(
        name="branch_by_data",
        build=ByBranch,
        make_batch=routed_batch,
        kept=("first", "second"),
        four_ranks=True,
    ),
]
