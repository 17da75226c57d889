"""Where a run's first weights come from: the model's own folder, a file, or new ones."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from shardwise.checkpointing.weights import load_weights
from shardwise.config.run import RunConfig
from shardwise.errors import ConfigError
from shardwise.sharding.materialize import materialize

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.bin.index.json")


def fill(model: nn.Module, config: RunConfig, *, is_resumed: bool = False) -> None:
    """Give a sharded model on meta its values.

    Args:
        model: On meta.
        config: `weights` says where they are.
        is_resumed: A checkpoint follows, which holds the weights: others need not be read.

    Raises:
        CheckpointError: The weights do not fit.

    Ranks:
        Collective.
    """
    path = None if is_resumed else weights_of(config)
    if path is None:
        materialize(model)
    else:
        load_weights(model, path)


def check_weights(config: RunConfig) -> None:
    """Raise if weights are named that do not exist.

    Raises:
        ConfigError: They do not.

    Ranks:
        Local.
    """
    if config.weights not in ("auto", "none") and not Path(config.weights).exists():
        raise ConfigError(
            f"there are no weights at {config.weights}",
            where="weights",
            why="it is auto, none, or a file or folder of weights",
            fix="set weights = none to draw new ones, or name an existing path",
        )


def weights_of(config: RunConfig) -> Path | None:
    """The file or folder that holds the first weights; None: they are drawn."""
    if config.weights == "none":
        return None
    if config.weights != "auto":
        return Path(config.weights)
    folder = Path(config.model)
    holds_weights = folder.is_dir() and any(next(folder.glob(pattern), None) for pattern in _WEIGHTS)
    return folder if holds_weights else None
