"""Grouped matrix products and divided experts on real GPUs."""

from dataclasses import replace

import pytest
import torch

from shardwise.distributed.local_ranks import start_local
from shardwise.models.grouped_experts import grouped_linear, looped_linear
from shardwise.models.moe import SHAPES, ExpertBias, Moe, next_token_and_balance

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 257, 0], [129, 64, 7, 1000]])
def test_grouped_products_of_any_group_size_equal_a_loop(counts: list[int]):
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    rows, weight = torch.randn(sum(counts), 128, **options), torch.randn(4, 256, 128, **options)
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    gradient = torch.randn(sum(counts), 256, **options)
    made = []
    for function in (grouped_linear, looped_linear):
        leaves = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        result = function(*leaves, ends)
        result.backward(gradient)
        made.append([result.detach(), *(leaf.grad for leaf in leaves)])
    for grouped, looped in zip(*made, strict=True):
        torch.testing.assert_close(grouped, looped, rtol=2e-2, atol=1e-1)


@pytest.mark.filterwarnings("ignore")  # torch warns of the debug mode, and of what its own compiler does
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_does_not_wait_for_the_gpu(compiled: bool):
    torch.manual_seed(0)
    model = Moe(replace(SHAPES["moe-debug"], bias_rate=0.001)).to("cuda", torch.bfloat16)
    for layer in model.model.layers if compiled else ():
        layer.compile(fullgraph=True)
    tokens, bias = torch.randint(0, 512, (2, 64), device="cuda"), ExpertBias(model)

    def step() -> None:
        next_token_and_balance(model, {"input_ids": tokens, "labels": tokens})[0].backward()
        bias.update()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_experts_divided_over_ranks_train_as_in_one_process(compute: str):
    for is_equal, report in start_local("tests.gpu.expert_jobs:divide_experts", 2, (compute,)):
        assert is_equal, report
