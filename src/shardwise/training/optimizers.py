"""The optimizer of a run, from its settings: which parameters are decayed, and which of them Muon changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import compat
from shardwise.config.run import OptimizerConfig
from shardwise.errors import ConfigError
from shardwise.sharding.full_params import reshard
from shardwise.training.muon import Muon
from shardwise.training.parameter_kinds import Kind, parameter_kinds


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Make the optimizer that `config` describes, with one parameter group per kind of parameter.

    Each group says its `kind`: `matrices` (decayed), `vectors` and `embeddings` (not decayed, unless
    `decay_everything`) and, with Muon, `blocks`: the matrices that Muon changes. All state is kept per parameter and
    laid out like it, so that a `Checkpointer` restores it on any number of ranks.

    Args:
        model: Sharded and filled already. Frozen parameters are left out.
        config: Which optimizer, and its settings.

    Raises:
        ConfigError: A setting is out of range, nothing is to be trained, or there is nothing for Muon to change.

    Ranks:
        Local. Its `step` is collective for Muon, else local.
    """
    _check(config)
    reshard(model)
    groups = _groups(model, config)
    if config.name == "muon":
        return Muon(groups, momentum=config.momentum, nesterov=config.nesterov, **_adamw_options(groups, config))
    if config.name == "sgd":
        return torch.optim.SGD(
            groups,
            lr=config.learning_rate,
            momentum=config.momentum,
            nesterov=config.nesterov and config.momentum > 0,
            fused=_fused(torch.optim.SGD, groups, config),
        )
    return torch.optim.AdamW(groups, lr=config.learning_rate, **_adamw_options(groups, config))


def _adamw_options(groups: list[dict[str, Any]], config: OptimizerConfig) -> dict[str, Any]:
    return {"betas": config.betas, "eps": config.eps, "fused": _fused(torch.optim.AdamW, groups, config)}


def _groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    by_kind: dict[Kind, list[nn.Parameter]] = {}
    for parameter, kind in parameter_kinds(model).items():
        if parameter.requires_grad:
            kind = "matrices" if kind == "blocks" and config.name != "muon" else kind
            by_kind.setdefault(kind, []).append(parameter)
    if not by_kind:
        raise ConfigError(
            "the model has no parameter to train",
            where=f"optimizer ({type(model).__name__})",
            why="all of them are frozen: requires_grad is False",
            fix="set requires_grad on what is to be trained, before sharding",
        )
    if config.name == "muon" and "blocks" not in by_kind:
        raise ConfigError(
            f"{type(model).__name__} has no matrices that Muon could change",
            where="optimizer.name",
            why="Muon changes matrices in repeated blocks: modules with parts of their own in a ModuleList, ModuleDict "
            "or Sequential",
            fix="set optimizer.name = adamw, or keep the model's blocks in an nn.ModuleList",
        )
    return [
        {
            "params": parameters,
            "kind": kind,
            "lr": config.muon_learning_rate if kind == "blocks" else config.learning_rate,
            "weight_decay": config.weight_decay if _is_decayed(kind, config) else 0.0,
        }
        for kind, parameters in by_kind.items()
    ]


def _is_decayed(kind: Kind, config: OptimizerConfig) -> bool:
    return config.decay_everything or kind in ("matrices", "blocks")


def _fused(optimizer: type[Optimizer], groups: list[dict[str, Any]], config: OptimizerConfig) -> bool | None:
    """Whether one kernel changes all parameters; None lets torch choose between its other ways."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    is_possible = compat.has_fused_kernels(parameters)
    if optimizer is torch.optim.SGD:  # its fused kernel does not know DTensors
        is_possible = is_possible and not any(isinstance(parameter, DTensor) for parameter in parameters)
    if config.fused is True and not is_possible:
        where = sorted({f"{parameter.dtype} on {parameter.device.type}" for parameter in parameters})
        raise ConfigError(
            f"{optimizer.__name__} cannot be fused here: {', '.join(where)}",
            where="optimizer.fused",
            why="not every device and dtype has that kernel, and that of SGD does not know sharded parameters",
            fix="set optimizer.fused = auto",
        )
    return True if is_possible and config.fused is not False else None


def _check(config: OptimizerConfig) -> None:
    problems = list(_out_of_range(config))
    if problems:
        raise ConfigError(
            "; ".join(f"{name} is {value}" for name, value, _ in problems),
            where=", ".join(f"optimizer.{name}" for name, _, _ in problems),
            why="; ".join(f"{name} must be {rule}" for name, _, rule in problems),
            fix="choose values in these ranges",
        )


def _out_of_range(config: OptimizerConfig) -> Iterator[tuple[str, object, str]]:
    for name in ("learning_rate", "muon_learning_rate", "weight_decay", "eps"):
        if not getattr(config, name) >= 0:  # refuses NaN too
            yield name, getattr(config, name), "at least 0"
    if not 0 <= config.momentum < 1:
        yield "momentum", config.momentum, "at least 0 and below 1"
    if not all(0 <= beta < 1 for beta in config.betas):
        yield "betas", config.betas, "at least 0 and below 1"
