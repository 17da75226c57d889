"""What a training step needs around forward and backward: accumulation, clipping, a loss per token."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import compat
from shardwise.errors import ConfigError, ShardError
from shardwise.training.gradient_norm import collect_gradients, total_norm

AccumulationMode = Literal["comm", "memory", "hsdp"]

# Shardwise's own axis names, and those that other FSDP2 code gives to data-parallel axes.
_DATA_AXES = frozenset(["replicate", "shard", "dp", "dp_replicate", "dp_shard", "fsdp", "ddp", "data"])


@contextmanager
def accumulate(
    model: nn.Module, micro_step: int, num_micro_steps: int, mode: AccumulationMode = "comm"
) -> Iterator[None]:
    """Accumulate gradients over micro-steps; forward and backward of one micro-step go inside.

    After the last micro-step the gradients are the sum over micro-steps of the mean over ranks, whichever the
    mode. Modes differ in when they communicate:

    - `comm`: only on the last micro-step. Until then full, unreduced gradients stay in memory.
    - `memory`: on every micro-step, so that only sharded gradients are kept.
    - `hsdp`: reduce-scatter on every micro-step, all-reduce between replicas on the last. Without a replicate
      axis it is the same as `memory`.

    Args:
        model: Any model; one that FSDP2 does not shard accumulates by itself, and nothing is done.
        micro_step: From 0 to `num_micro_steps - 1`.
        num_micro_steps: Micro-steps in one optimizer step.
        mode: See above.

    Raises:
        ConfigError: An argument is out of range.

    Ranks:
        Local. The backward inside communicates, so every rank passes the same arguments.
    """
    _check_accumulation(micro_step, num_micro_steps, mode)
    is_last = micro_step == num_micro_steps - 1
    compat.mend_accumulation(model)
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
    """Scale gradients in place so that their norm, taken together as one vector, is at most `max_norm`.

    A sharded gradient counts once however many replicas hold it. A plain tensor counts once too: it must hold
    the same gradient on every rank, as shardwise's ignored parameters do. If the norm is not finite,
    gradients are scaled to NaN or 0, as in torch: test the returned norm before you step.

    Args:
        parameters: One tensor, some, or a model. Give the model itself rather than `model.parameters()` if a
            forward without gradients may have left its root gathered.
        max_norm: The largest norm to leave.
        norm_type: The p of the p-norm; `math.inf` for the largest absolute value.
        error_if_nonfinite: Raise instead of scaling. Waits for the device.

    Returns:
        The norm before clipping: a plain 0-d float32 tensor, the same on every rank.

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
        gradients = collect_gradients(parameters)
        norm = total_norm(gradients, float(norm_type))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise ShardError(
                f"the gradients' norm is {norm.item()}",
                where=f"clip_grad_norm_, {norm_type}-norm",
                why="clipping cannot repair a gradient that is not finite",
                fix="skip this step, or leave error_if_nonfinite out",
            )
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for (device, _), grads in gradients.by_device_and_dtype().items():
            torch._foreach_mul_(grads, scale.to(device))  # a no-op by 1.0 is cheaper than asking the device
    return norm.to(torch.float32)


def scale_grads_(model: nn.Module, factor: torch.Tensor) -> None:
    """Multiply every gradient by a plain 0-d tensor, in place.

    Ranks:
        Local. Every rank passes the same factor.
    """
    with torch.no_grad():
        for (device, _), grads in collect_gradients(model).by_device_and_dtype().items():
            torch._foreach_mul_(grads, factor.to(device))


def token_mean(
    loss_sum: torch.Tensor, num_tokens: int | torch.Tensor, *, mesh: DeviceMesh | None = None
) -> torch.Tensor:
    """Scale a summed loss so that training minimises the mean over all tokens of the global batch.

    FSDP2 averages gradients over ranks, which is wrong as soon as ranks or micro-steps hold different numbers
    of tokens. The loss returned here is `loss_sum * num_ranks / (tokens of all ranks)`: after FSDP2's
    average, and summed over micro-steps, every token counts the same.

    Its value on one rank is therefore not the mean loss. `mean_over_ranks` of it, summed over the
    micro-steps, is.

    Args:
        loss_sum: This micro-step's loss, summed over this rank's tokens.
        num_tokens: This rank's tokens over *all* micro-steps of the step. A tensor on the loss's device
            avoids a copy.
        mesh: The mesh the model is sharded over, of which data-parallel axes count; None: all ranks.

    Returns:
        What to call `backward()` on. With no tokens on any rank it is 0, not NaN.

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

    Of the losses that `token_mean` returned, summed over the micro-steps, it makes the true mean per token.

    Args:
        value: The same shape on every rank; detached, and left as it is.
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
    axes = [axis for axis, name in enumerate(names) if name in _DATA_AXES]
    if not axes:
        raise ConfigError(
            f"no axis of the mesh is known to be data parallel: {list(names) or 'they have no names'}",
            where="mesh",
            why="tokens are counted over the ranks that see different data, and over no others",
            fix="name the axes replicate and shard, or pass one axis, as in mesh['your_data_axis']",
        )
    return [mesh.get_group(axis) for axis in axes]


def _check_accumulation(micro_step: int, num_micro_steps: int, mode: str) -> None:
    for name, value in (("micro_step", micro_step), ("num_micro_steps", num_micro_steps)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}", where=f"accumulate({name})", why="it counts", fix="pass an int")
    if num_micro_steps < 1:
        raise ConfigError(
            f"num_micro_steps is {num_micro_steps}",
            where="accumulate(num_micro_steps)",
            why="a step has at least one micro-step",
            fix="pass 1 or more",
        )
    if not 0 <= micro_step < num_micro_steps:
        raise ConfigError(
            f"micro_step is {micro_step} of {num_micro_steps}",
            where="accumulate(micro_step)",
            why="micro-steps count from 0, and gradients are reduced on the last",
            fix=f"pass 0 to {num_micro_steps - 1}, as in range(num_micro_steps)",
        )
    if mode not in get_args(AccumulationMode):
        raise ConfigError(
            f"mode is {mode!r}",
            where="accumulate(mode)",
            why="it says when gradients are communicated",
            fix=f"pass one of {', '.join(get_args(AccumulationMode))}",
        )
