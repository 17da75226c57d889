"""`model_options`: shapes changed by name, and every mistake in them said at once."""

import json
from pathlib import Path

import pytest
from torch import nn

from shardwise.errors import ConfigError
from shardwise.models.load import load_model


def two_layers(width: int, *, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias))


def test_a_reference_model_takes_another_shape():
    assert len(load_model("llama3-debug", options={"num_layers": 7}).model.layers) == 7  # pyrefly: ignore
    tied = load_model("llama3-debug", options={"tie_embeddings": True, "rope_theta": 10_000})
    assert tied.lm_head.weight is tied.model.embed_tokens.weight  # pyrefly: ignore
    assert tied.config.rope_theta == 10_000.0  # pyrefly: ignore


def test_inner_shapes_are_changed_by_a_mapping():
    options = {"vision_config": {"num_layers": 1}, "autoencoder": {"widths": [4, 4, 8]}}
    model = load_model("multimodal-debug", options=options)
    assert len(model.vit_model.layers) == 1  # pyrefly: ignore
    assert model.config.autoencoder.widths == (4, 4, 8)  # pyrefly: ignore
    assert model.config.vision_config.patch_size == 4  # pyrefly: ignore


def test_arguments_of_a_callable():
    model = load_model(f"{__name__}:two_layers", options={"width": 3, "bias": False})
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "1.weight"]


def test_a_hugging_face_config_is_changed_by_its_names_and_their_aliases(tmp_path: Path):
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    assert len(load_model(str(tmp_path), options={"n_layer": 3}).transformer.h) == 3  # pyrefly: ignore
    assert len(load_model(str(tmp_path), options={"num_hidden_layers": 1}).transformer.h) == 1  # pyrefly: ignore
    with pytest.raises(ConfigError, match=r"model_options\.n_layers: there is no such option \(did you mean 'n_layer'"):
        load_model(str(tmp_path), options={"n_layers": 3})


@pytest.mark.parametrize(
    ("name", "options", "messages"),
    [
        (
            "llama3-debug",
            {"num_layer": 2, "hidden_size": "wide", "tie_embeddings": 1, "num_heads": 0},
            [
                "4 problems in model_options",
                "model_options.num_layer: unknown setting (did you mean 'num_layers'?)",
                "model_options.hidden_size: input should be a valid integer, got 'wide'",
                "model_options.tie_embeddings: input should be a valid boolean, got 1",
                "model_options.num_heads: input should be greater than or equal to 1, got 0",
            ],
        ),
        ("llama3-debug", {"num_heads": 7}, ["7 heads do not divide a width of 64", "2 do not divide 7 heads"]),
        ("llama3-debug", {"rope_theta": True}, ["rope_theta: input should be a valid number, got True"]),
        ("moe-debug", {"experts_per_token": 9}, ["experts_per_token: 9 of 4 experts"]),
        ("multimodal-debug", {"vision_config": 3}, ["model_options.vision_config: input should be an object, got 3"]),
        ("multimodal-debug", {"vision_config": {"depth": 3}}, ["model_options.vision_config.depth: unknown setting"]),
        (
            "multimodal-debug",
            {"autoencoder": {"widths": [0]}},
            ["autoencoder.widths.0: input should be greater than or equal to 1, got 0"],
        ),
        (f"{__name__}:two_layers", {}, ["cannot be called with nothing", "missing a required argument: 'width'"]),
        (f"{__name__}:two_layers", {"width": 2, "x": 1}, ["unexpected keyword argument 'x'", "two_layers(width: int"]),
    ],
)
def test_every_mistake_is_told(name: str, options: dict[str, object], messages: list[str]):
    with pytest.raises(ConfigError) as failure:
        load_model(name, options=options)
    for message in messages:
        assert message in str(failure.value)
    assert failure.value.fix
