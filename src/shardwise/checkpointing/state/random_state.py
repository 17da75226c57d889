"""The random number generators of a rank: Python's, NumPy's, torch's on the CPU and on this rank's accelerator."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from shardwise.checkpointing.sharded.values import decode_value, encode_value
from shardwise.errors import CheckpointError


def random_state() -> dict[str, torch.Tensor]:
    """Copies of the states of all generators in use, as bytes.

    Ranks:
        Local.
    """
    states = {"python": _as_bytes(random.getstate()), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = _as_bytes(numpy.random.get_state(legacy=False))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: Mapping[str, torch.Tensor]) -> None:
    """Put states back, as far as this process has the generators.

    Raises:
        CheckpointError: A state is not one of its generator.

    Ranks:
        Local.
    """
    for name, state in states.items():
        try:
            _set_one(name, state)
        except (ValueError, TypeError, RuntimeError, KeyError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"the state of {name}'s random numbers cannot be set",
                where=f"rng.{name}",
                why=str(error),
                fix="load without it: Checkpointer(..., rng=False)",
            ) from error


def derived_state(states: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """States for a rank that none was saved for: drawn from another rank's, different for every rank.

    Nothing but the given states and the number decide them, so resuming twice gives the same run.
    """
    generator = torch.Generator()
    generator.set_state(states["torch"])
    seed = int(torch.randint(0, 2**62, (), generator=generator)) ^ (rank * 0x9E3779B97F4A7C15 % 2**62)
    generator.manual_seed(seed)
    derived = {"torch": generator.get_state(), "python": _as_bytes(random.Random(seed).getstate())}
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        derived["numpy"] = _as_bytes(numpy.random.RandomState(seed % 2**32).get_state(legacy=False))
    if "cuda" in states and torch.cuda.is_available():
        on_device = torch.Generator("cuda")
        on_device.manual_seed(seed)
        derived["cuda"] = on_device.get_state()
    return derived


def _set_one(name: str, state: torch.Tensor) -> None:
    if name == "torch":
        torch.set_rng_state(state)
    elif name == "python":
        random.setstate(_from_bytes(state))
    elif name == "numpy" and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(_from_bytes(state))
    elif name == "cuda" and torch.cuda.is_available():
        torch.cuda.set_rng_state(state)


def _as_bytes(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(encode_value(value)).encode()), dtype=torch.uint8)


def _from_bytes(state: torch.Tensor) -> Any:
    return decode_value(json.loads(bytes(state.tolist()).decode()))
