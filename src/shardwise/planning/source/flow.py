"""Data flow between the modules of a block: the sources of each module's input, and the operations on them."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from torch import nn

from shardwise.planning.calls import Places, has_parameters, is_opaque
from shardwise.planning.source.functions import Arguments, enter_function, find_node, start, underlying
from shardwise.planning.source.values import (
    TENSOR,
    Analysis,
    Frame,
    TooComplex,
    Trail,
    Value,
    from_source,
    known,
    trail_of,
)


class DataFlow(NamedTuple):
    """Data flow through the code of one module and its descendants."""

    inputs: dict[str, Trail]
    """Input of each module with its own parameters, by FQN in call order."""
    returned: Trail
    """Returned value."""
    sizes_read: dict[str, Trail]
    """Values whose size the code of a module reads, by FQN."""
    in_loss: Trail
    """Sources of the arguments of a cross-entropy."""
    problem: str = ""
    """Why the analysis stopped early; empty if it did not."""


class Flow:
    """Follows data through the modules that a module calls, down to modules with their own parameters.

    Args:
        leaves: Identities of modules whose code is not read.
    """

    def __init__(self, leaves: Collection[int]) -> None:
        self._leaves = leaves
        self.inputs: dict[str, Trail] = defaultdict(frozenset)
        self.sizes_read: dict[str, Trail] = defaultdict(frozenset)
        self.in_loss: Trail = frozenset()

    def call(self, module: nn.Module, callee: Value, arguments: Arguments, frame: Frame) -> Value:
        """Evaluate `module(...)`: its result, with the trail of sources and operations."""
        places, values = frame.analysis.places, arguments.values()
        if module in places and self._is_leaf(module):
            name = places.name(module)
            self.inputs[name] |= frame.trail(*values)
            return TENSOR.replace(trail=from_source("module", name))
        if type(module).forward is nn.Sequential.forward:
            return self.call_in_turn(module, arguments.first(), frame)
        if not type(module).__module__.startswith("torch.nn."):
            forward = vars(module).get("forward") or inspect.getattr_static(type(module), "forward")
            given = arguments.after(known(module))
            chain = (*frame.chain, module) if module in places else frame.chain
            result = enter_function(forward, given, frame, receiver=module, chain=chain, through=callee)
            if result is not None:
                return result
        if has_parameters(module):
            raise TooComplex(f"{type(module).__name__} has no source that can be read")
        return frame.after(type(module).__name__, TENSOR, *values)

    def call_in_turn(self, modules: nn.Module, value: Value, frame: Frame) -> Value:
        """Call the modules in a Sequential one after the other."""
        for module in modules.children():
            value = self.call(module, known(module), Arguments([value]), frame)
        return value

    def _is_leaf(self, module: nn.Module) -> bool:
        inside = any(has_parameters(child) for child in module.children())
        return id(module) in self._leaves or is_opaque(module) or (has_parameters(module) and not inside)


def read_flow(places: Places, name: str, leaves: Iterable[nn.Module] = ()) -> DataFlow:
    """Follow data through one call of a module, from its source.

    Args:
        places: Names of the model's modules.
        name: FQN of the module.
        leaves: Modules whose code is not read.
    """
    module = places.modules[name]
    analysis = Analysis(places)
    flow = analysis.flow = Flow(set(map(id, leaves)))
    frame = Frame(analysis, (module,), None, {}, receiver=module)
    problem, returned = "", Trail()
    try:
        if type(module).forward is nn.Sequential.forward:
            result = flow.call_in_turn(module, TENSOR.replace(trail=from_source("argument", "input")), frame)
        else:
            own = vars(module).get("forward")
            result = start(own or inspect.getattr_static(type(module), "forward"), module, frame)
        problem = "it has no source" if result is None else ""
        returned = frozenset() if result is None else trail_of(result)
    except Exception as error:  # unusual code must not stop planning
        problem = f"{type(error).__name__}: {error}"
    return DataFlow(dict(flow.inputs), returned, dict(flow.sizes_read), flow.in_loss, problem)


_SIZED = ("view", "reshape", "unflatten", "expand", "rearrange", "zeros", "ones", "empty", "full", "new_", "rand")


def size_attributes(module: nn.Module, values: Collection[int]) -> tuple[list[str], bool]:
    """Return the attributes with one of these values that a module's code uses as sizes, and whether it divides by one.

    A size is an argument of functions such as `view` and `zeros`, an item of a tuple, or a number assigned to a name;
    the last of several sizes is that of a head, not the number of heads.
    """
    held = {name for name, value in vars(module).items() if type(value) is int and value in values}
    found, last, divides = set[str](), set[str](), False
    methods = {name: method for kind in reversed(type(module).__mro__) for name, method in vars(kind).items()}
    for name, method in methods.items() if held else ():
        plain = underlying(method)[0] if name != "__init__" and callable(method) else None
        node = find_node(plain) if plain is not None and not (plain.__module__ or "").startswith("torch.") else None
        for inner in ast.walk(node) if node is not None else ():
            if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Div | ast.FloorDiv | ast.Mod):
                divides |= bool(_own_attributes(inner.right) & held)
                continue
            is_sizes = isinstance(inner, ast.Call) and _called_name(inner.func).startswith(_SIZED)
            sizes = inner.args if is_sizes else inner.elts if isinstance(inner, ast.Tuple | ast.List) else []
            if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Attribute):
                found |= _own_attributes(inner.value)
            if sizes and isinstance(sizes[-1], ast.Attribute):
                last |= _own_attributes(sizes[-1])
                sizes = sizes[:-1]
            found |= set[str]().union(*map(_own_attributes, sizes))
    return sorted((found - last) & held), divides


def _called_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _own_attributes(node: ast.AST) -> set[str]:
    """Return the attributes of `self` in an expression."""
    inner = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return {each.attr for each in inner if isinstance(each.value, ast.Name) and each.value.id == "self"}
