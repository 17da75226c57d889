"""Translation of FSDP1's and Composer's settings into ShardConfig."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.config.fsdp1_names import KEEPS_UNSHARDED, NOT_NEEDED, STRATEGIES, member_name
from shardwise.config.load import load
from shardwise.config.schema import PrecisionConfig, ShardConfig
from shardwise.errors import ConfigError, fix_name, raise_listed


@dataclass(slots=True)
class Translation:
    """Result of a translation, filled key by key before the model is changed."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of `ShardConfig`."""
    precision: dict[str, Any] = field(default_factory=dict)
    """Fields of `PrecisionConfig`."""
    precision_reason: str | None = None
    """Reason for the compute dtype if a named precision decided it; replaces the plan's reason."""
    notes: list[str] = field(default_factory=list)
    """Notes for the plan about keys without another visible effect."""
    warnings: list[str] = field(default_factory=list)
    """Warnings for the plan about differences between FSDP1 and FSDP2."""
    problems: list[str] = field(default_factory=list)
    """Problems as `key: what is wrong; what to do`, raised in one error."""
    mesh: DeviceMesh | None = None
    strategy: str | None = None
    degrees: dict[str, int] = field(default_factory=dict)
    """Given sizes of mesh axes."""
    named_precision: str | None = None
    """PURE, DEFAULT or FULL; the meaning depends on the trainer's precision, or else on the device."""
    trainer_precision: str | None = None
    buffer_dtype: str | None = None
    sync_from_rank_zero: bool = False
    recompute: bool = False
    """Whether `activation_checkpointing` is on, for the modules that the model selects, or else for the blocks."""
    offload_activations: bool = False
    only_children: bool = False
    """Whether groups are the root's direct children, regardless of `fsdp_wrap_fn` and `_fsdp_wrap`."""
    _said_by: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def put(self, key: str, name: str, value: Any) -> None:
        """Set a field of `ShardConfig` for `key`; conflicting keys are a problem."""
        earlier, before = self._said_by.get(name, (key, value))
        if before != value:
            self.problem(earlier, f"contradicts {key}: one asks for {before!r}, the other for {value!r}", "give one")
        self._said_by[name] = (key, value)
        self.settings[name] = value

    def note(self, key: str, text: str) -> None:
        """Add a note about `key` to the plan."""
        self.notes.append(f"{key}: {text}")

    def warn(self, key: str, text: str) -> None:
        """Add a warning to the plan that `key` has a different meaning in FSDP2."""
        self.warnings.append(f"{key}: {text}")

    def problem(self, key: str, what: str, fix: str) -> None:
        """Record a problem of `key`, raised after all keys have been read."""
        self.problems.append(f"{key}: {what}; {fix}")

    def raise_problems(self) -> None:
        """Raise one error with one problem per line."""
        raise_listed(
            self.problems,
            f"{{num}} problem{'s' if len(self.problems) > 1 else ''} in the config of prepare_fully_shard",
            why="every setting is applied, explained or refused",
            fix="as each line says",
            most=len(self.problems),
        )


def as_bool(translation: Translation, key: str, value: Any) -> bool | None:
    """Return a bool value; for any other value record a problem and return None."""
    if isinstance(value, bool):
        return value
    translation.problem(key, f"is {value!r}", "give True or False")
    return None


NAMED = ("PURE", "DEFAULT", "FULL")

_DTYPES = {
    "float64": ("float64", "fp64", "double"),
    "float32": ("float32", "fp32", "float", "full"),
    "bfloat16": ("bfloat16", "bf16", "bfp16", "amp_bf16"),
    "float16": ("float16", "fp16", "half", "amp", "amp_fp16"),
}
_DTYPE_OF = {spelling: dtype for dtype, spellings in _DTYPES.items() for spelling in spellings}
_CASTS = ("cast_forward_inputs", "cast_root_forward_inputs")
_DTYPE_KEYS = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")


def dtype_of(value: Any) -> str | None:
    """Return the dtype name, such as `bfloat16` for `torch.bfloat16`, "bf16" and "amp_bf16"; None for other values."""
    return _DTYPE_OF.get(str(getattr(value, "value", value)).lower().removeprefix("torch."))


def read_mixed_precision(translation: Translation, key: str, value: Any, model: nn.Module) -> None:
    """Translate `mixed_precision`: one of Composer's names, a dictionary, or an object of FSDP1 or FSDP2."""
    if value is None:
        return
    if isinstance(value, str) and value.upper() in NAMED:
        translation.named_precision = value.upper()
        return
    given = fields_of(value)
    if given is None:
        fix = 'give "PURE", "DEFAULT", "FULL" or {"param_dtype": "bf16", "reduce_dtype": "fp32"}'
        translation.problem(key, f"is {value!r}", fix)
        return
    translation.precision |= read_fields(translation, key, given)
    if (buffers := given.get("buffer_dtype")) is not None:
        translation.buffer_dtype = dtype_of(buffers)


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return a dictionary or the attributes of a dataclass by name; None for other values."""
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return fields | getattr(value, "__dict__", {})  # Composer's constructor accepts any attribute
    return None


def read_fields(translation: Translation, key: str, given: dict[str, Any]) -> dict[str, Any]:
    """Translate a precision dictionary to `PrecisionConfig`; None and absent fields mean the same as in FSDP."""
    known = (*_DTYPE_KEYS, *_CASTS, "keep_low_precision_grads", "_module_classes_to_ignore")
    dtypes: dict[str, str | None] = {}
    for name, value in given.items():
        if name == "param_dtype_override_fn" and value is None:
            continue  # a field that torch 2.15 added
        if name not in known:
            translation.problem(
                f"{key}.{name}", "is not a setting of mixed precision", f"choose among {', '.join(known[:6])}"
            )
        elif name in _DTYPE_KEYS and value is not None:
            dtypes[name] = dtype_of(value)
            if dtypes[name] is None:
                translation.problem(
                    f"{key}.{name}", f"is {value!r}", "give a torch dtype, or a name such as bf16 or fp32"
                )
    if given.get("keep_low_precision_grads"):
        explain_low_precision_grads(translation, f"{key}.keep_low_precision_grads", True)
    if given.get("_module_classes_to_ignore"):
        names = ", ".join(sorted(kind.__name__ for kind in given["_module_classes_to_ignore"]))
        translation.note(key, f"{names}: FSDP1 kept such modules out of low precision; name them in overrides for that")
    param = dtypes.get("param_dtype")
    fields: dict[str, Any] = {"param_dtype": param or "storage"}
    if (reduce := dtypes.get("reduce_dtype") or param) is not None:
        fields["reduce_dtype"] = reduce
        if dtypes.get("reduce_dtype") is None and reduce in ("bfloat16", "float16"):
            translation.note(key, f"gradients are summed in {reduce}, the param_dtype, as no reduce_dtype is given")
    if (output := dtypes.get("output_dtype")) is not None:
        fields["output_dtype"] = output
    casts = [given.get(name) for name in _CASTS]
    if any(cast is not None for cast in casts):
        fields["cast_inputs"] = any(casts)
    if casts[0] is False and casts[1]:
        translation.note(
            key, "inputs are cast at every group, not only at the root; where dtypes agree it costs nothing"
        )
    return fields


def explain_low_precision_grads(translation: Translation, key: str, value: Any, model: Any = None) -> None:
    """Report `keep_low_precision_grads`, which FSDP2 does not have."""
    if value:
        why = "gradients have the dtype parameters are stored in; store those in 16 bits to keep them there"
        translation.warn(key, why)
    else:
        translation.note(key, "no effect: gradients have the storage dtype of parameters")


def resolve_named(translation: Translation, compute_dtype: str | None) -> None:
    """Turn PURE, DEFAULT or FULL into dtypes.

    Args:
        translation: Has the name, and the trainer's precision if given.
        compute_dtype: Default compute dtype of this device; None is the storage dtype.
    """
    name, trainer = translation.named_precision, translation.trainer_precision
    if name is None and trainer is None:
        return
    if translation.precision:
        translation.problem("precision", "is given twice: by name and by dtypes", "keep one")
        return
    name = name or "DEFAULT"
    dtype = None if name == "FULL" else trainer or compute_dtype
    translation.precision["param_dtype"] = dtype or "storage"
    if name == "PURE" and dtype is not None:
        translation.precision["reduce_dtype"] = dtype
    if name == "FULL":
        text = "computes as stored; gradients are summed in 32 bits or more"
    else:
        whose = "the trainer's precision" if trainer else "this device's own choice"
        sums = dtype if name == "PURE" and dtype else "float32"
        text = f"computes in {dtype or 'the stored dtype'}, {whose}; sums gradients in {sums}"
    translation.precision_reason = f"mixed_precision: {name}: {text}"


KeyReader = Callable[[Translation, str, Any, nn.Module], None]


def translate(config: Mapping[str, Any], model: nn.Module) -> Translation:
    """Translate all keys of a dictionary; collect problems instead of raising.

    Args:
        config: Fields of `ShardConfig`, FSDP1's and Composer's settings, in any combination without conflicts;
            or a run file of Composer with these settings.
        model: Gives the names of modules and parameters that settings contain as objects.
    """
    translation, native = Translation(), {}
    settings = _find_settings(translation, config, model)
    for key, value in settings.items():
        if key in _OWN and not (key == "precision" and not isinstance(value, Mapping | PrecisionConfig)):
            native[key] = value
        elif key in _READERS:
            _READERS[key](translation, key, value, model)
        elif key in _FLAGS:
            setattr(translation, _FLAGS[key], bool(as_bool(translation, key, value)))
        elif key in _EXPLAINED:
            translation.note(key, _EXPLAINED[key])
        elif key in _REFUSED and value:
            translation.problem(key, *_REFUSED[key])
        elif key not in _KNOWN:
            hint = fix_name(str(key), _KNOWN, "see ShardConfig for what there is")
            translation.problem(str(key), "is not a setting of ShardConfig, FSDP1 or Composer", hint)
    _check_own(translation, native)
    _check_strategy(translation)
    return translation


def _find_settings(translation: Translation, config: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Return the FSDP settings of a run file, with the trainer's precision; any other config unchanged."""
    places = list(_places(config, "", None))
    if not places:
        return config
    given = [place for place in places if place[1] is not None]
    for path, value, _ in given:
        if path.rpartition(".")[2] in _TENSOR_PARALLEL:
            _tensor_parallel(translation, path, value, model)
    fsdp = [place for place in given if place[0].rpartition(".")[2] not in _TENSOR_PARALLEL]
    beside = [key for key in sorted(config, key=str) if key in _KNOWN]
    beside = [key for key in beside if key not in ("precision", "verbose")]  # trainers have these too
    if len(fsdp) + bool(beside) > 1:
        names = ", ".join([path for path, _, _ in fsdp] + beside)
        translation.problem("config", f"FSDP settings are in two places: {names}", "keep one")
        return {}
    if beside:
        return {key: config[key] for key in (*beside, "precision") if key in config}
    path, value, precision = fsdp[0] if fsdp else ("the defaults", {}, config.get("precision"))
    settings = fields_of(value)
    if settings is None:
        translation.problem(path, f"is a {type(value).__name__}", "give a mapping of settings")
        return {}
    roots = {place.partition(".")[0] for place, _, _ in places} | {"precision"}
    others = ", ".join(sorted(str(key) for key in config if key not in roots))
    translation.note("config", f"settings of {path}" + (f"; not about sharding: {others}" if others else ""))
    return settings if precision is None else {"precision": precision, **settings}


def _places(values: Mapping[str, Any], prefix: str, precision: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, value and trainer's precision of each FSDP or tensor parallel section."""
    precision = values.get("precision", precision)
    for key, value in values.items():
        path, inner = f"{prefix}{key}", fields_of(value)
        if key in _FSDP or key in _TENSOR_PARALLEL or (key == "parallelism_config" and value is None):
            yield path, value, precision
        elif inner is not None:
            yield from _places(inner, f"{path}.", precision)


def _tensor_parallel(translation: Translation, path: str, value: Any, model: nn.Module) -> None:
    """Translate Composer's `TPConfig`: the degree, and torch's styles by module."""
    given = fields_of(value) or {}
    for key, setting in given.items():
        where = f"{path}.{key}"
        if key == "tensor_parallel_degree":
            _degree(translation, where, setting, model)
        elif key == "layer_plan" and setting:
            plan = {pattern: _style(translation, f"{where}.{pattern}", style) for pattern, style in setting.items()}
            translation.put(where, "tensor", {"plan": {pattern: style for pattern, style in plan.items() if style}})
        elif key == "strategy":
            translation.note(where, "split modules are found in the model; tensor.plan changes them")
        elif key not in ("device_mesh", "layer_plan") or setting:
            translation.problem(where, f"is {setting!r}", "give tensor_parallel_degree, and layer_plan if need be")
    if translation.degrees.get("tensor", 1) == 1:
        translation.note(path, "tensor_parallel_degree is 1: nothing to do")


def _style(translation: Translation, where: str, style: Any) -> str | None:
    """Return the name of a style, also for an object of torch's styles."""
    if isinstance(style, str):
        return style
    inputs, outputs = (getattr(style, f"{end}_layouts", None) for end in ("input", "output"))
    is_whole = [bool(layouts) and layouts[0].is_replicate() for layouts in (inputs, outputs)]
    match type(style).__name__:
        case "ColwiseParallel":
            return "colwise_gather_output" if is_whole[1] else "colwise"
        case "RowwiseParallel":
            return "rowwise_split_input" if is_whole[0] else "rowwise"
        case "SequenceParallel":
            return "sequence"
        case "PrepareModuleInput" | "PrepareModuleOutput" | "PrepareModuleInputOutput":
            translation.note(where, "not needed: layouts between layers are automatic")
        case name:
            translation.problem(where, f"is a {name}", "give colwise, rowwise, sequence, or another of tensor.plan")
    return None


def _check_own(translation: Translation, native: dict[str, Any]) -> None:
    """Validate fields of `ShardConfig` as in a config file, and merge them with the translated settings."""
    try:
        checked = load(ShardConfig, native)
    except ConfigError as error:
        translation.problems += error.where.splitlines()
        return
    for name in native:
        if name == "ignored":  # adds to ignored_modules and the like
            translation.settings[name] = (*checked.ignored, *translation.settings.get(name, ()))
        else:
            translation.put(name, name, getattr(checked, name))


def _check_strategy(translation: Translation) -> None:
    strategy, reshard = translation.strategy, translation.settings.get("reshard_after_forward")
    if strategy in KEEPS_UNSHARDED and strategy != "NO_SHARD":
        translation.put("sharding_strategy", "reshard_after_forward", False)
    elif strategy is not None and reshard is False:
        translation.problem(
            "reshard_after_forward", f"False contradicts {strategy}", "use SHARD_GRAD_OP, or leave it out"
        )
    replicate, shard = (translation.degrees.get(axis, 1) for axis in ("replicate", "shard"))
    if strategy in ("FULL_SHARD", "SHARD_GRAD_OP") and replicate > 1:
        translation.strategy = "HYBRID_SHARD" if strategy == "FULL_SHARD" else "_HYBRID_SHARD_ZERO2"
        what = f"{strategy} with {replicate} replicas is {translation.strategy}, as in Composer"
        translation.warn("sharding_strategy", what)
    if strategy == "NO_SHARD" and shard > 1:
        what = f"NO_SHARD contradicts data_parallel_shard_degree = {shard}"
        translation.problem("sharding_strategy", what, "leave the degree out, or use HYBRID_SHARD")


def _strategy(translation: Translation, key: str, value: Any, model: nn.Module) -> None:
    name = member_name(value)
    if name is None:
        translation.problem(key, f"is {value!r}", f"choose among {', '.join(STRATEGIES)}")
    else:
        translation.strategy = name


def _degree(translation: Translation, key: str, value: Any, model: nn.Module) -> None:
    axis = key.rpartition(".")[2].removeprefix("data_parallel_").removesuffix("_degree").removesuffix("_parallel")
    if value is None or (value == -1 and axis == "shard"):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        fix = "give a number of ranks" + (", or -1" if axis == "shard" else "")
        translation.problem(key, f"is {value!r}", fix)
    else:
        translation.degrees[axis] = value


def _mesh(translation: Translation, key: str, value: Any, model: nn.Module) -> None:
    if value is None:
        return
    if not isinstance(value, DeviceMesh):
        fix = "pass the DeviceMesh that init_distributed returns"
        translation.problem(key, f"is a {type(value).__name__}, not a DeviceMesh", fix)
    elif translation.mesh is not None and translation.mesh != value:
        translation.problem(key, "contradicts another mesh of the config", "give one")
    else:
        translation.mesh = value
    if key == "_device_mesh":
        translation.warn(key, "private to Composer, which derives it from the degrees; used as device_mesh")


def _offload(translation: Translation, key: str, value: Any, model: nn.Module) -> None:
    given = fields_of(value)
    if given is None:
        asked = as_bool(translation, key, bool(value) if value is None else value)
    else:  # FSDP1's CPUOffload(offload_params), FSDP2's CPUOffloadPolicy(pin_memory) and OffloadPolicy()
        asked = bool(given.get("offload_params", "pin_memory" in given))
        if "pin_memory" in given:
            translation.put(key, "pin_memory", bool(given["pin_memory"]))
    if asked is not None:
        translation.put(key, "offload", asked)


def _backward_prefetch(translation: Translation, key: str, value: Any, model: nn.Module) -> None:
    name = "NONE" if value is None else member_name(value, ("BACKWARD_PRE", "BACKWARD_POST"))
    if name == "BACKWARD_PRE":
        translation.note(key, "BACKWARD_PRE is what FSDP2 always does; prefetch.backward asks for more")
    elif name == "NONE":
        translation.note(key, "None: FSDP2 still prefetches one group in backward, which unshards one more group")
    elif name == "BACKWARD_POST":
        what = "FSDP2 unshards the next group before this group's gradients are computed, not after: it prefetches as "
        translation.warn(key, what + "BACKWARD_PRE does, and one more group is unsharded at a time")
    else:
        translation.problem(key, f"is {value!r}", "use BACKWARD_PRE, or leave it out")


def _forward_prefetch(translation: Translation, key: str, value: Any, model: nn.Module) -> None:
    if value is None or not isinstance(value, int) or value < 0:
        translation.problem(key, f"is {value!r}", "give True, False, or how many groups to gather ahead")
    elif value:
        translation.put(key, "prefetch", {"forward": int(value)})


def _ignored(translation: Translation, key: str, value: Any, model: nn.Module) -> None:
    """Translate modules, parameters or patterns to names in the model."""
    names: list[str] = []
    modules = {id(module): name for name, module in model.named_modules()}
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    alone = isinstance(value, str | nn.Module | nn.Parameter)
    for item in [value] if alone else value or ():
        name = item if isinstance(item, str) else modules.get(id(item), parameters.get(id(item)))
        if not name:
            what = "the model itself" if name == "" else f"a {type(item).__name__} that is not in the model"
            translation.problem(key, f"names {what}", "pass modules or parameters of this model, or their names")
        elif not isinstance(item, nn.Module) or next(item.parameters(), None) is not None:
            names.append(name)
    if names:
        translation.settings["ignored"] = (*translation.settings.get("ignored", ()), *names)
        translation.note(key, "gradients of ignored parameters are averaged over ranks, unlike in FSDP1")


def _auto_wrap(translation: Translation, key: str, value: Any, model: nn.Module) -> None:
    if as_bool(translation, key, value) is False:
        translation.only_children = True
        translation.note(key, "False: groups are the direct children, regardless of fsdp_wrap_fn")


def _auto_wrap_policy(translation: Translation, key: str, value: Any, model: nn.Module) -> None:
    """Translate classes, or torch's two common policies as partials; other policies are code for FSDP1."""
    if value is None:
        return
    keywords = getattr(value, "keywords", {})
    named = keywords.get("transformer_layer_cls", value)
    classes = tuple(named) if isinstance(named, Iterable) else ()
    if "min_num_params" in keywords:
        translation.put(key, "min_group_params", int(keywords["min_num_params"]))
    elif classes and all(isinstance(kind, type) for kind in classes):
        translation.put(key, "wrap_if", lambda module: isinstance(module, classes))
    else:
        fix = 'name the blocks: block_classes=("MyBlock",), or wrap_if=lambda module: ...'
        translation.problem(key, f"a {type(value).__name__} cannot be translated", fix)


def _precision(translation: Translation, key: str, value: Any, model: nn.Module) -> None:
    translation.trainer_precision = dtype_of(value)
    if translation.trainer_precision is None and value is not None:
        translation.problem(key, f"is {value!r}", "give fp32, amp_bf16, amp_fp16, or fields of PrecisionConfig")


_FSDP = ("fsdp_config", "fsdp", "fsdp2")
_TENSOR_PARALLEL = ("tp_config", "tp")
_OWN = tuple(field.name for field in dataclasses.fields(ShardConfig))
_NOT_HERE = "is about saving and loading; it has no bearing on how the model is sharded"
_READERS: dict[str, KeyReader] = {
    "sharding_strategy": _strategy,
    "data_parallel_shard_degree": _degree,
    "data_parallel_replicate_degree": _degree,
    "tensor_parallel_degree": _degree,
    "expert_parallel_degree": _degree,
    "context_parallel_degree": _degree,
    "device_mesh": _mesh,
    "_device_mesh": _mesh,
    "mesh": _mesh,
    "mixed_precision": read_mixed_precision,
    "mp_policy": read_mixed_precision,
    "precision": _precision,
    "keep_low_precision_grads": explain_low_precision_grads,
    "cpu_offload": _offload,
    "offload_policy": _offload,
    "backward_prefetch": _backward_prefetch,
    "forward_prefetch": _forward_prefetch,
    "ignored_modules": _ignored,
    "ignored_params": _ignored,
    "ignored_parameters": _ignored,
    "ignored_states": _ignored,
    "auto_wrap": _auto_wrap,
    "auto_wrap_policy": _auto_wrap_policy,
}
_FLAGS = {
    "sync_module_states": "sync_from_rank_zero",
    "_sync_module_states": "sync_from_rank_zero",
    "activation_checkpointing": "recompute",
    "activation_cpu_offload": "offload_activations",
}
"""Boolean settings, and the fields of `Translation` that they set."""
_EXPLAINED = {
    **NOT_NEEDED,
    "backward_prefetch_limit": "FSDP2 gathers one group ahead; prefetch.backward asks for more",
    "forward_prefetch_limit": "prefetch.forward says how many groups are gathered ahead",
    "device_id": "shards live on the device of the mesh",
    "verbose": "print(shardwise.plan(model)) shows what is done and why",
    "state_dict_type": _NOT_HERE,
    "load_monolith_rank0_only": _NOT_HERE,
    "load_fsdp_monolith_rank0_only": _NOT_HERE,
    "sharded_ckpt_prefix_dir": _NOT_HERE,
    "load_planner": _NOT_HERE,
    "save_planner": _NOT_HERE,
}
"""Settings without a use in FSDP2, for any value, with the reason."""
_REFUSED = {
    "te_checkpoint_wrapper": ("is not offered", "set activation_checkpointing"),
    "te_shard_fp8_weight": ("is not offered", "leave it out"),
    "param_init_fn": ("is a step of its own", "call shardwise.materialize(model, init=...) afterwards"),
    "process_group": ("a group has no device or axes", "pass device_mesh=DeviceMesh.from_group(...)"),
}
"""Settings that must be off, with the problem and its fix if they are on."""
_KNOWN = (*_OWN, *_READERS, *_FLAGS, *_EXPLAINED, *_REFUSED)
