"""FSDP settings of accelerate."""

from __future__ import annotations

from typing import Any

from shardwise.fsdp1.codemod.framework_settings import (
    COMPUTED,
    Become,
    Block,
    Conversion,
    Drop,
    Keep,
    Rule,
    Settings,
    Step,
    drop,
    drop_with,
    is_none,
    is_true,
    keep,
)

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""In the order of the numbers 1 to 5 that a config may say instead."""
_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
_NO_SHARD = Block(
    "NO_SHARD replicates the parameters, and FSDP2 always shards them",
    "use distributed_type: MULTI_GPU (DistributedDataParallel), which is what NO_SHARD does, or choose a strategy",
)
_CHOSEN_LATER = Block(
    "the sharding strategy is only known at run time", "write the strategy out, or convert by hand where it is chosen"
)


def strategy_name(value: Any) -> str | None:
    """The strategy as FSDP1 names it, from a name in any case, a number or an enum's last name; None if unknown."""
    name = str(value).rsplit(".", 1)[-1].upper().removeprefix("_")
    if name.isdigit() and 1 <= int(name) <= len(STRATEGIES):
        return STRATEGIES[int(name) - 1]
    return name if name in STRATEGIES else None


def convert_settings(settings: Settings, *, launched: bool, around: Settings) -> Conversion:
    """Decide on every setting of an accelerate FSDP1 config, keys without their `fsdp_` prefix.

    Args:
        settings: The config's keys and values.
        launched: Whether `accelerate launch` reads it from YAML, which has other defaults than the plugin in Python.
        around: The mapping that holds the config: `num_machines`, `num_processes`, `mixed_precision`.
    """
    rules = {**_RULES, **(_LAUNCHED if launched else _PLUGIN)}
    conversion = Conversion({key: rules.get(key, _unknown)(value, settings) for key, value in settings.items()})
    conversion.added["version"] = 2
    if "version" in settings:
        conversion.steps["version"] = Become("version", conversion.added.pop("version"))
    _state_dict_type(conversion, settings, launched=launched)
    _weights_from_rank_zero(conversion, settings, launched=launched)
    _hybrid_mesh(conversion, settings, around)
    if str(around.get("mixed_precision", "no")) in {"fp16", "bf16", "fp8"}:
        conversion.notes.append(
            "buffers keep their own dtype under FSDP2; FSDP1 cast them to that of mixed_precision as well"
        )
    return conversion


def _strategy(value: Any, settings: Settings) -> Step:
    if value is COMPUTED:
        return _CHOSEN_LATER
    name = strategy_name(value)
    if name is None:
        return Block(f"{value!r} is no sharding strategy", f"write one of {', '.join(STRATEGIES)}")
    return _NO_SHARD if name == "NO_SHARD" else Become("reshard_after_forward", _RESHARDS[name])


def _reshard(value: Any, settings: Settings) -> Step:
    """`reshard_after_forward` of an FSDP1 config: the launcher reads `sharding_strategy` before it."""
    if "sharding_strategy" in settings:
        return Drop()
    if strategy_name(value) == "FULL_SHARD" or is_true(value):
        return Become("reshard_after_forward", True)
    return Block(
        f"under FSDP1 the launcher ignores fsdp_reshard_after_forward ({value}) and shards fully",
        "write fsdp_sharding_strategy: FULL_SHARD to keep what runs today, or the strategy that was meant",
    )


def _state_dict(value: Any, settings: Settings) -> Step:
    name = {"1": "FULL", "2": "LOCAL", "3": "SHARDED"}.get(str(value), str(value).rsplit(".", 1)[-1].upper())
    if name.startswith("LOCAL"):
        return Block(
            "LOCAL_STATE_DICT saves flat parameters, which FSDP2 does not have",
            "choose SHARDED_STATE_DICT or FULL_STATE_DICT; old checkpoints: `shardwise ckpt convert`",
        )
    return Keep()


def _wrap(value: Any, settings: Settings) -> Step:
    if "SIZE_BASED" in str(value).upper():
        return Keep("accelerate counts a module's nested groups too under FSDP2: there will be more, smaller groups")
    return Keep()


def _checkpointing(value: Any, settings: Settings) -> Step:
    if value is not COMPUTED and not is_true(value):
        return Keep()
    return Block(
        "under FSDP2 accelerate checkpoints blocks without their random state: with dropout, gradients are wrong",
        "set fsdp_activation_checkpointing: false and switch on the model's own gradient_checkpointing",
    )


def _offload(value: Any, settings: Settings) -> Step:
    """The plugin's `cpu_offload`: booleans serve both versions, `CPUOffload(...)` only FSDP1."""
    if isinstance(value, bool) or is_none(value):
        return Keep()
    return Block("cpu_offload is not a plain True or False", "pass cpu_offload=True or cpu_offload=False")


def _precision(value: Any, settings: Settings) -> Step:
    if is_none(value) or value in {"fp8", "fp16", "bf16", "fp32"}:
        return Keep()
    return Block(
        "mixed_precision_policy is FSDP1's MixedPrecision",
        "pass MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...); buffers keep their own dtype",
    )


def _init_function(value: Any, settings: Settings) -> Step:
    if is_none(value):
        return Drop()
    return Block("param_init_fn has no place in FSDP2", "set cpu_ram_efficient_loading=True, or load after prepare()")


def _unknown(value: Any, settings: Settings) -> Step:
    return Block("this setting is not known to be FSDP2's", "remove it, or convert by hand")


_RULES: dict[str, Rule] = {
    "version": keep,
    "sharding_strategy": _strategy,
    "reshard_after_forward": _reshard,
    "auto_wrap_policy": _wrap,
    "min_num_params": keep,
    "ignored_modules": keep,
    "cpu_ram_efficient_loading": keep,
    "state_dict_type": _state_dict,
    "activation_checkpointing": _checkpointing,
    "sync_module_states": drop,  # _weights_from_rank_zero has the last word
    "use_orig_params": drop_with(
        "parameters are never flattened under FSDP2: optimizer groups are those of the model",
        when=lambda v: not is_true(v),
    ),
    "backward_prefetch": drop_with(
        "FSDP2 always gathers the next group early, as BACKWARD_PRE does; memory and overlap may change",
        when=lambda value: str(value).rsplit(".", 1)[-1].upper() not in {"BACKWARD_PRE", "1"},
    ),
    "forward_prefetch": drop_with("accelerate has no explicit forward prefetch under FSDP2; only the overlap changes"),
    "limit_all_gathers": drop,
}
_LAUNCHED: dict[str, Rule] = {
    "offload_params": keep,
    "transformer_layer_cls_to_wrap": keep,
    "backward_prefetch_policy": _RULES["backward_prefetch"],
}
_PLUGIN: dict[str, Rule] = {
    "cpu_offload": _offload,
    "mixed_precision_policy": _precision,
    "param_init_fn": _init_function,
    "state_dict_config": keep,
    "optim_state_dict_config": keep,
    "transformer_cls_names_to_wrap": keep,
}
KEYS = frozenset(_RULES) | frozenset(_LAUNCHED)
"""What a YAML config may say, without the prefix."""


def _state_dict_type(conversion: Conversion, settings: Settings, *, launched: bool) -> None:
    if not is_none(settings.get("state_dict_type")):
        return
    if launched:  # FSDP1's default; FSDP2's is SHARDED_STATE_DICT
        conversion.steps.pop("state_dict_type", None)
        conversion.added["state_dict_type"] = "FULL_STATE_DICT"
        if "state_dict_type" in settings:
            conversion.steps["state_dict_type"] = Become("state_dict_type", conversion.added.pop("state_dict_type"))
    else:
        conversion.blocks.append(
            Block(
                "no state_dict_type is given, and its default changes from FULL_STATE_DICT to SHARDED_STATE_DICT",
                "write the state_dict_type that checkpoints should have, then migrate again",
            )
        )


def _weights_from_rank_zero(conversion: Conversion, settings: Settings, *, launched: bool) -> None:
    """FSDP1 broadcast weights with `sync_module_states`; under FSDP2 only efficient loading does."""
    syncs = settings.get("sync_module_states", launched)
    loads_on_rank_zero = settings.get("cpu_ram_efficient_loading", launched)
    if is_true(loads_on_rank_zero) or (syncs is not COMPUTED and not is_true(syncs)):
        return
    block = Block(
        "FSDP1 broadcast the weights of rank 0; under FSDP2 accelerate does so only with cpu_ram_efficient_loading",
        "set cpu_ram_efficient_loading to true, or sync_module_states to false if all ranks build equal weights",
    )
    if "sync_module_states" in settings:
        conversion.steps["sync_module_states"] = block
    else:
        conversion.blocks.append(block)


def _hybrid_mesh(conversion: Conversion, settings: Settings, around: Settings) -> None:
    """HYBRID_SHARD shards inside a machine and replicates across machines: that is a 2-D mesh under FSDP2."""
    name = strategy_name(settings.get("sharding_strategy"))
    if name not in {"HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}:
        return
    machines, processes = around.get("num_machines"), around.get("num_processes")
    if isinstance(machines, int) and isinstance(processes, int) and machines > 1 and processes % machines == 0:
        conversion.beside["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": machines,
            "parallelism_config_dp_shard_size": processes // machines,
            "parallelism_config_tp_size": 1,
            "parallelism_config_cp_size": 1,
        }
        conversion.notes.append(
            f"{name} became a mesh of {machines} x {processes // machines} ranks, from num_machines and num_processes; "
            "a launch with other numbers must change parallelism_config too"
        )
    else:
        conversion.steps["sharding_strategy"] = Block(
            f"{name} replicates across machines, and the config does not say over how many",
            "add parallelism_config with parallelism_config_dp_replicate_size (machines) and "
            "parallelism_config_dp_shard_size (processes of one machine), fsdp_version: 2 and "
            f"fsdp_reshard_after_forward: {str(_RESHARDS[name]).lower()}",
        )
