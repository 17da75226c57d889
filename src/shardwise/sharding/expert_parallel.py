"""Expert parallelism: ranks along the expert axis hold different experts of a layer, and tokens travel to them.

It works on modules of one interface, `planning.experts.EXPERTS_INTERFACE`: stacked parameters, and a forward that takes
`(hidden_states, top_k_index, top_k_weights)`. Routers and shared experts stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.errors import ShardError
from shardwise.models.grouped_experts import SortedByExpert


def divide_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's experts of a module, and let its forward send tokens to the ranks that have theirs.

    Args:
        module: Of the interface above. Its parameters become DTensors over `mesh`.
        mesh: The expert axis, whose size divides the number of experts.

    Ranks:
        Local; from now on calling the module is collective over the axis.
    """
    num_ranks, rank = mesh.size(), mesh.get_local_rank()
    for name, parameter in list(module.named_parameters(recurse=False)):
        local = parameter.detach().chunk(num_ranks)[rank].clone()
        divided = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        setattr(module, name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
    module.forward = DispatchingForward(module, mesh)  # pyrefly: ignore[bad-assignment]


class DispatchingForward:
    """The forward of a module with some of a layer's experts: tokens go to their experts' ranks and come back.

    Args:
        module: With parameters divided over `mesh`.
        mesh: The expert axis.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.module, self.mesh = module, mesh
        self.num_experts = int(getattr(module, "num_experts", 0))
        self.__wrapped__ = module.forward

    @torch.compiler.disable(reason="how many tokens go to each rank is known when they are counted")
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the module's own forward.

        Ranks:
            Collective over the expert axis, and so is the backward. Waits for the device once.
        """
        if hidden_states.ndim != 2 or top_k_index.shape != top_k_weights.shape:
            shapes = [list(each.shape) for each in (hidden_states, top_k_index, top_k_weights)]
            raise ShardError(
                f"{type(self.module).__name__} is called with shapes {shapes}",
                where=type(self.module).__name__,
                why="tokens are dispatched by (tokens, width) hidden states and (tokens, k) expert numbers and weights",
                fix="call it with these shapes, or leave the module out of expert.modules",
            )
        num_ranks = self.mesh.size()
        pairs = SortedByExpert(top_k_index, self.num_experts)
        to_send = pairs.counts.view(num_ranks, -1)
        to_receive = torch.empty_like(to_send)
        _all_to_all(to_receive, to_send, None, None, self.mesh)
        sent, received = torch.stack([to_send.sum(1), to_receive.sum(1)]).tolist()
        weights = top_k_weights.flatten().gather(0, pairs.order).unsqueeze(-1)
        made = self._run_experts(
            _Exchange.apply(pairs.rows(hidden_states), sent, received, self.mesh),
            to_receive,
            _Exchange.apply(weights, sent, received, self.mesh),
        )
        return pairs.sum(_Exchange.apply(made, received, sent, self.mesh)).to(hidden_states.dtype)

    def _run_experts(self, rows: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """The outputs of this rank's experts for the rows that arrived, sorted by rank and then by expert."""
        num_rows, num_experts = rows.shape[0], counts.shape[1]
        numbers = torch.arange(num_experts, device=rows.device).repeat(counts.shape[0])
        index = numbers.repeat_interleave(counts.flatten(), output_size=num_rows).unsqueeze(-1)
        if num_rows == 0:  # a row of weight 0, so that backward finds its way to the exchanges and the parameters
            rows, weights = (torch.cat([each, each.new_zeros(1, each.shape[1])]) for each in (rows, weights))
            index = index.new_zeros(1, 1)
        with self._local_experts(num_experts):
            return self.__wrapped__(rows, index, weights)[:num_rows]

    @contextmanager
    def _local_experts(self, num_experts: int) -> Iterator[None]:
        """Let the module see this rank's experts as plain tensors, and their number."""
        attributes, num_ranks = self.module.__dict__, self.mesh.size()
        parameters = {name: each for name, each in self.module._parameters.items() if isinstance(each, DTensor)}
        try:
            for name, parameter in parameters.items():  # hides the parameter, which stays registered
                attributes[name] = _ScaledGradient.apply(parameter.to_local(), 1 / num_ranks)
            attributes["num_experts"] = num_experts
            yield
        finally:
            for name in parameters:
                attributes.pop(name, None)
            attributes["num_experts"] = self.num_experts


class _ScaledGradient(torch.autograd.Function):
    """What FSDP2's average over fewer ranks lacks: an expert's gradient holds the tokens of all ranks of the axis."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        return gradient * ctx.factor, None


class _Exchange(torch.autograd.Function):
    """Rows to other ranks and from them; their gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], mesh: DeviceMesh) -> Tensor:
        ctx.sent, ctx.received, ctx.mesh = sent, received, mesh
        made = rows.new_empty(sum(received), *rows.shape[1:])
        _all_to_all(made, rows.contiguous(), received, sent, mesh)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyrefly: ignore[bad-override]
        return _Exchange.apply(gradient, ctx.received, ctx.sent, ctx.mesh), None, None, None


def _all_to_all(
    made: Tensor, given: Tensor, received: list[int] | None, sent: list[int] | None, mesh: DeviceMesh
) -> None:
    """`dist.all_to_all_single`, through host memory where gloo serves a GPU: gloo has it for CPU tensors only."""
    group, device = mesh.get_group(), given.device.type
    if device == "cpu" or f"{device}:gloo" not in str(dist.get_backend_config(group)).split(","):
        dist.all_to_all_single(made, given, received, sent, group=group)
        return
    on_host = torch.empty_like(made, device="cpu")
    dist.all_to_all_single(on_host, given.cpu(), received, sent, group=group)
    made.copy_(on_host)
