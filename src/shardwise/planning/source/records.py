"""Writing down what the code does: modules called, parameters read or returned."""

import itertools
import math
import types
from collections.abc import Iterable
from typing import Any

from torch import nn

from shardwise.planning.places import Places, is_holder
from shardwise.planning.source.frames import Fact, Frame, Loop
from shardwise.planning.source.values import (
    Bound,
    Closure,
    Known,
    Value,
    leaves,
)

_ITEMS_TRIED = 16


def record_call(module: nn.Module, through: Value, frame: Frame) -> None:
    """`module(...)` is written in this frame; `through` is the value that was called."""
    analysis = frame.analysis
    if module not in analysis.places or is_holder(module):
        return
    if id(module) in analysis.places.internal:  # `attention.out_proj(x)`: its weights are its owner's
        for parameter in module.parameters():
            record_read(parameter, frame)
        return
    analysis.activity += 1
    analysis.add(Fact("call", frame.chain, module, "", frame.is_conditional or through.picked))
    turns = math.prod(loop.count or 0 for loop in frame.loops if loop.identity in through.loops)
    if turns >= len(candidates(through)):  # otherwise some of them may not be called at all
        again = any(loop.count is None or loop.count > 1 for loop in unwalked(through, frame))
        analysis.counts[id(module)] = analysis.counts.get(id(module), 0) + (2 if again else 1)


def candidates(value: Value) -> set[int]:
    """Identities of the objects that a value may be."""
    return {id(_object(leaf)) for leaf in leaves(value)}


def unwalked(value: Value, frame: Frame) -> tuple[Loop, ...]:
    """The running loops that meet an object again: it is not theirs, or they have more turns than objects."""
    return tuple(
        loop
        for loop in frame.loops
        if loop.identity not in value.loops or (loop.count is not None and loop.count > len(candidates(value)))
    )


def _object(leaf: Known | Bound | Closure) -> Any:
    return leaf.object if isinstance(leaf, Known) else leaf.receiver.object if isinstance(leaf, Bound) else leaf


def record_read(parameter: nn.Parameter, frame: Frame) -> None:
    """A parameter takes part in a computation written in this frame."""
    places = frame.analysis.places
    frame.analysis.activity += 1
    # torch's own modules read their children's weights to choose a fused kernel; they call them all the same.
    if frame.is_torch_code or places.covered(frame.chain) & {id(owner) for owner in places.owners(parameter)}:
        return
    owner, _, name = places.parameter_name(parameter).rpartition(".")
    frame.analysis.add(Fact("read", frame.chain, places.modules[owner], name))


def record_escape(value: Value, frame: Frame) -> None:
    """A parameter is among the results, as in `return output, self.bias`: the caller will compute with it."""
    places = frame.analysis.places
    for leaf in leaves(value):
        if isinstance(leaf, Known) and places.has_parameter(leaf.object):
            owner, _, name = places.parameter_name(leaf.object).rpartition(".")
            frame.analysis.add(Fact("escape", frame.chain, places.modules[owner], name))


def consume(value: Value, frame: Frame) -> None:
    """The value goes into a computation: record the parameters in it."""
    for leaf in leaves(value):
        if isinstance(leaf, Known) and frame.analysis.places.has_parameter(leaf.object):
            record_read(leaf.object, frame)


def is_interesting(value: Value, places: Places) -> bool:
    """Whether a function that gets this value could call a module or read a parameter through it."""
    return any(isinstance(leaf, Closure) or _holds_modules(leaf, places) for leaf in leaves(value))


def _holds_modules(leaf: Any, places: Places) -> bool:
    thing = leaf.object if isinstance(leaf, Known) else leaf.receiver.object
    if isinstance(thing, nn.Module) or places.has_parameter(thing):
        return True
    inner = getattr(type(thing), "__dict__", None) and getattr(thing, "__dict__", None)
    if not isinstance(inner, dict) or isinstance(thing, type | types.ModuleType | types.FunctionType):
        return False
    return any(isinstance(item, nn.Module) for held in inner.values() for item in _held(held))


def _held(thing: Any) -> Iterable[Any]:
    if type(thing) in (list, tuple, set):
        return itertools.islice(thing, _ITEMS_TRIED)
    return itertools.islice(thing.values(), _ITEMS_TRIED) if type(thing) is dict else (thing,)
