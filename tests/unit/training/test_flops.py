"""The stated formula, on models whose numbers can be counted by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardwise.models.load import load_model
from shardwise.training.metrics import flops_per_token, mfu, peak_flops


def test_llama_by_hand():
    """llama3-debug: 4 layers of width 64, 2 of 4 heads for keys and values, 192 inside; 512 tokens."""
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192
    expected = 6 * (4 * layer + 64 * 512) + 12 * 4 * 64 * 128
    assert flops_per_token(load_model("llama3-debug"), 128) == expected


def test_published_figure_of_llama3_8b():
    """6 N with N = 8.03e9 less the embedding's 0.525e9, and attention at 8192 tokens."""
    expected = 6 * (8.03e9 - 0.525e9) + 12 * 32 * 4096 * 8192
    assert flops_per_token(load_model("llama3-8b"), 8192) == pytest.approx(expected, rel=2e-3)


def test_tied_output_counts_and_a_lookup_does_not():
    model = nn.Module()
    model.embedding, model.output = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    assert flops_per_token(model, 8) == 6 * 40
    model.output.weight = model.embedding.weight
    assert flops_per_token(model, 8) == 6 * 40
    model.output = nn.Identity()
    assert flops_per_token(model, 8) == 0


def test_frozen_parameters_need_no_gradient_of_their_own():
    assert flops_per_token(nn.Linear(3, 5).requires_grad_(False), 8) == 4 * 15


class Experts(nn.Module):
    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_experts=4, experts_per_token=2)
        self.gate = nn.Linear(6, 4, bias=False)
        if stacked:
            self.up = nn.Parameter(torch.ones(4, 6, 7))
        else:
            self.experts = nn.ModuleList(nn.Linear(6, 7, bias=False) for _ in range(4))


@pytest.mark.parametrize("stacked", [True, False])
def test_only_chosen_experts_count(stacked: bool):
    assert flops_per_token(Experts(stacked), 8) == 6 * (24 + 2 * 42)


def test_utilisation():
    assert mfu(1000.0, 2e9, 2, 1e12) == pytest.approx(1.0)
    assert mfu(1000.0, 2e9, 2, None) is None
    assert peak_flops("cpu") is None
