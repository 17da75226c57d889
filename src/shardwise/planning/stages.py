"""Pipeline stages of a decoder: blocks, and the modules before and after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.errors import PlanError
from shardwise.models.nested_tensors import find_tensors
from shardwise.planning.tracing import innermost_module, on_fake_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """Modules of one pipeline stage."""

    index: int
    num_stages: int
    blocks: tuple[str, ...]
    """FQNs, in the order in which they run."""
    units: tuple[str, ...]
    """FQNs of the other modules with parameters: embeddings on the first stage, norm and head on the last."""

    @property
    def is_first(self) -> bool:
        """Whether its input is the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes the loss."""
        return self.index == self.num_stages - 1


def refuse_tensor_axis(sizes: Mapping[str, int]) -> None:
    """Raise if a mesh has both a pipeline and a tensor axis.

    Raises:
        PlanError: The mesh has both.
    """
    if sizes.get("pipeline", 1) > 1 and sizes.get("tensor", 1) > 1:
        raise PlanError(
            f"the mesh has both a pipeline ({sizes['pipeline']} stages) and a tensor axis ({sizes['tensor']} ranks)",
            where="mesh.pipeline, mesh.tensor",
            why="what divides layers is read from the code of whole models, of which a stage has a part",
            fix="set mesh.tensor = 1 and give its ranks to shard, or mesh.pipeline = 1",
        )


def plan_stages(
    model: nn.Module, blocks: Mapping[str, nn.Module], num_stages: int, run: Callable[[Any], object], inputs: Any
) -> list[StagePlan]:
    """Distribute the blocks evenly over stages; earlier stages get one more if the number is uneven.

    Args:
        model: The whole model.
        blocks: FQN to module, in the order in which they run.
        num_stages: Number of stages, over all ranks.
        run: Function that calls the model with a micro-batch, as the loss does.
        inputs: The micro-batch.

    Raises:
        PlanError: There are fewer blocks than stages, or parameters that belong to no stage.

    Ranks:
        Local.
    """
    if len(blocks) < num_stages:
        raise PlanError(
            f"{type(model).__name__} has {len(blocks)} blocks for {num_stages} stages",
            where="mesh.pipeline",
            why="each stage needs at least one block",
            fix=f"set mesh.pipeline * pipeline.stages_per_rank = {max(len(blocks), 1)} or less",
        )
    others = other_units(model, blocks)
    before = units_before(model, blocks, others, run, inputs)
    after = [name for name in others if name not in before]
    size, rest = divmod(len(blocks), num_stages)
    ends = [stage * size + min(stage, rest) for stage in range(num_stages + 1)]
    names = list(blocks)
    inside = (*blocks, *others)
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not any(name.startswith(f"{unit}.") for unit in inside):
            raise not_a_sequence(name, "belongs to no module that runs on one stage only")
    return [
        StagePlan(
            index=index,
            num_stages=num_stages,
            blocks=tuple(names[ends[index] : ends[index + 1]]),
            units=(*(before if index == 0 else ()), *(after if index == num_stages - 1 else ())),
        )
        for index in range(num_stages)
    ]


class _FirstBlock(Exception):
    """Stops the forward at its first block."""


def units_before(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    others: Mapping[str, nn.Module],
    run: Callable[[Any], object],
    inputs: Any,
) -> list[str]:
    """Return the other modules with parameters that run before the first block on fake tensors.

    Raises:
        PlanError: A block needs more outputs than its hidden states, or the model does not run on fake tensors.
    """
    called: list[str] = []
    first = next(iter(blocks))

    def stop(block: nn.Module, args: Any, kwargs: Any) -> None:
        learnt = [tensor for tensor in find_tensors((args, kwargs)) if tensor.requires_grad]
        if len(learnt) > 1:
            raise not_a_sequence(first, "gets more than one tensor that depends on parameters")
        raise _FirstBlock

    try:
        with on_fake_tensors(model, inputs) as (fake, _):
            for parameter in model.parameters():
                parameter.requires_grad_(parameter.is_floating_point())
            blocks[first].register_forward_pre_hook(stop, with_kwargs=True)
            for name, module in others.items():
                module.register_forward_hook(lambda *_, name=name: called.append(name))
            run(fake)
    except _FirstBlock:
        return list(dict.fromkeys(called))
    except PlanError:
        raise
    except Exception as error:  # the model's own code runs here and may raise anything
        where = innermost_module(error.__traceback__, model) or type(model).__name__
        what = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise PlanError(
            f"the model cannot be run on fake tensors up to its first block: {what}",
            where=where,
            why="this run determines the modules of the first stage",
            fix="avoid data-dependent code before the blocks, or set mesh.pipeline = 1",
        ) from error
    raise not_a_sequence(first, "does not run")


def other_units(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the outermost modules with parameters that neither contain a block nor are in one, such as embeddings."""
    held = {id(inner) for block in blocks.values() for inner in block.modules()}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{unit}.") for unit in found)
        has_blocks = any(id(inner) in held for inner in module.modules())
        if not is_inside and not has_blocks and next(module.parameters(), None) is not None:
            found[name] = module
    return found


def not_a_sequence(name: str, what: str) -> PlanError:
    """Return the error for a model that cannot be split into stages."""
    return PlanError(
        f"{name} {what}",
        where=name,
        why="in a pipeline each block takes the hidden states of the one before, and runs on one stage only",
        fix="set mesh.pipeline = 1, and use mesh.shard or mesh.tensor",
    )
