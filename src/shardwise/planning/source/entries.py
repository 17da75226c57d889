"""The public methods of a model that a script may call in place of its forward."""

import inspect
import types

from torch import nn

from shardwise.planning.source.facts import Entry, FactBook
from shardwise.planning.source.files import find_node, is_generator, underlying

_MACHINERY = (
    "torch.", "transformers.modeling_utils", "transformers.generation", "transformers.integrations",
    "transformers.utils", "transformers.trainer", "diffusers.models.modeling_utils", "diffusers.loaders",
    "diffusers.configuration_utils", "huggingface_hub", "pytorch_lightning.", "lightning.",
    "peft.mixed_model",
)  # fmt: skip
_BOOKKEEPING = (
    "reset_", "init", "tie_", "load", "save", "set_", "from_", "to_", "num_", "count_",
    "gradient_checkpointing", "resize_", "prune_", "fuse_", "unfuse_", "enable_", "disable_", "freeze",
    "unfreeze", "merge_", "unmerge_", "add_", "remove_", "register_", "prepare_inputs_for_generation",
    "configure_", "quantize", "dequantize", "push_", "export", "extra_repr", "train", "eval",
)  # fmt: skip
_ENTRIES = {"training_step", "train_step", "eval_step"}


def public_entries(model: nn.Module, book: FactBook) -> tuple[list[str], list[str]]:
    """Read the root's public methods; return those that compute, and notes on the unusable."""
    found: list[str] = []
    notes: list[str] = []
    for name in _candidates(type(model)):
        function = underlying(inspect.getattr_static(type(model), name))[0]
        node = find_node(function) if function is not None else None
        if name == "generate" and function is not None and (function.__module__ or "").startswith("transformers."):
            found.append(name)  # thousands of lines that end in self(...)
            continue
        if node is None or not book.follow(Entry(model, name)):
            continue
        if is_generator(node) or inspect.iscoroutinefunction(function):
            notes.append(f"{name}() computes step by step as its caller asks; it cannot be an entry point")
        else:
            found.append(name)
    return found, notes


def _candidates(cls: type) -> list[str]:
    names: dict[str, None] = {}
    for base in cls.__mro__:
        module = base.__module__ or ""
        for name, attribute in vars(base).items():
            if name in names or name.startswith("_") or name == "forward" or base is nn.Module or base is object:
                continue
            if hasattr(nn.Module, name) or not isinstance(attribute, types.FunctionType):
                continue
            if name != "generate" and (module.startswith(_MACHINERY) or ".generation" in module):
                continue
            if name in _ENTRIES or not name.startswith(_BOOKKEEPING):
                names[name] = None
    return list(names)
