"""parity(): is the sharded run equal to one process?"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from shardwise.config.schema import ShardConfig
from shardwise.diagnosing.parity_criteria import (
    ORDER,
    Comparison,
    Findings,
    Parity,
    earliest,
    tolerance_for,
)
from shardwise.diagnosing.parity_runs import (
    ReferenceRun,
    Task,
    bind_batch,
    bind_loss,
    random_state_kept,
    seed_everything,
)
from shardwise.distributed.agreement import agree_on, gather_over_mesh
from shardwise.distributed.mesh import data_parallel_mesh, data_parallel_rank, default_mesh
from shardwise.errors import ConfigError
from shardwise.planning.plan import Plan
from shardwise.sharding.apply import shard
from shardwise.sharding.materialize import materialize
from shardwise.sharding.registry import sharded_state

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


def parity(
    build_model: Callable[[], nn.Module],
    make_batch: Callable[..., Any],
    loss: Callable[..., Tensor] | None = None,
    config: ShardConfig | None = None,
    steps: int = 3,
    *,
    optimizer: OptimizerFactory | None = None,
    mesh: DeviceMesh | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    device: torch.device | str | None = None,
) -> Parity:
    """Train a model sharded and in one process, and compare losses, gradients, parameters and buffers.

    The one process runs each rank's batch in turn, with that rank's buffers and random numbers, averages
    the gradients and steps the same optimizer. Batch statistics and losses over a batch are therefore per
    rank, as they are in training, and dropout may stay on. What a module keeps outside parameters and
    buffers is shared between the batches in the one process, and must not matter.

    Args:
        build_model: Called twice after the same seeding; may build on the meta device.
        make_batch: Takes `rank`, `step`, `seed` by these names; or nothing; or one seed; or rank and step.
            A tuple or list is spread over the model's arguments, a mapping over its keywords.
        loss: `loss(output)`, `loss(output, batch)` or `loss(model, batch)`; by default the output's own loss,
            else the mean of squares of what the model returned.
        config: How to shard.
        steps: Optimizer steps.
        optimizer: Takes parameters, returns an optimizer; AdamW with lr=1e-3 by default.
        mesh: From `init_distributed`; by default all ranks of the process group.
        seed: Of weights and batches.
        tolerance: Allowed difference relative to a tensor's largest value. By default 1e-5 in float32 (1e-4
            after the first step), because ranks add up in another order and an adaptive optimizer magnifies
            that; coarser where the plan computes or stores in 16 bits.
        device: Where both run; the mesh's by default.

    Returns:
        The verdict, the same on every rank. A difference is a result, not an error.

    Raises:
        ConfigError: `build_model`, `make_batch` or `loss` cannot be used.
        ShardError: `build_model` makes different weights on different ranks.

    Ranks:
        Collective. Each rank holds the whole model once more, for the one process.
    """
    if steps < 1:
        raise ConfigError(f"steps is {steps}", where="parity(steps=...)", why="nothing runs", fix="steps=1 or more")
    make_batch, loss_of = bind_batch(make_batch), bind_loss(loss)
    mesh = mesh or default_mesh()
    ranks = data_parallel_mesh(mesh)
    target = torch.device(device or mesh.device_type)
    task = Task(make_batch=make_batch, loss=loss_of, seed=seed, num_ranks=ranks.size(), device=target)
    make_optimizer = optimizer or _adamw
    with random_state_kept():
        unsharded, model = _build_twice(build_model, seed, target)
        model = _materialized(shard(model, config, mesh=mesh), seed)
        state = sharded_state(model)
        assert state is not None
        _upcast(unsharded, state.plan)
        reference = ReferenceRun(unsharded, make_optimizer(unsharded.parameters()), task, data_parallel_rank(mesh))
        accuracy = tolerance_for(state.plan, tolerance)
        comparison = Comparison(reference, model, make_optimizer(model.parameters()), accuracy, ranks)
        comparison.compare_start()
        for step in range(steps):
            comparison.step(step)
    return _verdict(comparison, state.plan)


def _adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1e-3)


def _build_twice(build_model: Callable[[], nn.Module], seed: int, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """The model for one process and the model to shard, from the same random numbers.

    Ranks:
        Collective: ranks compare what they built.
    """
    built = []
    for _ in range(2):
        seed_everything(seed)
        model = build_model()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"build_model returned a {type(model).__name__}",
                where="parity(build_model=...)",
                why="it is called twice and must make the model afresh",
                fix="build_model=lambda: MyModel(...)",
            )
        built.append(model if _has_meta(model) else model.to(device))
    if built[0] is built[1]:
        raise ConfigError(
            "build_model returned the same module twice",
            where="parity(build_model=...)",
            why="one copy is sharded, the other is not",
            fix="build the model inside the function",
        )
    weights = [_checksums(model) for model in built]
    if weights[0] != weights[1]:
        raise ConfigError(
            "build_model makes different weights each time",
            where="parity(build_model=...)",
            why="only torch's and Python's generators are seeded before each call",
            fix="draw weights from torch's generator, or load the same ones in both calls",
        )
    agree_on(weights[0], "the weights that build_model makes")
    return _materialized(built[0], seed), built[1]


def _materialized(model: nn.Module, seed: int) -> nn.Module:
    """The model with real tensors; parameters on meta are initialised from the same seed in both runs."""
    if _has_meta(model):
        seed_everything(seed)
        materialize(model)
    return model


def _upcast(model: nn.Module, plan: Plan) -> None:
    """Store in one process what the plan stores in a wider dtype; widening changes no value."""
    for planned in plan.parameters:
        if planned.upcast_from:
            parameter = model.get_parameter(planned.fqn)
            parameter.data = parameter.data.to(getattr(torch, planned.dtype))


def _has_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


def _checksums(model: nn.Module) -> str:
    """A line for each parameter and buffer, equal only if the values are."""
    lines = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        flat = flat.to(torch.float64).reshape(-1) if not tensor.is_meta else torch.zeros(0)
        weighted = flat @ torch.arange(1, flat.numel() + 1, dtype=flat.dtype, device=flat.device)
        lines.append(f"{name} {tuple(tensor.shape)} {tensor.dtype} {float(flat.sum())!r} {float(weighted)!r}")
    return "\n".join(lines)


def _verdict(comparison: Comparison, plan: Plan) -> Parity:
    """What all ranks saw together.

    Ranks:
        Collective.
    """
    seen: list[Findings] = gather_over_mesh(comparison.mesh, comparison.found)
    first = earliest([f.first for f in seen if f.first is not None], comparison.reference.parameter_order)
    worst = [[found.worst[quantity] for found in seen if quantity in found.worst] for quantity in ORDER]
    mesh = " x ".join(f"{name} {size}" for name, size in plan.axes) or "one rank"
    return Parity(
        equal=first is None,
        steps=len(comparison.reference_losses),
        world_size=comparison.reference.task.num_ranks,
        losses=tuple(sum(column) / len(column) for column in zip(*[f.losses for f in seen], strict=True)),
        reference_losses=tuple(comparison.reference_losses),
        tolerance=comparison.tolerance.relative,
        tolerance_reason=comparison.tolerance.reason,
        worst=tuple(max(found, key=lambda deviation: deviation.relative) for found in worst if found),
        first_difference=first,
        plan=f"{plan.model} in {len(plan.groups)} groups over {mesh}",
    )
