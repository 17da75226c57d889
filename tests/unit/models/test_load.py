"""MODEL arguments: reference names, local configs, `module:callable`, and what is said about the others."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.models.configs import make_batch
from shardwise.models.llama import Llama
from shardwise.models.load import load_model, reference_names
from shardwise.models.transformer import Transformer

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99}
VIT = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VIT |= {"intermediate_size": 32, "image_size": 32, "patch_size": 16, "architectures": ["ViTModel"]}


def small() -> nn.Module:
    return nn.Linear(2, 3)


def not_a_module() -> str:
    return "text"


a_number = 3


def config_folder(folder: Path, config: Mapping[str, object]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_reference_names_build_on_meta():
    assert isinstance(load_model("tutorial"), Transformer)
    assert isinstance(load_model("llama3-70b"), Llama)
    for name in reference_names():
        assert all(parameter.is_meta for parameter in load_model(name).parameters())


def test_callable_is_built_on_the_device():
    model = load_model(f"{__name__}:small", device="cpu")
    assert isinstance(model, nn.Linear)
    assert model.weight.device == torch.device("cpu")
    assert load_model(f"{__name__}:small").weight.is_meta


def test_folder_with_architectures_builds_that_class(tmp_path: Path):
    model = load_model(config_folder(tmp_path, {**GPT2, "architectures": ["GPT2LMHeadModel"]}))
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert all(parameter.is_meta for parameter in model.parameters())


def test_config_file_without_architectures_builds_the_bare_model(tmp_path: Path):
    model = load_model(config_folder(tmp_path, GPT2) + "/config.json")
    assert type(model).__name__ == "GPT2Model"


def test_diffusers_config_builds_its_class(tmp_path: Path):
    config = {"_class_name": "AutoencoderKL", "block_out_channels": [4], "norm_num_groups": 2}
    assert type(load_model(config_folder(tmp_path, config))).__name__ == "AutoencoderKL"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama3-8b", r"no reference model 'lama3-8b' \(did you mean 'llama3-8b'\?\)"),
        ("xyz", "no reference model 'xyz'"),
        ("org/model", "org/model does not exist"),
        (f"{__name__}:smal", r"no callable of .* 'smal' \(did you mean 'small'\?\)"),
        (f"{__name__}:a_number", "is a int, not callable"),
        (f"{__name__}:not_a_module", "returned a str"),
        ("no_such_package.model:build", "there is no module 'no_such_package.model'"),
    ],
)
def test_wrong_model_is_explained(name: str, message: str):
    with pytest.raises(ConfigError, match=message) as failure:
        load_model(name)
    assert failure.value.fix


def test_broken_import_inside_a_users_module_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken_model.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load_model("broken_model:build")


def test_folder_without_config_and_unknown_class_are_explained(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_model(str(tmp_path))
    with pytest.raises(ConfigError, match="has no class NoSuchModel"):
        load_model(config_folder(tmp_path, {**GPT2, "architectures": ["NoSuchModel"]}))


@pytest.mark.parametrize("config", [{**GPT2, "architectures": ["GPT2LMHeadModel"]}, VIT], ids=["text", "image"])
def test_invented_batch_fits_the_model_and_depends_on_the_seed(tmp_path: Path, config: dict[str, object]):
    model = load_model(config_folder(tmp_path, config), device="cpu")
    first, again = (make_batch(model, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    other = make_batch(model, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        model(**first)
    (name,) = first
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize("name", ["tutorial", "llama3-debug", "moe-debug", "multimodal-debug"])
def test_reference_models_take_the_invented_batch(name: str):
    model = load_model(name, device="cpu")
    with torch.no_grad():
        output = model(**make_batch(model, generator=torch.Generator().manual_seed(1)))
    assert all(value.isfinite().all() for value in (output.values() if isinstance(output, dict) else [output]))


def test_model_whose_input_is_unknown_asks_for_a_batch():
    with pytest.raises(ConfigError, match="no random batch can be generated for Linear") as failure:
        make_batch(nn.Linear(2, 2), generator=torch.Generator())
    assert "--batch" in failure.value.fix
