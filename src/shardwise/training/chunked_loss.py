"""Cross-entropy of a language model without its logits: the output matrix and the loss in chunks of tokens.

The logits of a long sequence are the largest tensors of a step (8,192 tokens of a vocabulary of 128,256: 4 GiB in
float32, and as much again for their gradient). Here they exist for one chunk at a time; its gradients are computed
along with its loss. The function is the same, only the order of additions differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shardwise import compat
from shardwise.training.data.samples import IGNORED

_CHUNK_NUMEL = 2**28
"""Logits in a chunk: 1 GiB in float32."""
_MIN_CHUNK_ROWS = 256


def output_matrix(model: nn.Module) -> nn.Linear | None:
    """The module that turns hidden states into logits, if it is a plain matrix."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else getattr(model, "lm_head", None)
    is_plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in vars(head)
    return head if is_plain else None


class ChunkedLoss:
    """The summed cross-entropy of a forward, computed where its output matrix is called.

    That matrix returns a stand-in of the logits' shape, which takes no memory. A model that does anything with its
    logits but return them (a soft cap, a slice) returns something else, and the loss must be computed from that.

    Args:
        head: The output matrix.
        labels: (rows, length); `IGNORED` is left out.
    """

    def __init__(self, head: nn.Linear, labels: Tensor) -> None:
        self._head, self._labels = head, labels
        self._stand_in: Tensor | None = None

    @contextmanager
    def computed(self) -> Iterator[None]:
        """Run the model once inside."""
        self._head.forward = self._forward  # pyrefly: ignore[bad-assignment]
        try:
            yield
        finally:
            del self._head.forward

    def of(self, logits: Any) -> Tensor | None:
        """The loss, where the model returned the stand-in; else None."""
        mine = self._stand_in
        is_stand_in = (
            mine is not None
            and isinstance(logits, Tensor)
            and logits.shape == mine.shape
            and logits.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()
        )
        return _FirstElement.apply(logits) if is_stand_in else None

    def _forward(self, hidden: Tensor) -> Tensor:
        weight, bias = self._head.weight, self._head.bias
        if hidden.shape[:-1] != self._labels.shape or isinstance(weight, DTensor) or self._stand_in is not None:
            self._stand_in = None
            return F.linear(hidden, weight, bias)
        self._stand_in = _ChunkedCrossEntropy.apply(hidden, weight, bias, self._labels)
        return self._stand_in


class _FirstElement(torch.autograd.Function):
    """The loss that a stand-in repeats; its gradient takes no memory either."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor) -> Tensor:
        ctx.shape = stand_in.shape
        return stand_in[(0,) * stand_in.ndim].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return gradient.expand(ctx.shape)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        rows, targets = hidden.detach().flatten(0, -2), labels.flatten().long()
        wide = torch.promote_types(torch.float32, hidden.dtype)
        needs = ctx.needs_input_grad
        grad_hidden = torch.empty_like(rows, dtype=wide) if needs[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        num_rows = max(_MIN_CHUNK_ROWS, _CHUNK_NUMEL // weight.shape[0])
        num_chunks = max(1, -(-rows.shape[0] // num_rows))
        first = 0
        for some, wanted in zip(rows.chunk(num_chunks), targets.chunk(num_chunks), strict=True):
            loss, gradient = _cross_entropy(hidden.device.type)(F.linear(some, weight, bias), wanted)
            total += loss
            if grad_hidden is not None:
                _matmul(gradient, weight, grad_hidden[first : first + len(some)])
            if grad_weight is not None:
                _add_matmul(grad_weight, gradient.t(), some)
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=wide)
            first += len(some)
        ctx.gradients, ctx.dtypes = (grad_hidden, grad_weight, grad_bias), (hidden.dtype, weight.dtype)
        ctx.shape = hidden.shape
        return total.expand(*labels.shape, weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        scale = gradient[(0,) * gradient.ndim]
        hidden, weight, bias = (None if each is None else each.mul_(scale) for each in ctx.gradients)
        del ctx.gradients  # scaled in place: they are the largest tensors here
        return (
            None if hidden is None else hidden.to(ctx.dtypes[0]).view(ctx.shape),
            None if weight is None else weight.to(ctx.dtypes[1]),
            None if bias is None else bias.to(ctx.dtypes[1]),
            None,
        )


def _matmul(left: Tensor, right: Tensor, out: Tensor) -> None:
    """`out = left @ right`, added up and kept in the dtype of `out`."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif left.is_cuda:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def _add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, added up in the dtype of `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _cross_entropy_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss of some rows and its gradient, in the dtype of the logits."""
    wide = logits.to(torch.promote_types(torch.float32, logits.dtype))
    is_learnt = (targets != IGNORED)[:, None]
    wanted = targets.clamp_min(0)[:, None]
    normaliser = torch.logsumexp(wide, -1, keepdim=True)
    loss = torch.where(is_learnt, normaliser - wide.gather(-1, wanted), 0.0).sum()
    is_wanted = torch.arange(logits.shape[-1], device=logits.device) == wanted
    gradient = torch.where(is_learnt, torch.exp(wide - normaliser) - is_wanted.to(wide.dtype), 0.0)
    return loss, gradient.to(logits.dtype)


@functools.cache
def _cross_entropy(device_type: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """As one kernel where there is a compiler for the device."""
    if compat.can_compile(torch.device(device_type)):
        return torch.compile(_cross_entropy_and_gradient)
    return _cross_entropy_and_gradient
