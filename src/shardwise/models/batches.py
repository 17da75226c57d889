"""Invent a batch that a model accepts, from its forward's parameters and its config."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.models.configs import config_size


def make_batch(model: nn.Module, *, generator: torch.Generator, batch_size: int = 2, sequence_length: int = 16) -> Any:
    """Random tokens or pixels for `model`, as a dict of keyword arguments, or a tensor where it takes `tokens`.

    Args:
        model: A reference or Hugging Face model; anything whose forward takes `tokens`, `input_ids` or
            `pixel_values`.
        generator: Makes the batch; equal generators make equal batches.
        batch_size: Sequences or images.
        sequence_length: Tokens in a sequence.

    Raises:
        ConfigError: What the model wants is not one of these.

    Ranks:
        Local. Give each rank a generator of its own seed.
    """
    names = list(inspect.signature(model.forward).parameters)
    shape = (batch_size, sequence_length)
    if names[:1] == ["tokens"]:
        return _tokens(model, shape, generator)
    batch: dict[str, Tensor] = {}
    if "input_ids" in names:
        batch["input_ids"] = _tokens(model, shape, generator)
        if "decoder_input_ids" in names:
            batch["decoder_input_ids"] = _tokens(model, shape, generator)
    if "pixel_values" in names and (not batch or hasattr(getattr(model, "config", None), "vision_config")):
        batch["pixel_values"] = _pixels(model, batch_size, generator)
    if "target_pixels" in names:
        batch["target_pixels"] = _pixels(model, batch_size, generator)
    if not batch:
        raise ConfigError(
            f"no batch can be invented for {type(model).__name__}",
            where=f"{type(model).__name__}.forward({', '.join(names)})",
            why="only tokens, input_ids, pixel_values are understood",
            fix="name a function that makes one: --batch module:callable",
        )
    return batch


def _tokens(model: nn.Module, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    vocab_size = config_size(model, "vocab_size")
    if vocab_size is None:
        raise _missing(model, "vocab_size")
    return torch.randint(0, vocab_size, shape, generator=generator)


def _pixels(model: nn.Module, batch_size: int, generator: torch.Generator) -> Tensor:
    config = getattr(model, "config", None)
    config = getattr(config, "vision_config", None) or config
    size = getattr(config, "image_size", None)
    if size is None:
        raise _missing(model, "image_size")
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(batch_size, getattr(config, "num_channels", 3), height, width, generator=generator)


def _missing(model: nn.Module, name: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} has no config.{name}",
        where=type(model).__name__,
        why="the batch's values and shape come from it",
        fix="name a function that makes a batch: --batch module:callable",
    )
