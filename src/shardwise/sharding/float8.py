"""float8 matrix products by torchao: in-place conversion of linear layers, and scales of all-gathered weights."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import math
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import compat
from shardwise.errors import import_optional
from shardwise.planning.float8 import GATHERED
from shardwise.planning.plan import Plan
from shardwise.sharding.inventory import layout_of, local_tensor
from shardwise.sharding.repointing import around_steps


@functools.cache
def import_torchao() -> Any:
    """Import torchao's float8 package.

    Raises:
        EnvironmentProblem: torchao is not installed.
    """
    # torchao warns about extension libraries for another Python or torch, which float8 training does not need.
    logger = logging.getLogger("torchao")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return import_optional(
            "torchao.float8",
            where="float8.recipe",
            why="torchao provides the float8 linear layer",
            fix='pip install "shardwise[float8]", or set float8.recipe = off',
        )
    finally:
        logger.setLevel(level)


def convert_linears(model: nn.Module, plan: Plan) -> None:
    """Convert the planned linear layers to float8.

    Layers remain the same objects, with their names, hooks and initialization.

    Args:
        model: Unsharded model.
        plan: Plan of the model.

    Raises:
        EnvironmentProblem: torchao is not installed.
    """
    for module in plan.float8:
        if module.how:
            recipe = module.how.removesuffix(GATHERED)
            _convert(model.get_submodule(module.fqn), recipe, plan.device, gathers=module.how.endswith(GATHERED))


def _convert(linear: Any, recipe: str, device: str, *, gathers: bool) -> None:
    float8 = import_torchao()
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    options = {"enable_fsdp_float8_all_gather": gathers, "emulate": device == "cpu"}
    twin = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    plain = set(vars(twin))
    twin = float8.convert_to_float8_training(twin, config=dataclasses.replace(config, **options))
    vars(linear).update({name: value for name, value in vars(twin).items() if name not in plain})
    linear.__class__ = _converted_class(type(linear), type(twin))
    if gathers:
        wrap = importlib.import_module("torchao.float8.fsdp_utils").WeightWithDynamicFloat8CastTensor
        target = linear.config.cast_config_weight.target_dtype
        weight = wrap(linear.weight.detach(), linear.linear_mm_config, target)
        linear.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)


@functools.cache
def _converted_class(kind: type, float8_linear: type) -> type:
    return type(f"Float8{kind.__name__}", (float8_linear, kind), {"__module__": float8_linear.__module__})


class GatheredScales:
    """Scales of weights that are all-gathered in float8, computed by one all-reduce at the start of the root's forward.

    Otherwise each all-gather of a weight would reduce its own scale. Scales are valid until the end of backward, or of
    a forward without backward; after that an optimizer or a loader may write the weights.

    Args:
        root: The sharded root module.
    """

    def __init__(self, root: nn.Module) -> None:
        shards: list[Any] = [p for group in compat.param_groups(root) for p in compat.sharded_parameters(group)]
        found = [p for p in shards if hasattr(compat.extension_of(p), "_precomputed_scale")]
        layouts = [(p, layout) for p in found if (layout := layout_of(p)) is not None]
        self._layout = layouts[0][1] if layouts else None
        self._weights = [weight for weight, layout in layouts if layout.mesh == layouts[0][1].mesh]
        if self._weights:
            if self._weights[0].device.type == "cpu":
                compat.gather_bytes(root)
            root.register_forward_pre_hook(lambda *_unused: self._find(), prepend=True)
            root.register_forward_hook(lambda *_unused: None if torch.is_grad_enabled() else self._forget())
            compat.on_backward_end(root, self._forget)
            weakref.finalize(root, around_steps(compat.param_groups(root), before=lambda _: self._forget()))

    @torch.no_grad()
    def _find(self) -> None:
        """Compute the scales of all weights from their maxima. Collective over the shard axis."""
        largest = torch.stack(torch._foreach_norm([local_tensor(weight) for weight in self._weights], math.inf)).float()
        assert self._layout is not None
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._layout.mesh.get_group(self._layout.axis))
        # As in torchao: in double precision, with a lower bound.
        highest = torch.finfo(compat.extension_of(self._weights[0])._dtype).max
        scales = (highest / largest.clamp(min=1e-12).double()).float()
        for weight, scale in zip(self._weights, scales.unbind(), strict=True):
            compat.extension_of(weight)._precomputed_scale = scale

    def _forget(self) -> None:
        for weight in self._weights:
            compat.extension_of(weight)._precomputed_scale = None
