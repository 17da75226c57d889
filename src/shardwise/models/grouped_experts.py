"""All experts of a layer on tokens sorted by expert: grouped matrix products, without device synchronization.

The interface is that of transformers: one module holds the stacked parameters of all experts, and its forward takes
`(hidden_states, top_k_index, top_k_weights)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ALIGNMENT_BYTES = 16
_INIT_STD = 0.02


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows (rows, in) with its own matrix (groups, out, in), as `F.linear` does with one.

    torch's grouped product supports bfloat16 only; other dtypes, and row sizes that are not a multiple of 16 bytes, use
    a loop over the groups, which copies `ends` (int32, the end of each group) to the host.
    """
    aligned = all(size * rows.element_size() % _ALIGNMENT_BYTES == 0 for size in weight.shape[1:])
    if rows.dtype == weight.dtype == torch.bfloat16 and aligned:
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
    return looped_linear(rows, weight, ends)


@torch.library.custom_op("shardwise::looped_linear", mutates_args=())
def looped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear` as a loop over the groups."""
    made = rows.new_empty(rows.shape[0], weight.shape[1])
    for matrix, part, out in _groups(weight, rows, made, ends=ends):
        torch.mm(part, matrix.t(), out=out)
    return made


@looped_linear.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@torch.library.custom_op("shardwise::looped_linear_gradients", mutates_args=())
def _looped_gradients(gradient: Tensor, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    of_rows, of_weight = torch.empty_like(rows), torch.empty_like(weight)
    for matrix, matrix_out, part, row_out, incoming in _groups(weight, of_weight, rows, of_rows, gradient, ends=ends):
        torch.mm(incoming, matrix, out=row_out)
        torch.mm(incoming.t(), part, out=matrix_out)
    return of_rows, of_weight


@_looped_gradients.register_fake
def _(gradient: Tensor, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weight)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_looped_gradients(gradient, *ctx.saved_tensors), None


looped_linear.register_autograd(_backward, setup_context=_remember)


def _groups(*tensors: Tensor, ends: Tensor) -> Any:
    """The parts of each group: a slice of a tensor of rows, an element of a stack of matrices."""
    start = 0
    for number, end in enumerate(ends.tolist()):
        yield tuple(tensor[number] if tensor.ndim == 3 else tensor[start:end] for tensor in tensors)
        start = end


def count_tokens(index: Tensor, num_experts: int) -> Tensor:
    """Number of tokens for each expert, int64."""
    return (index.flatten().unsqueeze(-1) == torch.arange(num_experts, device=index.device)).sum(0)


class SortedByExpert:
    """The (token, expert) pairs of a routing, given as expert indices (tokens, k), sorted by expert."""

    def __init__(self, index: Tensor, num_experts: int) -> None:
        self.k = index.shape[1]
        self.order = index.flatten().argsort(stable=True)
        places = torch.arange(self.order.shape[0], device=index.device)
        self.inverse = torch.empty_like(self.order).scatter_(0, self.order, places)
        self.counts = count_tokens(index, num_experts)

    @property
    def ends(self) -> Tensor:
        """The end of each expert's rows, int32."""
        return self.counts.cumsum(0).to(torch.int32)

    def rows(self, tokens: Tensor) -> Tensor:
        """A row for each pair: (tokens, width) to (tokens * k, width)."""
        return _Rows.apply(tokens, self.order, self.inverse, self.k)

    def sum(self, rows: Tensor) -> Tensor:
        """For each token the sum of its rows: (tokens * k, width) to (tokens, width)."""
        return _Sum.apply(rows, self.order, self.inverse, self.k)


class _Rows(torch.autograd.Function):
    """Gather rows by index. Forward and backward only read rows, without in-place sums: faster, and deterministic."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.k = k
        return tokens.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyrefly: ignore[bad-override]
        return _Sum.apply(gradient, *ctx.saved_tensors, ctx.k), None, None, None


class _Sum(torch.autograd.Function):
    """The transpose of `_Rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.k = k
        return rows.index_select(0, inverse).view(rows.shape[0] // k, k, rows.shape[1]).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyrefly: ignore[bad-override]
        return _Rows.apply(gradient, *ctx.saved_tensors, ctx.k), None, None, None


class GroupedExperts(nn.Module):
    """SwiGLU experts; the stacked parameters have the same names as in transformers."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from a narrow normal distribution."""
        nn.init.normal_(self.gate_up_proj, std=_INIT_STD)
        nn.init.normal_(self.down_proj, std=_INIT_STD)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum (tokens, hidden) of the outputs of the experts chosen for each token (tokens, k)."""
        pairs = SortedByExpert(top_k_index, self.num_experts)
        gate, up = grouped_linear(pairs.rows(hidden_states), self.gate_up_proj, pairs.ends).chunk(2, -1)
        weights = top_k_weights.flatten().gather(0, pairs.order).unsqueeze(-1).to(hidden_states.dtype)
        return pairs.sum(grouped_linear(F.silu(gate) * up * weights, self.down_proj, pairs.ends))
