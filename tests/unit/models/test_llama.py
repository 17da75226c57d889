"""The reference Llama: published sizes, published numbers, and buildable on meta."""

from dataclasses import replace

import pytest
import torch

from shardwise.models.llama import SHAPES, Llama, LlamaConfig

DEBUG = SHAPES["llama3-debug"]


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("llama3-1b", 1_235_814_400),
        ("llama3-3b", 3_212_749_824),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_size_is_the_published_one(name: str, num_params: int):
    with torch.device("meta"):
        model = Llama(SHAPES[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == num_params


@pytest.mark.parametrize("config", [DEBUG, replace(DEBUG, tie_embeddings=True, rope_factor=8.0)])
def test_logits_equal_those_of_transformers(config: LlamaConfig):
    transformers = pytest.importorskip("transformers")
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_factor != 1.0:
        rope = {**rope, "rope_type": "llama3", "factor": config.rope_factor, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            max_position_embeddings=16384,
            rope_parameters=rope,
        )
    )
    torch.manual_seed(0)
    ours = Llama(config)
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(0, config.vocab_size, (2, 200))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-6)


def test_reset_parameters_rebuilds_everything_from_meta():
    torch.manual_seed(0)
    expected = Llama(DEBUG)
    with torch.device("meta"):
        model = Llama(DEBUG)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(float("nan"))
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert not tensor.isnan().any(), name
    torch.testing.assert_close(model.model.rotary_emb.cos, expected.model.rotary_emb.cos)
    assert "model.rotary_emb.cos" not in model.state_dict()


def test_tied_model_has_one_matrix_for_both_ends():
    model = Llama(replace(DEBUG, tie_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tokens_do_not_see_the_future():
    model = Llama(DEBUG)
    tokens = torch.randint(0, DEBUG.vocab_size, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = 0
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[:, :8], model(changed)[:, :8])
        assert not torch.equal(model(tokens)[:, 8:], model(changed)[:, 8:])


@pytest.mark.parametrize("config", [DEBUG, replace(DEBUG, num_kv_heads=4)], ids=["grouped", "one key head each"])
def test_packed_documents_equal_documents_run_alone(config: LlamaConfig):
    torch.manual_seed(0)
    model = Llama(config)
    lengths = [[5, 1, 10], [16]]
    rows = [[torch.randint(0, config.vocab_size, (length,)) for length in row] for row in lengths]
    tokens = torch.stack([torch.cat(row) for row in rows])
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    packed = model(tokens, position_ids=positions, document_ids=documents.int())
    alone = [torch.cat([model(document[None])[0] for document in row]) for row in rows]
    torch.testing.assert_close(packed, torch.stack(alone))
    packed.square().mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch.stack([torch.cat([model(document[None])[0] for document in row]) for row in rows]).square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_position_ids_that_count_up_change_nothing():
    model = Llama(DEBUG)
    tokens = torch.randint(0, DEBUG.vocab_size, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, torch.arange(12).expand(2, -1)), model(tokens))
        assert not torch.allclose(model(tokens, torch.zeros(2, 12, dtype=torch.int64)), model(tokens))


def test_the_byte_model_knows_bytes_and_the_end_of_a_document():
    config = SHAPES["llama3-bytes"]
    assert config.vocab_size == 257
    with torch.device("meta"):
        assert 0.7e6 < sum(p.numel() for p in Llama(config).parameters()) < 3e6


def test_the_names_that_transformers_has_for_the_shape():
    from shardwise.models.configs import hugging_face_config
    from shardwise.models.moe import MoeConfig

    shape = {
        "hidden_size": 8, "intermediate_size": 24, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
        "vocab_size": 11, "max_sequence_length": 77, "norm_eps": 1e-3, "rope_theta": 123.0, "tie_embeddings": True,
    }  # fmt: skip
    expected = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 11,
        "max_position_embeddings": 77, "rms_norm_eps": 1e-3, "rope_theta": 123.0, "tie_word_embeddings": True,
        "hidden_act": "silu", "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    assert hugging_face_config(LlamaConfig(**shape)) == expected
    scaled = hugging_face_config(LlamaConfig(**shape, rope_factor=8.0))
    assert scaled == expected | {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    }  # fmt: skip
    moe = hugging_face_config(MoeConfig(**shape, num_experts=5, experts_per_token=3))
    assert moe == expected | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 5,
        "num_experts_per_tok": 3, "sliding_window": None,
    }  # fmt: skip
    assert hugging_face_config(object()) is None
