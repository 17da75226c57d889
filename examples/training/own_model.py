"""A model, data and objective of one's own, as `own_model.yaml` and `bad_losses.yaml` name them."""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss


def build(width: int) -> nn.Module:
    """Three blocks; `model_options` are the arguments."""
    return nn.Sequential(
        nn.Linear(8, width),
        *(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(3)),
        nn.Linear(width, 1),
    )


class Sums:
    """Numbered samples: eight numbers and their sum. One of them may be bad."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        numbers = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"numbers": numbers, "total": numbers.sum() if index != self.bad else torch.tensor(float("nan"))}


def samples(config: object) -> Sums:
    """Called with the run's `data` settings."""
    return Sums()


def samples_with_a_bad_one(config: object) -> Sums:
    """Sample 100 is in the seventh step of a batch of 16."""
    return Sums(bad=100)


def objective(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The loss summed over the rows, and their number."""
    error = mse_loss(model(batch["numbers"])[:, 0], batch["total"], reduction="sum")
    return error, len(batch["numbers"])
