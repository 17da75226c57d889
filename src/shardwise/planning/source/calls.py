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
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from shardwise.planning.calls import is_holder
from shardwise.planning.source import attributes
from shardwise.planning.source import values as v
from shardwise.planning.source.functions import Arguments, defining_class, enter_closure, enter_function, underlying
from shardwise.planning.source.values import Frame, Origin, Value


def evaluate_arguments(node: ast.Call, frame: Frame) -> Arguments:
    """Evaluate the arguments of a call, with `*` and `**` unpacked if their content is known."""
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
    held = attributes.contents(next(iter(value.atoms))) if len(value.atoms) == 1 else None
    arguments.spread |= value.may_be_unknown or not isinstance(held, v.Sequence | v.Mapping)
    if isinstance(held, v.Sequence):
        arguments.positional += held.items
    elif isinstance(held, v.Mapping):
        arguments.keywords.update({key: inner for key, inner in held.items if isinstance(key, str)})
    elif value.atoms:  # they may contain modules: keep them for the callee
        arguments.keywords["*"] = value


BUILTINS: dict[Any, Callable[[Arguments, Frame], Value]] = {}
WITHOUT_EFFECT = {
    "print", "id", "hash", "repr", "str", "format", "setattr", "delattr", "deepcopy", "copy", "warn",
    "warning", "warning_once", "info", "debug", "error", "exception", "append", "extend", "insert", "add",
    "update", "issubclass",
}  # fmt: skip


@v.handles(BUILTINS, list, tuple, set, frozenset, iter, reversed, sorted, copy.copy, copy.deepcopy)
def _same(arguments: Arguments, frame: Frame) -> Value:
    return arguments.first() if arguments.positional else v.just(v.Sequence(()))


@v.handles(BUILTINS, filter)
def _filter(arguments: Arguments, frame: Frame) -> Value:
    return arguments.positional[-1] if arguments.positional else v.PLAIN


@v.handles(BUILTINS, dict)
def _dict(arguments: Arguments, frame: Frame) -> Value:
    made = v.just(v.Mapping(tuple(arguments.keywords.items())))
    return v.join([*arguments.positional, v.PLAIN, made]) if arguments.positional or arguments.spread else made


@v.handles(BUILTINS, next)
def _next(arguments: Arguments, frame: Frame) -> Value:
    return v.join([attributes.walk(arguments.first(), frame).element, *arguments.positional[1:]])


@v.handles(BUILTINS, len)
def _len(arguments: Arguments, frame: Frame) -> Value:
    value = arguments.first()
    items = attributes.walk(value, frame).items if value.atoms else None
    if items is not None:
        return v.known(len(items))
    frame.note_size_read(value)
    made = v.opaque(value, source=Origin.TENSOR_VALUE if value.source == Origin.DYNAMIC else Origin.PLAIN)
    return made.replace(trail=frozenset())


@v.handles(BUILTINS, range)
def _range(arguments: Arguments, frame: Frame) -> Value:
    numbers = [value.constant() for value in arguments.positional]
    source = Origin.TENSOR_VALUE if _top(arguments) >= Origin.TENSOR_VALUE else Origin.PLAIN
    element = v.opaque(*arguments.positional, source=source)
    with suppress(TypeError, ValueError, OverflowError):
        if len(known := range(*numbers)) <= v.MOST_TURNS:
            return v.just(v.Sequence(tuple(map(v.known, known))))
    return Value(frozenset({v.Repeated(element)}), source=source)


@v.handles(BUILTINS, enumerate)
def _enumerate(arguments: Arguments, frame: Frame) -> Value:
    found = attributes.walk(arguments.first(), frame)
    starts_at_zero = len(arguments.values()) == 1
    numbers = [v.known(number) if starts_at_zero else v.PLAIN for number in range(len(found.items or ()))]
    return _rows([attributes.LoopItems(v.PLAIN, None if found.items is None else tuple(numbers)), found])


@v.handles(BUILTINS, zip)
def _zip(arguments: Arguments, frame: Frame) -> Value:
    return _rows([attributes.walk(value, frame) for value in arguments.positional])


def _rows(columns: list[attributes.LoopItems]) -> Value:
    """Return the rows of these columns, as many as in the shortest column of known length."""
    known = [column.items for column in columns if column.items is not None]
    source = Origin.DYNAMIC if any(column.dynamic for column in columns) else Origin.PLAIN
    if not known:
        row = v.just(v.Sequence(tuple(column.element for column in columns)))
        return Value(frozenset({v.Repeated(row)}), source=source)
    every = [column.items or (column.element,) * min(map(len, known)) for column in columns]
    rows = tuple(v.just(v.Sequence(row)) for row in zip(*every, strict=False))
    return v.just(v.Sequence(rows)).replace(source=source)


@v.handles(BUILTINS, itertools.chain, itertools.product, itertools.islice, itertools.cycle, itertools.repeat)
def _chain(arguments: Arguments, frame: Frame) -> Value:
    found = [attributes.walk(value, frame).element for value in arguments.positional if value.atoms]
    return v.just(v.Repeated(v.join(found) if found else v.PLAIN))


@v.handles(BUILTINS, getattr, inspect.getattr_static)
def _getattr(arguments: Arguments, frame: Frame) -> Value:
    if len(arguments.positional) < 2:
        return v.PLAIN
    thing, name, *default = arguments.positional
    objects = [atom.object for atom in name.atoms if isinstance(atom, v.Known)]
    names = [one for one in objects if isinstance(one, str)]
    if names and not name.may_be_unknown:
        found = [_attribute(thing, one, default, frame) for one in names]
        return v.join(found).replace(data_dependent=name.source >= Origin.ARGUMENT and len(found) > 1)
    # An f-string with unknown parts evaluates to a regular expression for its text.
    patterns = [one for one in objects if isinstance(one, re.Pattern)]
    fits: Callable[[str], Any] = patterns[0].fullmatch if len(patterns) == 1 else bool
    modules = [atom.object for atom in thing.atoms if isinstance(atom, v.Known) and isinstance(atom.object, nn.Module)]
    children = [
        attributes.wrap(child)
        for module in modules
        for key, child in module._modules.items()
        if child is not None and fits(key)
    ]
    if not children:
        return v.PLAIN
    data_dependent = name.source >= Origin.ARGUMENT
    return v.join([*children, *default]).replace(data_dependent=data_dependent, may_be_unknown=True)


def _attribute(thing: Value, name: str, default: list[Value], frame: Frame) -> Value:
    objects = [atom.object for atom in thing.atoms if isinstance(atom, v.Known)]
    may_have = thing.may_be_unknown or any(attributes.has_attribute(each, name) for each in objects)
    return default[0] if default and objects and not may_have else attributes.load(thing, name, frame)


@v.handles(BUILTINS, hasattr)
def _hasattr(arguments: Arguments, frame: Frame) -> Value:
    thing, name = _two(arguments)
    is_known = thing is not v.Unknown and isinstance(name, str)
    return v.known(attributes.has_attribute(thing, name)) if is_known else v.PLAIN


@v.handles(BUILTINS, isinstance)
def _isinstance(arguments: Arguments, frame: Frame) -> Value:
    thing, kind = _two(arguments)
    # A custom metaclass could run code here; ABCMeta and type do not.
    is_plain = type(kind) is type and isinstance(thing, nn.Module)
    return v.known(issubclass(type(thing), kind)) if is_plain else v.PLAIN


def _two(arguments: Arguments) -> tuple[Any, Any]:
    """Return two arguments as real objects."""
    objects = [value.constant() for value in arguments.positional]
    return (objects[0], objects[1]) if len(objects) == 2 else (v.Unknown, v.Unknown)


@v.handles(BUILTINS, super)
def _super(arguments: Arguments, frame: Frame) -> Value:
    cls, receiver = _two(arguments) if arguments.positional else (defining_class(frame), frame.receiver)
    is_object = isinstance(cls, type) and isinstance(receiver, cls)
    return v.just(v.Super(cls, v.Known(receiver))) if is_object else v.PLAIN


@v.handles(BUILTINS, functools.partial)
def _partial(arguments: Arguments, frame: Frame) -> Value:
    return v.just(v.Partial(arguments.first(), tuple(arguments.positional[1:]), tuple(arguments.keywords.items())))


@v.handles(BUILTINS, int)
def _int(arguments: Arguments, frame: Frame) -> Value:
    number = arguments.first().constant()
    return v.known(int(number)) if type(number) in (int, float) else _number(arguments, frame)


@v.handles(BUILTINS, float, bool, str, abs, round, min, max, sum, any, all, operator.itemgetter)
def _number(arguments: Arguments, frame: Frame) -> Value:
    inner = [attributes.walk(value, frame).element.source for value in arguments.positional if value.atoms]
    top = max([_top(arguments), *inner])
    return v.opaque(*arguments.positional, source=Origin.TENSOR_VALUE if top >= Origin.TENSOR else top)


@v.handles(BUILTINS, type, callable, id, print, repr, hash, issubclass, vars, dir)
def _about(arguments: Arguments, frame: Frame) -> Value:
    return v.PLAIN


def _many(things: Iterable[Any], *, named: bool = False) -> Value:
    values = [attributes.wrap(thing) for thing in things]
    return v.just(v.Sequence(tuple(v.just(v.Sequence((v.PLAIN, one))) if named else one for one in values)))


def _get_submodule(module: nn.Module, arguments: Arguments, frame: Frame) -> Value:
    name = arguments.first().constant()
    parts = name.split(".") if isinstance(name, str) and name else []
    return functools.reduce(lambda value, part: attributes.load(value, part, frame), parts, v.known(module))


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
        lambda module, *_: v.known(module),
    ),
}
"""Results of nn.Module's own methods."""


def container_method(value: Value, name: str, arguments: Arguments, frame: Frame) -> Value | None:
    """`values()`, `items()`, `keys()`, `get()` and `pop()` of containers, or None for anything else."""
    if name not in ("values", "items", "keys", "get", "pop") or not value.atoms:
        return None
    held = [attributes.contents(atom) for atom in value.atoms]
    if name == "pop" and any(isinstance(one, v.Sequence) for one in held):
        return attributes.item(value, v.PLAIN, frame)
    if not all(isinstance(one, v.Mapping) for one in held):
        return None
    if name in ("get", "pop"):
        return v.join([attributes.item(value, arguments.first(), frame), *arguments.positional[1:]])
    lists = [[(v.known(key), inner) for key, inner in one.items] for one in held if isinstance(one, v.Mapping)]
    if name == "items":
        lists = [[v.just(v.Sequence(row)) for row in rows] for rows in lists]
    else:
        lists = [[row[name == "values"] for row in rows] for rows in lists]
    return Value(frozenset(v.Sequence(tuple(each)) for each in lists), may_be_unknown=value.may_be_unknown)


def invoke(callee: Value, arguments: Arguments, frame: Frame) -> Value:
    """`callee(*arguments)`."""
    if not callee.atoms:
        return hand_over(arguments, frame)
    results = [_invoke_atom(atom, callee, arguments, frame) for atom in callee.atoms]
    # If a callee is known, an unknown alternative is a fallback of the same kind.
    return v.join([*results, _unknown_result(arguments)] if callee.may_be_unknown else results)


def _top(arguments: Arguments) -> Origin:
    return max((value.source for value in arguments.values()), default=Origin.PLAIN)


def _unknown_result(arguments: Arguments) -> Value:
    return v.opaque(*arguments.values(), source=min(_top(arguments), Origin.ARGUMENT))


def _invoke_atom(atom: Any, callee: Value, arguments: Arguments, frame: Frame) -> Value:
    with frame.under(callee.data_dependent and isinstance(atom, v.Closure | v.Bound)):
        if isinstance(atom, v.Closure):
            return enter_closure(atom, arguments, frame)
        if isinstance(atom, v.Bound):
            return _invoke_bound(atom, callee, arguments, frame)
        if isinstance(atom, v.Partial):
            keywords = {**dict(atom.keywords), **arguments.keywords}
            merged = Arguments([*atom.positional, *arguments.positional], keywords, arguments.spread)
            return invoke(atom.callee.selected_by(callee), merged, frame)
        if isinstance(atom, v.Sequence):  # a slice of a Sequential is a new Sequential: its items are called here
            return v.join([v.TENSOR, *(invoke(inner, arguments, frame) for inner in atom.items)])
        return _invoke_known(atom.object, callee, arguments, frame) if isinstance(atom, v.Known) else v.PLAIN


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
        positional = tuple(v.known(value) for value in thing.args)
        keywords = tuple((name, v.known(value)) for name, value in thing.keywords.items())
        return _invoke_atom(v.Partial(v.known(thing.func), positional, keywords), callee, arguments, frame)
    if isinstance(thing, type):
        return _construct(thing, arguments, frame)
    if attributes.is_random_function(thing):
        return v.opaque(*arguments.values(), source=Origin.RANDOM)
    if attributes.is_torch_function(thing):
        return _invoke_torch(getattr(thing, "__name__", ""), arguments, frame)
    if isinstance(thing, types.FunctionType | types.MethodType) or hasattr(thing, "__wrapped__"):
        return _invoke_function(thing, arguments, frame)
    method = inspect.getattr_static(type(thing), "__call__", None)
    if isinstance(method, types.FunctionType):
        return _invoke_bound(v.Bound(method, v.Known(thing), "__call__"), callee, arguments, frame)
    return hand_over(arguments, frame, name=getattr(thing, "__name__", ""))


def call_module(module: nn.Module, callee: Value, arguments: Arguments, frame: Frame) -> Value:
    """`module(...)`; its forward is read separately, and also here if modules or parameters are passed to it."""
    if frame.analysis.flow is not None:
        return frame.analysis.flow.call(module, callee, arguments, frame)
    frame.record_call(module, callee)
    if module not in frame.analysis.places:
        hand_over(arguments, frame)
        for inner in attributes.elements(module) or ():  # a Sequential that the code creates
            invoke(inner, arguments, frame)
    elif frame.is_interesting(arguments.values()):
        if type(module).__module__.startswith("torch.nn."):
            hand_over(arguments, frame)
        else:
            _enter_forward(module, callee, arguments, frame)
    return v.TENSOR


def _enter_forward(module: nn.Module, callee: Value, arguments: Arguments, frame: Frame) -> None:
    counts = dict(frame.analysis.counts)
    with frame.under(callee.data_dependent):
        for atom in attributes.load_from(module, "forward", frame).atoms:
            if isinstance(atom, v.Bound):
                given, chain = arguments.after(v.known(module)), (*frame.chain, module)
                enter_function(atom.function, given, frame, receiver=module, chain=chain, through=callee)
    frame.analysis.counts = counts  # its calls are counted when the module itself is read


def _invoke_bound(bound: v.Bound, callee: Value, arguments: Arguments, frame: Frame) -> Value:
    receiver, name = bound.receiver.object, bound.name
    given = arguments.after(v.known(receiver))
    if isinstance(receiver, nn.Module):
        if name == "__call__":
            return v.TENSOR if receiver is frame.chain[-1] else call_module(receiver, callee, arguments, frame)
        if underlying(bound.function)[0] is getattr(nn.Module, name, None):
            special = MODULE_METHODS.get(name)
            return special(receiver, arguments, frame) if special is not None else v.PLAIN
        return _invoke_method(bound, callee, given, frame)
    result = None
    if frame.is_interesting(given.values()):
        result = enter_function(bound.function, given, frame, receiver=receiver)
    return result if result is not None else hand_over(arguments, frame, name=name)


def _invoke_method(bound: v.Bound, callee: Value, given: Arguments, frame: Frame) -> Value:
    """A method of a module other than `__call__`: entered without its hooks."""
    analysis, module = frame.analysis, bound.receiver.object
    own = module is frame.chain[-1] or module not in analysis.places
    chain = frame.chain if own else (*frame.chain, module)
    before = analysis.activity
    result = enter_function(bound.function, given, frame, receiver=module, chain=chain, through=callee)
    if result is None:
        return hand_over(Arguments(given.positional[1:], given.keywords, given.spread), frame)
    if analysis.activity > before and not own and id(module) not in analysis.places.covered(frame.chain):
        analysis.add("method", frame.chain, analysis.places.name(module), bound.name, frame.is_conditional)
    return result


def _invoke_function(function: Any, arguments: Arguments, frame: Frame) -> Value:
    if not frame.is_interesting(arguments.values()):
        return _unknown_result(arguments)
    first, name = arguments.first().constant(), getattr(function, "__name__", "")
    if isinstance(first, nn.Module) and any(vars(cls).get(name) is function for cls in type(first).__mro__):
        # Base.forward(self, x)
        return _invoke_method(v.Bound(function, v.Known(first), name), arguments.first(), arguments, frame)
    result = enter_function(function, arguments, frame)
    return result if result is not None else hand_over(arguments, frame)


def _invoke_torch(name: str, arguments: Arguments, frame: Frame) -> Value:
    if name == "checkpoint_sequential":
        for leaf in v.leaves(arguments.first()):
            for inner in (attributes.elements(leaf.object) or ()) if isinstance(leaf, v.Known) else ():
                invoke(inner, Arguments(), frame)
        return v.TENSOR
    if not (name.endswith("_like") or name.startswith(("is_", "get_", "set_", "has_torch_function"))):
        hand_over(arguments, frame)
    return frame.after(name, attributes.torch_result(name, arguments), *arguments.values(), sizes=arguments.flat())


def hand_over(arguments: Arguments, frame: Frame, *, name: str = "") -> Value:
    """Pass these to a function that cannot be read: it may call modules and functions, and reads parameters."""
    if name not in WITHOUT_EFFECT:
        for position, value in enumerate(arguments.positional):
            _hand_over_one(value, Arguments(arguments.positional[position + 1 :], spread=True), frame)
        for value in arguments.keywords.values():
            _hand_over_one(value, Arguments(spread=True), frame)
    return frame.after(name or "a function that cannot be read", _unknown_result(arguments), *arguments.values())


def _hand_over_one(value: Value, rest: Arguments, frame: Frame) -> None:
    for leaf in v.leaves(value):
        if isinstance(leaf, v.Closure):
            enter_closure(leaf, rest, frame)
        elif isinstance(leaf, v.Bound):
            if isinstance(leaf.receiver.object, nn.Module) and leaf.receiver.object in frame.analysis.places:
                _invoke_bound(leaf, value, rest, frame)
        elif isinstance(leaf.object, nn.Module) and leaf.object is not frame.chain[-1]:
            if not is_holder(leaf.object):
                frame.record_call(leaf.object, value)
            for inner in (attributes.elements(leaf.object) or ()) if is_holder(leaf.object) else ():
                if isinstance(inner.constant(), nn.Module):
                    frame.record_call(inner.constant(), inner.replace(data_dependent=value.data_dependent))
    frame.consume(value)


def _construct(cls: type, arguments: Arguments, frame: Frame) -> Value:
    """Create an object. A Sequential becomes a list of its modules; other objects are opaque."""
    if issubclass(cls, nn.Sequential | nn.ModuleList):
        items = tuple(arguments.positional)
        if len(items) == 1 and not isinstance(items[0].constant(), nn.Module):
            return items[0]
        return v.just(v.Sequence(items))
    if issubclass(cls, torch.Tensor):
        for value in arguments.values():
            frame.consume(value)
        return v.TENSOR
    made = v.ARGUMENT if _top(arguments) or frame.is_interesting(arguments.values()) else v.PLAIN
    return frame.after("[number]", made, *arguments.values())
