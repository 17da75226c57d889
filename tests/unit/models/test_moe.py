"""The reference mixture of experts: published size, names and numbers, balance, unused experts."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import CheckpointError
from shardwise.models.moe import SHAPES, ExpertBias, Moe, RoutedFeedForward, next_token_and_balance

DEBUG = SHAPES["moe-debug"]


def test_size_is_the_published_one():
    with torch.device("meta"):
        model = Moe(SHAPES["moe-8x7b"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 46_702_792_704


def config_of_transformers(transformers):
    return transformers.MixtralConfig(
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


@pytest.mark.filterwarnings("ignore")  # of transformers' own loading
def test_logits_equal_those_of_transformers_on_our_file(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = Moe(DEBUG)
    save_file(ours.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config_of_transformers(transformers).to_dict()))
    theirs = transformers.MixtralForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, DEBUG.vocab_size, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of transformers' own saving
def test_published_names_of_experts_are_loaded(tmp_path: Path):
    """Transformers writes what Mixtral was published as: three matrices for each expert."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.MixtralForCausalLM(config_of_transformers(transformers))
    theirs.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in file.keys()  # noqa: SIM118
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    ours = Moe(DEBUG)
    report = sw.load_weights(ours, tmp_path)
    assert not report.missing
    assert not report.unexpected
    tokens = torch.randint(0, DEBUG.vocab_size, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    del state["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(state, tmp_path / "short.safetensors")
    with pytest.raises(CheckpointError, match="block_sparse_moe"):
        sw.load_weights(Moe(DEBUG), tmp_path / "short.safetensors")


def test_output_is_the_weighted_sum_of_the_chosen_experts():
    torch.manual_seed(0)
    routed = RoutedFeedForward(DEBUG)
    x = torch.randn(2, 5, DEBUG.hidden_size)
    mixed, _ = routed(x)
    for row in range(2):
        for place in range(5):
            token = x[row, place]
            weights, chosen = routed.gate(token).softmax(-1).topk(DEBUG.experts_per_token)
            expected = torch.zeros_like(token)
            for weight, expert in zip(weights / weights.sum(), chosen, strict=True):
                gate, up = (routed.experts.gate_up_proj[expert] @ token).chunk(2)
                expected += weight * (routed.experts.down_proj[expert] @ (F.silu(gate) * up))
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


def test_experts_without_tokens_get_a_gradient_of_zero_and_the_others_do_not():
    torch.manual_seed(0)
    model = Moe(replace(DEBUG, num_experts=16, num_layers=1))
    model(torch.randint(0, DEBUG.vocab_size, (1, 3))).square().mean().backward()
    experts = model.model.layers[0].block_sparse_moe.experts  # pyrefly: ignore[missing-attribute]
    for parameter in experts.parameters():
        assert 2 <= parameter.grad.flatten(1).any(-1).sum() <= 6


def test_no_step_waits_for_the_device():
    """A fake tensor has no values: to read one on the host raises."""
    with FakeTensorMode():
        model = Moe(replace(DEBUG, bias_rate=0.001))
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        tokens = torch.randint(0, DEBUG.vocab_size, (2, 16))
        next_token_and_balance(model, {"input_ids": tokens, "labels": tokens})[0].backward()
        ExpertBias(model).update()


def test_bias_moves_tokens_to_experts_that_have_few():
    torch.manual_seed(0)
    routed = RoutedFeedForward(replace(DEBUG, experts_per_token=1, bias_rate=0.006))
    x = torch.randn(2, 64, DEBUG.hidden_size) + 1.0  # most tokens prefer the same expert
    bias = ExpertBias(routed)
    mixed, _ = routed(x)
    assert routed.token_counts.sum() == 128
    assert routed.token_counts.max() > 50
    for _ in range(30):
        bias.update()
        assert not routed.token_counts.any()
        mixed, _ = routed(x)
    assert routed.token_counts.max() < 40
    assert list(routed.state_dict()) == ["expert_bias", "gate.weight", "experts.gate_up_proj", "experts.down_proj"]
    routed.eval()
    routed.token_counts.zero_()
    routed(x)
    assert not routed.token_counts.any(), "only tokens that are learnt count"
    # The bias chooses, and does not weigh: with one expert for each token the weight is 1.
    chosen = (routed.gate(x[0, 0]).softmax(-1) + routed.expert_bias).argmax()
    gate, up = (routed.experts.gate_up_proj[chosen] @ x[0, 0]).chunk(2)
    torch.testing.assert_close(mixed[0, 0], routed.experts.down_proj[chosen] @ (F.silu(gate) * up))


def test_bias_stays_in_a_step_that_is_not_finite():
    routed = RoutedFeedForward(replace(DEBUG, bias_rate=0.006))
    bias, finite = ExpertBias(routed), torch.tensor(1.0)
    for norm in (math.nan, math.inf, 1.0):
        assert not routed.expert_bias.any()
        routed(torch.randn(2, 16, DEBUG.hidden_size))
        bias.update(finite, torch.tensor(norm))
        assert not routed.token_counts.any(), "those of a bad step do not count in the next one"
    assert routed.expert_bias.any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Dynamo itself
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_blocks_compile_as_one_graph_and_count_tokens_once(policy: str):
    made = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Moe(replace(DEBUG, num_layers=2, bias_rate=0.01))
        if compiled:
            model = sw.checkpoint_activations(model, policy)  # pyrefly: ignore[bad-argument-type]
            model = sw.compile_blocks(model, backend="aot_eager", fullgraph=True)
        tokens = torch.randint(0, DEBUG.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
        next_token_and_balance(model, {"input_ids": tokens, "labels": tokens})[0].backward()
        counts = [layer.token_counts for layer in ExpertBias(model).layers]
        made.append([*counts, *(parameter.grad for parameter in model.parameters())])
    for plain, compiled in zip(*made, strict=True):
        torch.testing.assert_close(compiled, plain)
