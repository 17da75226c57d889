"""FSDP settings of Composer."""

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
    only_false,
)

_MESH_FIX = "build the mesh in Python and pass FSDP2Config(device_mesh=init_device_mesh(...), ...)"
_REENTRANT = "activations are checkpointed without re-entrance under FSDP2; the values are the same"
_PREFETCH = "FSDP2 prefetches by itself; memory and overlap may change"


def convert_settings(settings: Settings, *, around: Settings) -> Conversion:
    """Decide on every setting of a Composer FSDP1 config.

    Args:
        settings: The config's keys and values.
        around: The whole file: `model.init_device` says whether ranks start from the same weights.
    """
    conversion = Conversion({key: _RULES.get(key, _unknown)(value, settings) for key, value in settings.items()})
    if "sharding_strategy" not in settings:
        conversion.added["reshard_after_forward"] = True
    if "state_dict_type" not in settings:
        conversion.added["state_dict_type"] = "full"  # FSDPConfig's default; FSDP2Config's is sharded
    if is_true(settings.get("activation_checkpointing")) and "activation_checkpointing_reentrant" not in settings:
        conversion.notes.append(_REENTRANT)
    if is_true(settings.get("sync_module_states", False)) and _init_device(around) not in {"mixed", "meta"}:
        conversion.steps["sync_module_states"] = Block(
            "FSDP1 broadcast the weights of rank 0; under FSDP2 Composer does so only when other ranks start on meta",
            "set the model's init_device to mixed, or remove sync_module_states if all ranks build equal weights",
        )
    conversion.notes.append("Composer reads this as FSDP2Config only where FSDP_VERSION=2 is in the environment")
    return conversion


def _init_device(around: Settings) -> str:
    model = around.get("model") if isinstance(around, dict) else None
    value = model.get("init_device") if isinstance(model, dict) else None
    return str(value)


def _strategy(value: Any, settings: Settings) -> Step:
    match str(value).upper() if value is not COMPUTED else COMPUTED:
        case "FULL_SHARD":
            return Become("reshard_after_forward", True)
        case "SHARD_GRAD_OP":
            return Become("reshard_after_forward", False)
        case "NO_SHARD":
            return Block("NO_SHARD replicates the parameters, and FSDP2 always shards them", "leave fsdp out: DDP")
        case "HYBRID_SHARD" | "_HYBRID_SHARD_ZERO2" | "HYBRID_SHARD_ZERO2":
            return Block(f"{value} replicates across machines, which takes a 2-D device mesh", _MESH_FIX)
    return Block("the sharding strategy is only known at run time", "write the strategy out, or convert by hand")


def _precision(value: Any, settings: Settings) -> Step:
    if str(value).upper() not in {"DEFAULT", "PURE", "FULL"}:
        return Block("mixed_precision is not one of DEFAULT, PURE and FULL", "choose one of these")
    if str(value).upper() == "FULL":
        return Keep()
    return Keep("buffers keep their own dtype under FSDP2; FSDP1 cast them as well")


def _only(default: Any, why: str, fix: str) -> Rule:
    """Rule: nothing is lost as long as the setting is at its default."""

    def rule(value: Any, settings: Settings) -> Step:
        return Drop() if is_none(value) or str(value) == str(default) else Block(why, fix)

    return rule


def _unknown(value: Any, settings: Settings) -> Step:
    return Block("this setting is not known to be FSDP2Config's", "remove it, or convert by hand")


_RULES: dict[str, Rule] = {
    "sharding_strategy": _strategy,
    "mixed_precision": _precision,
    "activation_checkpointing": keep,
    "activation_cpu_offload": keep,
    "state_dict_type": keep,
    "load_monolith_rank0_only": keep,
    "verbose": keep,
    "activation_checkpointing_reentrant": drop_with(_REENTRANT),
    "auto_wrap": lambda value, settings: (
        Drop()
        if is_true(value)
        else Block("auto_wrap: false has no place in FSDP2Config", "choose the modules with fsdp_wrap_fn")
    ),
    "backward_prefetch": drop_with(_PREFETCH, when=lambda value: str(value).upper() != "BACKWARD_PRE"),
    "backward_prefetch_limit": drop_with(_PREFETCH, when=lambda value: str(value) != "1"),
    "forward_prefetch": drop_with(_PREFETCH),
    "forward_prefetch_limit": drop_with(_PREFETCH, when=lambda value: str(value) != "1"),
    "limit_all_gathers": drop,
    "use_orig_params": drop_with(
        "parameters are never flattened under FSDP2: optimizer groups are those of the model",
        when=lambda v: not is_true(v),
    ),
    "sync_module_states": drop,  # convert_settings has the last word
    "cpu_offload": only_false("FSDP2Config cannot offload parameters", "drop cpu_offload, or shard by hand"),
    "keep_low_precision_grads": only_false("FSDP2 keeps gradients in the parameters' dtype", "drop it"),
    "te_checkpoint_wrapper": only_false("FSDP2Config has no te_checkpoint_wrapper", "drop it"),
    "te_shard_fp8_weight": only_false("FSDP2Config has no te_shard_fp8_weight", "drop it"),
    "ignored_modules": only_false("FSDP2Config cannot ignore modules", "choose the modules with fsdp_wrap_fn"),
    "process_group": only_false("FSDP2Config takes a device mesh instead of process groups", _MESH_FIX),
    "load_planner": only_false("FSDP2Config takes no load_planner", "drop it"),
    "save_planner": only_false("FSDP2Config takes no save_planner", "drop it"),
    "data_parallel_shard_degree": _only(-1, "FSDP2Config takes a device mesh instead of degrees", _MESH_FIX),
    "data_parallel_replicate_degree": _only(1, "FSDP2Config takes a device mesh instead of degrees", _MESH_FIX),
    "sharded_ckpt_prefix_dir": _only(
        "ep{epoch}-ba{batch}", "FSDP2 checkpoints always go to ep{epoch}-ba{batch}", "rename the folder afterwards"
    ),
}
KEYS = frozenset(_RULES)
FSDP2_KEYS = frozenset({"reshard_after_forward", "device_mesh"})
"""A config that says one of these is FSDP2Config's already."""
