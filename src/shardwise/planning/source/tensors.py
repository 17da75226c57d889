"""What torch functions and tensor methods do to a value: does the result depend on a tensor's content?"""

import random
import types
from typing import Any

import torch

from shardwise.planning.source.functions import Arguments
from shardwise.planning.source.values import PLAIN, Many, Source, Value, opaque

_DYNAMIC = {"nonzero", "masked_select", "unique", "unique_consecutive", "argwhere"}
_CONTENT = {
    "item", "tolist", "numpy", "any", "all", "equal", "allclose", "isclose", "is_nonzero",
    "count_nonzero", "bincount", "eq", "ne", "gt", "ge", "lt", "le", "greater", "greater_equal", "less",
    "less_equal", "isnan", "isinf", "isin",
}  # fmt: skip
# The lengths of what they return are arguments, and may come from the data: `tokens.split(counts.tolist())`.
_INTO_PARTS = {"split", "split_with_sizes", "tensor_split", "unsafe_split", "hsplit", "vsplit"}
_TO_LENGTH = {"narrow", "repeat_interleave"}
_SIZES = {
    "size",
    "numel",
    "dim",
    "nelement",
    "ndimension",
    "element_size",
    "stride",
    "__len__",
    "storage_offset",
}
# A value nobody knows, on which such a method is called, is a tensor: no container or string has it.
_TENSOR_METHODS = {name for name in dir(torch.Tensor) if not name.startswith("_")} - {
    name for kind in (dict, list, str, set, torch.nn.Module) for name in dir(kind)
} | {"to", "cpu", "cuda", "float", "half", "double", "bfloat16"}
_FROM_LIKENESS = {"to", "type_as", "view_as", "expand_as", "reshape_as", "is_same_size"}
_WITHOUT_CONTENT = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}
_PLAIN_MODULES = (
    "torch.jit",
    "torch.compiler",
    "torch.cuda",
    "torch.backends",
    "torch.distributed",
    "torch.overrides",
)


def is_torch_function(thing: Any) -> bool:
    """Whether a callable is torch's own and so never looked into."""
    if isinstance(thing, types.BuiltinFunctionType):
        return "VariableFunctions" in thing.__qualname__ or (thing.__module__ or "").startswith("torch")
    module = getattr(thing, "__module__", None)
    return isinstance(module, str) and (module == "torch" or module.startswith("torch."))


def is_random_function(thing: Any) -> bool:
    """Whether a callable is of Python's or numpy's random numbers, which every rank draws for itself."""
    if isinstance(getattr(thing, "__self__", None), random.Random):
        return True
    return (getattr(thing, "__module__", None) or "").startswith(("random", "numpy.random"))


def reads_no_content(name: str) -> bool:
    """Whether a torch function looks only at shapes, dtypes and devices of its arguments."""
    return name.endswith("_like") or name.startswith(("is_", "get_", "set_")) or name in _WITHOUT_CONTENT


def torch_result(name: str, arguments: Arguments) -> Value:
    """What a torch function returns."""
    values = arguments.values()
    if name in ("rand", "rand_like", "bernoulli", "randperm", "randint"):
        return opaque(*values, source=Source.RANDOM)
    if name in _DYNAMIC or (name == "where" and len(values) == 1):
        return opaque(*values, source=Source.DYNAMIC)
    if (cut := _cut_by_data(name, values)) is not None:
        return cut
    if name in _CONTENT:
        return opaque(*values, source=Source.CONTENT)
    if name.startswith(("is_", "get_", "has_", "finfo", "iinfo", "device")):
        return PLAIN
    return opaque(*values, source=Source.TENSOR)


def is_plain_torch(function: Any) -> bool:
    """Functions of torch that answer about the process, never about a tensor."""
    return (getattr(function, "__module__", None) or "").startswith(_PLAIN_MODULES)


def method_reads_content(name: str) -> bool:
    """Whether calling `tensor.name(...)` computes with the tensor."""
    return name not in _SIZES and not name.startswith(("is_", "new_", "get_device", "requires_grad", "register_"))


def method_reads_arguments(name: str) -> bool:
    """Whether `anything.name(tensor)` computes with its argument; `x.to(weight)` only looks at its dtype."""
    return name not in _FROM_LIKENESS


def method_result(receiver: Value, name: str, arguments: Arguments) -> Value:
    """What a method of an unknown value returns, which is taken for a tensor if its name is a tensor's."""
    source = receiver.source
    if name in _SIZES:
        return opaque(receiver, source=Source.CONTENT if source == Source.DYNAMIC else Source.PLAIN)
    top = max([source, *(value.source for value in arguments.values())])
    if source == Source.PLAIN:
        return opaque(receiver, *arguments.values(), source=min(top, Source.ARGUMENT))
    if name in _DYNAMIC:
        return opaque(receiver, source=Source.DYNAMIC)
    if (cut := _cut_by_data(name, [receiver, *arguments.values()])) is not None:
        return cut
    if name in ("tolist", "numpy") and source == Source.DYNAMIC:
        return opaque(receiver)
    if name in _CONTENT:
        return opaque(receiver, source=Source.CONTENT)
    if name.startswith(("is_", "has_", "get_")):
        return opaque(receiver, source=min(source, Source.ARGUMENT))
    if name in _TENSOR_METHODS:
        return opaque(receiver, source=max(source, Source.TENSOR))
    return opaque(receiver, source=source)


def _cut_by_data(name: str, values: list[Value]) -> Value | None:
    """What cutting a tensor (the first value) returns where the data decides the lengths."""
    if not any(value.source >= Source.CONTENT for value in values[1:]):
        return None
    part = opaque(*values, source=Source.DYNAMIC)
    if name in _INTO_PARTS:
        return Value(frozenset({Many(part)}))
    return part if name in _TO_LENGTH else None


def compare(left: Value, right: Value) -> Source:
    """What a comparison of two unknown values depends on."""
    top = max(left.source, right.source)
    return Source.CONTENT if top >= Source.TENSOR else top


TENSOR_TYPES = (torch.Tensor,)
