"""FSDP1 settings of accelerate and Composer, and what becomes of each under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.config.fsdp1_names import HYBRID, KEEPS_UNSHARDED, NOT_NEEDED, STRATEGIES, member_name


class _Computed:
    """A value that is only known when the program runs."""

    def __repr__(self) -> str:
        return "a computed value"


COMPUTED = _Computed()


@dataclass(frozen=True, slots=True)
class Keep:
    """The setting means the same under FSDP2; `note` is what a reader should know all the same."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """FSDP2 has no such setting and needs none."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Become:
    """The setting has another name or value under FSDP2."""

    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class Undecided:
    """A person has to decide; the whole config stays as it is."""

    why: str
    fix: str


Step = Keep | Drop | Become | Undecided
Settings = Mapping[str, Any]
Rule = Step | Callable[[Any], Step]
"""A step, or a function from a setting's value to one."""


@dataclass(slots=True)
class ConfigConversion:
    """What becomes of one config: a step for each of its keys, and what is added."""

    steps: dict[str, Step]
    added: dict[str, Any] = field(default_factory=dict)
    """New settings of the same mapping."""
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    """New mappings next to it."""
    blocks: list[Undecided] = field(default_factory=list)
    """Reasons that belong to no single key."""
    notes: list[str] = field(default_factory=list)

    @property
    def blocked(self) -> list[tuple[str, Undecided]]:
        """Each key that a person must decide about; an empty key stands for the config as a whole."""
        keyed = [(key, step) for key, step in self.steps.items() if isinstance(step, Undecided)]
        return keyed + [("", block) for block in self.blocks]


def is_true(value: Any) -> bool:
    """Whether a config's author meant true: `true`, `"true"`, `1`, `yes`."""
    return value is True or (value is not COMPUTED and str(value).lower() in {"true", "1", "yes", "on"})


def is_none(value: Any) -> bool:
    """Whether a setting is given but empty."""
    return value is None or (isinstance(value, str) and value.lower() in {"", "none", "null"})


def _is_off(value: Any) -> bool:
    return is_none(value) or str(value).lower() in {"false", "0", "no", "off"}


def _decide(rules: Mapping[str, Rule], settings: Settings, unknown: Undecided) -> ConfigConversion:
    found = {key: rules.get(key, unknown) for key in settings}
    return ConfigConversion({key: rule(settings[key]) if callable(rule) else rule for key, rule in found.items()})


def _unless(is_fine: Callable[[Any], bool], why: str, fix: str, otherwise: Step = Drop()) -> Rule:  # noqa: B008
    """A person decides, unless the value is fine."""
    return lambda value: otherwise if is_fine(value) else Undecided(why, fix)


def _not_needed(key: str, *unless: str) -> Rule:
    """Gone under FSDP2; what that changes is noted for all values but these."""
    return lambda value: Drop("" if str(value).upper().rpartition(".")[2] in unless else NOT_NEEDED[key])


_OFF = ("FALSE", "0", "NO", "OFF", "NONE", "")
_NOT_NEEDED: dict[str, Rule] = {
    "limit_all_gathers": Drop(),
    "use_orig_params": _not_needed("use_orig_params", "TRUE", "1", "YES", "ON"),
    "backward_prefetch": _not_needed("backward_prefetch", "BACKWARD_PRE", "1"),
    "forward_prefetch": _not_needed("forward_prefetch", *_OFF),
}


def _strategy(value: Any, instead_of_no_shard: str) -> Step:
    name = member_name(value)
    if value is COMPUTED:
        fix = "write the strategy out, or convert by hand where it is chosen"
        return Undecided("the sharding strategy is only known at run time", fix)
    if name == "NO_SHARD":
        return Undecided("NO_SHARD replicates the parameters, and FSDP2 always shards them", instead_of_no_shard)
    if name is None:
        return Undecided(f"{value!r} is not a sharding strategy", f"write one of {', '.join(STRATEGIES)}")
    return Become("reshard_after_forward", name not in KEEPS_UNSHARDED)


def _accelerate_strategy(value: Any) -> Step:
    fix = "use distributed_type: MULTI_GPU (DistributedDataParallel), which NO_SHARD does, or choose a strategy"
    return _strategy(value, fix)


def _accelerate_reshard(value: Any) -> Step:
    """`reshard_after_forward` of an FSDP1 config without `sharding_strategy`, which the launcher reads first."""
    if member_name(value) == "FULL_SHARD" or is_true(value):
        return Become("reshard_after_forward", True)
    return Undecided(
        f"under FSDP1 the launcher ignores fsdp_reshard_after_forward ({value}) and shards fully",
        "write fsdp_sharding_strategy: FULL_SHARD to keep what runs today, or the strategy that was meant",
    )


_NESTED = "accelerate counts a module's nested groups too under FSDP2: there will be more, smaller groups"
_ACCELERATE: dict[str, Rule] = {
    **dict.fromkeys(("version", "min_num_params", "ignored_modules", "cpu_ram_efficient_loading"), Keep()),
    "sharding_strategy": _accelerate_strategy,
    "reshard_after_forward": _accelerate_reshard,
    "auto_wrap_policy": lambda value: Keep(_NESTED if "SIZE_BASED" in str(value).upper() else ""),
    "state_dict_type": _unless(
        lambda value: str(value) != "2" and "LOCAL" not in str(value).upper(),
        "LOCAL_STATE_DICT saves flat parameters, which FSDP2 does not have",
        "choose SHARDED_STATE_DICT or FULL_STATE_DICT; old checkpoints: `shardwise ckpt convert`",
        Keep(),
    ),
    "activation_checkpointing": _unless(
        lambda value: value is not COMPUTED and not is_true(value),
        "under FSDP2 accelerate checkpoints blocks without their random state: with dropout, gradients are wrong",
        "set fsdp_activation_checkpointing: false and switch on the model's own gradient_checkpointing",
        Keep(),
    ),
    "sync_module_states": Drop(),  # _weights_from_rank_zero has the last word
    **_NOT_NEEDED,
}
_ACCELERATE_LAUNCHED: dict[str, Rule] = {
    "offload_params": Keep(),
    "transformer_layer_cls_to_wrap": Keep(),
    "backward_prefetch_policy": _NOT_NEEDED["backward_prefetch"],
}
_ACCELERATE_PLUGIN: dict[str, Rule] = {
    "cpu_offload": _unless(  # booleans serve both versions, `CPUOffload(...)` only FSDP1
        lambda value: isinstance(value, bool) or is_none(value),
        "cpu_offload is not a plain True or False",
        "pass cpu_offload=True or cpu_offload=False",
        Keep(),
    ),
    "mixed_precision_policy": _unless(
        lambda value: is_none(value) or value in {"fp8", "fp16", "bf16", "fp32"},
        "mixed_precision_policy is FSDP1's MixedPrecision",
        "pass MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...); buffers keep their own dtype",
        Keep(),
    ),
    "param_init_fn": _unless(
        is_none, "param_init_fn has no place in FSDP2", "set cpu_ram_efficient_loading=True, or load after prepare()"
    ),
    **dict.fromkeys(("state_dict_config", "optim_state_dict_config", "transformer_cls_names_to_wrap"), Keep()),
}
ACCELERATE_KEYS = frozenset(_ACCELERATE) | frozenset(_ACCELERATE_LAUNCHED)
"""What a YAML config may say, without the prefix."""


def convert_accelerate(settings: Settings, *, launched: bool, around: Settings) -> ConfigConversion:
    """Decide on every setting of an accelerate FSDP1 config, keys without their `fsdp_` prefix.

    Args:
        settings: The config's keys and values.
        launched: Whether `accelerate launch` reads it from YAML, which has other defaults than the plugin in Python.
        around: The mapping that holds the config: `num_machines`, `num_processes`, `mixed_precision`.
    """
    unknown = Undecided("this setting is not known to be FSDP2's", "remove it, or convert by hand")
    conversion = _decide(_ACCELERATE | (_ACCELERATE_LAUNCHED if launched else _ACCELERATE_PLUGIN), settings, unknown)
    new: dict[str, Any] = {"version": 2}
    if "sharding_strategy" in settings and "reshard_after_forward" in settings:
        conversion.steps["reshard_after_forward"] = Drop()
    if is_none(settings.get("state_dict_type")) and launched:
        new["state_dict_type"] = "FULL_STATE_DICT"  # FSDP1's default; FSDP2's is SHARDED_STATE_DICT
    elif is_none(settings.get("state_dict_type")):
        conversion.blocks.append(
            Undecided(
                "no state_dict_type is given, and its default changes from FULL_STATE_DICT to SHARDED_STATE_DICT",
                "write the state_dict_type that checkpoints should have, then migrate again",
            )
        )
    for key, value in new.items():
        if key in settings:
            conversion.steps[key] = Become(key, value)
        else:
            conversion.added[key] = value
    _weights_from_rank_zero(conversion, settings, launched=launched)
    _hybrid_mesh(conversion, settings, around)
    if str(around.get("mixed_precision", "no")) in {"fp16", "bf16", "fp8"}:
        conversion.notes.append(
            "buffers keep their own dtype under FSDP2; FSDP1 cast them to that of mixed_precision as well"
        )
    return conversion


def _weights_from_rank_zero(conversion: ConfigConversion, settings: Settings, *, launched: bool) -> None:
    """FSDP1 broadcast weights with `sync_module_states`; under FSDP2 only efficient loading does."""
    syncs = settings.get("sync_module_states", launched)
    loads_on_rank_zero = settings.get("cpu_ram_efficient_loading", launched)
    if is_true(loads_on_rank_zero) or (syncs is not COMPUTED and not is_true(syncs)):
        return
    block = Undecided(
        "FSDP1 broadcast the weights of rank 0; under FSDP2 accelerate does so only with cpu_ram_efficient_loading",
        "set cpu_ram_efficient_loading to true, or sync_module_states to false if all ranks build equal weights",
    )
    if "sync_module_states" in settings:
        conversion.steps["sync_module_states"] = block
    else:
        conversion.blocks.append(block)


def _hybrid_mesh(conversion: ConfigConversion, settings: Settings, around: Settings) -> None:
    """HYBRID_SHARD shards inside a machine and replicates across machines: that is a 2-D mesh under FSDP2."""
    name = member_name(settings.get("sharding_strategy"))
    if name not in HYBRID:
        return
    machines, processes = around.get("num_machines"), around.get("num_processes")
    if isinstance(machines, int) and isinstance(processes, int) and machines > 1 and processes % machines == 0:
        sizes = {"dp_replicate": machines, "dp_shard": processes // machines, "tp": 1, "cp": 1}
        conversion.beside["parallelism_config"] = {f"parallelism_config_{k}_size": size for k, size in sizes.items()}
        conversion.notes.append(
            f"{name} became a mesh of {machines} x {processes // machines} ranks, from num_machines and num_processes; "
            "a launch with other numbers must change parallelism_config too"
        )
    else:
        conversion.steps["sharding_strategy"] = Undecided(
            f"{name} replicates across machines, and the config does not say over how many",
            "add parallelism_config with parallelism_config_dp_replicate_size (machines) and "
            "parallelism_config_dp_shard_size (processes of one machine), fsdp_version: 2 and "
            f"fsdp_reshard_after_forward: {str(name not in KEEPS_UNSHARDED).lower()}",
        )


_MESH_FIX = "build the mesh in Python and pass FSDP2Config(device_mesh=init_device_mesh(...), ...)"
_DEGREES = "FSDP2Config takes a device mesh instead of degrees"


def _composer_strategy(value: Any) -> Step:
    if member_name(value) in HYBRID:
        return Undecided(f"{value} replicates across machines, which takes a 2-D device mesh", _MESH_FIX)
    return _strategy(value, "leave fsdp out: DDP")


def _composer_precision(value: Any) -> Step:
    if str(value).upper() not in {"DEFAULT", "PURE", "FULL"}:
        return Undecided("mixed_precision is not one of DEFAULT, PURE and FULL", "choose one of these")
    cast = "buffers keep their own dtype under FSDP2; FSDP1 cast them as well"
    return Keep("" if str(value).upper() == "FULL" else cast)


def _only(default: Any, why: str, fix: str) -> Rule:
    """Nothing is lost as long as the setting is at its default."""
    return _unless(lambda value: is_none(value) or str(value) == str(default), why, fix)


_COMPOSER: dict[str, Rule] = {
    "sharding_strategy": _composer_strategy,
    "mixed_precision": _composer_precision,
    **dict.fromkeys(("activation_checkpointing", "activation_cpu_offload", "state_dict_type", "verbose"), Keep()),
    "load_monolith_rank0_only": Keep(),
    **_NOT_NEEDED,
    "activation_checkpointing_reentrant": _not_needed("activation_checkpointing_reentrant", *_OFF),
    "backward_prefetch_limit": _not_needed("backward_prefetch", "1"),
    "forward_prefetch_limit": _not_needed("forward_prefetch", "1"),
    "auto_wrap": _unless(
        is_true, "auto_wrap: false has no place in FSDP2Config", "choose the modules with fsdp_wrap_fn"
    ),
    "sync_module_states": Drop(),  # convert_composer has the last word
    "cpu_offload": _unless(_is_off, "FSDP2Config cannot offload parameters", "drop cpu_offload, or shard by hand"),
    "keep_low_precision_grads": _unless(_is_off, "FSDP2 keeps gradients in the parameters' dtype", "drop it"),
    "te_checkpoint_wrapper": _unless(_is_off, "FSDP2Config has no te_checkpoint_wrapper", "drop it"),
    "te_shard_fp8_weight": _unless(_is_off, "FSDP2Config has no te_shard_fp8_weight", "drop it"),
    "ignored_modules": _unless(_is_off, "FSDP2Config cannot ignore modules", "choose the modules with fsdp_wrap_fn"),
    "process_group": _unless(_is_off, "FSDP2Config takes a device mesh instead of process groups", _MESH_FIX),
    "load_planner": _unless(_is_off, "FSDP2Config takes no load_planner", "drop it"),
    "save_planner": _unless(_is_off, "FSDP2Config takes no save_planner", "drop it"),
    "data_parallel_shard_degree": _only(-1, _DEGREES, _MESH_FIX),
    "data_parallel_replicate_degree": _only(1, _DEGREES, _MESH_FIX),
    "sharded_ckpt_prefix_dir": _only(
        "ep{epoch}-ba{batch}", "FSDP2 checkpoints always go to ep{epoch}-ba{batch}", "rename the folder afterwards"
    ),
}
COMPOSER_KEYS = frozenset(_COMPOSER)
COMPOSER_FSDP2_KEYS = frozenset({"reshard_after_forward", "device_mesh"})
"""A config that says one of these is FSDP2Config's already."""


def convert_composer(settings: Settings, *, around: Settings) -> ConfigConversion:
    """Decide on every setting of a Composer FSDP1 config.

    Args:
        settings: The config's keys and values.
        around: The whole file: `model.init_device` says whether ranks start from the same weights.
    """
    unknown = Undecided("this setting is not known to be FSDP2Config's", "remove it, or convert by hand")
    conversion = _decide(_COMPOSER, settings, unknown)
    if "sharding_strategy" not in settings:
        conversion.added["reshard_after_forward"] = True
    if "state_dict_type" not in settings:
        conversion.added["state_dict_type"] = "full"  # FSDPConfig's default; FSDP2Config's is sharded
    if is_true(settings.get("activation_checkpointing")) and "activation_checkpointing_reentrant" not in settings:
        conversion.notes.append(NOT_NEEDED["activation_checkpointing_reentrant"])
    model = around.get("model") if isinstance(around, dict) else None
    starts_on = model.get("init_device") if isinstance(model, dict) else None
    if is_true(settings.get("sync_module_states", False)) and starts_on not in ("mixed", "meta"):
        conversion.steps["sync_module_states"] = Undecided(
            "FSDP1 broadcast the weights of rank 0; under FSDP2 Composer does so only when other ranks start on meta",
            "set the model's init_device to mixed, or remove sync_module_states if all ranks build equal weights",
        )
    conversion.notes.append("Composer reads this as FSDP2Config only where FSDP_VERSION=2 is in the environment")
    return conversion
