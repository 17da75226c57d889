"""Items and iteration of containers: of modules, of real Python objects, and of lists written in the code."""

from collections import OrderedDict
from collections.abc import Sequence as AnySequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.planning.source.attributes import wrap
from shardwise.planning.source.files import underlying
from shardwise.planning.source.frames import Frame
from shardwise.planning.source.functions import Arguments, enter_function
from shardwise.planning.source.records import consume
from shardwise.planning.source.values import (
    PLAIN,
    TENSOR,
    Atom,
    Known,
    Many,
    Mapping,
    Parameters,
    Sequence,
    Source,
    Unknown,
    Value,
    join,
    known,
)

_LISTS = (nn.ModuleList, nn.Sequential, nn.ParameterList)
_DICTIONARIES = (nn.ModuleDict, nn.ParameterDict)
_MOST_ITEMS = 20_000


class Walk(NamedTuple):
    """What a loop over a value gets."""

    element: Value
    count: int | None
    dynamic: bool = False
    """The number of turns depends on the data."""


def list_items(thing: Any) -> list[Value] | None:
    """The items of a real list, tuple or list-like module."""
    if isinstance(thing, nn.ParameterList):
        return [wrap(thing._parameters.get(str(index))) for index in range(len(thing))]
    if isinstance(thing, _LISTS) and not _own(thing, "__getitem__") and not _own(thing, "__iter__"):
        return [wrap(child) for child in thing._modules.values()]
    if type(thing) in (list, tuple, set, frozenset) and len(thing) <= _MOST_ITEMS:
        return [wrap(item) for item in thing]
    return None


def dict_items(thing: Any) -> dict[Any, Value] | None:
    """The items of a real dictionary or dictionary-like module."""
    if isinstance(thing, nn.ParameterDict):
        return {key: wrap(thing._parameters.get(key)) for key in thing._keys}
    if isinstance(thing, _DICTIONARIES) and not _own(thing, "__getitem__"):
        return {key: wrap(child) for key, child in thing._modules.items()}
    if type(thing) in (dict, OrderedDict) and len(thing) <= _MOST_ITEMS:
        return {key: wrap(item) for key, item in thing.items()}
    return None


def _own(module: nn.Module, name: str) -> bool:
    """Whether the model's code, not torch, defines how the container behaves."""
    function = underlying(getattr(type(module), name, None))[0]
    return function is not None and not (function.__module__ or "").startswith("torch.")


def walk(value: Value, frame: Frame) -> Walk:
    """One turn of a loop over the value, standing for all of them."""
    frame.analysis.decide(value)
    walks = [_walk_atom(atom, value, frame) for atom in value.atoms]
    if value.open or not walks:
        source = Source.CONTENT if value.source >= Source.CONTENT else value.source
        walks.append(Walk(PLAIN.like(source=source), None, value.source == Source.DYNAMIC))
    element = join(one.element for one in walks)
    counts = {one.count for one in walks}
    return Walk(
        element.like(picked=element.picked or value.picked, loops=element.loops | value.loops),
        counts.pop() if len(counts) == 1 else None,
        any(one.dynamic for one in walks),
    )


def _walk_atom(atom: Atom, value: Value, frame: Frame) -> Walk:
    if isinstance(atom, Sequence):
        return Walk(join(atom.items) if atom.items else Value(), None if value.open else len(atom.items))
    if isinstance(atom, Mapping):
        return Walk(join(known(key) for key, _ in atom.items) if atom.items else PLAIN, len(atom.items))
    if isinstance(atom, Many):
        return Walk(atom.element, atom.count, value.source == Source.DYNAMIC)
    if isinstance(atom, Parameters):
        return _walk_parameters(atom)
    return _walk_known(atom.object, frame) if isinstance(atom, Known) else Walk(PLAIN, None)


def _walk_known(thing: Any, frame: Frame) -> Walk:
    if isinstance(thing, torch.Tensor):
        consume(known(thing), frame)
        return Walk(TENSOR, None)
    items = list_items(thing)
    if items is None and (by_key := dict_items(thing)) is not None:
        items = [known(key) for key in by_key]
    if items is not None:
        return Walk(join(items) if items else Value(), len(items))
    if isinstance(thing, nn.Module) and _own(thing, "__iter__"):
        result = enter_function(
            getattr(type(thing), "__iter__", None), Arguments([known(thing)]), frame, receiver=thing
        )
        return walk(result, frame) if result is not None else Walk(PLAIN, None)
    return Walk(PLAIN, None)


def _walk_parameters(atom: Parameters) -> Walk:
    parameters = [wrap(parameter) for parameter in atom.module.object.parameters()]
    element = join(parameters) if parameters else PLAIN
    if atom.named:
        element = Value(frozenset({Sequence((PLAIN, element))}))
    return Walk(element, len(parameters))


def item(value: Value, index: Value, frame: Frame) -> Value:
    """`value[index]`."""
    frame.analysis.decide(value)
    at = index.only()
    if at is not Unknown:
        frame.analysis.decide(index)
    found = [_item_of(atom, at, index, frame) for atom in value.atoms]
    if value.open or not found:
        found.append(PLAIN.like(source=_indexed(value, index), loops=value.loops))
    result = join(found)
    # A name looked up by a number from the data is itself up to the data: `experts[names[best]]`.
    source = max(result.source, index.source) if index.source >= Source.CONTENT else result.source
    return result.like(picked=result.picked or value.picked, loops=result.loops | value.loops, source=source)


def _indexed(value: Value, index: Value) -> Source:
    """What an item of something unknown is: `x[mask]` has its own length, `x[0, 1]` must be a tensor's."""
    if value.source >= Source.TENSOR and index.source >= Source.CONTENT:
        return Source.DYNAMIC
    several = any(isinstance(atom, Sequence) and len(atom.items) > 1 for atom in index.atoms)
    return Source.TENSOR if several and value.source == Source.ARGUMENT else value.source


def _item_of(atom: Atom, at: Any, index: Value, frame: Frame) -> Value:
    if isinstance(atom, Sequence):
        return _pick(atom.items, at, index)
    if isinstance(atom, Mapping):
        return _look_up(dict(atom.items), at, index)
    if isinstance(atom, Many):
        if isinstance(at, slice):
            return Value(frozenset({Many(atom.element)}))
        return _chosen(atom.element, index)
    if not isinstance(atom, Known):
        return PLAIN
    thing = atom.object
    if isinstance(thing, torch.Tensor):
        consume(known(thing), frame)
        return TENSOR
    items = list_items(thing)
    if items is not None:
        return _pick(items, at, index)
    by_key = dict_items(thing)
    if by_key is not None:
        return _look_up(by_key, at, index)
    if isinstance(thing, nn.Module) and _own(thing, "__getitem__"):
        result = enter_function(
            getattr(type(thing), "__getitem__", None), Arguments([known(thing), index]), frame, receiver=thing
        )
        return result if result is not None else PLAIN
    return PLAIN


def _pick(items: AnySequence[Value], at: Any, index: Value) -> Value:
    if isinstance(at, bool) or not isinstance(at, int | slice):
        is_slice = any(isinstance(atom, Known) and atom.object is slice for atom in index.atoms)
        everything = join(items) if items else PLAIN
        if not is_slice:
            return _chosen(everything, index)
        # `layers[:depth]`: which ones run is up to the data where the bound is.
        return Value(frozenset({Many(_chosen(everything, index) if index.source >= Source.TENSOR else everything)}))
    try:
        chosen = items[at]
    except (IndexError, TypeError, ValueError):
        return PLAIN
    return chosen if isinstance(chosen, Value) else Value(frozenset({Sequence(tuple(chosen))}))


def _look_up(by_key: dict[Any, Value], at: Any, index: Value) -> Value:
    if at is Unknown:
        return _chosen(join(by_key.values()), index) if by_key else PLAIN
    try:
        return by_key.get(at, PLAIN)
    except TypeError:  # not a key at all
        return PLAIN


def _chosen(element: Value, index: Value) -> Value:
    """One of several alike, chosen by an index that is not known."""
    picked = (index.picked or index.source >= Source.ARGUMENT) and len(element.atoms) > 1
    return element.like(picked=element.picked or picked, loops=element.loops | index.loops)
