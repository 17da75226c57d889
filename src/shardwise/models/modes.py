"""Context managers for evaluation mode and for a forward without side effects."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.models.random_state import kept_random_state


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the block and restore the mode of each module.

    Calling `model.train()` afterward would also affect modules that are in evaluation mode on purpose, as frozen norms.
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
    """Run `model` inside the block in evaluation mode, uncompiled; buffers and random state are restored."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with evaluation_mode(model), kept_random_state(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
