"""The loss on held-out data: every sample once, every token with the same weight, on any number of ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, nullcontext
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.models.modes import evaluation_mode
from shardwise.sharding.full_params import reshard
from shardwise.training.ema import EMA
from shardwise.training.lockstep import lockstep
from shardwise.training.objective import Batch, Objective


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    objective: Objective,
    *,
    mesh: DeviceMesh,
    max_batches: int | None = None,
    ema: EMA | None = None,
) -> float:
    """The mean loss over the tokens of all batches of all ranks.

    Args:
        model: Evaluated in eval mode; each module gets its own mode back.
        batches: Finite, and of the same length on every rank; rows that only fill up have labels of -100.
        objective: Makes losses.
        mesh: Of all ranks.
        max_batches: At most so many.
        ema: Evaluate this average instead of the weights.

    Returns:
        The loss, the same on every rank; NaN where there is no token.

    Ranks:
        Collective.
    """
    device = torch.device(mesh.device_type)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with torch.no_grad(), evaluation_mode(model), ExitStack() as leaving:
        leaving.callback(reshard, model)  # a forward without backward leaves the root gathered
        leaving.enter_context(ema.swap() if ema is not None else nullcontext())
        each = iter(batches)
        if isinstance(each, Generator):
            leaving.callback(each.close)  # its threads end now, also when only some batches are wanted
        for batch in lockstep(islice(each, max_batches)):  # if one rank cannot read its batch, all raise
            loss_sum, num_tokens = objective(model, batch)
            sums += torch.stack([loss_sum.detach().to(sums), num_tokens.to(sums)])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)  # ranks with the same batch count it alike above and below
    loss, tokens = sums.tolist()
    return loss / tokens if tokens else float("nan")
