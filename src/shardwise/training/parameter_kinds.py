"""What each parameter is: a matrix, a vector or an embedding. Told by the module that owns it, never by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import nn

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
