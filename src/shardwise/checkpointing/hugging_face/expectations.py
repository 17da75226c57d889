"""What Hugging Face's libraries expect beside the weights, and how transformers' models store their tensors."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from torch import nn

from shardwise.models.described import hugging_face_config
from shardwise.sharding.inventory import class_name


def companions_of(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, bytes]:
    """The small files that transformers or diffusers needs to open a folder of this model's weights.

    Args:
        model: One of theirs, a reference model that they have too, or any other, which needs none.
        dtype: That the weights are cast to.

    Returns:
        File name to its bytes.

    Ranks:
        Local.
    """
    config = getattr(model, "config", None)
    if config is None:
        return {}
    if hasattr(config, "to_json_string"):  # transformers
        config = copy.deepcopy(config)
        config.architectures = [class_name(model)]
        config.dtype = dtype or _dtype_of(model)
        found = {"config.json": config.to_json_string().encode()}
        generation = getattr(model, "generation_config", None)
        if generation is not None and hasattr(generation, "to_json_string"):
            found["generation_config.json"] = generation.to_json_string().encode()
        return found
    if (described := hugging_face_config(config)) is not None:
        stored = str(dtype or _dtype_of(model)).removeprefix("torch.")
        return {"config.json": json.dumps({**described, "dtype": stored}, indent=2).encode() + b"\n"}
    return {"config.json": _diffusers_config(model)} if _is_of_diffusers(model) else {}


def weights_stem(model: nn.Module) -> str:
    """What the library that opens the folder calls the weights: `<stem>.safetensors`.

    Ranks:
        Local.
    """
    return "diffusion_pytorch_model" if _is_of_diffusers(model) else "model"


def _is_of_diffusers(model: nn.Module) -> bool:
    return isinstance(getattr(model, "_internal_dict", None), dict) and hasattr(model, "to_json_string")


def _diffusers_config(model: Any) -> bytes:
    config = json.loads(model.to_json_string())
    config["_class_name"] = class_name(model)
    return json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
