"""Python's built-in functions and nn.Module's own methods, as far as they pass modules and parameters on."""

import copy
import functools
import inspect
import itertools
import operator
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.planning.source.attributes import has_attribute, load, wrap
from shardwise.planning.source.containers import walk
from shardwise.planning.source.frames import Frame
from shardwise.planning.source.functions import Arguments, defining_class
from shardwise.planning.source.values import (
    PLAIN,
    Known,
    Many,
    Mapping,
    Partial,
    Sequence,
    Source,
    Super,
    Unknown,
    Value,
    join,
    known,
    opaque,
)

Builtin = Callable[[Arguments, Frame], Value]
BUILTINS: dict[Any, Builtin] = {}
WITHOUT_EFFECT = {
    "print", "id", "hash", "repr", "str", "format", "setattr", "delattr", "deepcopy", "copy", "warn",
    "warning", "warning_once", "info", "debug", "error", "exception", "append", "extend", "insert", "add",
    "update", "issubclass",
}  # fmt: skip


def builtin(*functions: Any) -> Callable[[Builtin], Builtin]:
    """Register what calls of these real functions give."""

    def register(function: Builtin) -> Builtin:
        BUILTINS.update(dict.fromkeys(functions, function))
        return function

    return register


@builtin(list, tuple, set, frozenset, iter, reversed, sorted, copy.copy, copy.deepcopy)
def _same(arguments: Arguments, frame: Frame) -> Value:
    return arguments.first() if arguments.positional else Value(frozenset({Sequence(())}))


@builtin(filter)
def _filter(arguments: Arguments, frame: Frame) -> Value:
    return arguments.positional[-1] if arguments.positional else PLAIN


@builtin(dict)
def _dict(arguments: Arguments, frame: Frame) -> Value:
    if arguments.positional or arguments.spread:
        return join([*arguments.positional, PLAIN, Value(frozenset({Mapping(tuple(arguments.keywords.items()))}))])
    return Value(frozenset({Mapping(tuple(arguments.keywords.items()))}))


@builtin(next)
def _next(arguments: Arguments, frame: Frame) -> Value:
    found = [walk(arguments.first(), frame).element, *arguments.positional[1:]]
    return join(found)


@builtin(len)
def _len(arguments: Arguments, frame: Frame) -> Value:
    value = arguments.first()
    count = walk(value, frame).count if value.atoms and not value.open else None
    if count is not None:
        return known(count, settings=value.settings)
    return opaque(value, source=Source.CONTENT if value.source == Source.DYNAMIC else Source.PLAIN)


@builtin(range)
def _range(arguments: Arguments, frame: Frame) -> Value:
    for value in arguments.positional:
        frame.analysis.decide(value)
    numbers = [value.only() for value in arguments.positional]
    element = opaque(*arguments.positional, source=_content(arguments.positional))
    if not numbers or not all(type(number) is int for number in numbers):
        return Value(frozenset({Many(element)}), source=element.source)
    try:
        return Value(frozenset({Many(element, len(range(*numbers)))}))
    except (TypeError, ValueError, OverflowError):
        return Value(frozenset({Many(element)}))


def _content(values: list[Value]) -> Source:
    top = max((value.source for value in values), default=Source.PLAIN)
    return Source.CONTENT if top >= Source.CONTENT else Source.PLAIN


@builtin(enumerate)
def _enumerate(arguments: Arguments, frame: Frame) -> Value:
    value = arguments.first()
    inner = walk(value, frame)
    pair = Value(frozenset({Sequence((PLAIN, inner.element))}))
    return Value(frozenset({Many(pair, inner.count)}), source=_dynamic(value), loops=value.loops)


def _dynamic(*values: Value) -> Source:
    return Source.DYNAMIC if any(value.source == Source.DYNAMIC for value in values) else Source.PLAIN


@builtin(zip)
def _zip(arguments: Arguments, frame: Frame) -> Value:
    inner = [walk(value, frame) for value in arguments.positional]
    counts = [one.count for one in inner if one.count is not None]
    row = Value(frozenset({Sequence(tuple(one.element for one in inner))}))
    return Value(frozenset({Many(row, min(counts, default=None))}), source=_dynamic(*arguments.positional))


@builtin(itertools.chain, itertools.product, itertools.islice, itertools.cycle, itertools.repeat)
def _chain(arguments: Arguments, frame: Frame) -> Value:
    elements = [walk(value, frame).element for value in arguments.positional if value.atoms]
    return Value(frozenset({Many(join(elements) if elements else PLAIN)}))


@builtin(getattr, inspect.getattr_static)
def _getattr(arguments: Arguments, frame: Frame) -> Value:
    if len(arguments.positional) < 2:
        return PLAIN
    thing, name = arguments.positional[0], arguments.positional[1]
    frame.analysis.decide(name)
    default = arguments.positional[2:3]
    names = [atom.object for atom in name.atoms if isinstance(atom, Known) and isinstance(atom.object, str)]
    if names and not name.open:
        found = [_attribute(thing, one, default, frame) for one in names]
        return join(found).like(picked=name.source >= Source.ARGUMENT and len(found) > 1, loops=name.loops)
    modules = [atom.object for atom in thing.atoms if isinstance(atom, Known) and isinstance(atom.object, nn.Module)]
    fits = _name_filter(name)
    children = [
        wrap(child) for module in modules for key, child in module._modules.items() if child is not None and fits(key)
    ]
    picked = name.source >= Source.ARGUMENT
    return join([*children, *default]).like(picked=picked, loops=name.loops, open=True) if children else PLAIN


def _name_filter(name: Value) -> Callable[[str], Any]:
    """An f-string with unknown parts is evaluated to the pattern of what it may become."""
    patterns = [atom.object for atom in name.atoms if isinstance(atom, Known) and isinstance(atom.object, re.Pattern)]
    return patterns[0].fullmatch if len(patterns) == 1 else bool


def _attribute(thing: Value, name: str, default: list[Value], frame: Frame) -> Value:
    objects = [atom.object for atom in thing.atoms if isinstance(atom, Known)]
    if default and objects and not thing.open and not any(has_attribute(one, name) for one in objects):
        return default[0]
    return load(thing, name, frame)


@builtin(hasattr)
def _hasattr(arguments: Arguments, frame: Frame) -> Value:
    if len(arguments.positional) != 2:
        return PLAIN
    thing, name = (value.only() for value in arguments.positional)
    if thing is Unknown or not isinstance(name, str):
        return PLAIN
    return known(has_attribute(thing, name))


@builtin(isinstance)
def _isinstance(arguments: Arguments, frame: Frame) -> Value:
    if len(arguments.positional) != 2:
        return PLAIN
    thing, kind = (value.only() for value in arguments.positional)
    # A metaclass of the model's own could run code here; ABCMeta and type do not matter.
    if thing is Unknown or type(kind) is not type or not isinstance(thing, nn.Module):
        return PLAIN
    return known(issubclass(type(thing), kind))


@builtin(super)
def _super(arguments: Arguments, frame: Frame) -> Value:
    if len(arguments.positional) == 2:
        cls, receiver = (value.only() for value in arguments.positional)
    else:
        cls, receiver = defining_class(frame), frame.receiver
    if cls is Unknown or cls is None or receiver is Unknown:
        return PLAIN
    return Value(frozenset({Super(Known(cls), Known(receiver))}))


@builtin(functools.partial)
def _partial(arguments: Arguments, frame: Frame) -> Value:
    if not arguments.positional:
        return PLAIN
    given = Partial(arguments.positional[0], tuple(arguments.positional[1:]), tuple(arguments.keywords.items()))
    return Value(frozenset({given}))


@builtin(int, float, bool, str, abs, round, min, max, sum, any, all, operator.itemgetter)
def _number(arguments: Arguments, frame: Frame) -> Value:
    values = [
        *arguments.positional,
        *(walk(value, frame).element for value in arguments.positional if value.atoms),
    ]
    top = max((value.source for value in values), default=Source.PLAIN)
    return opaque(*arguments.positional, source=Source.CONTENT if top >= Source.TENSOR else top)


@builtin(type, callable, id, print, repr, hash, issubclass, vars, dir)
def _about(arguments: Arguments, frame: Frame) -> Value:
    return PLAIN
