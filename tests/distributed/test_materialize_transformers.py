"""materialize() on transformers' models: tables rebuilt, scales right, ties kept, nothing left unwritten."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import shard
from shardwise.sharding.materialize import materialize
from tests.ranks import ranks

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 67,
}


def build(name: str) -> nn.Module:
    """A small model of each kind, in evaluation mode."""
    if name == "llama":
        config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=False)
        model = transformers.LlamaForCausalLM(config)
    elif name == "llama-scaled-rope":
        rope = {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        }  # fmt: skip
        config = transformers.LlamaConfig(**SMALL, rope_parameters=rope, max_position_embeddings=256)
        model = transformers.LlamaForCausalLM(config)
    elif name == "gemma3":
        config = transformers.Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=8)
        model = transformers.Gemma3ForCausalLM(config)
    elif name == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=67, n_positions=32)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(**SMALL, max_position_embeddings=32)
        model = transformers.BertForMaskedLM(config)
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(12).view(2, 6)).logits


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("name", ["llama", "llama-scaled-rope", "gemma3", "gpt2", "bert"])
@ranks(2)
def test_logits_equal_those_of_a_normally_built_model(rank: int, name: str):
    """The reference is given the weights by `load_state_dict`; its tables, not in there, are its own."""
    with torch.device("meta"):
        model = build(name)
    shard(model)
    materialize(model)
    reference = build(name)
    reference.load_state_dict({key: full(value) for key, value in model.state_dict().items()})
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-5, atol=1e-6)
    for key, buffer in reference.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key


@ranks(2)
def test_weights_are_drawn_as_the_model_draws_them(rank: int):
    """Not `nn.Linear`'s own uniform numbers: normal ones of the configured width, and zero biases."""
    with torch.device("meta"):
        model = build("gpt2")
    shard(model)
    materialize(model)
    embedding = full(model.get_parameter("transformer.wte.weight"))
    projection = full(model.get_parameter("transformer.h.0.attn.c_proj.weight"))
    assert model.get_parameter("lm_head.weight") is model.get_parameter("transformer.wte.weight")
    assert 0.018 < embedding.std().item() < 0.022
    assert 0.008 < projection.std().item() < 0.012  # 0.02 / sqrt(2 layers * 2): the root writes its descendants
    assert not full(model.get_parameter("transformer.h.1.mlp.c_fc.bias")).any()


class RotaryOfVersionFour(nn.Module):
    """transformers 4 keeps a function and a second, unregistered name of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.config = 10.0
        self.rope_init_fn = lambda config, device: (torch.arange(4.0, device=device) * config, 0.5)
        table, self.attention_scaling = self.rope_init_fn(self.config, None)
        self.register_buffer("inv_freq", table, persistent=False)
        self.original_inv_freq = self.inv_freq


@ranks(1)
def test_rotary_table_of_transformers_four_is_rebuilt(rank: int):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), RotaryOfVersionFour())
    materialize(model)
    assert torch.equal(model.get_buffer("1.inv_freq"), torch.arange(4.0) * 10)
    assert model[1].original_inv_freq is model.get_buffer("1.inv_freq")
