"""Functions that rewritten programs carry along, assembled from the texts beside this file."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from importlib import resources

from shardwise.source.syntax import canonical

_MARK = re.compile(r"[ ]*#@(?P<condition>[\w!&|()]+)$")
_NAME = re.compile(r"\b[A-Za-z_]\w*\b")

IMPORTS = {
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "CheckpointWrapper": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "DTensor": "torch.distributed.tensor",
    "DeviceMesh": "torch.distributed.device_mesh",
    "FSDPModule": "torch.distributed.fsdp",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "OffloadPolicy": "torch.distributed.fsdp",
    "ShardingStrategy": "torch.distributed.fsdp",
    "StateDictOptions": "torch.distributed.checkpoint.state_dict",
    "StateDictType": "torch.distributed.fsdp",
    "contextlib": "",
    "dataclasses": "",
    "dist": "torch.distributed",
    "distribute_tensor": "torch.distributed.tensor",
    "fully_shard": "torch.distributed.fsdp",
    "functools": "",
    "get_model_state_dict": "torch.distributed.checkpoint.state_dict",
    "get_optimizer_state_dict": "torch.distributed.checkpoint.state_dict",
    "init_device_mesh": "torch.distributed.device_mesh",
    "register_optimizer_step_pre_hook": "torch.optim.optimizer",
    "set_model_state_dict": "torch.distributed.checkpoint.state_dict",
    "set_optimizer_state_dict": "torch.distributed.checkpoint.state_dict",
    "sw": "shardwise",
    "torch": "",
    "weakref": "",
}
"""Names that emitted code uses, and the module each comes from; empty where the name is a module itself."""
ORIGINS = {
    name: {"dist": "torch.distributed", "sw": "shardwise"}.get(name) or (f"{module}.{name}" if module else name)
    for name, module in IMPORTS.items()
}
"""The public name that each of them stands for."""
_UNMISTAKABLE = {"CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy"}
AS = {"dist": "import torch.distributed as dist", "sw": "import shardwise as sw"}


@functools.cache
def _template() -> str:
    files = [resources.files(__package__ or "").joinpath(f"{name}.txt") for name in ("carried", "state")]
    return "\n\n\n".join(file.read_text(encoding="utf-8").strip("\n") for file in files)


@functools.cache
def functions() -> tuple[str, ...]:
    """The names of all functions there are."""
    return tuple(dict.fromkeys(re.findall(r"^(?:def|class) (\w+)", _template(), re.MULTILINE)))


def is_ours(name: str, origin: str | None) -> bool:
    """Whether a name of a file, imported from `origin`, is the one emitted code means.

    Packages that run on several releases of torch re-export FSDP2's classes under names nobody else uses.
    """
    if not origin:
        return False
    return canonical(origin) == ORIGINS[name] or (name in _UNMISTAKABLE and origin.endswith(f".{name}"))


def assemble(wanted: Iterable[str], features: Iterable[str]) -> list[tuple[str, str]]:
    """The functions asked for and those they call, as (name, text), each before the ones that use it are needed.

    Args:
        wanted: Names of functions.
        features: Which of the marked lines to keep.
    """
    text = _select(_template(), frozenset(features))
    pieces = {name: piece for piece in re.split(r"\n\n\n(?=def |class |@)", text.strip()) for name in _defined(piece)}
    found: dict[str, str] = {}
    waiting = list(wanted)
    while waiting:
        name = waiting.pop(0)
        if name not in found:
            found[name] = pieces[name]
            waiting += [used for used in dict.fromkeys(_NAME.findall(pieces[name])) if used in pieces]
    return [(name, found[name]) for name in pieces if name in found]


def names_used(text: str) -> list[str]:
    """The names in a text that need an import, in order of first use."""
    words = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    return [name for name in IMPORTS if name in words]


def _defined(piece: str) -> list[str]:
    return re.findall(r"^(?:def|class) (\w+)", piece, re.MULTILINE)


def _select(text: str, features: frozenset[str]) -> str:
    lines = []
    for line in text.split("\n"):
        mark = _MARK.search(line)
        if mark is None:
            lines.append(line)
        elif _holds(mark["condition"], features):
            lines.append(line[: mark.start()])
    return re.sub(r":\n\n(?! +def )", ":\n", "\n".join(lines))


def _holds(condition: str, features: frozenset[str]) -> bool:
    """`a&!b|c` of features, brackets allowed: our own text, so small a language needs no parser."""
    python = _NAME.sub(lambda word: str(word.group() in features), condition)
    python = python.replace("!", " not ").replace("&", " and ").replace("|", " or ")
    return bool(_evaluate(ast.parse(python.strip(), mode="eval").body))


def _evaluate(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=bool(value)):
            return value
        case ast.UnaryOp(operand=operand):
            return not _evaluate(operand)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(map(_evaluate, values))
        case ast.BoolOp(values=values):
            return any(map(_evaluate, values))
    raise AssertionError(ast.dump(node))
