"""Who calls whom: methods as entry points, checkpointed blocks, evaluation between steps."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.case import Case, features

DIM = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class ComputesLoss(nn.Module):
    """Trained through `compute_loss`; `forward` is for inference."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.blocks: Any = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)

    def compute_loss(self, x: Tensor) -> Tensor:
        return (self(x) - x).square().mean()

    def embed(self, x: Tensor) -> Tensor:
        """Uses only the first part of the model."""
        return self.blocks[0](self.inp(x))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inp, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.blocks: Any = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)  # pyrefly: ignore[bad-assignment]
        return self.out(x)


class CheckpointedInside(nn.Module):
    """Each block checkpoints its own inner function."""

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.compute, x, use_reentrant=False)  # pyrefly: ignore[bad-return]

        def compute(self, x: Tensor) -> Tensor:
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([self.Inner() for _ in range(3)])
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class CallsForwardDirectly(nn.Module):
    """`block.forward(x)`, which runs no hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([Block() for _ in range(3)])
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return self.out(x)


class CustomMethods(nn.Module):
    """Blocks entered through a method of their own and through `forward`, in the same pass."""

    class Part(Block):
        def encode(self, x: Tensor) -> Tensor:
            return torch.relu(self.up(x))

        def decode(self, x: Tensor) -> Tensor:
            return self.down(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([self.Part() for _ in range(3)])
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.decode(block.encode(x))
        return self.out(self.blocks[0](x))


class TeacherStudent(nn.Module):
    """A frozen teacher under no_grad beside the student."""

    def __init__(self) -> None:
        super().__init__()
        self.student = ComputesLoss()
        self.teacher = ComputesLoss()
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return (self.student(x) - target).square().mean()


def through_method(model: nn.Module, batch: Tensor) -> Tensor:
    return model.compute_loss(batch)  # pyrefly: ignore[not-callable]


def evaluates_first(model: nn.Module, batch: Tensor) -> Tensor:
    """Metrics under no_grad before the forward that trains, as reference log-probabilities are computed."""
    with torch.no_grad():
        model(batch)
    return model(batch).square().mean()


def evaluates_last(model: nn.Module, batch: Tensor) -> Tensor:
    """Evaluation between forward and backward."""
    loss = model(batch).square().mean()
    with torch.no_grad():
        model(batch)
    return loss


def two_forwards(model: nn.Module, batch: Tensor) -> Tensor:
    """Two forwards, one backward, as contrastive and DPO losses do."""
    return (model(batch) - model(batch.flip(-1))).square().mean()


def part_then_whole(model: nn.Module, batch: Tensor) -> Tensor:
    """A method that uses part of the model, then the model."""
    return model.embed(batch).square().mean() + model(batch).square().mean()  # pyrefly: ignore[not-callable]


def block_from_outside(model: nn.Module, batch: Tensor) -> Tensor:
    """A block called by the training script itself, before the model has ever run."""
    hidden = model.get_submodule("blocks.1")(batch)
    return hidden.square().mean() + model(batch).square().mean()


def leaf_from_outside(model: nn.Module, batch: Tensor) -> Tensor:
    """The script calls a head by itself after the model."""
    return model.get_submodule("out")(model(batch)).square().mean()


def checkpointed() -> nn.Module:
    return Checkpointed(use_reentrant=False)


def checkpointed_reentrant() -> nn.Module:
    return Checkpointed(use_reentrant=True)


AGAIN = ("**",)

CASES = [
    Case(
        name="compute_loss",
        build=ComputesLoss,
        make_batch=features(2, DIM),
        loss=through_method,
        four_ranks=True,
    ),
    Case(
        name="evaluates_first",
        build=ComputesLoss,
        make_batch=features(2, DIM),
        loss=evaluates_first,
        runs_again=AGAIN,
    ),
    Case(
        name="evaluates_last",
        build=ComputesLoss,
        make_batch=features(2, DIM),
        loss=evaluates_last,
        runs_again=AGAIN,
    ),
    Case(
        name="two_forwards",
        build=ComputesLoss,
        make_batch=features(2, DIM),
        loss=two_forwards,
        runs_again=AGAIN,
    ),
    Case(
        name="part_then_whole",
        build=ComputesLoss,
        make_batch=features(2, DIM),
        loss=part_then_whole,
        runs_again=AGAIN,
    ),
    Case(
        name="block_from_outside",
        build=ComputesLoss,
        make_batch=features(2, DIM),
        loss=block_from_outside,
        runs_again=AGAIN,
    ),
    Case(
        name="leaf_from_outside",
        build=ComputesLoss,
        make_batch=features(2, DIM),
        loss=leaf_from_outside,
        runs_again=AGAIN,
    ),
    Case(name="checkpointed", build=checkpointed, make_batch=features(2, DIM), four_ranks=True),
    Case(name="checkpointed_reentrant", build=checkpointed_reentrant, make_batch=features(2, DIM)),
    Case(name="checkpointed_inside", build=CheckpointedInside, make_batch=features(2, DIM)),
    Case(name="calls_forward_directly", build=CallsForwardDirectly, make_batch=features(2, DIM)),
    Case(name="custom_methods", build=CustomMethods, make_batch=features(2, DIM), runs_again=AGAIN),
    Case(name="teacher_student", build=TeacherStudent, make_batch=features(2, DIM), four_ranks=True),
]
