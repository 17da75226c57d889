"""Attributes, items and iteration of real objects, looked up without running any of the model's code."""

import functools
import inspect
import types
from typing import Any

import torch
from torch import nn

from shardwise.planning.source.files import underlying
from shardwise.planning.source.frames import Frame
from shardwise.planning.source.functions import Arguments, enter_function
from shardwise.planning.source.records import consume, record_read
from shardwise.planning.source.values import (
    ARGUMENT,
    CONTENT,
    PLAIN,
    TENSOR,
    Absent,
    Atom,
    Bound,
    Known,
    Source,
    Super,
    Value,
    join,
    known,
)

_MISSING = object()
_SIZES = {"shape", "ndim", "nbytes", "itemsize"}
METADATA = _SIZES | {
    "dtype", "device", "requires_grad", "is_cuda", "is_meta", "is_sparse", "is_leaf", "is_quantized",
    "layout", "names", "grad_fn", "grad", "type", "__class__", "is_cpu", "is_mps", "is_xpu", "is_nested",
}  # fmt: skip
_STILL_TENSORS = {"T", "mT", "H", "data", "real", "imag", "values", "indices"}


def load(value: Value, name: str, frame: Frame) -> Value:
    """`value.name`."""
    found = [_load_atom(atom, name, value, frame) for atom in value.atoms]
    if value.open or not found:
        found.append(_load_open(value, name))
    result = join(found)
    return result.like(picked=result.picked or value.picked, loops=result.loops | value.loops)


def has_attribute(thing: Any, name: str) -> bool:
    """`hasattr`, as far as it can be told without running code."""
    if isinstance(thing, nn.Module) and _registered(thing, name) is not _MISSING:
        return True
    return name in _instance_names(thing) or inspect.getattr_static(thing, name, _MISSING) is not _MISSING


def wrap(thing: Any, settings: frozenset[tuple[int, str]] = frozenset()) -> Value:
    """A real object as a value; tensors are data, everything else is plain."""
    value = known(thing, settings=settings)
    return value.like(source=Source.TENSOR) if isinstance(thing, torch.Tensor) else value


def _load_open(value: Value, name: str) -> Value:
    if name in _SIZES:
        return CONTENT if value.source == Source.DYNAMIC else PLAIN
    if name in METADATA or value.source == Source.PLAIN:
        return PLAIN
    return Value(open=True, source=value.source) if name in _STILL_TENSORS else ARGUMENT


def _load_atom(atom: Atom, name: str, value: Value, frame: Frame) -> Value:
    if isinstance(atom, Super):
        return _load_super(atom, name, frame)
    if not isinstance(atom, Known):
        return PLAIN.like(source=value.source)
    thing = atom.object
    if isinstance(thing, torch.Tensor):
        return _load_tensor(thing, name, frame)
    if isinstance(thing, types.ModuleType):
        return wrap(vars(thing)[name]) if name in vars(thing) else PLAIN
    if isinstance(thing, nn.Module):
        return load_from_module(thing, name, frame)
    return _load_plain(thing, name, value, frame)


def _load_tensor(tensor: torch.Tensor, name: str, frame: Frame) -> Value:
    if name in METADATA:
        return PLAIN
    if frame.analysis.places.has_parameter(tensor) and isinstance(tensor, nn.Parameter):
        record_read(tensor, frame)
    return TENSOR


def load_from_module(module: nn.Module, name: str, frame: Frame) -> Value:
    """An attribute of a module: property, setting, parameter, submodule or method, in Python's order."""
    on_class = inspect.getattr_static(type(module), name, _MISSING)
    if isinstance(on_class, property | functools.cached_property):
        return _load_property(module, on_class, name, frame)
    own = vars(module).get(name, _MISSING)
    setting = frozenset({(id(module), name)})
    if own is not _MISSING:
        if isinstance(own, bool):  # a switch that training code may flip after the plan was made
            return PLAIN
        if isinstance(own, torch.Tensor) and name + "_v" in module._parameters:  # weight_norm's computed weight
            return _all_of([module._parameters[name + suffix] for suffix in ("_v", "_g")])
        return wrap(own, setting)
    registered = _registered(module, name)
    if registered is not _MISSING:
        return wrap(registered)
    if on_class is not _MISSING:
        return _load_class_attribute(on_class, name, Known(module))
    fallback = inspect.getattr_static(type(module), "__getattr__", None)
    if fallback is not None and fallback is not nn.Module.__getattr__ and name != "__getattr__":
        found = enter_function(fallback, Arguments([known(module), known(name)]), frame, receiver=module)
        return found if found is not None else PLAIN
    # Set by the model's own code as it runs, or in a branch that this model never takes.
    return Value(frozenset({Absent()}), open=True, source=Source.ARGUMENT)


def _registered(module: nn.Module, name: str) -> Any:
    for table in (module._parameters, module._buffers, module._modules):
        if name in table:
            return table[name]
    return _MISSING


def _load_property(module: nn.Module, descriptor: Any, name: str, frame: Frame) -> Value:
    parametrizations = module._modules.get("parametrizations")
    if parametrizations is not None and name in parametrizations._modules:
        inner = parametrizations._modules[name]
        return _all_of(list(inner.parameters()) if inner is not None else [])
    if isinstance(descriptor, functools.cached_property) and name in vars(module):
        return wrap(vars(module)[name])
    getter = descriptor.fget if isinstance(descriptor, property) else descriptor.func
    # Whoever reads a property runs its code without entering the module: the frame keeps the reader's chain.
    result = enter_function(getter, Arguments([known(module)]), frame, receiver=module)
    return result if result is not None else PLAIN


def _all_of(parameters: list[Any]) -> Value:
    """One tensor that is computed from several parameters: using it uses them all."""
    atoms = frozenset(Known(parameter) for parameter in parameters if parameter is not None)
    return Value(atoms, open=not atoms, source=Source.TENSOR)


def _load_class_attribute(attribute: Any, name: str, receiver: Known) -> Value:
    if isinstance(attribute, staticmethod):
        return known(attribute.__func__)
    if isinstance(attribute, classmethod):
        return Value(frozenset({Bound(attribute.__func__, Known(type(receiver.object)), name)}))
    if underlying(attribute)[0] is not None or isinstance(attribute, types.FunctionType):
        return Value(frozenset({Bound(attribute, receiver, name)}))
    if hasattr(type(attribute), "__get__"):  # slots and descriptors of other kinds
        return PLAIN
    return PLAIN if isinstance(attribute, bool) else wrap(attribute)


def _load_super(atom: Super, name: str, frame: Frame) -> Value:
    mro = type(atom.receiver.object).__mro__
    after = mro.index(atom.after.object) + 1 if atom.after.object in mro else 1
    for cls in mro[after:]:
        if name in vars(cls):
            attribute = vars(cls)[name]
            if isinstance(attribute, property):
                receiver = atom.receiver.object
                result = enter_function(attribute.fget, Arguments([known(receiver)]), frame, receiver=receiver)
                return result if result is not None else PLAIN
            return _load_class_attribute(attribute, name, atom.receiver)
    return PLAIN


def _instance_names(thing: Any) -> dict[str, Any]:
    try:
        names = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return names if isinstance(names, dict) else {}


def _load_plain(thing: Any, name: str, value: Value, frame: Frame) -> Value:
    if isinstance(thing, type):
        attribute = inspect.getattr_static(thing, name, _MISSING)
        if isinstance(attribute, classmethod):
            return Value(frozenset({Bound(attribute.__func__, Known(thing), name)}))
        attribute = attribute.__func__ if isinstance(attribute, staticmethod) else attribute
        return PLAIN if attribute is _MISSING or isinstance(attribute, property) else wrap(attribute)
    names = _instance_names(thing)
    attribute = inspect.getattr_static(type(thing), name, _MISSING)
    if isinstance(attribute, property):
        result = enter_function(attribute.fget, Arguments([known(thing)]), frame, receiver=thing)
        return result if result is not None else PLAIN
    if name in names:
        return wrap(names[name], value.settings)
    if attribute is not _MISSING:
        return _load_class_attribute(attribute, name, Known(thing))
    return PLAIN


def use_as_data(value: Value, frame: Frame) -> Value:
    """The value takes part in arithmetic: record what it reads and forget which object it was."""
    consume(value, frame)
    return PLAIN.like(source=value.source, loops=value.loops, settings=value.settings)
