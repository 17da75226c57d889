"""Expert parallelism: ranks of the expert axis have different experts of a layer, and tokens are sent to them.

It supports modules with the interface in `planning.experts`: stacked parameters, and a forward with the arguments
`(hidden_states, top_k_index, top_k_weights)`. Routers and shared experts are not split.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardwise.errors import ShardError
from shardwise.models.grouped_experts import SortedByExpert


def divide_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's experts of a module, and make its forward send tokens to the ranks of their experts.

    Args:
        module: Module with the interface above. Its parameters become DTensors over `mesh`.
        mesh: The expert axis, whose size divides the number of experts.

    Ranks:
        Local; later calls of the module are collective over the axis.
    """
    divide_parameters(module, mesh)
    module.forward = DispatchingForward(module, mesh)  # pyrefly: ignore[bad-assignment]


def divide_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's part of dimension 0 of a module's own parameters, as DTensors over `mesh`."""
    num_ranks, rank = mesh.size(), mesh.get_local_rank()
    for name, parameter in list(module.named_parameters(recurse=False)):
        local = parameter.detach().chunk(num_ranks)[rank].clone()
        divided = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        setattr(module, name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


class DispatchingForward:
    """Forward of a module with a part of a layer's experts: tokens are sent to their experts' ranks and back.

    Args:
        module: Module with parameters split over `mesh`.
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
        """Return the outputs of this rank's experts for the received rows, sorted by rank and then by expert."""
        num_rows, num_experts = rows.shape[0], counts.shape[1]
        numbers = torch.arange(num_experts, device=rows.device).repeat(counts.shape[0])
        index = numbers.repeat_interleave(counts.flatten(), output_size=num_rows).unsqueeze(-1)
        if num_rows == 0:  # a row of weight 0, so that backward reaches the exchanges and the parameters
            rows, weights = (torch.cat([each, each.new_zeros(1, each.shape[1])]) for each in (rows, weights))
            index = index.new_zeros(1, 1)
        with self._local_experts(num_experts, 1 / self.mesh.size()):
            return self.__wrapped__(rows, index, weights)[:num_rows]

    @contextmanager
    def _local_experts(self, num_experts: int, gradient_scale: float) -> Iterator[None]:
        """Expose this rank's experts to the module as plain tensors, with their number."""
        attributes = self.module.__dict__
        parameters = {name: each for name, each in self.module._parameters.items() if isinstance(each, DTensor)}
        try:
            for name, parameter in parameters.items():  # hides the parameter, which stays registered
                attributes[name] = local = parameter.to_local()
                if local.requires_grad and gradient_scale != 1:
                    # FSDP2 averages over fewer ranks, but an expert's gradient includes the tokens of all of them.
                    local.register_hook(lambda gradient: gradient * gradient_scale)
            attributes["num_experts"] = num_experts
            yield
        finally:
            for name in parameters:
                attributes.pop(name, None)
            attributes["num_experts"] = self.num_experts


class SelectingForward(DispatchingForward):
    """Forward of a module with a part of a layer's experts, if all ranks have the same tokens.

    Each rank computes the pairs of tokens with its own experts, and the results are summed.
    """

    @torch.compiler.disable(reason="how many pairs are this rank's is known when they are counted")
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the module's own forward.

        Ranks:
            Collective over the tensor axis, and so is the backward. Waits for the device once.
        """
        # All ranks have these tensors and use a part of each: gradients are summed over the ranks.
        given = (
            DTensor.from_local(x, self.mesh, [Replicate()], run_check=False) for x in (hidden_states, top_k_weights)
        )
        hidden, weights = (each.to_local(grad_placements=[Partial()]) for each in given)
        num_local = self.num_experts // self.mesh.size()
        index = top_k_index - self.mesh.get_local_rank() * num_local
        rows, places = ((index >= 0) & (index < num_local)).nonzero(as_tuple=True)
        numbers, shares = index[rows, places], weights[rows, places]
        if rows.numel() == 0:  # a pair of weight 0, so that backward reaches the parameters
            rows, numbers, shares = rows.new_zeros(1), rows.new_zeros(1), weights[:1, 0] * 0
        with self._local_experts(num_local, 1.0):
            made = self.__wrapped__(hidden[rows], numbers.unsqueeze(-1), shares.unsqueeze(-1))
        mixed = torch.zeros_like(hidden).index_add(0, rows, made.to(hidden.dtype))
        return DTensor.from_local(mixed, self.mesh, [Partial()], run_check=False).full_tensor()


class _Exchange(torch.autograd.Function):
    """Exchange rows between ranks; backward exchanges their gradients in reverse."""

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
    """`dist.all_to_all_single`, in host memory for GPU tensors with gloo, which supports it for CPU tensors only.

    Ranks:
        Collective over the mesh.
    """
    group, device = mesh.get_group(), given.device.type
    if device == "cpu" or f"{device}:gloo" not in str(dist.get_backend_config(group)).split(","):
        dist.all_to_all_single(made, given, received, sent, group=group)
        return
    on_host = torch.empty_like(made, device="cpu")
    dist.all_to_all_single(on_host, given.cpu(), received, sent, group=group)
    made.copy_(on_host)
