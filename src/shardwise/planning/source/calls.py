"""Calls: arguments, builtins, methods of modules, and the user's functions."""

import ast
import copy
import functools
import inspect
import itertools
import operator
import re
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardwise.planning.calls import Fact, is_holder
from shardwise.planning.source.attributes import (
    contents,
    elements,
    has_attribute,
    is_random_function,
    is_torch_function,
    item,
    load,
    load_from,
    torch_result,
    walk,
    wrap,
)
from shardwise.planning.source.functions import Arguments, defining_class, enter_closure, enter_function, underlying
from shardwise.planning.source.values import (
    ARGUMENT,
    PLAIN,
    TENSOR,
    Bound,
    Closure,
    Frame,
    Known,
    Many,
    Mapping,
    Origin,
    Partial,
    Sequence,
    Super,
    Unknown,
    Value,
    handles,
    join,
    just,
    known,
    leaves,
    opaque,
)


def evaluate_arguments(node: ast.Call, frame: Frame) -> Arguments:
    """The arguments of a call in the code, with `*` and `**` unpacked where their content is known."""
    arguments = Arguments()
    for argument in node.args:
        if isinstance(argument, ast.Starred):
            _unpack(frame.evaluate(argument.value), arguments)
        else:
            arguments.positional.append(frame.evaluate(argument))
    for keyword in node.keywords:
        value = frame.evaluate(keyword.value)
        if keyword.arg is not None:
            arguments.keywords[keyword.arg] = value
        else:
            _unpack(value, arguments)
    return arguments


def _unpack(value: Value, arguments: Arguments) -> None:
    held = contents(next(iter(value.atoms))) if len(value.atoms) == 1 else None
    arguments.spread |= value.open or not isinstance(held, Sequence | Mapping)
    if isinstance(held, Sequence):
        arguments.positional += held.items
    elif isinstance(held, Mapping):
        arguments.keywords.update({key: inner for key, inner in held.items if isinstance(key, str)})
    elif value.atoms:  # modules may hide in there: keep them where a callee can find them
        arguments.keywords["*"] = value


BUILTINS: dict[Any, Callable[[Arguments, Frame], Value]] = {}
WITHOUT_EFFECT = {
    "print", "id", "hash", "repr", "str", "format", "setattr", "delattr", "deepcopy", "copy", "warn",
    "warning", "warning_once", "info", "debug", "error", "exception", "append", "extend", "insert", "add",
    "update", "issubclass",
}  # fmt: skip


@handles(BUILTINS, list, tuple, set, frozenset, iter, reversed, sorted, copy.copy, copy.deepcopy)
def _same(arguments: Arguments, frame: Frame) -> Value:
    return arguments.first() if arguments.positional else just(Sequence(()))


@handles(BUILTINS, filter)
def _filter(arguments: Arguments, frame: Frame) -> Value:
    return arguments.positional[-1] if arguments.positional else PLAIN


@handles(BUILTINS, dict)
def _dict(arguments: Arguments, frame: Frame) -> Value:
    made = just(Mapping(tuple(arguments.keywords.items())))
    return join([*arguments.positional, PLAIN, made]) if arguments.positional or arguments.spread else made


@handles(BUILTINS, next)
def _next(arguments: Arguments, frame: Frame) -> Value:
    return join([walk(arguments.first(), frame).element, *arguments.positional[1:]])


@handles(BUILTINS, len)
def _len(arguments: Arguments, frame: Frame) -> Value:
    value = arguments.first()
    count = walk(value, frame).count if value.atoms and not value.open else None
    if count is not None:
        return known(count)
    return opaque(value, source=Origin.CONTENT if value.source == Origin.DYNAMIC else Origin.PLAIN)


@handles(BUILTINS, range)
def _range(arguments: Arguments, frame: Frame) -> Value:
    numbers = [value.only() for value in arguments.positional]
    source = Origin.CONTENT if _top(arguments) >= Origin.CONTENT else Origin.PLAIN
    element = opaque(*arguments.positional, source=source)
    try:
        return just(Many(element, len(range(*numbers))))
    except (TypeError, ValueError, OverflowError):
        return Value(frozenset({Many(element)}), source=source)


@handles(BUILTINS, enumerate)
def _enumerate(arguments: Arguments, frame: Frame) -> Value:
    value = arguments.first()
    inner = walk(value, frame)
    pair = just(Sequence((PLAIN, inner.element)))
    return Value(frozenset({Many(pair, inner.count)}), source=_dynamic(value), loops=value.loops)


def _dynamic(*values: Value) -> Origin:
    return Origin.DYNAMIC if any(value.source == Origin.DYNAMIC for value in values) else Origin.PLAIN


@handles(BUILTINS, zip)
def _zip(arguments: Arguments, frame: Frame) -> Value:
    inner = [walk(value, frame) for value in arguments.positional]
    counts = [one.count for one in inner if one.count is not None]
    row = just(Sequence(tuple(one.element for one in inner)))
    return Value(frozenset({Many(row, min(counts, default=None))}), source=_dynamic(*arguments.positional))


@handles(BUILTINS, itertools.chain, itertools.product, itertools.islice, itertools.cycle, itertools.repeat)
def _chain(arguments: Arguments, frame: Frame) -> Value:
    found = [walk(value, frame).element for value in arguments.positional if value.atoms]
    return just(Many(join(found) if found else PLAIN))


@handles(BUILTINS, getattr, inspect.getattr_static)
def _getattr(arguments: Arguments, frame: Frame) -> Value:
    if len(arguments.positional) < 2:
        return PLAIN
    thing, name, *default = arguments.positional
    objects = [atom.object for atom in name.atoms if isinstance(atom, Known)]
    names = [one for one in objects if isinstance(one, str)]
    if names and not name.open:
        found = [_attribute(thing, one, default, frame) for one in names]
        return join(found).like(picked=name.source >= Origin.ARGUMENT and len(found) > 1, loops=name.loops)
    # An f-string with unknown parts is evaluated to the pattern of what it may become.
    patterns = [one for one in objects if isinstance(one, re.Pattern)]
    fits: Callable[[str], Any] = patterns[0].fullmatch if len(patterns) == 1 else bool
    modules = [atom.object for atom in thing.atoms if isinstance(atom, Known) and isinstance(atom.object, nn.Module)]
    children = [
        wrap(child) for module in modules for key, child in module._modules.items() if child is not None and fits(key)
    ]
    picked = name.source >= Origin.ARGUMENT
    return join([*children, *default]).like(picked=picked, loops=name.loops, open=True) if children else PLAIN


def _attribute(thing: Value, name: str, default: list[Value], frame: Frame) -> Value:
    objects = [atom.object for atom in thing.atoms if isinstance(atom, Known)]
    if default and objects and not thing.open and not any(has_attribute(one, name) for one in objects):
        return default[0]
    return load(thing, name, frame)


@handles(BUILTINS, hasattr)
def _hasattr(arguments: Arguments, frame: Frame) -> Value:
    thing, name = _two(arguments)
    return known(has_attribute(thing, name)) if thing is not Unknown and isinstance(name, str) else PLAIN


@handles(BUILTINS, isinstance)
def _isinstance(arguments: Arguments, frame: Frame) -> Value:
    thing, kind = _two(arguments)
    # A metaclass of the model's own could run code here; ABCMeta and type do not matter.
    is_plain = type(kind) is type and isinstance(thing, nn.Module)
    return known(issubclass(type(thing), kind)) if is_plain else PLAIN


def _two(arguments: Arguments) -> tuple[Any, Any]:
    """Two arguments as real objects."""
    objects = [value.only() for value in arguments.positional]
    return (objects[0], objects[1]) if len(objects) == 2 else (Unknown, Unknown)


@handles(BUILTINS, super)
def _super(arguments: Arguments, frame: Frame) -> Value:
    cls, receiver = _two(arguments) if arguments.positional else (defining_class(frame), frame.receiver)
    return PLAIN if cls in (Unknown, None) or receiver is Unknown else just(Super(Known(cls), Known(receiver)))


@handles(BUILTINS, functools.partial)
def _partial(arguments: Arguments, frame: Frame) -> Value:
    return just(Partial(arguments.first(), tuple(arguments.positional[1:]), tuple(arguments.keywords.items())))


@handles(BUILTINS, int, float, bool, str, abs, round, min, max, sum, any, all, operator.itemgetter)
def _number(arguments: Arguments, frame: Frame) -> Value:
    inner = [walk(value, frame).element.source for value in arguments.positional if value.atoms]
    top = max([_top(arguments), *inner])
    return opaque(*arguments.positional, source=Origin.CONTENT if top >= Origin.TENSOR else top)


@handles(BUILTINS, type, callable, id, print, repr, hash, issubclass, vars, dir)
def _about(arguments: Arguments, frame: Frame) -> Value:
    return PLAIN


def _many(things: Iterable[Any], *, named: bool = False) -> Value:
    values = [wrap(thing) for thing in things]
    element = join(values) if values else PLAIN
    return just(Many(just(Sequence((PLAIN, element))) if named else element, len(values)))


def _get_submodule(module: nn.Module, arguments: Arguments, frame: Frame) -> Value:
    name = arguments.first().only()
    parts = name.split(".") if isinstance(name, str) and name else []
    return functools.reduce(lambda value, part: load(value, part, frame), parts, known(module))


MODULE_METHODS: dict[str, Callable[[nn.Module, Arguments, Frame], Value]] = {
    "children": lambda module, *_: _many(module.children()),
    "named_children": lambda module, *_: _many(module.children(), named=True),
    "modules": lambda module, *_: _many(module.modules()),
    "named_modules": lambda module, *_: _many(module.modules(), named=True),
    "parameters": lambda module, *_: _many(module.parameters()),
    "named_parameters": lambda module, *_: _many(module.parameters(), named=True),
    **dict.fromkeys(("get_submodule", "get_parameter"), _get_submodule),
    **dict.fromkeys(
        ("to", "float", "half", "bfloat16", "double", "cuda", "cpu", "eval", "train", "requires_grad_", "type"),
        lambda module, *_: known(module),
    ),
}
"""What nn.Module's own methods give."""


def container_method(value: Value, name: str, arguments: Arguments, frame: Frame) -> Value | None:
    """`values()`, `items()`, `keys()`, `get()` and `pop()` of containers, or None for anything else."""
    if name not in ("values", "items", "keys", "get", "pop") or not value.atoms:
        return None
    held = [contents(atom) for atom in value.atoms]
    if name == "pop" and any(isinstance(one, Sequence) for one in held):
        return item(value, PLAIN, frame)
    if not all(isinstance(one, Mapping) for one in held):
        return None
    if name in ("get", "pop"):
        return join([item(value, arguments.first(), frame), *arguments.positional[1:]])
    rows = [row for one in held if isinstance(one, Mapping) for row in one.items]
    element = join(inner for _, inner in rows) if rows else PLAIN
    key = join(known(key) for key, _ in rows) if rows else PLAIN
    shown = {"values": element, "keys": key, "items": just(Sequence((key, element)))}[name]
    return Value(frozenset({Many(shown, len(rows))}), open=value.open, loops=value.loops)


def invoke(callee: Value, arguments: Arguments, frame: Frame) -> Value:
    """`callee(*arguments)`."""
    if not callee.atoms:
        return hand_over(arguments, frame)
    results = [_invoke_atom(atom, callee, arguments, frame) for atom in callee.atoms]
    # Where some callee is known, the unknown rest is a fallback of the same kind.
    return join([*results, _unknown_result(arguments)] if callee.open else results)


def _top(arguments: Arguments) -> Origin:
    return max((value.source for value in arguments.values()), default=Origin.PLAIN)


def _unknown_result(arguments: Arguments) -> Value:
    return opaque(*arguments.values(), source=min(_top(arguments), Origin.ARGUMENT))


def _invoke_atom(atom: Any, callee: Value, arguments: Arguments, frame: Frame) -> Value:
    with frame.under(callee.picked and isinstance(atom, Closure | Bound)):
        if isinstance(atom, Closure):
            return enter_closure(atom, arguments, frame)
        if isinstance(atom, Bound):
            return _invoke_bound(atom, callee, arguments, frame)
        if isinstance(atom, Partial):
            keywords = {**dict(atom.keywords), **arguments.keywords}
            merged = Arguments([*atom.positional, *arguments.positional], keywords, arguments.spread)
            return invoke(atom.callee.like(picked=atom.callee.picked or callee.picked), merged, frame)
        if isinstance(atom, Sequence):  # a slice of a Sequential is a new Sequential: its items are called here
            return join([TENSOR, *(invoke(inner, arguments, frame) for inner in atom.items)])
        return _invoke_known(atom.object, callee, arguments, frame) if isinstance(atom, Known) else PLAIN


def _invoke_known(thing: Any, callee: Value, arguments: Arguments, frame: Frame) -> Value:
    if isinstance(thing, nn.Module):
        return call_module(thing, callee, arguments, frame)
    try:
        special = BUILTINS.get(thing)
    except TypeError:
        special = None
    if special is not None:
        return special(arguments, frame)
    if isinstance(thing, functools.partial):
        positional = tuple(known(value) for value in thing.args)
        keywords = tuple((name, known(value)) for name, value in thing.keywords.items())
        return _invoke_atom(Partial(known(thing.func), positional, keywords), callee, arguments, frame)
    if isinstance(thing, type):
        return _construct(thing, arguments, frame)
    if is_random_function(thing):
        return opaque(*arguments.values(), source=Origin.RANDOM)
    if is_torch_function(thing):
        return _invoke_torch(getattr(thing, "__name__", ""), arguments, frame)
    if isinstance(thing, types.FunctionType | types.MethodType) or hasattr(thing, "__wrapped__"):
        return _invoke_function(thing, arguments, frame)
    method = inspect.getattr_static(type(thing), "__call__", None)
    if isinstance(method, types.FunctionType):
        return _invoke_bound(Bound(method, Known(thing), "__call__"), callee, arguments, frame)
    return hand_over(arguments, frame, name=getattr(thing, "__name__", ""))


def call_module(module: nn.Module, callee: Value, arguments: Arguments, frame: Frame) -> Value:
    """`module(...)`; its forward is read apart, and here too when it is handed modules or parameters."""
    frame.record_call(module, callee)
    if module not in frame.analysis.places:
        hand_over(arguments, frame)
        for inner in elements(module) or ():  # a Sequential made on the fly
            invoke(inner, arguments, frame)
    elif frame.is_interesting(arguments.values()):
        if type(module).__module__.startswith("torch.nn."):
            hand_over(arguments, frame)
        else:
            _enter_forward(module, callee, arguments, frame)
    return TENSOR


def _enter_forward(module: nn.Module, callee: Value, arguments: Arguments, frame: Frame) -> None:
    counts = dict(frame.analysis.counts)
    with frame.under(callee.picked):
        for atom in load_from(module, "forward", frame).atoms:
            if isinstance(atom, Bound):
                given, chain = arguments.after(known(module)), (*frame.chain, module)
                enter_function(atom.function, given, frame, receiver=module, chain=chain, through=callee)
    frame.analysis.counts = counts  # the module's own reading counts what it calls


def _invoke_bound(bound: Bound, callee: Value, arguments: Arguments, frame: Frame) -> Value:
    receiver, name = bound.receiver.object, bound.name
    given = arguments.after(known(receiver))
    if isinstance(receiver, nn.Module):
        if name == "__call__":
            return TENSOR if receiver is frame.chain[-1] else call_module(receiver, callee, arguments, frame)
        if underlying(bound.function)[0] is getattr(nn.Module, name, None):
            special = MODULE_METHODS.get(name)
            return special(receiver, arguments, frame) if special is not None else PLAIN
        return _invoke_method(bound, callee, given, frame)
    result = None
    if frame.is_interesting(given.values()):
        result = enter_function(bound.function, given, frame, receiver=receiver)
    return result if result is not None else hand_over(arguments, frame, name=name)


def _invoke_method(bound: Bound, callee: Value, given: Arguments, frame: Frame) -> Value:
    """A method of a module other than `__call__`: entered without its hooks."""
    analysis, module = frame.analysis, bound.receiver.object
    own = module is frame.chain[-1] or module not in analysis.places
    chain = frame.chain if own else (*frame.chain, module)
    before = analysis.activity
    result = enter_function(bound.function, given, frame, receiver=module, chain=chain, through=callee)
    if result is None:
        return hand_over(Arguments(given.positional[1:], given.keywords, given.spread), frame)
    if analysis.activity > before and not own and id(module) not in analysis.places.covered(frame.chain):
        analysis.add(Fact("method", frame.chain, module, bound.name, frame.is_conditional))
    return result


def _invoke_function(function: Any, arguments: Arguments, frame: Frame) -> Value:
    if not frame.is_interesting(arguments.values()):
        return _unknown_result(arguments)
    first, name = arguments.first().only(), getattr(function, "__name__", "")
    if isinstance(first, nn.Module) and any(vars(cls).get(name) is function for cls in type(first).__mro__):
        # Base.forward(self, x)
        return _invoke_method(Bound(function, Known(first), name), arguments.first(), arguments, frame)
    result = enter_function(function, arguments, frame)
    return result if result is not None else hand_over(arguments, frame)


def _invoke_torch(name: str, arguments: Arguments, frame: Frame) -> Value:
    if name == "checkpoint_sequential":
        for leaf in leaves(arguments.first()):
            for inner in (elements(leaf.object) or ()) if isinstance(leaf, Known) else ():
                invoke(inner, Arguments(), frame)
        return TENSOR
    if not (name.endswith("_like") or name.startswith(("is_", "get_", "set_", "has_torch_function"))):
        hand_over(arguments, frame)
    return torch_result(name, arguments)


def hand_over(arguments: Arguments, frame: Frame, *, name: str = "") -> Value:
    """A function nobody can look into gets these: it may call modules and functions, and reads parameters."""
    if name not in WITHOUT_EFFECT:
        for position, value in enumerate(arguments.positional):
            _hand_over_one(value, Arguments(arguments.positional[position + 1 :], spread=True), frame)
        for value in arguments.keywords.values():
            _hand_over_one(value, Arguments(spread=True), frame)
    return _unknown_result(arguments)


def _hand_over_one(value: Value, rest: Arguments, frame: Frame) -> None:
    for leaf in leaves(value):
        if isinstance(leaf, Closure):
            enter_closure(leaf, rest, frame)
        elif isinstance(leaf, Bound):
            if isinstance(leaf.receiver.object, nn.Module) and leaf.receiver.object in frame.analysis.places:
                _invoke_bound(leaf, value, rest, frame)
        elif isinstance(leaf.object, nn.Module) and leaf.object is not frame.chain[-1]:
            if not is_holder(leaf.object):
                frame.record_call(leaf.object, value)
            for inner in (elements(leaf.object) or ()) if is_holder(leaf.object) else ():
                if isinstance(inner.only(), nn.Module):
                    frame.record_call(inner.only(), inner.like(picked=value.picked))
    frame.consume(value)


def _construct(cls: type, arguments: Arguments, frame: Frame) -> Value:
    """An object is made. Made-up Sequentials are lists of what they hold; the rest is opaque."""
    if issubclass(cls, nn.Sequential | nn.ModuleList):
        items = tuple(arguments.positional)
        if len(items) == 1 and not isinstance(items[0].only(), nn.Module):
            return items[0]
        return just(Sequence(items))
    if issubclass(cls, torch.Tensor):
        for value in arguments.values():
            frame.consume(value)
        return TENSOR
    return ARGUMENT if _top(arguments) or frame.is_interesting(arguments.values()) else PLAIN
