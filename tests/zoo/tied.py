"""One tensor under several names: across non-siblings, shared modules, and weights used by function."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.toy_models import PlainBlock as Block
from tests.zoo.case import Case, features, tokens

DIM, VOCAB = 16, 40


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks: Any = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.out = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class TiedAcross(nn.Module):
    """Embedding and head live in different children of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Inner(), Head()
        self.head.out.weight = self.inner.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(ids))


class FunctionalHead(nn.Module):
    """The head is the embedding's weight, read by the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks: Any = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return functional.linear(x, self.embed.weight)


class NestedFunctionalHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.inner(ids)) @ self.inner.embed.weight.T


class TiedBlocks(nn.Module):
    """The same matrix inside every second block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        blocks = [Block() for _ in range(4)]
        blocks[2].up.weight = blocks[0].up.weight
        blocks[3].up.weight = blocks[1].up.weight
        self.blocks = nn.ModuleList(blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


class SharedModule(nn.Module):
    """One block object in two places of a list."""

    def __init__(self) -> None:
        super().__init__()
        shared = Block()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks: Any = nn.ModuleList([shared, Block(), shared])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


class UsedTwice(nn.Module):
    """A block that runs twice in a pass, and one that runs in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.first, self.again = Block(), Block()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.embed(ids))
        for _ in range(3):
            x = self.again(x)
        return self.first(x)


class ReadsBlockWeight(nn.Module):
    """A caller that reads `block.weight` besides calling the blocks, as weight penalties do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        penalty = x.new_zeros(())
        for block in self.blocks:
            x = torch.tanh(block(x))
            penalty = penalty + block.weight.square().sum()
        return x.square().mean() + 1e-2 * penalty


class OnlyReadsWeights(nn.Module):
    """Never calls its Linears at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(3)])
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(functional.linear(x, block.weight, block.bias))
        return self.head(x)


class OwnsParameters(nn.Module):
    """Root-owned parameters used first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(6, DIM))
        self.query = nn.Parameter(torch.randn(1, DIM))
        self.blocks: Any = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x @ self.query.T


class SharedTower(nn.Module):
    """Siamese: two inputs through one tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(*[Block() for _ in range(3)])

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return (self.tower(left) - self.tower(right)).square().mean()


class TwinTowers(nn.Module):
    """Two towers of one class, each with its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(*[Block() for _ in range(2)])
        self.right = nn.Sequential(*[Block() for _ in range(2)])

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return (self.left(left) - self.right(right)).square().mean()


def ids(seed: int) -> Tensor:
    return tokens(seed, vocab=VOCAB, length=5)


def pair(seed: int) -> tuple[Tensor, Tensor]:
    return features(3, DIM)(seed), features(3, DIM)(seed + 1000)


CASES = [
    Case(name="tied_across", build=TiedAcross, make_batch=ids, four_ranks=True),
    Case(name="functional_head", build=FunctionalHead, make_batch=ids, four_ranks=True),
    Case(name="nested_functional_head", build=NestedFunctionalHead, make_batch=ids),
    Case(name="tied_blocks", build=TiedBlocks, make_batch=ids, together=("blocks.*",)),
    Case(name="shared_module", build=SharedModule, make_batch=ids, runs_again=("blocks.0",), four_ranks=True),
    Case(name="used_twice", build=UsedTwice, make_batch=ids, runs_again=("first", "again")),
    Case(name="reads_block_weight", build=ReadsBlockWeight, make_batch=features(2, DIM), together=("blocks.*",)),
    Case(name="only_reads_weights", build=OnlyReadsWeights, make_batch=features(2, DIM), together=("blocks.*",)),
    Case(name="owns_parameters", build=OwnsParameters, make_batch=features(2, 5, DIM)),
    Case(name="shared_tower", build=SharedTower, make_batch=pair, runs_again=("tower", "tower.*")),
    Case(name="twin_towers", build=TwinTowers, make_batch=pair),
]
