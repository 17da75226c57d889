"""Optimizers by name, and which parameters each optimizer takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import compat
from shardwise.config.run import OptimizerConfig
from shardwise.errors import ConfigError, raise_listed
from shardwise.sharding.full_params import reshard
from shardwise.training.muon import Muon

Kind = Literal["matrices", "vectors", "embeddings", "blocks"]
"""`blocks`: matrices inside the model's repeated blocks; matrices like others to whoever does not tell them apart."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)  # batch and instance norms have vectors anyway
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def parameter_kinds(model: nn.Module) -> dict[nn.Parameter, Kind]:
    """The kind of every parameter, in the model's order.

    - `embeddings`: of an `nn.Embedding` or `nn.EmbeddingBag`, also where the same parameter serves as output matrix.
    - `vectors`: of a norm, or with fewer than two dims that are longer than 1 (biases, gains, class tokens).
    - `blocks`: matrices, or stacks of them as experts have, in a block. A block is a module with parts of its own that
      stands in a `ModuleList`, `ModuleDict` or `Sequential`; convolutions are left out.
    - `matrices`: all the rest, such as output matrices and convolutions.

    Ranks:
        Local. Sharding changes nothing: a sharded parameter has the shape of the whole.
    """
    embeddings = {id(p) for module in model.modules() if isinstance(module, _EMBEDDINGS) for p in module.parameters()}
    kinds: dict[nn.Parameter, Kind] = {}
    for module, in_block in _walk(model, in_block=False):
        for parameter in module.parameters(recurse=False):
            if parameter not in kinds:
                kind = _kind(module, parameter, in_block)
                kinds[parameter] = "embeddings" if id(parameter) in embeddings else kind
    return kinds


def _walk(module: nn.Module, *, in_block: bool) -> Iterator[tuple[nn.Module, bool]]:
    """Every module, and whether it is (in) a block; a module with several parents comes several times."""
    yield module, in_block
    for child in module.children():
        starts_block = isinstance(module, _CONTAINERS) and next(child.children(), None) is not None
        yield from _walk(child, in_block=in_block or starts_block)


def _kind(module: nn.Module, parameter: nn.Parameter, in_block: bool) -> Kind:
    is_matrix = isinstance(module, nn.Linear) and parameter.ndim == 2
    num_dims = sum(size > 1 for size in parameter.shape)
    if isinstance(module, _NORMS) or (num_dims < 2 and not is_matrix):
        return "vectors"
    is_stack = parameter.ndim == 3 and parameter.shape[0] > 1
    if in_block and not isinstance(module, _CONVOLUTIONS) and (parameter.ndim == 2 or is_stack):
        return "blocks"
    return "matrices"


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
    what = "{num} setting(s) of the optimizer are out of range"
    raise_listed(list(_out_of_range(config)), what, why="the update is not defined there", fix="set them in range")
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


def _out_of_range(config: OptimizerConfig) -> Iterator[str]:
    for name in ("learning_rate", "muon_learning_rate", "weight_decay", "eps"):
        if not getattr(config, name) >= 0:  # refuses NaN too
            yield f"optimizer.{name} is {getattr(config, name)}: at least 0"
    if not 0 <= config.momentum < 1:
        yield f"optimizer.momentum is {config.momentum}: at least 0 and below 1"
    if not all(0 <= beta < 1 for beta in config.betas):
        yield f"optimizer.betas is {config.betas}: at least 0 and below 1"
