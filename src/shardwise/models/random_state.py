"""Seed, read and restore the generators that models draw from: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed torch's generators, Python's, and NumPy's if it is imported."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would query every device type
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    elif torch.accelerator.is_available():
        torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def random_state(device: torch.device | None = None) -> dict[str, Any]:
    """Copies of the states of all generators in use, by name.

    Args:
        device: Device whose generator is used in addition to the CPU's; None: the current CUDA device, if initialized.
    """
    states = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state(legacy=False)
    if device is not None and device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    elif torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Restore states of `random_state` for generators that this process has."""
    for name, state in states.items():
        if name == "torch":
            torch.set_rng_state(state)
        elif name == "python":
            random.setstate(state)
        elif name == "numpy":
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.set_state(state)
        elif torch.get_device_module(name).is_available():
            torch.get_device_module(name).set_rng_state(state, device or name)


@contextmanager
def kept_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Restore all generators after the block; see `random_state`."""
    states = random_state(device)
    try:
        yield
    finally:
        set_random_state(states, device)
