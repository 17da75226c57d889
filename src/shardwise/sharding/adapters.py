"""LoRA: low-rank adapters for the linear layers of a frozen model, and their names in peft's files."""

from __future__ import annotations

import functools
import importlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.config.load import check_ranges
from shardwise.config.schema import LoraConfig
from shardwise.errors import CheckpointError, ConfigError, ShardError, listed
from shardwise.models.configs import hugging_face_config
from shardwise.planning.groups import name_matcher
from shardwise.planning.regions import called_linears, computes_linear, layer_sizes
from shardwise.sharding.blocks import find_blocks, refuse_sharded
from shardwise.sharding.full_params import gather_in_buckets, reshard
from shardwise.sharding.inventory import canonical_name, class_name, local_part, local_tensor
from shardwise.sharding.nf4 import NF4Tensor, quantize_nf4, why_not_nf4
from shardwise.sharding.registry import forget_parameters

CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."
"""Prefix of the model's names in peft's files."""
_BUCKET_BYTES = 64 << 20
M = TypeVar("M", bound=nn.Module)


class LoraLayer(nn.Module):
    """Mixin of a linear layer with an adapter: two matrices and a forward that adds their product.

    The adapter's parameters are registered on the layer itself, not on submodules: the base weights keep their names,
    and plans find the same groups as without adapters.
    """

    weight: nn.Parameter
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_dropout: float

    def reset_parameters(self) -> None:
        """Initialize the layer, and the adapter to zero output."""
        if callable(reset := getattr(super(), "reset_parameters", None)):
            reset()
        self.reset_adapter()

    def reset_adapter(self) -> None:
        """Initialize the first matrix randomly and the second to zero, as peft does."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the layer's output and the adapter's, which is computed in the adapter's dtype."""
        output = super().forward(x)
        narrow = F.dropout(x.to(self.lora_A.dtype), self.lora_dropout, self.training)
        update = F.linear(F.linear(narrow, self.lora_A), self.lora_B) * self.lora_scale
        return (output + update).to(output.dtype)


def add_lora(model: M, config: LoraConfig | str | Path | None = None) -> M:
    """Freeze a model and add a low-rank adapter to each of its linear layers, in place; return the model.

    Call it before `shard` (and before `checkpoint_activations` and `compile_blocks`). The names of the model's own
    parameters stay, so that `load_weights` reads the base weights as before; adapters are called `<layer>.lora_A` and
    `<layer>.lora_B`. `save_weights(model, folder, format="peft")` writes them for peft, `load_weights(model, folder)`
    reads such a folder, and `merge_lora` adds them to the base.

    Args:
        model: Unsharded model, on the meta device or with values. With values, each rank must draw the same adapters:
            use the same seed.
        config: Rank, layers and quantization, or a peft folder with these settings.

    Raises:
        ConfigError: A setting is out of range, or a pattern matches no layer that supports adapters.
        ShardError: The model is sharded, or has adapters already.

    Ranks:
        Local. Call it identically on every rank.
    """
    config = read_peft_config(Path(config)) if isinstance(config, str | Path) else config or LoraConfig()
    check_ranges(config, "lora")
    refuse_sharded(model, "add_lora")
    _refuse_adapted(model)
    blocks = _linears_of_blocks(model)
    targets = blocks if config.targets == "auto" else _targets(model, config.targets)
    if not targets:
        raise ConfigError(
            f"{class_name(model)} has no linear layer for an adapter",
            where="lora.targets",
            why="adapters are added to nn.Linear layers and transformers' Conv1D",
            fix="train the model without lora",
        )
    model.requires_grad_(False)
    if config.quantize == "nf4":
        uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
        for layer in {**blocks, **targets}.values():
            if not why_not_nf4(layer.weight) and uses[layer.weight] == 1:  # not tied
                layer.weight = nn.Parameter(quantize_nf4(layer.weight.detach()), requires_grad=False)
    for layer in targets.values():
        _adapt(layer, config)
    return model


def _adapt(layer: Any, config: LoraConfig) -> None:
    num_inputs, num_outputs = layer_sizes(layer)
    options: dict[str, Any] = {"dtype": getattr(torch, config.dtype), "device": layer.weight.device}
    layer.__class__ = _adapted_class(type(layer))
    layer.lora_A = nn.Parameter(torch.empty(config.rank, num_inputs, **options))
    layer.lora_B = nn.Parameter(torch.empty(num_outputs, config.rank, **options))
    layer.lora_scale, layer.lora_dropout = config.alpha / config.rank, config.dropout
    if not layer.weight.is_meta:
        layer.reset_adapter()


@functools.cache
def _adapted_class(kind: type) -> type:
    """Return a layer's class with an adapter; the layer remains the same object, with its hooks and initialization."""
    return type(f"Lora{kind.__name__}", (LoraLayer, kind), {"__module__": __name__})


def _refuse_adapted(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) or type(module).__module__.startswith("peft."):
            raise ShardError(
                f"{name or 'the model'} already has an adapter",
                where=name or class_name(model),
                why="a layer has one adapter",
                fix="merge_lora(model) first, or call add_lora once with all targets",
            )


def _linears_of_blocks(model: nn.Module) -> dict[str, Any]:
    """Return the linear layers in the model's repeated blocks, or all if it has no blocks."""
    try:
        inside = {
            id(module) for block in find_blocks(model, None, action="add_lora").values() for module in block.modules()
        }
    except ShardError:
        inside = {id(module) for module in model.modules()}
    return {name: layer for name, layer in _linears(model) if id(layer) in inside}


def _linears(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that support adapters: those with the forward of a linear layer, called by the model."""
    yield from ((name, layer) for name, layer in called_linears(model) if computes_linear(layer))
    if computes_linear(model):
        yield "", model


def _targets(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, Any]:
    linears = dict(_linears(model))
    chosen: dict[str, Any] = {}
    for pattern in patterns:
        fits = name_matcher(pattern)
        found = [name for name, module in model.named_modules() if fits(name) or type(module).__name__ == pattern]
        wrong = [name for name in found if name not in linears]
        if wrong or not found:
            what, why = "no layer", "`*` stays within one name, `**` and a leading `*.` span dots"
            if wrong:
                what = f"{wrong[0]!r}, a {type(model.get_submodule(wrong[0])).__name__}"
                why = "adapters stand beside nn.Linear layers that are called as modules, and transformers' Conv1D"
            known = ", ".join(listed(sorted({name.rpartition(".")[2] for name in linears})))
            fix = f"the linear layers of the model are {known}; as in '*.q_proj'"
            raise ConfigError(f"{pattern!r} matches {what}", where="lora.targets", why=why, fix=fix)
        chosen |= {name: linears[name] for name in found}
    return chosen


@torch.no_grad()
def merge_lora(model: M) -> M:
    """Merge each adapter into its base weight and remove the adapters, in place; return the model.

    The outputs stay the same up to rounding. The model has its parameters from before `add_lora`, still frozen, and
    `save_weights` writes them as for any model.

    Args:
        model: Sharded or unsharded model with adapters of `add_lora`, not on the meta device.

    Raises:
        ShardError: The model has no adapters, or its weights are quantized.

    Ranks:
        Collective if the model is sharded.
    """
    reshard(model)
    layers = _layers(model)
    if not layers:
        raise ShardError(
            f"{class_name(model)} has no adapters to merge",
            where=f"merge_lora({class_name(model)})",
            why="it merges adapters of add_lora; peft merges its own (merge_and_unload, before sharding)",
            fix="remove the call of merge_lora",
        )
    for name, layer in layers:
        if isinstance(local_tensor(layer.weight), NF4Tensor):
            raise ShardError(
                f"the weight of {name!r} is stored in NF4",
                where=name,
                why="the adapter would be rounded to 16 levels, and most of it lost",
                fix="save_weights(model, folder, format='peft'); then merge in a model without quantize='nf4': "
                "add_lora(model, folder), load_weights(model, folder), merge_lora(model)",
            )
    pairs = (
        (f"{index}.{part}", getattr(layer, part))
        for index, (_, layer) in enumerate(layers)
        for part in ("lora_A", "lora_B")
    )
    gathered = gather_in_buckets(pairs, bucket_bytes=_BUCKET_BYTES, keep=True)
    for _, layer in layers:
        (_, first), (_, second) = next(gathered), next(gathered)
        update = second.float() @ first.float() * layer.lora_scale  # pyrefly: ignore[missing-attribute]
        update = update if isinstance(layer, nn.Linear) else update.T
        weight = local_tensor(layer.weight)
        weight.add_(local_part(update, layer.weight).to(weight.device))
    forget_parameters(model, [parameter for _, layer in layers for parameter in (layer.lora_A, layer.lora_B)])
    for _, layer in layers:
        del layer.lora_A, layer.lora_B, layer.lora_scale, layer.lora_dropout
        layer.__class__ = _original_class(type(layer))
    return model


def _original_class(kind: type) -> type:
    """Return the class of a layer without its adapter."""
    if kind.__bases__[0] is LoraLayer:
        return kind.__bases__[1]
    sharded, adapted = kind.__bases__  # created by `fully_shard`, because the layer is a separate group
    original = _original_class(adapted)
    return type(f"FSDP{original.__name__}", (sharded, original), {"__deepcopy__": vars(kind).get("__deepcopy__")})


def adapter_keys(model: nn.Module) -> dict[str, str]:
    """Map the name of each adapter parameter in the model to its name in peft's files; empty without adapters.

    Args:
        model: Sharded or unsharded model with adapters of `add_lora`, or a peft model with any adapters.
    """
    if (peft := _peft_model(model)) is not None:
        names = {canonical_name(name): parameter.shape for name, parameter in model.named_parameters()}
        stand_ins = {name: torch.empty(shape, device="meta") for name, shape in names.items()}
        stored = importlib.import_module("peft").get_peft_model_state_dict(
            peft, state_dict=stand_ins, save_embedding_layers=False
        )
        key_of = {id(tensor): key for key, tensor in stored.items()}
        return {name: key_of[id(tensor)] for name, tensor in stand_ins.items() if id(tensor) in key_of}
    return {
        f"{path}.{part}".lstrip("."): f"{_PREFIX}{path}.{part}.weight"
        for path, _ in _layers(model)
        for part in ("lora_A", "lora_B")
    }


def without_adapters(model: nn.Module, names: Iterable[str]) -> tuple[nn.Module, dict[str, str]]:
    """Return the model inside a peft model, with its names mapped to those in `model`; any other model unchanged.

    Args:
        model: Any model.
        names: Names of its tensors.
    """
    if (peft := _peft_model(model)) is None:
        return model, {name: name for name in names}
    return peft.get_base_model(), {name.removeprefix(_PREFIX).replace(".base_layer.", "."): name for name in names}


def _layers(model: nn.Module) -> list[tuple[str, LoraLayer]]:
    return [(canonical_name(name), each) for name, each in model.named_modules() if isinstance(each, LoraLayer)]


def peft_config(model: nn.Module) -> dict[str, Any]:
    """Return the content of `adapter_config.json` for the model's adapters.

    Raises:
        CheckpointError: The model has no adapters.
    """
    if (peft := _peft_model(model)) is not None:
        described = peft.peft_config[peft.active_adapter].to_dict()
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in described.items()}
        return {**plain, "inference_mode": True}
    layers = _layers(model)
    if not layers:
        raise CheckpointError(
            f"{class_name(model)} has no adapters to save",
            where="format='peft'",
            why="a peft folder contains adapters, not the base model",
            fix="save_weights(model, path) writes the whole model; add_lora(model) adds adapters, before sharding",
        )
    layer, config = layers[0][1], getattr(model, "config", None)
    rank = layer.lora_A.shape[0]
    known = hugging_face_config(config) or {"architectures": [class_name(model)]}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if known["architectures"][0].endswith("ForCausalLM") else None,
        "base_model_name_or_path": getattr(config, "_name_or_path", None) or None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": layer.lora_scale * rank,
        "lora_dropout": layer.lora_dropout,
        "bias": "none",
        "fan_in_fan_out": not isinstance(layer, nn.Linear),
        "target_modules": _target_modules(model, [path for path, _ in layers]),
    }


def _target_modules(model: nn.Module, paths: list[str]) -> list[str]:
    """Return the last components of the layers' names, as peft matches them; full names if other layers match too."""
    ends = {path.rpartition(".")[2] for path in paths}
    same = [canonical_name(name) for name, _ in model.named_modules() if name.rpartition(".")[2] in ends]
    return sorted(ends) if sorted(same) == sorted(paths) else sorted(paths)


_REFUSED = {
    "use_dora": False, "use_rslora": False, "bias": "none", "lora_bias": False, "rank_pattern": {}, "alpha_pattern": {},
    "modules_to_save": None, "layers_to_transform": None, "target_parameters": None, "trainable_token_indices": None,
    "use_qalora": False, "layer_replication": None, "exclude_modules": None,
}  # fmt: skip
"""Settings of peft that `add_lora` supports only with these values."""


def read_peft_config(folder: Path) -> LoraConfig:
    """Read the settings of the adapters in a peft folder.

    Raises:
        CheckpointError: The folder is not a peft folder, or `add_lora` does not support its kind of adapters.
    """
    described = _read_config(folder)
    strange = [
        f"{key} = {described[key]!r}"
        for key, plain in _REFUSED.items()
        if described.get(key, plain) not in (plain, None, [], {})
    ]
    if described.get("peft_type") != "LORA" or strange:
        raise CheckpointError(
            f"the adapters are {described.get('peft_type')}" + (f" with {', '.join(strange)}" if strange else ""),
            where=str(folder / CONFIG_FILE),
            why="add_lora supports plain LoRA adapters of linear layers",
            fix="open the folder with peft (PeftModel.from_pretrained), and shard that model",
        )
    targets = described["target_modules"]
    if isinstance(targets, str):
        raise CheckpointError(
            f"target_modules is a pattern of peft's, {targets!r}",
            where=str(folder / CONFIG_FILE),
            why="it is a regular expression over names; add_lora takes names with *",
            fix="pass LoraConfig(rank=..., alpha=..., targets=(...)), then load_weights(model, folder)",
        )
    return LoraConfig(
        rank=described["r"],
        alpha=float(described["lora_alpha"]),
        dropout=float(described.get("lora_dropout") or 0.0),
        targets=tuple(target if "." in target else f"*.{target}" for target in targets),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        described = json.loads((folder / CONFIG_FILE).read_text())
        if not isinstance(described, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{CONFIG_FILE} cannot be read: {error}",
            where=str(folder),
            why="a peft folder needs one",
            fix="name the folder that save_pretrained or save_weights(format='peft') wrote",
        ) from None
    return described


def refuse_other_adapters(model: nn.Module, folder: Path) -> None:
    """Raise if adapters in a peft folder have another scale than the model's, which names and shapes do not show.

    Raises:
        CheckpointError: The scales differ.
    """
    theirs, ours = _read_config(folder), peft_config(model)
    scales = [config["lora_alpha"] / config["r"] for config in (theirs, ours) if config.get("r")]
    if len(scales) == 2 and not math.isclose(*scales):
        raise CheckpointError(
            f"the adapters were trained with alpha / rank = {scales[0]:g}, the model's have {scales[1]:g}",
            where=str(folder / CONFIG_FILE),
            why="their product is multiplied by it",
            fix=f"add_lora(model, {str(folder)!r}), which takes the settings from there",
        )


def _peft_model(model: nn.Module) -> Any:
    library: Any = sys.modules.get("peft")
    return model if library is not None and isinstance(model, library.PeftModel) else None
