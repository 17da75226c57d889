"""A sharded moving average of a sharded model's weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import CheckpointError, ConfigError, ShardError, raise_listed
from shardwise.sharding.full_params import reshard
from shardwise.sharding.inventory import local_part, local_tensor


class EMA:
    """An exponential moving average of a model's trainable parameters.

    After each `update()` the average is `decay * average + (1 - decay) * parameter`. It is sharded like
    the parameters and has their dtype; averages of 16-bit parameters are kept in float32, because the updates of
    a slow average are too small to change a 16-bit number. Frozen parameters are left out.

    Args:
        model: Sharded by shardwise or by hand, or not at all. Materialized.
        decay: Between 0 and 1, or a function of the number of updates made before this one.
        include_buffers: Also average floating-point buffers, and copy the others.

    Ranks:
        Local throughout: no method communicates. Call them on every rank.
    """

    def __init__(
        self, model: nn.Module, decay: float | Callable[[int], float], *, include_buffers: bool = False
    ) -> None:
        self.model = model
        self.decay = decay
        self.num_updates = 0
        self._is_swapped = False
        if not callable(decay):
            _check_decay(decay)
        reshard(model)  # an unsharded root would show plain copies that no optimizer updates
        averaged = {name: p for name, p in model.named_parameters() if p.requires_grad}
        averaged |= dict(model.named_buffers()) if include_buffers else {}
        self._shadow: dict[str, torch.Tensor] = {}
        for name, tensor in averaged.items():
            is_short = tensor.is_floating_point() and tensor.dtype.itemsize < 4
            self._shadow[name] = tensor.detach().to(torch.float32 if is_short else tensor.dtype, copy=True)

    def update(self) -> None:
        """Move the average toward the parameters; call it after `optimizer.step()`.

        Raises:
            ShardError: The average is currently swapped into the model, or averaged parameters were removed.

        Ranks:
            Local; call it on every rank, each with its own shards.
        """
        self._refuse_if_swapped("update")
        decay = self.decay(self.num_updates) if callable(self.decay) else self.decay
        _check_decay(decay)
        alike: dict[tuple[Any, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for shadow, value in self._pairs():
            shadows, values = alike.setdefault((shadow.device, shadow.dtype, value.dtype), ([], []))
            shadows.append(shadow)
            values.append(value)
        with torch.no_grad():
            for shadows, values in alike.values():
                if shadows[0].is_floating_point() or shadows[0].is_complex():
                    if values[0].dtype != shadows[0].dtype:
                        values = [value.to(shadows[0].dtype) for value in values]
                    torch._foreach_lerp_(shadows, values, 1.0 - decay)
                else:
                    torch._foreach_copy_(shadows, values)
        self.num_updates += 1

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Swap the average into the model's parameters inside the block.

        For evaluation and saving, not for training: changes that the block makes to the parameters are dropped.

        Raises:
            ShardError: The average is already swapped into the model, or averaged parameters were removed.

        Ranks:
            Local; call it on every rank, each with its own shards.
        """
        self._refuse_if_swapped("swap")
        pairs = self._pairs()
        with torch.no_grad():
            backup = [(value, value.clone()) for _, value in pairs]
            for shadow, value in pairs:
                value.copy_(shadow)
        self._is_swapped = True
        try:
            yield
        finally:
            # A forward in the block may have left the averaged root unsharded; the next one would use it.
            reshard(self.model)
            with torch.no_grad():
                for value, saved in backup:
                    value.copy_(saved)
            self._is_swapped = False

    def state_dict(self) -> dict[str, Any]:
        """The averages, as DTensors under the parameters' names, and the number of updates.

        They are the live tensors, as in a module's state dict. `torch.distributed.checkpoint` can save and
        load it, also on another number of ranks.

        Ranks:
            Local.
        """
        return {"num_updates": self.num_updates, "shadow": dict(self._shadow)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load averages: DTensors placed like the parameters, or full plain tensors.

        Raises:
            CheckpointError: Names, shapes, or a DTensor's mesh or placements differ. Nothing is loaded.

        Ranks:
            Local; call it on every rank, each with its own shards.
        """
        loaded = state_dict["shadow"]
        _check_matches(self._shadow, loaded)
        with torch.no_grad():
            for name, shadow in self._shadow.items():
                new = loaded[name]
                part = local_tensor(new) if isinstance(new, DTensor) else local_part(new, shadow)
                local_tensor(shadow).copy_(part)
        self.num_updates = int(state_dict["num_updates"])

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return this rank's part of every average, with its part of the model's tensor."""
        reshard(self.model)
        current = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        missing = sorted(self._shadow.keys() - current.keys())
        if missing:
            raise ShardError(
                f"{len(missing)} averaged parameters are no longer in the model",
                where=", ".join(missing[:5]),
                why="the average contains parameters with these names",
                fix="create the EMA after the last change of the model",
            )
        return [(local_tensor(shadow), local_tensor(current[name])) for name, shadow in self._shadow.items()]

    def _refuse_if_swapped(self, method: str) -> None:
        if self._is_swapped:
            raise ShardError(
                f"EMA.{method} was called while the average is swapped into the model",
                where="with ema.swap(): ...",
                why="the parameters there are the average itself",
                fix=f"call {method} outside the block",
            )


def _check_decay(decay: float) -> None:
    if not 0.0 <= decay <= 1.0:
        raise ConfigError(
            f"decay is {decay}",
            where="EMA(decay)",
            why="the average is decay * average + (1 - decay) * parameter",
            fix="pass a number from 0 to 1, as in 0.999",
        )


def _check_matches(shadow: dict[str, torch.Tensor], loaded: Mapping[str, torch.Tensor]) -> None:
    problems = [f"{name}: missing" for name in sorted(shadow.keys() - loaded.keys())]
    problems += [f"{name}: not in this model" for name in sorted(loaded.keys() - shadow.keys())]
    for name in sorted(shadow.keys() & loaded.keys()):
        ours, theirs = shadow[name], loaded[name]
        if ours.shape != theirs.shape:
            problems.append(f"{name}: shape {tuple(theirs.shape)}, expected {tuple(ours.shape)}")
        elif isinstance(theirs, DTensor) and not (
            isinstance(ours, DTensor) and (theirs.device_mesh, theirs.placements) == (ours.device_mesh, ours.placements)
        ):
            problems.append(f"{name}: placed {theirs.placements} on {theirs.device_mesh}")
    raise_listed(
        problems,
        "{num} of the averages cannot be loaded",
        why="an average belongs to the parameter of the same name, shape and placement",
        fix="load it with torch.distributed.checkpoint, which reshards, or pass full tensors",
        kind=CheckpointError,
    )
