"""Evaluation mode for a while, and every module's own mode back afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` in evaluation mode inside; then give each of its modules back the mode it had.

    `model.train()` afterwards would also wake modules that were put to sleep on purpose, as frozen norms are.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
