"""Rewritten mixed precision computes and reduces in the dtypes FSDP1 used: seen where they are used, not by numbers.

Losses in 16 bits differ in their last bits whatever one does, so numbers cannot tell a wrong dtype from a right one.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import ranks
from tests.rules.moving.test_same_numbers import migrated, run

HEADER = """
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from tests.rules.moving.test_same_dtypes import Part


"""
FORMS = {
    "in_the_call": """
def wrap(model):
    return FSDP(
        model,
        mixed_precision=MixedPrecision({fields}),
        auto_wrap_policy=ModuleWrapPolicy({{Part}}),
        device_id=torch.device("cpu"),
    )
""",
    "at_run_time": """
def wrap(model, low=True):
    precision = MixedPrecision({fields}) if low else None
    policy = ModuleWrapPolicy({{Part}})
    return FSDP(model, mixed_precision=precision, auto_wrap_policy=policy, device_id=torch.device("cpu"))
""",
    "root_only": """
def wrap(model):
    return FSDP(model, mixed_precision=MixedPrecision({fields}), device_id=torch.device("cpu"))
""",
    "root_only_at_run_time": """
def wrap(model, low=True):
    return FSDP(model, mixed_precision=MixedPrecision({fields}) if low else None, device_id=torch.device("cpu"))
""",
}
FIELDS = {
    "no_reduce": "param_dtype=torch.bfloat16",
    "finer_reduce": "param_dtype=torch.bfloat16, reduce_dtype=torch.float32",
    "coarser_reduce": "param_dtype=torch.float32, reduce_dtype=torch.bfloat16",
    "reduce_alone": "reduce_dtype=torch.bfloat16",
    "three_dtypes": "param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float16",
    "inputs_of_all": "param_dtype=torch.bfloat16, cast_forward_inputs=True",
    "inputs_of_none": "param_dtype=torch.bfloat16, cast_root_forward_inputs=False",
}


class Part(nn.Module):
    """Works in any dtype, and remembers those it met."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.seen: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        weight, scale = self.linear.weight, self.get_buffer("scale")
        self.seen.append((x.dtype, extra.dtype, weight.dtype, scale.dtype))
        return self.linear(x.to(weight.dtype)) * scale.to(weight.dtype) + extra.to(weight.dtype)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Part()
        self.parts = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        x = self.first(x, extra)
        for part in self.parts:
            x = part(x, torch.ones(4, dtype=torch.float32))  # made inside: only a unit itself would cast it
        return x


class Reductions(TorchDispatchMode):
    """Notes the dtype of each tensor that is summed over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "reduce" in func.name():
            tensors = args[1] if "scatter" in func.name() else args[0]
            first = tensors[0] if isinstance(tensors, list) else tensors
            self.dtypes.append(first.dtype)
        return func(*args, **(kwargs or {}))


def dtypes(text: str) -> dict[str, Any]:
    """What a program's model meets in one step."""
    torch.manual_seed(0)
    model = Whole()
    parts = {name: module for name, module in model.named_modules() if isinstance(module, Part)}
    wrapped = run(text)["wrap"](model)
    output = wrapped(torch.ones(2, 4), torch.ones(4))
    with Reductions() as reductions:
        output.float().sum().backward()
    assert reductions.dtypes
    stored = {parameter.dtype for parameter in wrapped.parameters()}
    gradients = {parameter.grad.dtype for parameter in wrapped.parameters() if parameter.grad is not None}
    met = {name: part.seen for name, part in parts.items()}
    return {"met": met, "reduced": set(reductions.dtypes), "stored": stored, "gradients": gradients}


@pytest.mark.parametrize("target", ["torch", "shardwise"])
@pytest.mark.parametrize("form", FORMS)
@ranks(2)
def test_dtypes_are_those_of_fsdp1(rank: int, form: str, target: str):
    for name, fields in FIELDS.items():
        text = HEADER + FORMS[form].format(fields=fields)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 warns about the CPU and about being old
            expected = dtypes(text)
        assert dtypes(migrated(text, target)) == expected, name
