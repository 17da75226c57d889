"""Grouped matrix products: every dtype and size against one product after another, forward and backward."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.models.grouped_experts import GroupedExperts, SortedByExpert, grouped_linear


def looped(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    parts = zip(rows.split(counts), weight, strict=True)
    return torch.cat([part @ matrix.t() for part, matrix in parts])


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0], [8, 8, 8, 8]])
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float64, (24, 16)), (torch.float32, (24, 16)), (torch.float32, (7, 5)), (torch.bfloat16, (24, 16)),
        (torch.bfloat16, (12, 16)), (torch.bfloat16, (16, 5)),
    ],
)  # fmt: skip
def test_products_and_gradients_equal_those_of_a_loop(dtype: torch.dtype, sizes: tuple[int, int], counts: list[int]):
    torch.manual_seed(0)
    made: list[list[Tensor]] = []
    rows, weight = torch.randn(sum(counts), sizes[0], dtype=dtype), torch.randn(4, sizes[1], sizes[0], dtype=dtype)
    gradient = torch.randn(sum(counts), sizes[1], dtype=dtype)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    for function, groups in ((grouped_linear, ends), (looped, counts)):
        leaves = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        result = function(*leaves, groups)
        result.backward(gradient)
        made.append([result.detach(), *(leaf.grad for leaf in leaves)])
    for ours, expected in zip(*made, strict=True):
        torch.testing.assert_close(ours, expected)


def test_rows_are_sorted_and_summed_again():
    index = torch.tensor([[2, 0], [1, 2], [2, 1]])
    pairs = SortedByExpert(index, 4)
    tokens = torch.tensor([[1.0], [10.0], [100.0]], requires_grad=True)
    assert pairs.rows(tokens).flatten().tolist() == [1, 10, 100, 1, 10, 100]
    assert pairs.counts.tolist() == [1, 2, 3, 0]
    assert pairs.ends.tolist() == [1, 3, 6, 6]
    assert pairs.sum(torch.arange(6.0).unsqueeze(-1)).flatten().tolist() == [0 + 3, 1 + 4, 2 + 5]
    wide = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(pairs.rows, wide)
    assert torch.autograd.gradcheck(pairs.sum, torch.randn(6, 5, dtype=torch.float64, requires_grad=True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of Dynamo itself
def test_experts_compile_as_one_graph():
    torch.manual_seed(0)
    experts = GroupedExperts(4, 16, 24)
    nn.init.normal_(experts.gate_up_proj)
    nn.init.normal_(experts.down_proj)
    x, index = torch.randn(9, 16, requires_grad=True), torch.randint(0, 3, (9, 2))
    weights = torch.rand(9, 2, requires_grad=True)
    made = []
    for module in (experts, torch.compile(experts, fullgraph=True, backend="aot_eager")):
        output = module(x, index, weights)
        leaves = [x, weights, *experts.parameters()]
        made.append([output, *torch.autograd.grad(F.mse_loss(output, torch.zeros_like(output)), leaves)])
    for eager, compiled in zip(*made, strict=True):
        torch.testing.assert_close(compiled, eager)
