"""What the plan says about each of FSDP1's and Composer's settings, and how a bad one is refused, to the letter."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

import shardwise as sw
from shardwise.distributed.mesh import shutdown
from shardwise.errors import ShardwiseError
from shardwise.sharding.registry import sharded_state
from tests.golden import same_as_kept
from tests.toy_models import Block


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(10, 8), nn.ModuleList([Block(8, 16), Block(8, 16)])
        self.head = nn.Linear(8, 10, bias=False)
        self.register_buffer("scale", torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def left_afterwards() -> Iterator[None]:
    yield
    shutdown()


def outcome(model: nn.Module, config: Any) -> dict[str, Any]:
    try:
        with warnings.catch_warnings(action="ignore"):  # they stand in the plan too
            sw.prepare_fully_shard(model, config=config)
        plan = sharded_state(model).plan  # pyrefly: ignore[missing-attribute]
    except ShardwiseError as error:
        return {"refused": type(error).__name__, "what": error.what, "where": error.where.splitlines()}
    groups = [
        [
            *group.modules,
            group.kind,
            str(group.param_dtype),
            str(group.reduce_dtype),
            str(group.output_dtype),
            group.cast_inputs,
            str(group.reshard_after_forward),
            group.offload,
            *group.forward_prefetch,
            "|",
            *group.backward_prefetch,
        ]
        for group in plan.groups
    ]
    buffers = {name: str(buffer.dtype) for name, buffer in model.named_buffers()}
    return {"groups": groups, "reasons": plan.reasons, "warnings": plan.warnings, "buffers": buffers}


CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "full": {"sharding_strategy": "FULL_SHARD", "mixed_precision": "FULL"},
    "grad op by number": {"sharding_strategy": 2},
    "hybrid without copies": {"sharding_strategy": "HYBRID_SHARD"},
    "hybrid of one copy": {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "data_parallel_replicate_degree": 1},
    "copies of a full shard": {"sharding_strategy": "full_shard", "data_parallel_replicate_degree": 2},
    "copies of a grad op": {"sharding_strategy": "SHARD_GRAD_OP", "data_parallel_replicate_degree": 2},
    "full and no reshard": {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False},
    "no such strategy": {"sharding_strategy": "SOME_SHARD"},
    "strategy number 9": {"sharding_strategy": 9},
    "degrees": {"data_parallel_shard_degree": -1, "data_parallel_replicate_degree": None},
    "bad degrees": {"data_parallel_shard_degree": 0, "data_parallel_replicate_degree": True},
    "pure": {"mixed_precision": "pure"},
    "pure of a trainer": {"mixed_precision": "PURE", "precision": "amp_bf16"},
    "default of a trainer": {"mixed_precision": "DEFAULT", "precision": "bf16"},
    "trainer alone": {"precision": torch.float16},
    "trainer and dtypes": {"precision": "bf16", "mixed_precision": {"param_dtype": "bf16"}},
    "dtypes": {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": torch.float32, "output_dtype": "float"}},
    "dtypes without sums": {"mixed_precision": {"param_dtype": "bf16", "buffer_dtype": "bf16"}},
    "no dtypes": {"mixed_precision": {"reduce_dtype": "fp32"}},
    "bad dtypes": {"mixed_precision": {"param_dtype": "int3", "reduce_dtype": 5, "other": 1}},
    "bad precision": {"mixed_precision": 7},
    "casts at the root": {"mixed_precision": {"cast_forward_inputs": False, "cast_root_forward_inputs": True}},
    "no casts": {"mixed_precision": {"param_dtype": "bf16", "cast_forward_inputs": False}},
    "objects of FSDP1": {
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.float32),
        "cpu_offload": CPUOffload(offload_params=True),
        "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
    },
    "objects of FSDP2": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    },
    "low precision gradients": {"keep_low_precision_grads": True},
    "no low precision gradients": {"keep_low_precision_grads": False},
    "low precision gradients of the policy": {"mixed_precision": {"keep_low_precision_grads": True}},
    "no offload": {"cpu_offload": None},
    "bad offload": {"cpu_offload": "yes"},
    "no prefetch": {"backward_prefetch": None, "forward_prefetch": False},
    "prefetch": {"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": True},
    "prefetch after": {"backward_prefetch": "BACKWARD_POST"},
    "bad prefetch": {"backward_prefetch": "SOMETIMES", "forward_prefetch": -1},
    "limits": {"backward_prefetch_limit": 2, "forward_prefetch_limit": 2, "limit_all_gathers": True},
    "ignored name": {"ignored_modules": "head", "ignored": ["embed"]},
    "wrapped by children": {"auto_wrap": False},
    "children against blocks": {"auto_wrap": False, "block_classes": ["Block"]},
    "bad auto_wrap": {"auto_wrap": 1},
    "by class": {"auto_wrap_policy": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})},
    "by size": {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=200)},
    "by a set": {"auto_wrap_policy": {nn.Linear}},
    "by a function": {"auto_wrap_policy": lambda module, recurse, nonwrapped_numel: True},
    "synced": {"sync_module_states": True},
    "bad sync": {"sync_module_states": "yes"},
    "explained": {
        "use_orig_params": True, "flatten_parameters": False, "device_id": 0, "verbose": True,
        "activation_checkpointing_reentrant": False, "state_dict_type": "sharded", "load_planner": None,
    },
    "off": {"activation_checkpointing": False, "activation_cpu_offload": False, "te_shard_fp8_weight": False},
    "other steps": {"activation_cpu_offload": True, "te_checkpoint_wrapper": True, "process_group": "node"},
    "bad mesh": {"device_mesh": "all"},
    "typing mistakes": {"sharding_stratgy": "FULL_SHARD", "zzz": 1, "block_classes": 5},
    "twice": {"reshard_after_forward": True, "sharding_strategy": "SHARD_GRAD_OP"},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_settings(name: str):
    same_as_kept("settings", name, outcome(Net(), CONFIGS[name]))


def test_ignored_objects():
    model = Net()
    model.drop = nn.Dropout()
    ignored = [model.blocks[0], model.head.weight, model.drop]
    same_as_kept("settings", "ignored objects", outcome(model, {"ignored_modules": ignored}))
    other = {"ignored_parameters": [nn.Parameter(torch.ones(1))], "ignored_modules": model}
    same_as_kept("settings", "ignored strangers", outcome(Net(), other))


WISHES: dict[str, Any] = {
    "by class": lambda module: isinstance(module, Block),
    "settings of its own": lambda module: (
        {"reshard_after_forward": False, "mixed_precision": {"param_dtype": "bf16"}, "cpu_offload": True}
        if isinstance(module, Block)
        else isinstance(module, nn.Linear)
    ),
    "full precision": lambda module: {"mixed_precision": "FULL"} if isinstance(module, nn.Embedding) else False,
    "bad settings": lambda module: (
        {"mixed_precision": "PURE", "reshard_after_forwrd": 1, "zz": 2} if isinstance(module, Block) else False
    ),
}


@pytest.mark.parametrize("name", WISHES)
def test_what_the_model_asks_for(name: str):
    model = Net()
    model.fsdp_wrap_fn = WISHES[name]
    same_as_kept("settings", f"asked for {name}", outcome(model, {}))
    model = Net()
    model.fsdp_wrap_fn = WISHES[name]
    same_as_kept("settings", f"asked for {name}, named", outcome(model, {"block_classes": ["Block"]}))


def test_marks_and_ties():
    model = Net()
    model.blocks[1]._fsdp_wrap = True
    model.embed._fsdp_wrap = model.head._fsdp_wrap = True
    model.head.weight = model.embed.weight
    same_as_kept("settings", "marks and ties", outcome(model, {}))


def test_a_config_that_is_none():
    same_as_kept("settings", "a number", outcome(Net(), 5))
    same_as_kept("settings", "a ShardConfig", outcome(Net(), sw.ShardConfig(block_classes=("Block",))))
