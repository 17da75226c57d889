"""FSDP1's and Composer's settings as ours: each carried out, explained or refused; all problems at once."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from shardwise.errors import ConfigError
from shardwise.sharding.fsdp1_keys import Translation, dtype_of, resolve_named, translate


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


def read(**config: Any) -> Translation:
    translation = translate(config, model())
    assert not translation.problems
    return translation


def problems(**config: Any) -> list[str]:
    return translate(config, model()).problems


@pytest.mark.parametrize(
    "value",
    [
        "SHARD_GRAD_OP",
        "shard_grad_op",
        ShardingStrategy.SHARD_GRAD_OP,
        2,
        "2",
        "ShardingStrategy.SHARD_GRAD_OP",
    ],
)
def test_a_strategy_is_read_as_a_name_a_member_or_a_number(value: Any):
    assert read(sharding_strategy=value).settings == {"reshard_after_forward": False}


def test_full_shard_is_the_default_and_leaves_the_root_gathered_as_fsdp1_did():
    assert read(sharding_strategy="FULL_SHARD").settings == {}


@pytest.mark.parametrize("value", list(ShardingStrategy))
def test_every_member_of_the_enum_has_a_meaning(value: ShardingStrategy):
    translation = translate({"sharding_strategy": value}, model())
    assert (translation.strategy == value.name) != bool(translation.problems)


def test_no_sharding_contradicts_a_shard_degree():
    assert read(sharding_strategy="NO_SHARD", data_parallel_shard_degree=1).strategy == "NO_SHARD"
    (problem,) = problems(sharding_strategy="NO_SHARD", data_parallel_shard_degree=2)
    assert "NO_SHARD contradicts data_parallel_shard_degree = 2" in problem


def test_a_strategy_and_a_contrary_reshard_are_a_contradiction():
    assert "contradicts" in problems(sharding_strategy="SHARD_GRAD_OP", reshard_after_forward=True)[0]
    assert "contradicts FULL_SHARD" in problems(sharding_strategy="FULL_SHARD", reshard_after_forward=False)[0]
    assert not problems(sharding_strategy="FULL_SHARD", reshard_after_forward=2)
    assert not problems(sharding_strategy="SHARD_GRAD_OP", reshard_after_forward=False)


@pytest.mark.parametrize(
    ("given", "becomes"), [("FULL_SHARD", "HYBRID_SHARD"), ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")]
)
def test_copies_make_a_strategy_hybrid_with_a_warning(given: str, becomes: str):
    translation = read(sharding_strategy=given, data_parallel_replicate_degree=2)
    assert translation.strategy == becomes
    assert translation.warnings == [f"sharding_strategy: {given} with 2 replicas is {becomes}, as in Composer"]
    assert translation.settings == ({"reshard_after_forward": False} if given == "SHARD_GRAD_OP" else {})


@pytest.mark.parametrize("degree", [0, -2, 1.5, True, "2"])
def test_a_degree_is_a_number_of_ranks(degree: Any):
    assert len(problems(data_parallel_replicate_degree=degree)) == 1


def test_minus_one_leaves_the_shard_degree_open():
    assert read(data_parallel_shard_degree=-1, data_parallel_replicate_degree=None).degrees == {}


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.bfloat16, "bfloat16"),
        ("bf16", "bfloat16"),
        ("amp_bf16", "bfloat16"),
        ("torch.float32", "float32"),
        ("fp32", "float32"),
        ("amp_fp16", "float16"),
        (torch.float64, "float64"),
        (torch.int8, None),
        ("fp8", None),
    ],
)
def test_dtypes_are_read_as_objects_and_names(value: Any, dtype: str | None):
    assert dtype_of(value) == dtype


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("DEFAULT", "amp_bf16", {"param_dtype": "bfloat16"}),
        ("PURE", "amp_bf16", {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}),
        ("PURE", "fp16", {"param_dtype": "float16", "reduce_dtype": "float16"}),
        ("FULL", "amp_bf16", {"param_dtype": "storage"}),
        ("pure", None, {"param_dtype": "float16", "reduce_dtype": "float16"}),
        (None, "bf16", {"param_dtype": "bfloat16"}),
    ],
)
def test_composers_names_mean_what_they_mean_there(name: str | None, precision: str | None, expected: dict[str, str]):
    given = {"mixed_precision": name, "precision": precision}
    translation = read(**{key: value for key, value in given.items() if value is not None})
    resolve_named(translation, "float16")  # what the device would choose
    assert translation.precision == expected
    assert "mixed_precision" in (translation.precision_reason or "")
    assert translation.notes == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            {"param_dtype": "bf16", "reduce_dtype": "fp32"},
            {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        ),
        ({"param_dtype": torch.bfloat16}, {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}),
        ({"reduce_dtype": "fp32"}, {"param_dtype": "storage", "reduce_dtype": "float32"}),
        ({"cast_forward_inputs": False}, {"param_dtype": "storage", "cast_inputs": False}),
        (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32),
            {
                "param_dtype": "bfloat16",
                "reduce_dtype": "float32",
                "output_dtype": "float32",
                "cast_inputs": True,
            },
        ),
    ],
)
def test_dtypes_by_dictionary_or_policy_keep_fsdps_meaning_of_none(value: Any, expected: dict[str, Any]):
    assert read(mixed_precision=value).precision == expected


def test_fsdp1s_object_casts_at_every_group_and_says_so():
    translation = read(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.float16))
    assert translation.precision["cast_inputs"] is True
    assert any("not only at the root" in note for note in translation.notes)
    assert translation.buffer_dtype == "float16"


def test_a_reduction_in_16_bits_that_nobody_spelled_out_is_noted():
    assert any("summed in bfloat16" in note for note in read(mixed_precision={"param_dtype": "bf16"}).notes)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, {"offload": True}),
        (False, {"offload": False}),
        (CPUOffload(offload_params=True), {"offload": True}),
        (CPUOffload(offload_params=False), {"offload": False}),
        (CPUOffloadPolicy(pin_memory=False), {"offload": True, "pin_memory": False}),
    ],
)
def test_offload_is_read_in_all_its_forms(value: Any, expected: dict[str, bool]):
    assert read(cpu_offload=value).settings == expected


@pytest.mark.parametrize("value", ["BACKWARD_PRE", BackwardPrefetch.BACKWARD_PRE, None])
def test_prefetch_before_backward_is_what_fsdp2_does(value: Any):
    translation = read(backward_prefetch=value)
    assert translation.settings == {}
    assert len(translation.notes) == 1


@pytest.mark.parametrize("value", ["BACKWARD_POST", BackwardPrefetch.BACKWARD_POST])
def test_prefetch_after_backward_is_a_warning(value: Any):
    assert "as BACKWARD_PRE does" in read(backward_prefetch=value).warnings[0]
    assert "use BACKWARD_PRE" in problems(backward_prefetch="sometimes")[0]


@pytest.mark.parametrize(("value", "depth"), [(True, 1), (3, 3)])
def test_forward_prefetch_is_a_depth(value: Any, depth: int):
    assert read(forward_prefetch=value).settings["prefetch"] == {"forward": depth}


def test_ignored_modules_and_parameters_become_names_and_add_up():
    net = model()
    config = {"ignored_modules": [net[2], net[1]], "ignored_params": [net[0].weight], "ignored": ["0.bias"]}
    translation = translate(config, net)
    assert translation.settings["ignored"] == ("0.bias", "2", "0.weight")


def test_a_strange_module_cannot_be_ignored():
    assert "not in the model" in problems(ignored_modules=[nn.Linear(2, 2)])[0]


def test_auto_wrap_off_groups_direct_children():
    translation = read(auto_wrap=False)
    assert translation.settings == {}
    assert translation.only_children is True


def test_torchs_common_policies_are_translated():
    chosen = read(auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}))
    assert chosen.settings["wrap_if"](nn.Linear(1, 1))
    assert not chosen.settings["wrap_if"](nn.ReLU())
    assert read(auto_wrap_policy=[nn.Linear]).settings["wrap_if"](nn.Linear(1, 1))
    sized = read(auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=100))
    assert sized.settings == {"min_group_params": 100}
    assert "block_classes" in problems(auto_wrap_policy=lambda module, recurse, nonwrapped_numel: True)[0]


@pytest.mark.parametrize(
    "key",
    [
        "limit_all_gathers", "use_orig_params", "flatten_parameters", "verbose", "state_dict_type",
        "load_planner", "save_planner", "load_monolith_rank0_only", "sharded_ckpt_prefix_dir", "device_id",
        "activation_checkpointing_reentrant", "backward_prefetch_limit", "forward_prefetch_limit",
    ],
)  # fmt: skip
def test_what_is_no_longer_needed_is_accepted_and_explained_once(key: str):
    translation = read(**{key: True})
    assert translation.settings == {}
    assert [note.partition(":")[0] for note in translation.notes] == [key]


def test_low_precision_gradients_are_a_warning_because_fsdp2_differs():
    assert len(read(keep_low_precision_grads=True).warnings) == 1
    assert read(keep_low_precision_grads=False).warnings == []


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("te_checkpoint_wrapper", "set activation_checkpointing"),
        ("te_shard_fp8_weight", "leave it out"),
        ("param_init_fn", "materialize(model"),
    ],
)
def test_what_another_call_does_is_refused_with_that_call_unless_it_is_off(key: str, fix: str):
    assert fix in problems(**{key: True})[0]
    assert problems(**{key: False}) == []


def test_all_problems_come_at_once_with_the_nearest_name():
    config = {
        "sharding_strategy": "SOME_SHARD",
        "mixed_precison": "PURE",
        "cpu_offload": "yes",
        "reshard_after_forwards": True,
        "group_by": "all",
        "mixed_precision": {"param_dtype": "int4", "reduce": "fp32"},
        "data_parallel_replicate_degree": 0,
        "device_mesh": "cpu",
        "nonsense": 1,
    }
    translation = translate(config, model())
    with pytest.raises(ConfigError, match=r"^10 problems") as raised:
        translation.raise_problems()
    text = str(raised.value)
    assert "did you mean 'mixed_precision'?" in text
    assert "did you mean 'reshard_after_forward'?" in text
    for key in (
        "sharding_strategy",
        "cpu_offload",
        "group_by",
        "mixed_precision.param_dtype",
        "mixed_precision.reduce",
    ):
        assert f"{key}: " in text
    assert "nonsense: " in text


def test_our_own_fields_are_checked_as_in_a_file():
    assert read(shard_dim="first", block_classes=["Block"]).settings == {
        "shard_dim": "first",
        "block_classes": ("Block",),
    }
    assert "shard_dim: " in problems(shard_dim="second")[0]
