"""Local Hugging Face folders: load_weights into a sharded model is from_pretrained, save_weights is opened by it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardwise import shard
from shardwise.checkpointing.weights import load_weights, save_weights
from tests.ranks import ranks

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 67,
}
KV = {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
          "image_size": 8, "patch_size": 4}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-tied": ("LlamaConfig", "LlamaForCausalLM", {**SMALL, **KV, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 67}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**SMALL, **KV, "num_local_experts": 4}),
    "vit": ("ViTConfig", "ViTForImageClassification", VISION),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**SMALL, **KV, "tie_word_embeddings": False}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**SMALL, **KV, "head_dim": 8}),
    "bert": ("BertConfig", "BertForMaskedLM", {**SMALL, "max_position_embeddings": 32}),
    "t5": ("T5Config", "T5ForConditionalGeneration",
           {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 67}),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**SMALL, **KV, **EXPERTS, "head_dim": 8}),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM",
                {**SMALL, **KV, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "jamba": ("JambaConfig", "JambaForCausalLM",
              {**SMALL, **KV, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4,
               "attn_layer_period": 2, "attn_layer_offset": 1}),
    "llava": ("LlavaConfig", "LlavaForConditionalGeneration",
              {"text_config": {**SMALL, **KV, "model_type": "llama"},
               "vision_config": {**VISION, "model_type": "clip_vision_model"}}),
    "paligemma": ("PaliGemmaConfig", "PaliGemmaForConditionalGeneration",
                  {"text_config": {**SMALL, **KV, "model_type": "gemma", "head_dim": 8}, "projection_dim": 32,
                   "vision_config": {**VISION, "model_type": "siglip_vision_model"}}),
}  # fmt: skip
FAST = ("llama-tied", "gpt2", "mixtral", "vit")
SLOW = pytest.mark.slow
NAMES = [name if name in FAST else pytest.param(name, marks=SLOW) for name in ARCHITECTURES]
VISION_AND_EXPERTS = {
    "text_config": {**SMALL, **KV, **EXPERTS, "head_dim": 8,
                    "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
                      "patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}  # fmt: skip
OTHERS = {"qwen3-vl-moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration", VISION_AND_EXPERTS)}


def build(name: str) -> nn.Module:
    config_name, model_name, settings = (ARCHITECTURES | OTHERS)[name]
    config = getattr(transformers, config_name)(**settings)
    return getattr(transformers, model_name)(config).eval()


def write_folder(name: str, folder: Path, rank: int, **options: Any) -> None:
    """As transformers writes it, with values in every tensor, also in those that it initialises to 0 or 1."""
    if rank == 0:
        torch.manual_seed(5)
        model = build(name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        model.save_pretrained(folder, **options)
    dist.barrier()


def pretrained(name: str, folder: Path) -> nn.Module:
    return (
        getattr(transformers, (ARCHITECTURES | OTHERS)[name][1]).from_pretrained(folder, local_files_only=True).eval()
    )


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def outcome(name: str, model: nn.Module) -> torch.Tensor:
    tokens = torch.arange(12).view(2, 6)
    inputs = {"input_ids": tokens}
    if name == "vit":
        inputs = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)}
    if name == "t5":
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        return model(**inputs).logits


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    """Bitwise: every parameter and buffer, computed tables included."""
    for named in ("named_parameters", "named_buffers"):
        theirs = dict(getattr(expected, named)())
        ours = dict(getattr(model, named)())
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert torch.equal(full(ours[key]), tensor), key


@pytest.mark.parametrize("name", NAMES)
@ranks(2)
def test_a_local_folder_loads_as_from_pretrained_would(rank: int, tmp_path: Path, name: str):
    write_folder(name, tmp_path, rank, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = pretrained(name, tmp_path)
    with torch.device("meta"):
        model = build(name)
    shard(model)
    report = load_weights(model, tmp_path)
    assert not report.missing
    assert_same(model, expected)
    torch.testing.assert_close(outcome(name, model), outcome(name, expected), rtol=1e-5, atol=1e-5)


@ranks(2)
def test_conversions_are_found_for_classes_that_sharding_renamed(rank: int, tmp_path: Path):
    """Transformers looks them up by class, and `fully_shard` changes the classes of the model and its inner one."""
    write_folder("vit", tmp_path, rank)
    with torch.device("meta"):
        model = build("vit")
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.get_submodule("vit"), mesh=mesh)
    fully_shard(model, mesh=mesh)
    load_weights(model, tmp_path)
    assert type(model.vit).__name__ == "FSDPViTModel"
    assert_same(model, pretrained("vit", tmp_path))


@pytest.mark.parametrize(
    "name", ["llama-tied", "mixtral", pytest.param("gpt2", marks=SLOW), pytest.param("t5", marks=SLOW)]
)
@ranks(2)
def test_from_pretrained_opens_what_save_weights_writes(rank: int, tmp_path: Path, name: str):
    torch.manual_seed(1)
    reference = build(name)
    model = shard(build(name))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert full(ours).shape == theirs.shape
    reference.load_state_dict({key: full(value) for key, value in model.state_dict().items()})
    save_weights(model, tmp_path / "out", max_shard_bytes=40_000)
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert "model.safetensors.index.json" in written
    assert "config.json" in written
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [ARCHITECTURES[name][1]]
    opened = pretrained(name, tmp_path / "out")
    assert_same(opened, reference)
    assert torch.equal(outcome(name, opened), outcome(name, reference))


@ranks(2)
def test_a_base_model_loads_from_the_whole_one_and_back(rank: int, tmp_path: Path):
    """The prefix that transformers puts before the inner model is found; what is left over is named."""
    write_folder("llama", tmp_path, rank)
    config = transformers.LlamaConfig(**ARCHITECTURES["llama"][2])
    with torch.device("meta"):
        inner = transformers.LlamaModel(config)
    report = load_weights(shard(inner), tmp_path, strict=False)
    assert report.unexpected == ("lm_head.weight",)
    assert_same(inner, pretrained("llama", tmp_path).model)


@ranks(2)
def test_names_of_another_library_are_mapped_by_rename(rank: int, tmp_path: Path):
    """Experts stored one by one under foreign names: renamed first, then merged into the model's own tensors."""
    from safetensors.torch import load_file, save_file

    write_folder("qwen3-moe", tmp_path / "hf", rank)
    if rank == 0:
        state = load_file(tmp_path / "hf" / "model.safetensors")
        foreign = {f"net.{key.replace('model.layers', 'blocks')}": value for key, value in state.items()}
        save_file(foreign, tmp_path / "foreign.safetensors")
    dist.barrier()
    expected = pretrained("qwen3-moe", tmp_path / "hf")
    with torch.device("meta"):
        model = build("qwen3-moe")
    load_weights(shard(model), tmp_path / "foreign.safetensors", rename={"net.blocks": "model.layers", "net": ""})
    assert_same(model, expected)


@ranks(2)
def test_experts_stored_transposed_are_turned_as_they_are_read(rank: int, tmp_path: Path):
    """More than moving boxes: transformers' own conversion runs, one group of tensors at a time."""
    from safetensors.torch import load_file, save_file

    write_folder("qwen3-vl-moe", tmp_path, rank)
    if rank == 0:
        state = load_file(tmp_path / "model.safetensors")
        turned = {key: t.transpose(1, 2).contiguous() if "mlp.experts" in key else t for key, t in state.items()}
        assert any("mlp.experts" in key for key in turned)
        save_file(turned, tmp_path / "model.safetensors", {"format": "pt"})
    dist.barrier()
    expected = pretrained("qwen3-vl-moe", tmp_path)
    for broadcast in (False, True):
        with torch.device("meta"):
            model = build("qwen3-vl-moe")
        load_weights(shard(model), tmp_path, broadcast=broadcast)
        assert_same(model, expected)


@ranks(2)
def test_diffusers_opens_what_save_weights_writes_and_we_what_it_writes(rank: int, tmp_path: Path):
    diffusers = pytest.importorskip("diffusers")
    settings = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 8,
                "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4}  # fmt: skip
    torch.manual_seed(rank)  # only what is loaded may make the ranks equal
    expected = diffusers.UNet2DModel(**settings).eval()
    if rank == 0:
        expected.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    dist.barrier()
    with torch.device("meta"):
        model = diffusers.UNet2DModel(**settings).eval()
    load_weights(shard(model), tmp_path / "theirs")
    save_weights(model, tmp_path / "ours", max_shard_bytes=20_000)
    theirs = diffusers.UNet2DModel.from_pretrained(tmp_path / "theirs")
    ours = diffusers.UNet2DModel.from_pretrained(tmp_path / "ours")
    assert_same(model, theirs)
    assert_same(ours, theirs)
