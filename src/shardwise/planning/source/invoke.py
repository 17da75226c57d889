"""Calls: of modules, methods, functions, closures, and of things the reader cannot look into."""

import functools
import inspect
import types
from typing import Any

import torch
from torch import nn

from shardwise.planning.places import is_holder
from shardwise.planning.source.attributes import load_from_module
from shardwise.planning.source.builtins import BUILTINS, WITHOUT_EFFECT
from shardwise.planning.source.containers import list_items
from shardwise.planning.source.files import underlying
from shardwise.planning.source.frames import Fact, Frame
from shardwise.planning.source.functions import Arguments, enter_closure, enter_function
from shardwise.planning.source.module_methods import MODULE_METHODS
from shardwise.planning.source.records import consume, is_interesting, record_call
from shardwise.planning.source.tensors import is_random_function, is_torch_function, reads_no_content, torch_result
from shardwise.planning.source.values import (
    ARGUMENT,
    PLAIN,
    TENSOR,
    Bound,
    Closure,
    Known,
    Partial,
    Sequence,
    Source,
    Value,
    join,
    known,
    leaves,
    opaque,
)

_READ_ONE_BY_ONE = 4


def invoke(callee: Value, arguments: Arguments, frame: Frame) -> Value:
    """`callee(*arguments)`."""
    frame.analysis.decide(callee)
    results = []
    if not _put_off(callee, arguments, frame):
        for atom in callee.atoms:
            results.append(_invoke_atom(atom, callee, arguments, frame))
    else:
        results.append(TENSOR)
    if callee.open or not callee.atoms:
        # Where some callee is known, the unknown rest is a fallback of the same kind.
        if not callee.atoms:
            hand_over(arguments, frame)
        results.append(opaque(*arguments.values(), source=min(_top(arguments), Source.ARGUMENT)))
    return join(results)


def _top(arguments: Arguments) -> Source:
    return max((value.source for value in arguments.values()), default=Source.PLAIN)


def _invoke_atom(atom: Any, callee: Value, arguments: Arguments, frame: Frame) -> Value:
    if isinstance(atom, Closure):
        with frame.under(callee.picked):
            return enter_closure(atom, arguments, frame)
    if isinstance(atom, Bound):
        with frame.under(callee.picked):
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
        return opaque(*arguments.values(), source=Source.RANDOM)
    if is_torch_function(thing):
        return _invoke_torch(thing, arguments, frame)
    if isinstance(thing, types.FunctionType | types.MethodType) or hasattr(thing, "__wrapped__"):
        return _invoke_function(thing, arguments, frame)
    method = inspect.getattr_static(type(thing), "__call__", None)
    if isinstance(method, types.FunctionType):
        return _invoke_bound(Bound(method, Known(thing), "__call__"), callee, arguments, frame)
    return hand_over(arguments, frame, name=getattr(thing, "__name__", ""))


def call_module(module: nn.Module, callee: Value, arguments: Arguments, frame: Frame) -> Value:
    """`module(...)`; its forward is read apart, and here too when it is handed modules or parameters."""
    record_call(module, callee, frame)
    places = frame.analysis.places
    if module not in places:
        hand_over(arguments, frame)
        for inner in list_items(module) or ():  # a Sequential made on the fly
            invoke(inner, arguments, frame)
    elif any(is_interesting(value, places) for value in arguments.values()):
        if type(module).__module__.startswith("torch.nn."):
            hand_over(arguments, frame)
        else:
            _enter_forward(module, callee, arguments, frame)
    return TENSOR


def _enter_forward(module: nn.Module, callee: Value, arguments: Arguments, frame: Frame) -> None:
    counts = dict(frame.analysis.counts)
    with frame.under(callee.picked):
        for atom in load_from_module(module, "forward", frame).atoms:
            if isinstance(atom, Bound):
                given, chain = arguments.after(known(module)), (*frame.chain, module)
                enter_function(atom.function, given, frame, receiver=module, chain=chain, through=callee)
    frame.analysis.counts = counts  # the module's own reading counts what it calls


def _invoke_bound(bound: Bound, callee: Value, arguments: Arguments, frame: Frame) -> Value:
    receiver, name = bound.receiver.object, bound.name
    given = arguments.after(known(receiver))
    if isinstance(receiver, nn.Module) and not isinstance(receiver, type):
        if name == "__call__":
            return TENSOR if receiver is frame.chain[-1] else call_module(receiver, callee, arguments, frame)
        if underlying(bound.function)[0] is getattr(nn.Module, name, None):
            special = MODULE_METHODS.get(name)
            return special(receiver, arguments, frame) if special is not None else PLAIN
        return _invoke_method(bound, callee, given, frame)
    interesting = any(is_interesting(value, frame.analysis.places) for value in given.values())
    result = enter_function(bound.function, given, frame, receiver=receiver) if interesting else None
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
    if analysis.activity > before and module in analysis.places:
        if own and len(frame.chain) == 1 and analysis.entry == "forward" and bound.name != "forward":
            analysis.add(Fact("dispatch", frame.chain, module, bound.name))
        if not own and id(module) not in analysis.places.covered(frame.chain):
            analysis.add(Fact("method", frame.chain, module, bound.name, frame.is_conditional))
    return result


def _put_off(callee: Value, arguments: Arguments, frame: Frame) -> bool:
    """Leave the same method of many layers to be read once for all of them, instead of here one by one."""
    analysis = frame.analysis
    bound = [atom for atom in callee.atoms if isinstance(atom, Bound)]
    if len(bound) <= _READ_ONE_BY_ONE or len(bound) < len(callee.atoms):
        return False
    receivers = [atom.receiver.object for atom in bound]
    if len({atom.name for atom in bound}) > 1 or any(is_interesting(v, analysis.places) for v in arguments.values()):
        return False
    if bound[0].name == "__call__" or not all(receiver in analysis.places for receiver in receivers):
        return False
    for atom in bound:
        module = atom.receiver.object
        analysis.activity += 1
        analysis.deferred[id(module), atom.name] = (module, atom.name)
        conditional = frame.is_conditional or callee.picked
        analysis.add(Fact("method", frame.chain, module, atom.name, conditional))
    return True


def _invoke_function(function: Any, arguments: Arguments, frame: Frame) -> Value:
    if any(is_interesting(value, frame.analysis.places) for value in arguments.values()):
        first = arguments.positional[0].only() if arguments.positional else None
        if isinstance(first, nn.Module) and _is_method_of(function, first):  # Base.forward(self, x)
            bound = Bound(function, Known(first), function.__name__)
            return _invoke_method(bound, arguments.positional[0], arguments, frame)
        result = enter_function(function, arguments, frame)
        if result is not None:
            return result
        return hand_over(arguments, frame)
    return opaque(*arguments.values(), source=min(_top(arguments), Source.ARGUMENT))


def _is_method_of(function: Any, module: nn.Module) -> bool:
    name = getattr(function, "__name__", "")
    return any(vars(cls).get(name) is function for cls in type(module).__mro__)


def _invoke_torch(function: Any, arguments: Arguments, frame: Frame) -> Value:
    name = getattr(function, "__name__", "")
    if name == "checkpoint_sequential":
        for value in arguments.positional[:1]:
            for leaf in leaves(value):
                for inner in (list_items(leaf.object) or ()) if isinstance(leaf, Known) else ():
                    invoke(inner, Arguments(), frame)
        return TENSOR
    if not reads_no_content(name):
        hand_over(arguments, frame)
    return torch_result(name, arguments)


def hand_over(arguments: Arguments, frame: Frame, *, name: str = "") -> Value:
    """A function nobody can look into gets these: it may call modules and functions, and reads parameters."""
    if name not in WITHOUT_EFFECT:
        for position, value in enumerate(arguments.positional):
            _hand_over_one(value, Arguments(arguments.positional[position + 1 :]), frame)
        for value in arguments.keywords.values():
            _hand_over_one(value, Arguments(), frame)
    return opaque(*arguments.values(), source=min(_top(arguments), Source.ARGUMENT))


def _hand_over_one(value: Value, rest: Arguments, frame: Frame) -> None:
    rest.spread = True
    for leaf in leaves(value):
        if isinstance(leaf, Closure):
            enter_closure(leaf, rest, frame)
        elif isinstance(leaf, Bound):
            if isinstance(leaf.receiver.object, nn.Module) and leaf.receiver.object in frame.analysis.places:
                _invoke_bound(leaf, value, rest, frame)
        elif isinstance(leaf.object, nn.Module) and leaf.object is not frame.chain[-1]:
            elements = list_items(leaf.object) if is_holder(leaf.object) else None
            if elements is None:
                record_call(leaf.object, value, frame)
            for inner in elements or ():
                if isinstance(inner.only(), nn.Module):
                    record_call(inner.only(), inner.like(picked=value.picked), frame)
    consume(value, frame)


def _construct(cls: type, arguments: Arguments, frame: Frame) -> Value:
    """An object is made. Made-up Sequentials are lists of what they hold; the rest is opaque."""
    if issubclass(cls, nn.Sequential | nn.ModuleList):
        items = tuple(arguments.positional)
        if len(items) == 1 and not isinstance(items[0].only(), nn.Module):
            return items[0]
        return Value(frozenset({Sequence(items)}))
    if issubclass(cls, nn.Parameter) or issubclass(cls, torch.Tensor):
        for value in arguments.values():
            consume(value, frame)
        return TENSOR
    inner = [value for value in arguments.values() if is_interesting(value, frame.analysis.places)]
    return ARGUMENT if inner or _top(arguments) else PLAIN
