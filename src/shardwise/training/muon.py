"""Muon for sharded matrices: each is made whole once, on one rank, orthogonalised there, and its parts sent back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from shardwise import compat
from shardwise.sharding.layout import local_tensor
from shardwise.training.whole_matrices import BUCKET_BYTES, map_whole

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7


class Muon(Optimizer):
    """Muon for the groups of kind `blocks`, AdamW for all others, as one optimizer.

    The momentum is kept on the shards. Its orthogonalisation needs the whole matrix, so each matrix has an owner among
    the ranks that share it, replicas included: the others send it their parts, it does the work, and sends the parts
    of the result back. A matrix is thus worked on once, and a rank holds few of them whole at a time. Stacks of
    matrices (experts) that are cut between matrices need no exchange.

    Args:
        params: Parameter groups with `kind`, `lr` and `weight_decay`; a group without a kind is AdamW's.
        lr: AdamW's, where a group does not say.
        weight_decay: Where a group does not say.
        momentum: Muon's.
        nesterov: Muon's.
        betas: AdamW's.
        eps: AdamW's.
        fused: AdamW's.
        dtype: In which matrices are orthogonalised. None: bfloat16 on accelerators, as Muon was published; float32 on
            CPU, where bfloat16 is not faster and would magnify differences in the order of sums.

    Ranks:
        `step` is collective: two exchanges for each bucket of matrices. Every rank must have gradients for the same
        parameters, as FSDP2 sees to.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float = 3e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype, self.bucket_bytes = dtype, BUCKET_BYTES
        self.grad_scale: None = None
        self.found_inf: Tensor | None = None
        """1 where the next step is to change nothing, decided on the device; as torch's fused optimizers have it."""
        groups = [{"kind": "matrices", **group} for group in params]
        muon = {"momentum": momentum, "nesterov": nesterov}
        adamw = {"betas": betas, "eps": eps, "fused": fused}
        groups = [{**(muon if group["kind"] == "blocks" else adamw), **group} for group in groups]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        compat.allow_holding_back(self, all(group.get("fused", True) for group in self.param_groups))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change every parameter that has a gradient.

        Ranks:
            Collective.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["kind"] == "blocks":
                self._step_muon(parameters, group)
            else:
                self._step_adamw(parameters, group)
        return loss

    def _step_muon(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        if not parameters:
            return
        directions = [self._direction(parameter, group) for parameter in parameters]
        dtype = self.dtype or orthogonalizing_dtype(_compute_device(parameters[0]))
        for index, update in map_whole(
            parameters,
            directions,
            lambda matrix: orthogonalize(matrix, dtype),
            dtype=dtype,
            bucket_bytes=self.bucket_bytes,
        ):
            parameter = parameters[index]
            local = local_tensor(parameter)
            decay, update = 1 - group["lr"] * group["weight_decay"], update.to(local)
            if self.found_inf is not None:
                is_bad = self.found_inf.to(local.device) > 0
                decay, update = torch.where(is_bad, 1.0, decay), update.masked_fill(is_bad, 0.0)
            local.mul_(decay)
            local.add_(update, alpha=-group["lr"] * _shape_factor(parameter.shape))

    def _direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """This rank's part of what is orthogonalised: the gradient with momentum."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, buffer = local_tensor(parameter.grad), local_tensor(state["momentum_buffer"])
        if self.found_inf is not None:  # the momentum of a step that is left out stays as it is
            gradient = torch.where(self.found_inf.to(buffer.device) > 0, buffer, gradient)
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def _step_adamw(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        if not parameters:
            return
        states = [self._adamw_state(parameter, group) for parameter in parameters]
        adamw(
            [local_tensor(parameter) for parameter in parameters],
            [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None],
            [local_tensor(state["exp_avg"]) for state in states],
            [local_tensor(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _adamw_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            device = local_tensor(parameter).device if group["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def orthogonalizing_dtype(device: torch.device) -> torch.dtype:
    """In which dtype matrices on a device are orthogonalised, where nothing else is asked for."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalize(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Bring the singular values of a matrix, or of each in a stack, near 1 by five Newton-Schulz iterations.

    The same numbers as `torch.optim.Muon` gives, which works in bfloat16.

    Args:
        matrix: (rows, columns), or (stack, rows, columns). A matrix of zeros stays one.
        dtype: To compute in, and of the result.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(dtype or orthogonalizing_dtype(matrix.device), copy=True)
    x = x.mT if is_tall else x
    x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS))
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _shape_factor(shape: torch.Size) -> float:
    """Tall matrices take longer steps, so that outputs change as much as those of wide ones."""
    return math.sqrt(max(1.0, shape[-2] / shape[-1]))


def _compute_device(parameter: Tensor) -> torch.device:
    """Where whole matrices come together; not where an offloaded shard lies."""
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device
