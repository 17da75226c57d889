"""How much of the hardware a run uses (MFU): floating-point operations of the model over those of the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwise.training.parameter_kinds import parameter_kinds

# Dense bfloat16 with float32 sums, in FLOP/s, from the makers' data sheets. The first name found in the device's wins.
_PEAKS: tuple[tuple[str, float], ...] = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A40", 150e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("V100", 125e12),
    ("MI300X", 1307e12),
    ("MI325X", 1307e12),
    ("MI250X", 383e12),
)
_NUM_LAYERS = ("num_layers", "num_hidden_layers", "n_layer", "n_layers")
_WIDTH = ("hidden_size", "width", "n_embd", "d_model")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("experts_per_token", "num_experts_per_tok", "num_experts_per_token", "top_k")


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """Floating-point operations that one training step needs for one token.

    The formula is `6 N + 12 L W S`, where N counts the parameters of matrices that a token meets, L layers, W their
    width, S the sequence length.

    - A parameter costs 2 operations forward, 2 for the gradient of its input and 2 for its own; one that is frozen 4.
    - Embedding tables are looked up, not multiplied, and count only when they are also the output matrix. Of experts,
      as many count as see one token.
    - Attention costs `2 * 2 L W S` forward and twice that backward; causal attention is counted in full and activation
      recomputing not at all, as is usual, so that figures can be compared.

    L, W and experts are read from `model.config`; without them attention, or the choice of experts, is left out.

    Args:
        model: Sharded or not.
        sequence_length: Tokens in a sequence.

    Ranks:
        Local.
    """
    config = getattr(model, "config", None)
    multiplied = sum(
        parameter.numel() * share * (6 if parameter.requires_grad else 4) for parameter, share in _met(model, config)
    )
    layers, width = _first(config, _NUM_LAYERS) or 0, _first(config, _WIDTH) or 0
    return multiplied + 12.0 * layers * width * sequence_length


def peak_flops(device: torch.device | str) -> float | None:
    """What a device can do in a second in bfloat16, if it is a known GPU.

    Ranks:
        Local.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _PEAKS if known in name), None)


def mfu(tokens_per_s: float, flops_of_token: float, num_devices: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation: `tokens_per_s * flops_of_token / (num_devices * peak)`; None without a peak.

    Args:
        tokens_per_s: Over all ranks.
        flops_of_token: From `flops_per_token`.
        num_devices: Over all ranks.
        peak: Of one device.
    """
    return tokens_per_s * flops_of_token / (num_devices * peak) if peak else None


def _met(model: nn.Module, config: Any) -> Iterator[tuple[nn.Parameter, float]]:
    """Parameters that are multiplied with a token's vector, and which part of each."""
    num_experts, chosen = _first(config, _NUM_EXPERTS) or 0, _first(config, _EXPERTS_PER_TOKEN) or 0
    share = chosen / num_experts if num_experts > 1 and chosen else 1.0
    experts = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_experts > 1
        for parameter in module.parameters()
    }
    as_output = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    for parameter, kind in parameter_kinds(model).items():
        is_stack = parameter.ndim == 3 and parameter.shape[0] == num_experts > 1
        if kind == "vectors" or (kind == "embeddings" and id(parameter) not in as_output):
            continue
        yield parameter, share if is_stack or id(parameter) in experts else 1.0


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)
