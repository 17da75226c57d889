"""ShardedGradScaler: a gradient scaler whose ranks skip a step together."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.compat import LocalGradScaler
from shardwise.sharding.repointing import adopt


class ShardedGradScaler(LocalGradScaler):
    """`torch.amp.GradScaler` for sharded gradients, mixed with plain ones, on any device.

    Args:
        device: Where the scale is kept.
        init_scale: The first scale.
        backoff_factor: Multiplies the scale after a step that was skipped.
        growth_factor: Multiplies the scale after `growth_interval` steps that were not.
        growth_interval: See above.
        enabled: False turns everything into what it would be without a scaler.
        process_group: Ranks that skip together; all by default.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: torch.Tensor | Iterable[torch.Tensor]) -> Any:
        """Multiply a loss, or several, by the scale; each keeps its dtype, as with FSDP1's scaler.

        Ranks:
            Local.
        """
        if isinstance(outputs, torch.Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if not isinstance(outputs, Iterable):
            raise ValueError("outputs must be a tensor or an iterable of tensors")
        losses = [self.scale(loss) for loss in outputs]
        return type(outputs)(losses) if isinstance(outputs, list | tuple) else iter(losses)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, and agree on whether all are finite.

        Ranks:
            Collective over `process_group`.
        """
        adopt(optimizer)
        super().unscale_(optimizer)

    def agree(self, found_inf: torch.Tensor) -> None:
        """Let a value that is not finite on one rank count on all.

        Ranks:
            Collective over `process_group`.
        """
        shared = found_inf if found_inf.device.type == self._device else found_inf.to(self._device)
        dist.all_reduce(shared, group=self.process_group)
        found_inf.copy_(shared)
