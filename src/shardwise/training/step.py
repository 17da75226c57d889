"""The parts of a training step: accumulate, clip, average over ranks or tokens, iterate in lockstep."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.config.schema import KNOWN_AXES
from shardwise.distributed.agreement import flag_device, raise_on_all_ranks
from shardwise.distributed.mesh import gradient_mesh
from shardwise.errors import ConfigError, ShardError, require_choice
from shardwise.sharding.full_params import reshard
from shardwise.sharding.inventory import local_tensor, sharded_axes
from shardwise.sharding.registry import sharded_roots, sharded_state

Spread = tuple[DeviceMesh | None, tuple[int, ...]]
"""The mesh and its axes that a gradient is sharded over; (None, ()) if the gradient is not sharded."""


def collect_gradients(
    parameters: torch.Tensor | Iterable[torch.Tensor] | nn.Module,
) -> tuple[dict[Spread, list[torch.Tensor]], torch.dtype]:
    """Return this rank's part of each gradient by its sharded mesh axes, and the dtype for norms.

    Keys, their order and the dtype (of at least 32 bits) depend on the parameters only, so they are equal on all ranks.
    """
    given = _as_list(parameters)
    found: dict[Spread, list[torch.Tensor]] = {}
    for parameter in given:
        axes = sharded_axes(parameter) if isinstance(parameter, DTensor) else ()
        key = (parameter.device_mesh, axes) if isinstance(parameter, DTensor) and axes else (None, ())
        grads = found.setdefault(key, [])
        if parameter.grad is not None:
            grads.append(local_tensor(_laid_out_like(parameter, parameter.grad)))
    wide = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in given)
    # Sorted: the parameters' order may differ between ranks (a Python set), and the norms are reduced one by one.
    return {key: found[key] for key in sorted(found, key=_mesh_key)}, torch.float64 if wide else torch.float32


def _scale(gradients: dict[Spread, list[torch.Tensor]], factor: torch.Tensor) -> None:
    every = [grad for grads in gradients.values() for grad in grads]
    for (device, _), alike in _by_device_and_dtype(every).items():
        torch._foreach_mul_(alike, factor.to(device))


def _mesh_key(spread: Spread) -> tuple[object, ...]:
    mesh, axes = spread
    return () if mesh is None else (mesh.ndim, mesh.mesh_dim_names or (), mesh.shape, axes)


def _as_list(parameters: torch.Tensor | Iterable[torch.Tensor] | nn.Module) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if isinstance(parameters, nn.Module):
        reshard(parameters)
        parameters = parameters.parameters()
    return list(dict.fromkeys(parameters))  # a tied parameter counts once


def _laid_out_like(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if not isinstance(grad, DTensor) or not isinstance(parameter, DTensor) or grad.placements == parameter.placements:
        return grad
    what, why = (
        f"is placed {grad.placements}, its parameter {parameter.placements}",
        "norms are combined by the parameter's",
    )
    if any(placement.is_partial() for placement in grad.placements):
        what = f"of shape {tuple(grad.shape)} is not reduced yet: {grad.placements}"
        why = "norms of partial sums cannot be combined into the norm of the sum"
    fix = "parameter.grad = parameter.grad.redistribute(placements=parameter.placements)"
    raise ShardError(f"a gradient {what}", where="clip_grad_norm_", why=why, fix=fix)


def total_norm(
    gradients: dict[Spread, list[torch.Tensor]],
    dtype: torch.dtype,
    p: float,
    stages: Iterable[dist.ProcessGroup] = (),
) -> torch.Tensor:
    """Return the p-norm of all gradients as one vector; collective over their mesh axes and `stages`."""
    total = torch.zeros((), device=_home_device(gradients), dtype=dtype)
    for (mesh, axes), grads in gradients.items():
        power = _power_sum(grads, p, total)
        for group in [mesh.get_group(axis) for axis in axes] if mesh is not None else ():
            _reduce(power, group, p)
        total = torch.maximum(total, power) if math.isinf(p) else total + power
    for group in stages:
        _reduce(total, group, p)
    return total if math.isinf(p) else total ** (1.0 / p)


def _norm(parameters: list[torch.Tensor], p: float) -> torch.Tensor:
    """The p-norm of the gradients of these parameters, over all stages if they belong to a pipeline stage."""
    given = set(map(id, parameters))
    stages: dict[dist.ProcessGroup, set[int]] = {}
    for root in sharded_roots():
        state = sharded_state(root)
        if state is not None and (ranks := state.pipeline) is not None:
            named = {name: id(parameter) for name, parameter in root.named_parameters()}
            if not given.isdisjoint(named.values()):
                elsewhere = [named[name] for name in ranks.counted_elsewhere if name in named]
                stages.setdefault(ranks.group, set()).update(elsewhere)
    repeated = set().union(*stages.values())
    counted = [parameter for parameter in parameters if id(parameter) not in repeated]
    return total_norm(*collect_gradients(counted), p, stages)


def _power_sum(grads: list[torch.Tensor], p: float, like: torch.Tensor) -> torch.Tensor:
    """Sum of |x|^p over this rank's values, or the largest |x|; NaN if any value is NaN."""
    norms: list[torch.Tensor] = []
    for (_, dtype), alike in _by_device_and_dtype(grads).items():
        if dtype.is_complex:
            alike = [grad.abs() for grad in alike]
        norms.append(torch.stack(torch._foreach_norm(alike, p, dtype=like.dtype)).to(like))
    if not norms:
        return torch.zeros_like(like)
    norm = torch.linalg.vector_norm(torch.cat(norms), p)
    return norm if math.isinf(p) else norm**p


def _reduce(power: torch.Tensor, group: dist.ProcessGroup, p: float) -> None:
    """Add a power of the norm up over the group, or take the maximum if the norm is infinite. Collective."""
    if not math.isinf(p):
        dist.all_reduce(power, group=group)
        return
    # Some backends ignore NaN in a maximum: send it as a second value.
    both = torch.stack([power.nan_to_num(0.0, math.inf), power.isnan().to(power)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    power.copy_(torch.where(both[1] > 0, math.nan, both[0]))


def _by_device_and_dtype(
    tensors: list[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:  # an empty shard has no maximum
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


def _home_device(gradients: dict[Spread, list[torch.Tensor]]) -> torch.device:
    """Return the device for reductions: the mesh's, because offloaded gradients may be on an unsupported one."""
    for mesh, _ in gradients:
        if mesh is not None:
            return torch.device(mesh.device_type)
    return next((grad.device for grads in gradients.values() for grad in grads), torch.device("cpu"))


Batch = TypeVar("Batch")

_HAS_BATCH, _IS_EMPTY, _HAS_FAILED = 0, 1, 2


def lockstep(loader: Iterable[Batch], *, group: dist.ProcessGroup | None = None) -> Iterator[Batch]:
    """Iterate over `loader` until the first rank runs out of data; ends on all ranks.

    Each forward of a sharded model is collective: a rank with more batches than the others would hang, so its
    remaining batches are dropped. The loader is read one batch ahead, so that the all-reduce about the next
    batch overlaps the computation on the current one.

    Args:
        loader: This rank's batches.
        group: The ranks that stop together; default: all.

    Raises:
        Exception: The loader's error; on the other ranks, an error that names the rank that failed.

    Ranks:
        Collective. One all-reduce of a scalar per batch, in CPU memory if the backend supports it.
    """
    if not dist.is_initialized():
        yield from loader
        return
    batches = iter(loader)
    device = flag_device(group)

    def fetch() -> tuple[Batch | None, Exception | None, torch.Tensor, dist.Work | None]:
        batch, error, status = None, None, _HAS_BATCH
        try:
            batch = next(batches)
        except StopIteration:
            status = _IS_EMPTY
        except Exception as caught:
            status, error = _HAS_FAILED, caught
        worst = torch.tensor(status, dtype=torch.int32, device=device)
        return batch, error, worst, dist.all_reduce(worst, dist.ReduceOp.MAX, group=group, async_op=True)

    upcoming = fetch()
    while True:
        batch, error, worst, work = upcoming
        if work is not None:
            work.wait()
        if (status := int(worst.item())) != _HAS_BATCH:
            break
        upcoming = fetch()
        yield batch  # pyrefly: ignore[invalid-yield]  # all ranks have a batch
        del batch
    if status == _HAS_FAILED:
        raise_on_all_ranks(error, group=group)


AccumulationMode = Literal["comm", "memory", "hsdp"]


@contextmanager
def accumulate(
    model: nn.Module, micro_step: int, num_micro_steps: int, mode: AccumulationMode = "comm"
) -> Iterator[None]:
    """Accumulate gradients over micro-steps; forward and backward of one micro-step go inside.

    After the last micro-step the gradients are the sum over micro-steps of the mean over ranks, in every mode.
    Modes differ in when they communicate:

    - `comm`: only on the last micro-step. Until then full, unreduced gradients stay in memory.
    - `memory`: on every micro-step, so that only sharded gradients are kept.
    - `hsdp`: reduce-scatter on every micro-step, all-reduce between replicas on the last. Without a replicate
      axis it is the same as `memory`.

    Args:
        model: Any model; no effect without FSDP2, because plain modules accumulate gradients anyway.
        micro_step: From 0 to `num_micro_steps - 1`.
        num_micro_steps: Micro-steps in one optimizer step.
        mode: See above.

    Raises:
        ConfigError: An argument is out of range.

    Ranks:
        Local. The backward inside communicates, so pass the same arguments on every rank.
    """
    _check_accumulation(micro_step, num_micro_steps, mode)
    is_last = micro_step == num_micro_steps - 1
    compat.patch_accumulation(model)
    with compat.gradient_sync(
        model, reduce=is_last or mode != "comm", all_reduce=is_last or mode != "hsdp", is_last=is_last
    ):
        yield


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor] | nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their norm as one vector is at most `max_norm`.

    A sharded gradient counts once, regardless of the number of replicas. A plain tensor counts once too: its
    gradient must be the same on every rank, as it is for shardwise's ignored parameters. If the norm is not
    finite, gradients are scaled to NaN or 0, as in torch: check the returned norm before `optimizer.step()`.

    Args:
        parameters: One tensor, some, or a model. Pass the model rather than `model.parameters()` if a
            forward without gradients may have left its root unsharded.
        max_norm: Maximum norm after clipping.
        norm_type: The p of the p-norm; `math.inf` for the largest absolute value.
        error_if_nonfinite: Raise instead of scaling. Waits for the device.

    Returns:
        The norm before clipping: a plain 0-d tensor, the same on every rank; float64 if any gradient is, else float32.

    Raises:
        ConfigError: `norm_type` is not positive.
        ShardError: A gradient is not reduced yet (`Partial`), or not finite with `error_if_nonfinite`.

    Ranks:
        Collective. One all-reduce of a scalar for each set of mesh axes that the parameters are sharded over,
        whether or not this rank has gradients for them; nothing waits on the host.
    """
    if not norm_type > 0:
        raise ConfigError(
            f"norm_type is {norm_type}",
            where="clip_grad_norm_(norm_type)",
            why="a p-norm needs p > 0",
            fix="pass 2.0, or math.inf for the largest absolute value",
        )
    with torch.no_grad():
        given = _as_list(parameters)
        norm = _norm(given, float(norm_type))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise ShardError(
                f"the gradients' norm is {norm.item()}",
                where=f"clip_grad_norm_, {norm_type}-norm",
                why="clipping cannot fix a non-finite gradient",
                fix="skip this step, or omit error_if_nonfinite",
            )
        _scale(collect_gradients(given)[0], clipping_factor(norm, max_norm))
    return norm


def grad_norm(model: nn.Module) -> torch.Tensor:
    """Return the 2-norm of all gradients, as `clip_grad_norm_` does, without clipping; collective."""
    with torch.no_grad():
        return _norm(_as_list(model), 2.0)


def clipping_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor that clips gradients of this norm; 1.0 avoids a synchronization with the device."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def scale_grads_(model: nn.Module, factor: torch.Tensor) -> None:
    """Multiply every gradient by a plain 0-d tensor, the same on every rank, in place."""
    with torch.no_grad():
        _scale(collect_gradients(model)[0], factor)


def token_mean(
    loss_sum: torch.Tensor, num_tokens: int | torch.Tensor, *, mesh: DeviceMesh | None = None
) -> torch.Tensor:
    """Scale a summed loss so that training minimizes the mean over all tokens of the global batch.

    FSDP2 averages gradients over ranks, which is wrong if ranks or micro-steps have different numbers of
    tokens. The returned loss is `loss_sum * num_ranks / (tokens of all ranks)`: after FSDP2's average and the
    sum over micro-steps, every token has the same weight.

    The returned value on one rank is therefore not the mean loss. To log the mean loss, pass the sum over the
    micro-steps to `mean_over_ranks`.

    Args:
        loss_sum: This micro-step's loss, summed over this rank's tokens.
        num_tokens: This rank's tokens over *all* micro-steps of the step. A tensor on the loss's device
            avoids a copy.
        mesh: The mesh that the model is sharded over, whose data-parallel axes are used; None: all ranks.

    Returns:
        The loss for `backward()`. If no rank has tokens, it is 0, not NaN.

    Raises:
        ConfigError: None of several mesh axes is known to be data parallel.

    Ranks:
        Collective. One all-reduce of a scalar per data-parallel axis; nothing waits on the host.
    """
    total = torch.as_tensor(num_tokens).detach()
    total = total.to(loss_sum.device, torch.float32 if total.is_floating_point() else torch.int64, copy=True)
    num_ranks = 1
    for group in _data_groups(mesh):
        dist.all_reduce(total, group=group)
        num_ranks *= dist.get_world_size(group)
    total = torch.where(total == 0, torch.ones_like(total), total)
    return loss_sum * (num_ranks / total).to(loss_sum.dtype)


def mean_over_ranks(value: torch.Tensor, *, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Average a scalar over data-parallel ranks, for logging.

    The average of `token_mean` losses, summed over the micro-steps, is the mean loss per token.

    Args:
        value: Has the same shape on every rank; not modified.
        mesh: As in `token_mean`.

    Raises:
        ConfigError: None of several mesh axes is known to be data parallel.

    Ranks:
        Collective.
    """
    mean = value.detach().clone()
    for group in _data_groups(mesh):
        dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size(group)
    return mean


def _data_groups(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """One process group per data-parallel axis; reducing over each in turn reduces over all those ranks."""
    if mesh is None:
        return [dist.group.WORLD] if dist.is_initialized() and dist.group.WORLD is not None else []
    if mesh.ndim == 1:
        return [mesh.get_group()]
    names = mesh.mesh_dim_names or ()
    unknown = [name for name, size in zip(names, mesh.shape, strict=False) if name not in KNOWN_AXES and size > 1]
    if unknown or not names:
        raise ConfigError(
            f"mesh axes {unknown} are not known to be data parallel" if names else "no axis has a name",
            where="mesh",
            why="tokens are counted over the ranks with different data",
            fix="name the axes replicate and shard, or pass one axis, as in mesh['your_data_axis']",
        )
    ranks = gradient_mesh(mesh)
    return [ranks.get_group(axis) for axis in range(ranks.ndim)]


def _check_accumulation(micro_step: int, num_micro_steps: int, mode: str) -> None:
    for name, value in (("micro_step", micro_step), ("num_micro_steps", num_micro_steps)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(
                f"{name} is {value!r}", where=f"accumulate({name})", why="it must be an int", fix="pass an int"
            )
    if num_micro_steps < 1:
        where, why = "accumulate(num_micro_steps)", "a step has at least one micro-step"
        raise ConfigError(f"num_micro_steps is {num_micro_steps}", where=where, why=why, fix="pass 1 or more")
    if not 0 <= micro_step < num_micro_steps:
        raise ConfigError(
            f"micro_step is {micro_step} of {num_micro_steps}",
            where="accumulate(micro_step)",
            why="micro-steps count from 0, and gradients are reduced on the last",
            fix=f"pass 0 to {num_micro_steps - 1}, as in range(num_micro_steps)",
        )
    require_choice(mode, get_args(AccumulationMode), where="accumulate(mode=...)")
