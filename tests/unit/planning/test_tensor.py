"""What is divided over the tensor axis, by the plan; and what is refused, with the nearest thing that works."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.config.schema import LoraConfig, TensorConfig
from shardwise.errors import PlanError
from shardwise.models import llama, moe
from tests.distributed.test_tensor_parallel import ByNumber, Fused, Own, gpt2, of_transformers


def styles(model: nn.Module, num_ranks: int = 2, **settings: Any) -> dict[str, str]:
    config = sw.ShardConfig(tensor=TensorConfig(**settings))
    made = sw.plan(model, config, mesh=sw.MeshConfig(shard=1, tensor=num_ranks, device="cpu"))
    return {each.fqn: each.how for each in made.tensor_parallel if each.how}


def refusal(model: nn.Module, num_ranks: int = 2, **settings: Any) -> str:
    with pytest.raises(PlanError) as raised:
        styles(model, num_ranks, **settings)
    return str(raised.value)


def reference(name: str = "llama3-debug", vocab_size: int = 512) -> nn.Module:
    with torch.device("meta"):
        return llama.Llama(replace(llama.SHAPES[name], vocab_size=vocab_size))


def test_pairs_heads_and_vocabulary_of_a_decoder_are_divided():
    found = styles(reference(), sequence=False)
    layer = {name.removeprefix("model.layers.0."): how for name, how in found.items() if ".layers.0." in name}
    colwise = ("q_proj", "k_proj", "v_proj")
    assert {layer[f"self_attn.{name}"] for name in colwise} == {"colwise"}
    assert {layer[f"mlp.{name}_proj"] for name in ("gate", "up")} == {"colwise"}
    assert (layer["self_attn.o_proj"], layer["mlp.down_proj"]) == ("rowwise", "rowwise")
    assert (found["model.embed_tokens"], found["lm_head"]) == ("embedding", "colwise_gather_output")


def test_the_plan_shows_splits_order_and_reasons():
    plan = sw.plan(reference(), mesh=sw.MeshConfig(shard=2, tensor=2, device="cpu"))
    weight = next(p for p in plan.parameters if p.fqn == "model.layers.0.self_attn.o_proj.weight")
    assert weight.splits == (("tensor", 1, 2),)
    assert weight.bytes_per_rank(2) * 4 == weight.num_bytes
    assert "order: tensor parallel, then fully_shard" in str(plan)
    assert "2 of 4 heads on each rank" in str(plan)
    assert sw.Plan.from_json(plan.to_json()) == plan


def test_projections_in_one_matrix_hand_over_whole_tensors():
    found = styles(Own(Fused))
    inner = "stack.0.parts.0.1."
    assert [found[inner + name] for name in ("c_attn", "wide")] == ["colwise_gather_output"] * 2
    assert [found[inner + name] for name in ("c_proj", "narrow")] == ["rowwise_split_input"] * 2


def test_the_transposed_weights_of_gpt2_are_divided():
    plan = sw.plan(gpt2(), mesh=sw.MeshConfig(shard=1, tensor=2, device="cpu"))
    splits = {p.fqn.removeprefix("transformer.h.0.mlp."): p.splits for p in plan.parameters}
    assert (splits["c_fc.weight"], splits["c_proj.weight"]) == ((("tensor", 1, 2),), (("tensor", 0, 2),))
    assert (splits["c_fc.bias"], splits["c_proj.bias"]) == ((("tensor", 0, 2),), ())


def test_patterns_of_the_user_win():
    settings = {"*.q_proj": "colwise", "*.mlp": "off", "lm_head": "off"}
    found = styles(reference(), plan=settings)
    assert found["model.layers.0.self_attn.q_proj"] == "colwise"
    assert not [name for name in found if ".mlp." in name or name == "lm_head"]
    gathered = {"*.up_proj": "colwise_gather_output", "*.gate_proj": "colwise_gather_output"}
    found = styles(reference(), plan={**gathered, "*.down_proj": "rowwise_split_input"})
    assert found["model.layers.3.mlp.up_proj"] == "colwise_gather_output"


def test_a_class_may_bring_its_plan():
    model = Own(ByNumber)
    model.tensor_plan = {"*.parts.0.1.*": "off", "table": "off"}  # pyrefly: ignore
    assert not [name for name in styles(model) if ".parts.0." in name or name == "table"]


def test_norms_work_on_parts_of_sequences_where_that_is_asked_for():
    """By the plan of the reference models, by the user's, or by the setting."""
    assert not [how for how in styles(reference(), sequence=False).values() if "sequence" in how]
    assert not [how for how in styles(Own(ByNumber)).values() if "sequence" in how]
    assert styles(Own(ByNumber), plan={"*.parts.*.0": "sequence"}) == styles(Own(ByNumber), sequence=True)
    for settings in ({}, {"sequence": True}):
        found = styles(reference(), **settings)
        assert found["model.layers.0.input_layernorm"] == "sequence"
        assert found["model.layers.0.self_attn.o_proj"] == "rowwise, to sequence"
        assert found["model.layers.3"].endswith("join sequence")


def test_logits_stay_divided_where_the_loss_is_the_models_own():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 96}
    model = of_transformers("Llama", **sizes, num_attention_heads=4)
    assert styles(model)["lm_head"] == "colwise_gather_output"  # the logits are returned too
    assert styles(model, loss_parallel=True)["lm_head"] == "colwise, loss_parallel"
    assert styles(reference(), loss_parallel=False)["lm_head"] == "colwise_gather_output"


def test_a_scaled_table_that_is_tied_stays_whole_with_its_head():
    """Gemma multiplies what it looks up: a table of its own kind."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 8}
    found = styles(of_transformers("Gemma2", **sizes, num_attention_heads=4, num_key_value_heads=2))
    assert "lm_head" not in found
    assert found["model.layers.0.mlp.down_proj"] == "rowwise"


def test_heads_that_do_not_divide_are_refused_with_the_nearest_size():
    message = refusal(reference(), 8)
    assert "'model.layers.0.self_attn.q_proj' has 4 heads, which 8 ranks cannot share evenly" in message
    assert "set mesh.tensor = 2" in message
    assert '"model.layers.*.self_attn": "off"' in message
    message = refusal(Own(ByNumber), 3)
    assert "which 3 ranks cannot share evenly" in message
    assert "set mesh.tensor = 2" in message
    # As the error says: with attention left alone, the rest divides.
    assert styles(reference(), 8, plan={"model.layers.*.self_attn": "off"})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"*.q_proj": "colwse"}, "tensor.plan asks for the style 'colwse'"),
        ({"*.q_prj": "colwise"}, "q_prj"),
        ({"*.q_proj": "embedding"}, "'model.layers.0.self_attn.q_proj' (Linear) cannot be 'embedding'"),
        ({"*.input_layernorm": "colwise"}, "cannot be 'colwise'"),
        ({"*.o_proj": "off"}, "is colwise, but 'model.layers.0.self_attn.o_proj' is off"),
        ({"*.down_proj": "rowwise_split_input"}, "'model.layers.0.mlp.down_proj' is rowwise_split_input"),
    ],
)  # fmt: skip
def test_plans_that_do_not_fit_are_refused_by_name(settings: dict[str, str], expected: str):
    assert expected in refusal(reference(), plan=settings)


def test_one_of_two_tied_modules_is_refused():
    tied = reference("llama3-bytes")
    assert "'model.embed_tokens' is embedding, but 'lm_head' is off" in refusal(tied, plan={"lm_head": "off"})
    assert "lm_head" not in styles(tied, plan={"lm_head": "off", "*.embed_tokens": "off"})
    assert "lm_head" not in styles(reference("llama3-bytes", 511))  # rows that do not divide


def test_models_without_layers_to_divide_are_refused():
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).softmax(-1)

    assert "the mesh axis 'tensor' has 2 ranks, but Alone has no layers to split" in refusal(Alone())


def test_sequences_that_no_block_can_divide_are_refused():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(self.norm(x.cumsum(1))).relu())

    model = nn.Sequential(*(Recurrent() for _ in range(3)))
    assert styles(model)["0.up"] == "colwise"
    message = refusal(model, sequence=True)
    assert "can work on parts of sequences" in message
    assert "'cumsum'" in message


def test_experts_are_divided_where_the_mesh_has_no_axis_for_them():
    with torch.device("meta"):
        model = moe.Moe(moe.SHAPES["moe-debug"])
    assert styles(model)["model.layers.0.block_sparse_moe.experts"] == "experts"
    with pytest.raises(PlanError, match="both an expert axis"):
        sw.plan(model, mesh=sw.MeshConfig(shard=1, expert=2, tensor=2, device="cpu"))


def test_partial_resharding_is_refused_with_a_tensor_axis():
    config = sw.ShardConfig(reshard_after_forward=2)
    with pytest.raises(PlanError, match="is not supported with a tensor axis"):
        sw.plan(reference(), config, mesh=sw.MeshConfig(shard=4, tensor=2, device="cpu"))


def test_layers_with_adapters_are_refused():
    model = sw.add_lora(reference(), LoraConfig(rank=4))
    assert "'model.layers.0.self_attn.q_proj' has an adapter, and the mesh a tensor axis (2 ranks)" in refusal(model)


class Perceptron(nn.Module):
    """Layers in a loop, of which the last is registered before the others."""

    def __init__(self, num_layers: int, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(num_layers))
        self.outside = [activation or Doubling()]  # in a plain list: not one of the model's modules

    def forward(self, x: Tensor) -> Tensor:
        x = self.outside[0](self.first(x))
        for number, layer in enumerate(self.layers):
            x = layer(x).relu() if number < len(self.layers) else layer(x)
        return self.last(x)


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (2 if x.shape[0] else 1)


def test_layers_of_a_loop_are_divided_in_pairs():
    found = styles(nn.Sequential(Perceptron(2), Perceptron(2)), verify=False)
    pairs = {"first": "colwise", "layers.0": "rowwise", "layers.1": "colwise", "last": "rowwise"}
    assert found == {f"{block}.{name}": how for block in "01" for name, how in pairs.items()}


def test_a_layer_is_of_one_pair_only():
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.middle = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle(self.first(x).relu()).relu())

    found = styles(nn.Sequential(Chain(), Chain()), verify=False)
    assert found == {
        f"{block}.{name}": how for block in "01" for name, how in (("last", "rowwise"), ("middle", "colwise"))
    }
