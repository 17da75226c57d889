"""Evaluation mode, or a forward that leaves no trace, for a while; then everything back as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.models.random_state import kept_random_state


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


@contextmanager
def trial_forward(model: nn.Module) -> Iterator[None]:
    """Run `model` inside to look at it: in evaluation mode, not compiled; buffers and random states are kept."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with evaluation_mode(model), kept_random_state(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
