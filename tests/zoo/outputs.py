"""What goes in and comes out: dataclasses, plain objects, nested containers, views changed in place."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.zoo.case import Case, normal

DIM = 16


@dataclass
class State:
    hidden: Tensor
    scale: float = 1.0
    history: list[Tensor] = field(default_factory=list)
    total: Tensor | None = field(default=None, init=False)


class Plain:
    """Neither dataclass nor mapping nor tuple."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Pair(NamedTuple):
    hidden: Tensor
    auxiliary: Tensor


class Core(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class DataclassBlock(Core):
    def forward(self, state: State) -> State:
        hidden = self.compute(state.hidden)
        made = State(hidden=hidden, scale=state.scale, history=[*state.history, hidden])
        made.total = hidden.sum()
        return made


class PlainObjectBlock(Core):
    def forward(self, state: Plain) -> Plain:
        return Plain(self.compute(state.hidden))


class NamespaceBlock(Core):
    def forward(self, state: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(hidden=self.compute(state.hidden))


class NestedBlock(Core):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        hidden = self.compute(state["stack"][0][0])
        return {"stack": [(hidden, {"mean": hidden.mean()}), None], "index": state["index"] + 1}


class NamedTupleBlock(Core):
    def forward(self, state: Pair) -> Pair:
        hidden = self.compute(state.hidden)
        return Pair(hidden, state.auxiliary + hidden.square().mean())


class ViewBlock(Core):
    """Returns a view, which the caller then changes in place."""

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x).view(-1, DIM)


class StoredLossBlock(Core):
    """Keeps an auxiliary loss on itself for the root to collect."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.compute(x)
        self.auxiliary = x.square().mean()
        return x


class Root(nn.Module):
    def __init__(self, block: type[Core]) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([block() for _ in range(3)])
        self.out = nn.Linear(DIM, DIM)


class WithDataclass(Root):
    def __init__(self) -> None:
        super().__init__(DataclassBlock)

    def forward(self, state: State) -> State:
        for block in self.blocks:
            state = block(state)
        return State(hidden=self.out(state.hidden), history=state.history)


class WithPlainObject(Root):
    def __init__(self) -> None:
        super().__init__(PlainObjectBlock)

    def forward(self, x: Tensor) -> Plain:
        state = Plain(x)
        for block in self.blocks:
            state = block(state)
        return Plain(self.out(state.hidden))


class WithNamespace(Root):
    def __init__(self) -> None:
        super().__init__(NamespaceBlock)

    def forward(self, x: Tensor) -> Tensor:
        state = SimpleNamespace(hidden=x)
        for block in self.blocks:
            state = block(state)
        return self.out(state.hidden)


class WithNested(Root):
    def __init__(self) -> None:
        super().__init__(NestedBlock)

    def forward(self, x: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {"stack": [(x, {})], "index": 0}
        for block in self.blocks:
            state = block(state)
        return {
            "final": [self.out(state["stack"][0][0]), (state["stack"][0][1]["mean"],)],
            "index": state["index"],
        }


class WithNamedTuple(Root):
    def __init__(self) -> None:
        super().__init__(NamedTupleBlock)

    def forward(self, x: Tensor) -> Pair:
        state = Pair(x, x.new_zeros(()))
        for block in self.blocks:
            state = block(state)
        return Pair(self.out(state.hidden), state.auxiliary)


class WithInPlaceOnView(Root):
    def __init__(self) -> None:
        super().__init__(ViewBlock)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 0.1
            x[..., 0] *= 2.0
        return self.out(x)


class WithStoredLoss(Root):
    def __init__(self) -> None:
        super().__init__(StoredLossBlock)

    def forget(self) -> None:
        """FSDP2's nodes refer to the model, which would keep itself alive by a tensor of its own."""
        for block in self.blocks:
            block.auxiliary = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        auxiliary = torch.stack([block.auxiliary for block in self.blocks]).sum()
        self.forget()
        return self.out(x).square().mean() + 0.1 * auxiliary


class OnlyStoredLoss(WithStoredLoss):
    """The output is thrown away: backward enters through what the blocks stored."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.out(x)
        auxiliary = torch.stack([block.auxiliary for block in self.blocks]).sum()
        self.forget()
        return auxiliary


def state_batch(seed: int) -> State:
    return State(hidden=normal(seed, 3, DIM))


def hidden_batch(seed: int) -> Tensor:
    return normal(seed, 3, DIM)


CASES = [
    Case(name="dataclass", build=WithDataclass, make_batch=state_batch, four_ranks=True),
    Case(name="plain_object", build=WithPlainObject, make_batch=hidden_batch, four_ranks=True),
    Case(name="namespace", build=WithNamespace, make_batch=hidden_batch),
    Case(name="nested_outputs", build=WithNested, make_batch=hidden_batch),
    Case(name="named_tuple", build=WithNamedTuple, make_batch=hidden_batch),
    Case(name="in_place_on_view", build=WithInPlaceOnView, make_batch=hidden_batch, four_ranks=True),
    Case(name="stored_loss", build=WithStoredLoss, make_batch=hidden_batch),
    Case(name="only_stored_loss", build=OnlyStoredLoss, make_batch=hidden_batch),
]
