"""Selection of float8 linear layers, with reasons."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shardwise.config.schema import Float8Config
from shardwise.errors import PlanError
from shardwise.planning.calls import is_within
from shardwise.planning.groups import Tree, name_matcher, unknown_pattern
from shardwise.planning.plan import Group, ParallelModule
from shardwise.planning.regions import called_linears

FLOAT8_CAPABILITY = (8, 9)
"""CUDA compute capability of the first GPUs with float8 matrix products: Ada and Hopper."""
MULTIPLE = 16
"""Required divisor of the sizes of a float8 matrix product."""
GATHERED = " with float8 all-gather"
"""Suffix of the recipe of a module whose weight is all-gathered in float8."""


def choose_float8(
    model: nn.Module,
    config: Float8Config,
    tree: Tree,
    groups: Sequence[Group],
    device: str,
    capability: tuple[int, int] | None,
    num_shards: int,
) -> tuple[ParallelModule, ...]:
    """Return the recipe of each linear layer, or why it is not converted; empty if float8 is off.

    Args:
        model: Any module.
        config: Float8 settings.
        tree: Module tree of the model.
        groups: Groups of its plan.
        device: Device type of the mesh.
        capability: CUDA compute capability, None for other devices.
        num_shards: Number of ranks that parameters are sharded over.

    Raises:
        PlanError: The hardware has no float8, or the settings contradict each other.
    """
    if config.recipe == "off":
        return ()
    _refuse_hardware(device, capability)
    gathers = _gathers(config, groups, device, num_shards)
    blocks = [name for group in groups if group.kind in ("block", "part", "island") for name in group.modules]
    skipped = _matcher(config.skip, tree)
    shapes = {planned.fqn: planned.local_shape for group in groups for planned in group.parameters}
    chosen = []
    for name, linear in called_linears(model):
        if not isinstance(linear, nn.Linear):
            continue
        shape = shapes.get(f"{name}.weight", linear.weight.shape)
        if why := _why_not(name, linear, shape, config.recipe, blocks, skipped, device):
            chosen.append(ParallelModule(fqn=name, how="", reason=why))
            continue
        even = linear.weight.shape[0] % num_shards == 0
        how = config.recipe + (GATHERED if gathers and even else "")
        why = "" if even or not gathers else f"{linear.weight.shape[0]} rows on {num_shards} ranks: gathered as stored"
        chosen.append(ParallelModule(fqn=name, how=how, reason=why))
    if not any(module.how for module in chosen):
        raise PlanError(
            f"no linear layer of {type(model).__name__} can compute in float8",
            where="float8.recipe",
            why="; ".join(dict.fromkeys(f"{each.fqn}: {each.reason}" for each in chosen[:4])) or "it has none",
            fix="set float8.recipe = off",
        )
    return tuple(chosen)


def _refuse_hardware(device: str, capability: tuple[int, int] | None) -> None:
    if device == "cpu" or (device == "cuda" and (capability is None or capability >= FLOAT8_CAPABILITY)):
        return  # on CPUs float8 is emulated, for tests; without a GPU here, the plan is for another machine
    name = torch.cuda.get_device_name() if capability is not None and torch.cuda.is_available() else device
    raise PlanError(
        f"{name} has no float8 matrix products",
        where="float8.recipe",
        why="they need CUDA compute capability 8.9 (Ada, Hopper) or newer"
        + (f", this is {capability[0]}.{capability[1]}" if capability is not None else ""),
        fix="set float8.recipe = off; bfloat16 is the default there",
    )


def _gathers(config: Float8Config, groups: Sequence[Group], device: str, num_shards: int) -> bool:
    """Whether weights are all-gathered in float8: half the bytes of bfloat16."""
    kept = [group for group in groups if type(group.reshard_after_forward) is int]
    why = ""
    if config.recipe == "rowwise":
        why = "scales of rows are not those of the columns that backward needs"
    elif any(axis == "tensor" for group in groups for p in group.parameters for axis, _, _ in p.splits):
        why = "matrices are divided over the tensor axis, and each part would be scaled by itself"
    elif kept:
        why = f"{kept[0].name} reshards to {kept[0].reshard_after_forward} ranks after forward, in its own dtype"
    if config.all_gather is True and why:
        raise PlanError(
            "float8.all_gather is not supported with these settings",
            where="float8.all_gather",
            why=why,
            fix="set float8.all_gather = auto, or recipe = tensorwise and reshard_after_forward = true",
        )
    wanted = device == "cuda" and num_shards > 1 if config.all_gather == "auto" else config.all_gather
    return wanted and not why


def _matcher(patterns: Sequence[str], tree: Tree) -> Callable[[str], bool]:
    for pattern in patterns:
        if not tree.matching(pattern):
            raise unknown_pattern(pattern, [name for name in tree.nodes if name], "float8.skip")
    matched = {node.fqn for pattern in patterns for match in tree.matching(pattern) for node in match.walk()}
    fits = [name_matcher(pattern) for pattern in patterns]
    return lambda name: name in matched or any(fit(name) for fit in fits)


def _why_not(
    name: str,
    linear: nn.Linear,
    shape: Sequence[int],
    recipe: str,
    blocks: Sequence[str],
    skipped: Callable[[str], bool],
    device: str,
) -> str:
    """Return why a layer with a weight of this shape on each rank does not compute in float8; empty if it does."""
    if skipped(name):
        return "named in float8.skip"
    if not any(is_within(name, block) for block in blocks):
        return "outside the repeated blocks: embeddings and heads lose most by rounding"
    if type(linear).forward is not nn.Linear.forward:
        return f"a {type(linear).__name__} computes in its own way"
    if type(linear.weight) not in (nn.Parameter, torch.Tensor):
        return f"its weight is a {type(linear.weight).__name__}"
    outputs, inputs = shape
    if outputs % MULTIPLE or inputs % MULTIPLE:
        return f"{inputs} x {outputs} does not divide by {MULTIPLE}"
    if device == "cuda" and _is_small(outputs, inputs, recipe):
        return f"{inputs} x {outputs} is too small to gain, by torchao's measurements on an H100"
    return ""


def _is_small(outputs: int, inputs: int, recipe: str) -> bool:
    if recipe == "tensorwise":
        return inputs <= 4096 and outputs <= 1024
    return outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)
