"""Evaluation of attributes, containers, truth values and tensors."""

import ast
import functools
import inspect
import random
import types
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.planning.source import values as v
from shardwise.planning.source.functions import Arguments, result_of, underlying
from shardwise.planning.source.values import Frame, Origin, Value

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
    if value.may_be_unknown or not found:
        if name in _SIZES:
            frame.note_size_read(value)
        made = _load_open(value, name)
        found.append(frame.after(name, made, value) if name in _STILL_TENSORS else made)
    result = v.join(found)
    return result.selected_by(value)


def has_attribute(thing: Any, name: str) -> bool:
    """`hasattr`, without running code."""
    return _own(thing, name) is not _MISSING or inspect.getattr_static(thing, name, _MISSING) is not _MISSING


def wrap(thing: Any) -> Value:
    """Return a real object as a value; tensors are data, all others plain."""
    value = v.known(thing)
    return value.replace(source=Origin.TENSOR) if isinstance(thing, torch.Tensor) else value


def _load_open(value: Value, name: str) -> Value:
    if name in _SIZES:
        return v.TENSOR_VALUE if value.source == Origin.DYNAMIC else v.PLAIN
    if name in METADATA or value.source == Origin.PLAIN:
        return v.PLAIN
    return Value(may_be_unknown=True, source=value.source) if name in _STILL_TENSORS else v.ARGUMENT


def _load_atom(atom: v.Atom, name: str, value: Value, frame: Frame) -> Value:
    if isinstance(atom, v.Super):
        mro = type(atom.receiver.object).__mro__
        attribute = next((vars(cls)[name] for cls in mro[mro.index(atom.after) + 1 :] if name in vars(cls)), _MISSING)
        return _load_class_attribute(attribute, name, atom.receiver, frame)
    if not isinstance(atom, v.Known):
        return v.PLAIN.replace(source=value.source)
    thing = atom.object
    if isinstance(thing, torch.Tensor):
        if name in METADATA:
            return v.PLAIN
        frame.consume(v.known(thing))
        return v.TENSOR
    if isinstance(thing, types.ModuleType):
        return wrap(vars(thing)[name]) if name in vars(thing) else v.PLAIN
    if isinstance(thing, type):
        attribute = inspect.getattr_static(thing, name, _MISSING)
        if isinstance(attribute, classmethod):
            return v.just(v.Bound(attribute.__func__, v.Known(thing), name))
        attribute = attribute.__func__ if isinstance(attribute, staticmethod) else attribute
        return v.PLAIN if attribute is _MISSING or isinstance(attribute, property) else wrap(attribute)
    return load_from(thing, name, frame)


def load_from(thing: Any, name: str, frame: Frame) -> Value:
    """An attribute of an object: property, setting, parameter, submodule or method, in Python's order."""
    on_class = inspect.getattr_static(type(thing), name, _MISSING)
    own = _own(thing, name)
    is_module = isinstance(thing, nn.Module)
    if isinstance(on_class, property) and is_module and (computed := _computed_from(thing, name)) is not None:
        return computed
    if own is not _MISSING and not isinstance(on_class, property):
        if is_module and isinstance(own, bool):  # a flag that training code may change after planning
            return v.PLAIN
        computed = _computed_from(thing, name) if is_module and isinstance(own, torch.Tensor) else None
        return wrap(own) if computed is None else computed
    if on_class is not _MISSING or not is_module:
        return _load_class_attribute(on_class, name, v.Known(thing), frame)
    fallback = inspect.getattr_static(type(thing), "__getattr__", None)
    if fallback is not None and fallback is not nn.Module.__getattr__ and name != "__getattr__":
        return result_of(fallback, thing, [v.known(name)], frame)
    # The model's code sets it at run time, or uses it in a branch that this model never takes.
    return Value(frozenset({v.Missing()}), may_be_unknown=True, source=Origin.ARGUMENT)


def _own(thing: Any, name: str) -> Any:
    """Return an attribute of the object itself, not of its class."""
    try:
        names = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return _MISSING
    tables = [names] if isinstance(names, dict) else []
    tables += [thing._parameters, thing._buffers, thing._modules] if isinstance(thing, nn.Module) else []
    return next((table[name] for table in tables if name in table), _MISSING)


def _computed_from(module: nn.Module, name: str) -> Value | None:
    """Return the parameters from which a parametrization or `weight_norm` computes the tensor of this name."""
    parametrizations = module._modules.get("parametrizations")
    if parametrizations is not None and name in parametrizations._modules:
        inner = parametrizations._modules[name]
        parameters = list(inner.parameters()) if inner is not None else []
    elif name + "_v" in module._parameters:
        parameters = [module._parameters[name + suffix] for suffix in ("_v", "_g")]
    else:
        return None
    atoms = frozenset(v.Known(parameter) for parameter in parameters if parameter is not None)
    return Value(atoms, may_be_unknown=not atoms, source=Origin.TENSOR)


def _load_class_attribute(attribute: Any, name: str, receiver: v.Known, frame: Frame) -> Value:
    if isinstance(attribute, property | functools.cached_property):
        # Reading a property runs its code without entering the module: the frame keeps the reader's chain.
        getter = attribute.fget if isinstance(attribute, property) else attribute.func
        return result_of(getter, receiver.object, [], frame)
    if isinstance(attribute, staticmethod):
        return v.known(attribute.__func__)
    if isinstance(attribute, classmethod):
        return v.just(v.Bound(attribute.__func__, v.Known(type(receiver.object)), name))
    if underlying(attribute)[0] is not None:
        return v.just(v.Bound(attribute, receiver, name))
    # Slots and other descriptors run code.
    is_known = attribute is not _MISSING and not isinstance(attribute, bool) and not hasattr(type(attribute), "__get__")
    return wrap(attribute) if is_known else v.PLAIN


_MOST_ITEMS = 20_000


class LoopItems(NamedTuple):
    """Items of a loop over a value."""

    element: Value
    """Any of its items."""
    items: tuple[Value, ...] | None = None
    """All items, if known."""
    dynamic: bool = False
    """Whether the number of iterations depends on the data."""


def contents(atom: v.Atom) -> v.Sequence | v.Mapping | v.Repeated | None:
    """Return the items of a container: a literal in the code, or a real list, dictionary or module."""
    if isinstance(atom, v.Sequence | v.Mapping | v.Repeated):
        return atom
    thing: Any = atom.object if isinstance(atom, v.Known) else None
    if isinstance(thing, nn.ParameterList):
        return v.Sequence(tuple(wrap(thing._parameters.get(str(index))) for index in range(len(thing))))
    if isinstance(thing, nn.ParameterDict):
        return v.Mapping(tuple((key, wrap(thing._parameters.get(key))) for key in thing._keys))
    if isinstance(thing, nn.Module) and (_defines(thing, "__getitem__") or _defines(thing, "__iter__")):
        return None
    if isinstance(thing, nn.ModuleList | nn.Sequential):
        return v.Sequence(tuple(wrap(child) for child in thing._modules.values()))
    if isinstance(thing, nn.ModuleDict):
        return v.Mapping(tuple((key, wrap(child)) for key, child in thing._modules.items()))
    if type(thing) in (list, tuple, set, frozenset) and len(thing) <= _MOST_ITEMS:
        return v.Sequence(tuple(map(wrap, thing)))
    if type(thing) in (dict, OrderedDict) and len(thing) <= _MOST_ITEMS:
        return v.Mapping(tuple((key, wrap(inner)) for key, inner in thing.items()))
    return None


def elements(thing: Any) -> tuple[Value, ...] | None:
    """The elements of a real list, tuple or list-like module."""
    held = contents(v.Known(thing))
    return held.items if isinstance(held, v.Sequence) else None


def _defines(module: nn.Module, name: str) -> bool:
    """Whether the model's code, not torch, defines this method of the container."""
    function = underlying(getattr(type(module), name, None))[0]
    return function is not None and not (function.__module__ or "").startswith("torch.")


def walk(value: Value, frame: Frame) -> LoopItems:
    """The items of a value, in a loop over it."""
    walks = [_walk_atom(atom, value, frame) for atom in value.atoms]
    if value.may_be_unknown or not walks:
        made = frame.after("[number]", v.PLAIN.replace(source=min(value.source, Origin.TENSOR_VALUE)), value)
        walks.append(LoopItems(made, dynamic=value.source == Origin.DYNAMIC))
    element = v.join(one.element for one in walks).selected_by(value)
    items = walks[0].items if len(walks) == 1 else None
    each = None if items is None else tuple(item.selected_by(value) for item in items)
    return LoopItems(element, each, any(one.dynamic for one in walks))


def _walk_atom(atom: v.Atom, value: Value, frame: Frame) -> LoopItems:
    held = contents(atom)
    if isinstance(held, v.Repeated):
        return LoopItems(held.element, dynamic=value.source == Origin.DYNAMIC)
    if held is not None:
        items = held.items if isinstance(held, v.Sequence) else tuple(v.known(key) for key, _ in held.items)
        return LoopItems(v.join(items), items)
    thing = atom.object if isinstance(atom, v.Known) else None
    if isinstance(thing, torch.Tensor):
        frame.consume(v.known(thing))
        return LoopItems(v.TENSOR)
    if isinstance(thing, nn.Module) and _defines(thing, "__iter__"):
        return walk(result_of(getattr(type(thing), "__iter__", None), thing, [], frame), frame)
    return LoopItems(v.PLAIN)


def item(value: Value, index: Value, frame: Frame) -> Value:
    """`value[index]`."""
    found = [_item_of(atom, index, frame) for atom in value.atoms]
    if value.may_be_unknown or not found:
        made = v.PLAIN.replace(source=_indexed(value, index))
        found.append(frame.after("[number]" if type(index.constant()) is int else "[]", made, value))
    result = v.join(found)
    # A name selected by a number from the data depends on the data: `experts[names[best]]`.
    source = max(result.source, index.source) if index.source >= Origin.TENSOR_VALUE else result.source
    return result.selected_by(value).replace(source=source)


def _indexed(value: Value, index: Value) -> Origin:
    """Return the origin of an item of an unknown value: `x[mask]` has a dynamic length, `x[0, 1]` implies a tensor."""
    if value.source >= Origin.TENSOR and index.source >= Origin.TENSOR_VALUE:
        return Origin.DYNAMIC
    several = any(isinstance(atom, v.Sequence) and len(atom.items) > 1 for atom in index.atoms)
    return Origin.TENSOR if several and value.source == Origin.ARGUMENT else value.source


def _item_of(atom: v.Atom, index: Value, frame: Frame) -> Value:
    held, at = contents(atom), index.constant()
    if isinstance(held, v.Sequence):
        return _pick(held.items, at, index)
    if isinstance(held, v.Mapping):
        by_key = dict(held.items)
        if at is v.Unknown:
            return _chosen(v.join(by_key.values()), index) if by_key else v.PLAIN
        try:
            return by_key.get(at, v.PLAIN)
        except TypeError:  # not hashable
            return v.PLAIN
    if isinstance(held, v.Repeated):
        return v.just(v.Repeated(held.element)) if isinstance(at, slice) else _chosen(held.element, index)
    thing = atom.object if isinstance(atom, v.Known) else None
    if isinstance(thing, torch.Tensor):
        frame.consume(v.known(thing))
        return v.TENSOR
    if isinstance(thing, nn.Module) and _defines(thing, "__getitem__"):
        return result_of(getattr(type(thing), "__getitem__", None), thing, [index], frame)
    return v.PLAIN


def _pick(items: tuple[Value, ...], at: Any, index: Value) -> Value:
    if isinstance(at, bool) or not isinstance(at, int | slice):
        everything = v.join(items) if items else v.PLAIN
        if v.Known(slice) not in index.atoms:
            return _chosen(everything, index)
        # `layers[:depth]`: the data decide which layers run if they decide the bound.
        return v.just(v.Repeated(_chosen(everything, index) if index.source >= Origin.TENSOR else everything))
    try:
        chosen = items[at]
    except (IndexError, ValueError):
        return v.PLAIN
    return chosen if isinstance(chosen, Value) else v.just(v.Sequence(chosen))


def _chosen(element: Value, index: Value) -> Value:
    """Return an element selected by an unknown index."""
    data_dependent = (index.data_dependent or index.source >= Origin.ARGUMENT) and len(element.atoms) > 1
    return element.selected_by(index.replace(data_dependent=data_dependent))


def truth(value: Value) -> bool | None:
    """Return the outcome of `if value:`, or None if unknown."""
    if value.may_be_unknown or not value.atoms:
        return None
    answers = {_truth_of(atom) for atom in value.atoms}
    return answers.pop() if len(answers) == 1 else None


def _truth_of(atom: v.Atom) -> bool | None:
    held = contents(atom)
    if held is not None:
        return None if isinstance(held, v.Repeated) else bool(held.items)
    if not isinstance(atom, v.Known):
        return True
    thing = atom.object
    if thing is None or isinstance(thing, bool | int | float | str | bytes):
        return bool(thing)
    # Functions, classes and ordinary modules do not define `__bool__`, so they are true.
    is_module = isinstance(thing, nn.Module) and not hasattr(type(thing), "__len__")
    return True if is_module or isinstance(thing, type | types.FunctionType) else None


def assign(target: ast.expr, value: Value, frame: Frame) -> None:
    """`target = value`."""
    if isinstance(target, ast.Name):
        frame.names[target.id] = value
    elif isinstance(target, ast.Tuple | ast.List):
        _unpack(target.elts, value, frame)
    elif isinstance(target, ast.Starred):
        assign(target.value, v.just(v.Repeated(value)), frame)
    elif isinstance(target, ast.Subscript):
        _assign_item(target, value, frame)
    elif isinstance(target, ast.Attribute):
        frame.evaluate(target.value)


def _unpack(targets: list[ast.expr], value: Value, frame: Frame) -> None:
    starred = any(isinstance(target, ast.Starred) for target in targets)
    rows = [atom for atom in value.atoms if isinstance(atom, v.Sequence) and len(atom.items) == len(targets)]
    for position, target in enumerate(targets):
        if rows and not starred:
            parts = [row.items[position] for row in rows]
            if value.may_be_unknown:
                parts.append(v.PLAIN.replace(source=value.source))
            assign(target, v.join(parts), frame)
        else:
            index = v.PLAIN if starred else v.known(position)
            assign(target, item(value, index, frame), frame)


def _assign_item(target: ast.Subscript, value: Value, frame: Frame) -> None:
    """`blocks[i] = block` adds an item to the list; on a tensor it is a computation."""
    holder = frame.evaluate(target.value)
    frame.evaluate(target.slice)
    frame.consume(value)
    if isinstance(target.value, ast.Name) and value.atoms and target.value.id in frame.names:
        pieces = [value, *(part for atom in holder.atoms for part in v.inside(atom))]
        frame.names[target.value.id] = v.join([holder.replace(atoms=frozenset()), v.just(v.Repeated(v.join(pieces)))])


_DYNAMIC = {"nonzero", "masked_select", "unique", "unique_consecutive", "argwhere"}
_CONTENT = {
    "item", "tolist", "numpy", "any", "all", "equal", "allclose", "isclose", "is_nonzero",
    "count_nonzero", "bincount", "eq", "ne", "gt", "ge", "lt", "le", "greater", "greater_equal", "less",
    "less_equal", "isnan", "isinf", "isin",
}  # fmt: skip
# The lengths of their results are arguments, which may depend on the data: `tokens.split(counts.tolist())`.
_INTO_PARTS = {"split", "split_with_sizes", "tensor_split", "unsafe_split", "hsplit", "vsplit"}
_TO_LENGTH = {"narrow", "repeat_interleave"}
SIZE_METHODS = {"size", "numel", "dim", "nelement", "ndimension", "element_size", "stride", "__len__"}
# An unknown value with a call of such a method is a tensor: no container or string has the method.
_TENSOR_METHODS = {name for name in dir(torch.Tensor) if not name.startswith("_")} - {
    name for kind in (dict, list, str, set, torch.nn.Module) for name in dir(kind)
} | {"to", "cpu", "cuda", "float", "half", "double", "bfloat16"}


def is_torch_function(thing: Any) -> bool:
    """Whether a callable is torch's, whose code is not read."""
    if isinstance(thing, types.BuiltinFunctionType):
        return "VariableFunctions" in thing.__qualname__ or (thing.__module__ or "").startswith("torch")
    module = getattr(thing, "__module__", None)
    return isinstance(module, str) and (module == "torch" or module.startswith("torch."))


def is_random_function(thing: Any) -> bool:
    """Whether a callable draws Python's or numpy's random numbers, which differ between ranks."""
    if isinstance(getattr(thing, "__self__", None), random.Random):
        return True
    return (getattr(thing, "__module__", None) or "").startswith(("random", "numpy.random"))


def torch_result(name: str, arguments: Arguments) -> Value:
    """Return the result of a torch function."""
    values = arguments.values()
    if name in ("rand", "rand_like", "bernoulli", "randperm", "randint"):
        return v.opaque(*values, source=Origin.RANDOM)
    if name == "where" and len(values) == 1:
        return v.opaque(*values, source=Origin.DYNAMIC)
    if (found := _from_content(name, values)) is not None:
        return found
    about = name.startswith(("is_", "get_", "has_", "finfo", "iinfo", "device"))
    return v.PLAIN if about else v.opaque(*values, source=Origin.TENSOR)


def method_reads_content(name: str) -> bool:
    """Whether calling `tensor.name(...)` computes with the tensor."""
    shape_only = ("is_", "new_", "get_device", "requires_grad", "register_")
    return name not in SIZE_METHODS and not name.startswith(shape_only)


def method_result(receiver: Value, name: str, arguments: Arguments) -> Value:
    """Return the result of a method of an unknown value, which counts as a tensor if tensors have such a method."""
    source, values = receiver.source, [receiver, *arguments.values()]
    if name in SIZE_METHODS:
        return v.opaque(receiver, source=Origin.TENSOR_VALUE if source == Origin.DYNAMIC else Origin.PLAIN)
    if source == Origin.PLAIN:
        return v.opaque(*values, source=min(max(value.source for value in values), Origin.ARGUMENT))
    if (found := _from_content(name, values)) is not None:
        return found
    if name.startswith(("is_", "has_", "get_")):
        return v.opaque(receiver, source=min(source, Origin.ARGUMENT))
    return v.opaque(receiver, source=max(source, Origin.TENSOR) if name in _TENSOR_METHODS else source)


def _from_content(name: str, values: list[Value]) -> Value | None:
    """Return the result of a function of a tensor (the first value) that has a dynamic length or contains data."""
    if name in _DYNAMIC:
        return v.opaque(*values, source=Origin.DYNAMIC)
    if any(value.source >= Origin.TENSOR_VALUE for value in values[1:]) and name in _INTO_PARTS | _TO_LENGTH:
        part = v.opaque(*values, source=Origin.DYNAMIC)
        return v.just(v.Repeated(part)) if name in _INTO_PARTS else part
    if name in _CONTENT:
        still_dynamic = name in ("tolist", "numpy") and values and values[0].source == Origin.DYNAMIC
        return v.opaque(*values, source=Origin.DYNAMIC if still_dynamic else Origin.TENSOR_VALUE)
    return None
