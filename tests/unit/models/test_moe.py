"""The reference mixture of experts: published size and numbers, balance, unused experts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from shardwise.models.moe import SHAPES, Moe, RoutedFeedForward, next_token_and_balance

DEBUG = SHAPES["moe-debug"]


def test_size_is_the_published_one():
    with torch.device("meta"):
        model = Moe(SHAPES["moe-8x7b"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 46_702_792_704


@pytest.mark.filterwarnings("ignore")  # of transformers' own loading
def test_logits_equal_those_of_transformers_on_our_file(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = Moe(DEBUG)
    save_file(ours.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = transformers.MixtralConfig(
        hidden_size=DEBUG.hidden_size,
        intermediate_size=DEBUG.intermediate_size,
        num_hidden_layers=DEBUG.num_layers,
        num_attention_heads=DEBUG.num_heads,
        num_key_value_heads=DEBUG.num_kv_heads,
        vocab_size=DEBUG.vocab_size,
        num_local_experts=DEBUG.num_experts,
        num_experts_per_tok=DEBUG.experts_per_token,
        rms_norm_eps=DEBUG.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": DEBUG.rope_theta},
        sliding_window=None,
        tie_word_embeddings=False,
        architectures=["MixtralForCausalLM"],
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    theirs = transformers.MixtralForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, DEBUG.vocab_size, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_output_is_the_weighted_sum_of_the_chosen_experts():
    torch.manual_seed(0)
    routed = RoutedFeedForward(DEBUG)
    x = torch.randn(2, 5, DEBUG.hidden_size)
    mixed, _ = routed(x)
    for row in range(2):
        for place in range(5):
            token = x[row, place]
            weights, chosen = routed.gate(token).softmax(-1).topk(DEBUG.experts_per_token)
            expected = sum(
                w * routed.experts[int(e)](token) for w, e in zip(weights / weights.sum(), chosen, strict=True)
            )
            torch.testing.assert_close(mixed[row, place], expected)


def test_balance_is_one_when_even_and_the_number_of_experts_when_one_has_all():
    routed = RoutedFeedForward(replace(DEBUG, experts_per_token=1))
    with torch.no_grad():
        routed.gate.weight.zero_()
        routed.gate.weight[:, :4] = 50 * torch.eye(4)
    even = torch.zeros(1, 8, DEBUG.hidden_size)
    even[0, torch.arange(8), torch.arange(8) % 4] = 1.0
    assert routed(even)[1].item() == pytest.approx(1.0)
    one = torch.zeros(1, 8, DEBUG.hidden_size)
    one[..., 2] = 1.0
    assert routed(one)[1].item() == pytest.approx(4.0)


def test_objective_counts_learnt_tokens_and_weighs_the_balance():
    torch.manual_seed(0)
    model = Moe(DEBUG)
    tokens = torch.randint(0, DEBUG.vocab_size, (2, 9))
    labels = tokens[:, 1:].clone()
    labels[0, :3] = -100
    loss, num_tokens = next_token_and_balance(model, {"input_ids": tokens[:, :-1], "labels": labels})
    assert num_tokens == 13
    logits, balance = model(tokens[:, :-1], with_balance=True)
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, plain + 0.01 * 13 * balance)


def test_experts_without_tokens_get_no_gradient_and_the_others_do():
    torch.manual_seed(0)
    model = Moe(replace(DEBUG, num_experts=16, num_layers=1))
    model(torch.randint(0, DEBUG.vocab_size, (1, 3))).square().mean().backward()
    experts = model.model.layers[0].block_sparse_moe.experts  # pyrefly: ignore[missing-attribute]
    used = [expert.w1.weight.grad is not None for expert in experts]
    assert 2 <= sum(used) <= 6
