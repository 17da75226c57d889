"""Do the same with torch's FSDP1 and with `shardwise.fsdp1`, on CPU ranks, and compare what comes out."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import shardwise.fsdp1 as our_fsdp
from tests.by_hand import Tiny, assert_same, loss_of, tiny, tokens

CPU = torch.device("cpu")
EXACT: dict[str, float] = {"atol": 2e-6, "rtol": 1e-5}
"""float32: both sum over ranks, in another order from three ranks on."""
COARSE: dict[str, float] = {"atol": 2e-2, "rtol": 2e-2}
"""16 bits: a few units in the last of eight places, after some steps."""

REAL, OURS = torch_fsdp, our_fsdp


@contextmanager
def quiet() -> Iterator[None]:
    """FSDP1 warns that it is deprecated, and ours where FSDP2 differs; here that is no news."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class Trace:
    """What a run leaves behind."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


def model_for(api: Any, **sizes: int) -> Tiny:
    """All of it trainable: FSDP1 without `use_orig_params` takes no mixture."""
    model = tiny(**sizes)
    model.frozen.requires_grad_(True)
    return model


def both(run: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What `run` returns with FSDP1's module and with ours."""
    with quiet():
        return run(REAL), run(OURS)


def wrapped(api: Any, model: nn.Module, **arguments: Any) -> Any:
    """A copy of the model, wrapped on the CPU."""
    return api.FullyShardedDataParallel(copy.deepcopy(model), **({"device_id": CPU} | arguments))


def trained(
    api: Any, unit: Any, rank: int, *, steps: int = 3, micro_steps: int = 1, no_sync: bool = False, clip: float = 0.0
) -> Trace:
    """A few AdamW steps on this rank's batches."""
    optimizer = torch.optim.AdamW(unit.parameters(), lr=0.01)
    trace = Trace()
    for step in range(steps):
        optimizer.zero_grad()
        for micro_step in range(micro_steps):
            batch = tokens(rank, 10 * step + micro_step)
            if no_sync and micro_step < micro_steps - 1:
                with unit.no_sync():
                    loss = loss_of(unit, batch)
                    (loss / micro_steps).backward()
            else:
                loss = loss_of(unit, batch)
                (loss / micro_steps).backward()
            trace.losses.append(loss.item())
        if clip:
            trace.norms.append(unit.clip_grad_norm_(clip).item())
        optimizer.step()
    trace.parameters = full_state(api, unit)
    trace.optimizer = optimizer_state(api, unit, optimizer)
    return trace


def full_state(api: Any, unit: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers, on every rank."""
    kind, config = api.StateDictType.FULL_STATE_DICT, api.FullStateDictConfig(offload_to_cpu=False)
    with api.FullyShardedDataParallel.state_dict_type(unit, kind, config):
        return {name: value.clone() for name, value in unit.state_dict().items()}


def optimizer_state(api: Any, unit: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Whole optimizer state, on every rank. FSDP1 mixes tensors up when it offloads on a machine without GPU."""
    kind = api.StateDictType.FULL_STATE_DICT
    configs = (api.FullStateDictConfig(), api.FullOptimStateDictConfig(offload_to_cpu=False))
    with api.FullyShardedDataParallel.state_dict_type(unit, kind, *configs):
        return api.FullyShardedDataParallel.optim_state_dict(unit, optimizer)


def assert_alike(ours: Trace, real: Trace, **tolerance: float) -> None:
    """Same losses, norms, weights and optimizer state."""
    tolerance = tolerance or EXACT
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(real.losses), **tolerance)
    torch.testing.assert_close(torch.tensor(ours.norms), torch.tensor(real.norms), **tolerance)
    assert_same(ours.parameters, real.parameters, **tolerance)
    assert_same_optimizer(ours.optimizer, real.optimizer, **tolerance)


def assert_same_optimizer(ours: dict[str, Any], real: dict[str, Any], **tolerance: float) -> None:
    # A flat parameter lists its parts by unit, ours stand in the model's order; state is found by name.
    groups = [[group | {"params": sorted(group["params"])} for group in side["param_groups"]] for side in (ours, real)]
    assert groups[0] == groups[1]
    assert ours["state"].keys() == real["state"].keys()
    for name, state in real["state"].items():
        assert_same(ours["state"][name], state, **(tolerance or EXACT))
