"""nn.Module's own methods and those of dictionaries, as far as they pass modules and parameters on."""

from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.planning.source.attributes import load, wrap
from shardwise.planning.source.containers import dict_items, item, list_items
from shardwise.planning.source.frames import Frame
from shardwise.planning.source.functions import Arguments
from shardwise.planning.source.values import (
    PLAIN,
    Known,
    Many,
    Mapping,
    Parameters,
    Sequence,
    Value,
    join,
    known,
)

MODULE_METHODS: dict[str, Callable[[nn.Module, Arguments, Frame], Value]] = {}


def module_method(*names: str) -> Callable[[Any], Any]:
    """Register what nn.Module's own methods of these names give."""

    def register(function: Any) -> Any:
        MODULE_METHODS.update(dict.fromkeys(names, function))
        return function

    return register


def _many(values: list[Value], *, named: bool = False) -> Value:
    element = join(values) if values else PLAIN
    pair = Value(frozenset({Sequence((PLAIN, element))})) if named else element
    return Value(frozenset({Many(pair, len(values))}))


@module_method("children")
def _children(module: nn.Module, arguments: Arguments, frame: Frame) -> Value:
    return _many([wrap(child) for child in module.children()])


@module_method("named_children")
def _named_children(module: nn.Module, arguments: Arguments, frame: Frame) -> Value:
    return _many([wrap(child) for child in module.children()], named=True)


@module_method("modules")
def _modules(module: nn.Module, arguments: Arguments, frame: Frame) -> Value:
    return _many([wrap(child) for child in module.modules()])


@module_method("named_modules")
def _named_modules(module: nn.Module, arguments: Arguments, frame: Frame) -> Value:
    return _many([wrap(child) for child in module.modules()], named=True)


@module_method("parameters")
def _parameters(module: nn.Module, arguments: Arguments, frame: Frame) -> Value:
    return Value(frozenset({Parameters(Known(module))}))


@module_method("named_parameters")
def _named_parameters(module: nn.Module, arguments: Arguments, frame: Frame) -> Value:
    return Value(frozenset({Parameters(Known(module), named=True)}))


@module_method("get_submodule", "get_parameter")
def _get_submodule(module: nn.Module, arguments: Arguments, frame: Frame) -> Value:
    value = known(module)
    name = arguments.first().only()
    for part in name.split(".") if isinstance(name, str) and name else []:
        value = load(value, part, frame)
    return value


@module_method("to", "float", "half", "bfloat16", "double", "cuda", "cpu", "eval", "train", "requires_grad_", "type")
def _itself(module: nn.Module, arguments: Arguments, frame: Frame) -> Value:
    return known(module)


def container_method(value: Value, name: str, arguments: Arguments, frame: Frame) -> Value | None:
    """`values()`, `items()`, `keys()`, `get()` and `pop()` of containers, or None for anything else."""
    if name not in ("values", "items", "keys", "get", "pop") or not value.atoms:
        return None
    rows: list[tuple[Any, Value]] = []
    for atom in value.atoms:
        if isinstance(atom, Mapping):
            rows += atom.items
        elif isinstance(atom, Known) and (by_key := dict_items(atom.object)) is not None:
            rows += by_key.items()
        elif name == "pop" and (isinstance(atom, Sequence) or list_items(getattr(atom, "object", None)) is not None):
            return item(value, PLAIN, frame)
        else:
            return None
    frame.analysis.decide(value)
    if name in ("get", "pop"):
        return join([item(value, arguments.first(), frame), *arguments.positional[1:]])
    element = join(inner for _, inner in rows) if rows else PLAIN
    key = join(known(key) for key, _ in rows) if rows else PLAIN
    shown = {"values": element, "keys": key, "items": Value(frozenset({Sequence((key, element))}))}[name]
    return Value(frozenset({Many(shown, len(rows))}), open=value.open, loops=value.loops)
