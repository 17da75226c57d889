"""add_lora on one process: what it changes, what it refuses, NF4."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, PlanError, ShardwiseError
from shardwise.models.load import load_model
from shardwise.sharding.adapters import adapter_keys, peft_config, read_peft_config
from shardwise.sharding.nf4 import quantize_nf4
from tests.toy_models import Block, Stack


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack(nn.ModuleList(Block(64) for _ in range(2)), dim=64)


def test_only_adapters_train_and_nothing_changes_before_they_do():
    model, ids = stack(), torch.arange(6)[None]
    expected, names = model(ids), [name for name, _ in model.named_parameters()]
    sw.add_lora(model, sw.LoraConfig(rank=2))
    assert torch.equal(model(ids), expected)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == [f"blocks.{n}.{layer}.lora_{part}" for n in (0, 1) for layer in ("up", "down") for part in "AB"]
    assert [name for name, _ in model.named_parameters() if "lora" not in name] == names
    with torch.no_grad():
        model.get_parameter("blocks.0.up.lora_B").normal_()
    assert not torch.equal(copy.deepcopy(model)(ids), expected)
    changed = model(ids)
    sw.merge_lora(model)
    torch.testing.assert_close(model(ids), changed)
    assert [name for name, _ in model.named_parameters()] == names


def test_groups_are_those_of_the_model_without_adapters():
    model = stack()
    groups = [(group.modules, group.kind) for group in sw.plan(model).groups]
    sw.add_lora(model)
    assert [(group.modules, group.kind) for group in sw.plan(model).groups] == groups


def test_transformers_conv1d_has_adapters_too():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_head=4, n_layer=1, vocab_size=50, n_positions=16))
    sw.add_lora(model, sw.LoraConfig(rank=2))
    assert model.get_parameter("transformer.h.0.attn.c_attn.lora_B").shape == (192, 2)
    assert peft_config(model)["fan_in_fan_out"] is True
    with torch.no_grad():
        model.get_parameter("transformer.h.0.attn.c_attn.lora_B").normal_()
    ids = torch.arange(6)[None]
    expected = model.eval()(ids).logits
    torch.testing.assert_close(sw.merge_lora(model)(ids).logits, expected, atol=1e-5, rtol=1e-4)


def test_what_peft_reads_names_exactly_the_adapted_layers():
    model = sw.add_lora(load_model("llama3-debug"), sw.LoraConfig(rank=2, alpha=3, targets=("*.q_proj",)))
    assert peft_config(model) | {"target_modules": ["q_proj"], "r": 2, "lora_alpha": 3.0} == peft_config(model)
    assert adapter_keys(model)["model.layers.0.self_attn.q_proj.lora_A"] == (
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    )
    one = sw.add_lora(load_model("llama3-debug"), sw.LoraConfig(targets=("model.layers.0.self_attn.q_proj",)))
    assert peft_config(one)["target_modules"] == ["model.layers.0.self_attn.q_proj"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (sw.LoraConfig(targets=("*.nothing",)), "matches no layer"),
        (sw.LoraConfig(targets=("*.norm",)), "a LayerNorm"),
        (sw.LoraConfig(rank=0), "rank"),
        (sw.LoraConfig(dropout=1.5), "dropout"),
        (sw.LoraConfig(alpha=-1), "alpha"),
    ],
)
def test_bad_settings_change_nothing(config: sw.LoraConfig, message: str):
    model = stack()
    with pytest.raises(ConfigError, match=message):
        sw.add_lora(model, config)
    assert all(p.requires_grad for p in model.parameters())


def test_a_second_adapter_is_refused():
    with pytest.raises(ShardwiseError, match="already has an adapter"):
        sw.add_lora(sw.add_lora(stack()))


def test_adapters_of_another_kind_or_scale_are_refused(tmp_path: Path):
    model = sw.add_lora(stack(), sw.LoraConfig(rank=2, alpha=4))
    sw.save_weights(model, tmp_path / "adapters", format="peft")
    other = sw.add_lora(stack(), sw.LoraConfig(rank=2, alpha=8))
    with pytest.raises(ShardwiseError, match="alpha / rank = 2, the model's have 4"):
        sw.load_weights(other, tmp_path / "adapters")
    assert read_peft_config(tmp_path / "adapters").alpha == 4
    described = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    (tmp_path / "adapters/adapter_config.json").write_text(json.dumps({**described, "use_dora": True}))
    with pytest.raises(ShardwiseError, match="use_dora"):
        sw.add_lora(stack(), tmp_path / "adapters")
    with pytest.raises(ShardwiseError, match="no adapters to save"):
        sw.save_weights(stack(), tmp_path / "none", format="peft")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nf4_keeps_its_bits(dtype: torch.dtype):
    """Values quantise to the same bits again, rows by themselves, zeros and NaN too; what is written is quantised."""
    values = torch.randn(24, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[3], values[5, 7] = 0, float("nan")
    packed = quantize_nf4(values)
    again, rows = quantize_nf4(packed.dequantize()), quantize_nf4(values[6:13])
    assert torch.equal(again.codes[6:], packed.codes[6:])
    assert torch.equal(again.scales.nan_to_num(), packed.scales.nan_to_num())
    assert torch.equal(rows.codes, packed.codes[6:13])
    assert torch.equal(packed.dequantize()[3], values[3])
    assert packed.isnan().sum() == 64, "the block of the NaN"
    error = (packed.dequantize()[6:] - values[6:]).float().norm() / values[6:].float().norm()
    assert 0.08 < error < 0.11
    with torch.no_grad():
        packed[6:13].copy_(values[13:20])
        packed[:6].zero_()
    assert torch.equal(packed.codes[6:13], quantize_nf4(values[13:20]).codes)
    assert not packed.dequantize()[:6].any()


def test_nf4_parameters_asked_to_train_are_refused():
    model = sw.add_lora(stack(), sw.LoraConfig(quantize="nf4"))
    with pytest.raises(ShardwiseError, match="requires gradients"):
        model.requires_grad_(True)
    with pytest.raises(ShardwiseError, match="requires gradients"):
        nn.Parameter(quantize_nf4(torch.zeros(2, 64)))
    with pytest.raises(ShardwiseError, match="stored in NF4"):
        sw.merge_lora(model)


class Packed(torch.Tensor):
    """A stranger's quantised tensor."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, requires_grad=True)

    def __init__(self, data: torch.Tensor) -> None:
        self.data_int8 = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_int8"], None

    fsdp_pre_all_gather = fsdp_post_all_gather = None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # pyrefly: ignore
        return cls(args[0].data_int8) if func is torch.ops.aten.detach.default else NotImplemented


def test_any_packed_parameter_asked_to_train_is_refused():
    model = stack()
    model.blocks[0].up.weight = nn.Parameter(Packed(torch.zeros(256, 64, dtype=torch.int8)))
    with pytest.raises(PlanError, match="a Packed, requires gradients"):
        sw.plan(model)
