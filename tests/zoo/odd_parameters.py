"""Parameters FSDP2 has trouble with: scalar, empty, complex, strided, smaller than the world, unused."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm

from tests.toy_models import PlainBlock as Block
from tests.zoo.case import Case, features, normal

DIM = 16


class Root(nn.Module):
    def __init__(self, blocks: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(3)])
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class ScaledBlock(Block):
    """A scalar gate in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate.tanh() * super().forward(x)


class ScalarRoot(Root):
    """A scalar temperature on the root, used before and after the blocks."""

    def __init__(self) -> None:
        super().__init__([ScaledBlock() for _ in range(2)])
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.temperature) / self.temperature.exp()


class SmallBlock(nn.Module):
    """Three rows, one row, and a head of two: fewer than four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(DIM, 3), nn.Linear(3, DIM)
        self.score = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wide(self.narrow(x)) * torch.sigmoid(self.score(x))


def smaller_than_world() -> nn.Module:
    model = Root([SmallBlock() for _ in range(3)])
    model.out = nn.Linear(DIM, 1)
    return model


class ComplexBlock(nn.Module):
    """A spectral filter."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(DIM // 2 + 1, dtype=torch.complex64))
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=DIM))


def complex_filters() -> nn.Module:
    return Root([ComplexBlock() for _ in range(3)])


class EmptyBlock(Block):
    """A prompt of length zero, as optional prompts leave it."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.zeros(0, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([self.prompt, x]))


def empty() -> nn.Module:
    return Root([EmptyBlock() for _ in range(2)])


class StridedBlock(nn.Module):
    """A transposed, hence non-contiguous, weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * DIM, DIM).T)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(x @ self.weight))


def strided() -> nn.Module:
    return Root([StridedBlock() for _ in range(3)])


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def channels_last() -> nn.Module:
    model: Any = ConvNet()
    return model.to(memory_format=torch.channels_last)


class PartlyUsed(Root):
    """A block nobody calls, and a parameter of a used block that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = Block()
        self.blocks[1].extra = nn.Linear(DIM, DIM)


class UsedOnSomeRanks(nn.Module):
    """An auxiliary head that runs where the batch asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.main = Root()
        self.auxiliary = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        hidden = self.main(x)
        if wanted.item():
            hidden = hidden + self.auxiliary(x)
        return hidden


def wanted_batch(rank: int, seed: int) -> tuple[Tensor, Tensor]:
    return normal(seed, 2, DIM), torch.tensor(rank == 0)


class InnerBranch(nn.Module):
    """A block part of which runs on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        if x.sum() > 0:
            y = y + self.sometimes(x)
        return y


def inner_branch() -> nn.Module:
    return Root([InnerBranch() for _ in range(3)])


def signed_batch(rank: int, seed: int) -> Tensor:
    return normal(seed, 2, DIM) + (5.0 if rank == 0 else -5.0)


def weight_normed() -> nn.Module:
    """Torch's parametrisation."""
    return Root([nn.Sequential(parametrizations.weight_norm(nn.Linear(DIM, DIM)), nn.Tanh()) for _ in range(3)])


def old_weight_normed() -> nn.Module:
    """The deprecated hook, which wav2vec2 checkpoints and vocoders still use."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and the point of the case
        blocks = [nn.Sequential(old_weight_norm(nn.Linear(DIM, DIM)), nn.Tanh()) for _ in range(3)]
    return Root(list(blocks))


def spectral_normed() -> nn.Module:
    return Root([nn.Sequential(parametrizations.spectral_norm(nn.Linear(DIM, DIM)), nn.Tanh()) for _ in range(3)])


CASES = [
    Case(name="scalars", build=ScalarRoot, make_batch=features(2, DIM), four_ranks=True),
    Case(name="smaller_than_world", build=smaller_than_world, make_batch=features(2, DIM), four_ranks=True),
    Case(name="complex", build=complex_filters, make_batch=features(2, DIM)),
    Case(name="empty", build=empty, make_batch=features(2, DIM)),
    Case(name="strided", build=strided, make_batch=features(2, DIM)),
    Case(name="batch_norm", build=ConvNet, make_batch=features(3, 3, 8, 8), four_ranks=True),
    Case(name="channels_last", build=channels_last, make_batch=features(3, 3, 8, 8)),
    Case(name="partly_used", build=PartlyUsed, make_batch=features(2, DIM), four_ranks=True),
    Case(name="used_on_some_ranks", build=UsedOnSomeRanks, make_batch=wanted_batch, four_ranks=True),
    Case(name="inner_branch", build=inner_branch, make_batch=signed_batch, four_ranks=True),
    Case(name="weight_norm", build=weight_normed, make_batch=features(2, DIM), four_ranks=True),
    Case(name="old_weight_norm", build=old_weight_normed, make_batch=features(2, DIM)),
    Case(name="spectral_norm", build=spectral_normed, make_batch=features(2, DIM)),
]
