"""Evaluate expressions of a program."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from shardwise.source.syntax import Comprehension, FileContext, Function
from shardwise.source.values import (
    UNKNOWN,
    BranchTest,
    Constant,
    DictEntry,
    DictValue,
    Env,
    ImportedName,
    Items,
    ObjectRef,
    Param,
    Params,
    PartRef,
    ProgramEvent,
    StateDict,
    Trace,
    TupleValue,
    Value,
    Values,
    attribute,
    join,
)

MAX_DEPTH = 8
MAX_EVENTS = 20_000  # of one trace; a file that reaches it is read no further

Loop = ast.For | ast.AsyncFor | ast.While
ITEM = "[]"


class OutOfBudget(Exception):
    """The trace is long enough; what has been read so far stands."""


@dataclass(slots=True)
class Interpreter:
    """The state of reading one trace."""

    file: FileContext
    root: ast.AST
    module_env: Env
    env: Env = field(default_factory=dict)
    trace: Trace = field(default_factory=Trace)
    heap: dict[tuple[ObjectRef | PartRef, str], Values] = field(default_factory=dict)
    """Attributes and items that were stored."""
    guards: list[BranchTest] = field(default_factory=list)
    contexts: list[ProgramEvent] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    chain: list[ast.Call] = field(default_factory=list)
    active: list[Function] = field(default_factory=list)
    """The functions being read, outermost first."""
    returned: list[Values] = field(default_factory=list)
    reached: set[Function] = field(default_factory=set)
    turn: tuple[int, ...] = ()
    """Of the loops that are read turn by turn."""
    meta_depth: int = 0

    def unroll(self, elements: Sequence[Values]) -> Iterator[Values]:
        """Go through the turns of a loop; what is made in one turn is not what is made in another."""
        outer = self.turn
        for number, element in enumerate(elements):
            self.turn = (*outer, number) if len(elements) > 1 else outer
            yield element
        self.turn = outer

    def emit(self, node: ast.Call | ast.Attribute, **facts: object) -> ProgramEvent:
        """Add an event that happens here and now."""
        if len(self.trace.events) >= MAX_EVENTS:
            raise OutOfBudget
        event = ProgramEvent(
            node=node,
            order=len(self.trace.events),
            root=self.root,
            guards=tuple(self.guards),
            chain=tuple(self.chain),
            contexts=tuple(self.contexts),
            loop=self.loops[-1] if self.loops else None,
            **facts,  # pyrefly: ignore
        )
        self.trace.events.append(event)
        return event

    @contextmanager
    def guarded(self, test: ast.expr | ast.ExceptHandler, taken: bool) -> Iterator[None]:
        """Inside: the test came out so."""
        length = len(self.guards)
        self.assume(test, taken)
        try:
            yield
        finally:
            del self.guards[length:]

    def assume(
        self, test: ast.expr | ast.ExceptHandler, taken: bool, branch: tuple[ast.AST, bool] | None = None
    ) -> None:
        """From here to the end of the block: the test came out so."""
        branch = branch or (test, taken)
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, taken = test.operand, not taken
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == taken:
            # All of an `and` hold where it is taken; none of an `or` where it is not.
            for value in test.values:
                self.assume(value, taken, branch)
        else:
            key = f"except {test.lineno}" if isinstance(test, ast.ExceptHandler) else self.file.source(test)
            self.guards.append(BranchTest(test, taken, key, branch))

    def load(self, owner: ObjectRef | PartRef, name: str) -> Values:
        """An attribute, or an item by the name `[]`, of an object."""
        stored = self.heap.get((owner, name))
        return stored if stored is not None else frozenset({attribute(owner, name)})

    def store(self, owner: ObjectRef | PartRef, name: str, values: Values) -> None:
        """Set an attribute or item; under a test, it may also keep what it had."""
        for value in values:
            if isinstance(value, ObjectRef | PartRef) and value != owner:
                self.trace.owners.setdefault(value, set()).add(owner)
        before = self.heap.get((owner, name))
        keeps = before is not None and (self.guards or name == ITEM)
        self.heap[owner, name] = join(before, values) if keeps and before is not None else values

    def rebind(self, node: ast.expr, values: Values, owners: Values = UNKNOWN) -> None:
        """Give the name or attribute by which a dictionary or list was reached its new content."""
        if isinstance(node, ast.Name):
            self.env[node.id] = values
        elif isinstance(node, ast.Attribute):
            for owner in owners:
                if isinstance(owner, ObjectRef | PartRef):
                    self.heap[owner, node.attr] = values

    def find_method(self, definition: ast.ClassDef, name: str) -> Function | None:
        """A method of a class, or of its first base in this file, and so on."""
        for _ in range(MAX_DEPTH):
            for statement in definition.body:
                if isinstance(statement, Function) and statement.name == name:
                    return statement
            bases = [self.file.definition(base) for base in definition.bases]
            base = next((one for one in bases if isinstance(one, ast.ClassDef)), None)
            if base is None:
                return None
            definition = base
        return None

    def look_up(self, name: str) -> Values:
        """A name's values in the function being read, else in the module."""
        if name in self.env:
            return self.env[name]
        return self.module_env.get(name, UNKNOWN)


def merge(into: Env, other: Env) -> Env:
    """The names after two branches that may both have been taken."""
    return {name: join(into.get(name, UNKNOWN), other.get(name, UNKNOWN)) for name in into.keys() | other.keys()}


_MAX_TURNS = 4


def evaluate(walk: Interpreter, node: ast.expr) -> Values:
    """What an expression may be."""
    match node:
        case ast.Constant():
            return frozenset({Constant(node.value)}) if _is_plain(node.value) else UNKNOWN
        case ast.Name():
            return _name(walk, node)
        case ast.Attribute():
            return _attribute(walk, node)
        case ast.Call():
            from shardwise.source.statements import read_call  # calls evaluate their arguments here

            return read_call(walk, node)
        case ast.Subscript():
            return _subscript(walk, node)
        case ast.Tuple() | ast.List() | ast.Set():
            return _display(walk, node)
        case ast.Dict():
            return _dictionary(walk, node)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            return _comprehension(walk, node)
        case ast.IfExp():
            return _conditional(walk, node)
        case ast.BoolOp():
            return join(*(evaluate(walk, value) for value in node.values))
        case ast.NamedExpr():
            values = evaluate(walk, node.value)
            walk.env[node.target.id] = values
            return values
        case ast.Await() | ast.Starred():
            return evaluate(walk, node.value)
        case ast.BinOp():
            return _merged_tables(evaluate(walk, node.left), evaluate(walk, node.right), node)
        case ast.Lambda():
            return UNKNOWN
        case _:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    evaluate(walk, child)
            return UNKNOWN


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _name(walk: Interpreter, node: ast.Name) -> Values:
    known = walk.look_up(node.id)
    if known or node.id in walk.env:
        return known
    origins = walk.file.origins(node)
    return frozenset({ImportedName(origins)}) if origins else UNKNOWN


def _attribute(walk: Interpreter, node: ast.Attribute) -> Values:
    origins = walk.file.origins(node)
    owners = evaluate(walk, node.value)
    found: list[Values] = []
    for owner in owners:
        match owner:
            case ObjectRef() | PartRef():
                found.append(walk.load(owner, node.attr))
            case Param() if node.attr in ("data", "grad"):
                found.append(frozenset({owner}))
            case ImportedName():
                found.append(frozenset({ImportedName(frozenset(f"{o}.{node.attr}" for o in owner.origins))}))
    if origins and not found:
        return frozenset({ImportedName(origins)})
    return join(*found)


def _subscript(walk: Interpreter, node: ast.Subscript) -> Values:
    owners = evaluate(walk, node.value)
    evaluate(walk, node.slice)
    key = node.slice.value if isinstance(node.slice, ast.Constant) else None
    found: list[Values] = []
    for owner in owners:
        match owner:
            case ObjectRef() | PartRef() if isinstance(key, int | str):
                found.append(walk.load(owner, f"[{key!r}]"))  # `layers[0]` is not any of `layers`
            case ObjectRef() | PartRef():
                found.append(walk.load(owner, ITEM))
            case Items():
                found.append(owner.element)
            case TupleValue() if isinstance(key, int) and -len(owner.items) <= key < len(owner.items):
                found.append(owner.items[key])
            case TupleValue():
                found.append(join(*owner.items))
            case DictValue() if isinstance(key, str):
                entry = owner.get(key)
                found.append(entry.values if entry else UNKNOWN)
            case DictValue():
                found.append(join(*(entry.values for entry in owner.entries)))
    return join(*found)


def _display(walk: Interpreter, node: ast.Tuple | ast.List | ast.Set) -> Values:
    items: list[Values] = []
    for element in node.elts:
        values = evaluate(walk, element)
        if isinstance(element, ast.Starred):
            return frozenset({Items(join(iterate(walk, values), *items))})
        items.append(values)
    return frozenset({TupleValue(tuple(items))})


def _dictionary(walk: Interpreter, node: ast.Dict) -> Values:
    entries: list[DictEntry] = []
    is_open = False
    for key, value in zip(node.keys, node.values, strict=True):
        values = evaluate(walk, value)
        if key is None:
            tables = [one for one in values if isinstance(one, DictValue)]
            entries += [entry for table in tables for entry in table.entries]
            is_open |= not tables or len(tables) < len(values) or any(table.is_open for table in tables)
        elif isinstance(key, ast.Constant) and isinstance(key.value, str):
            entries.append(DictEntry(key.value, values, value))
        else:
            evaluate(walk, key)
            entries.append(DictEntry("", values, value))
            is_open = True
    return frozenset({DictValue(tuple(entries), is_open)})


def _merged_tables(left: Values, right: Values, node: ast.BinOp) -> Values:
    """`a | b` of dictionaries; any other arithmetic is unknown."""
    tables = [value for value in (*left, *right) if isinstance(value, DictValue)]
    if isinstance(node.op, ast.BitOr) and tables:
        is_open = len(tables) != 2 or any(table.is_open for table in tables)
        return frozenset({DictValue(tuple(entry for table in tables for entry in table.entries), is_open)})
    rows = frozenset(value for value in (*left, *right) if isinstance(value, TupleValue | Items | Params))
    return frozenset({Items(rows)}) if isinstance(node.op, ast.Add) and rows else UNKNOWN


def _comprehension(walk: Interpreter, node: Comprehension) -> Values:
    outer, guards = dict(walk.env), len(walk.guards)
    element = join(*_elements(walk, node, list(node.generators)))
    del walk.guards[guards:]
    walk.env = outer
    owners = {value.owner for value in element if isinstance(value, Param)}
    if owners and len(owners) == len(element):
        return frozenset(Params(owner) for owner in owners)
    return frozenset({Items(element)})


def _elements(walk: Interpreter, node: Comprehension, generators: list[ast.comprehension]) -> Iterator[Values]:
    """The elements that a comprehension gives, turn by turn."""
    from shardwise.source.statements import assign  # statements evaluate expressions

    if not generators:
        if isinstance(node, ast.DictComp):
            evaluate(walk, node.key)
        yield evaluate(walk, node.value if isinstance(node, ast.DictComp) else node.elt)
        return
    first, *rest = generators
    for value in walk.unroll(turns(walk, evaluate(walk, first.iter))):
        assign(walk, first.target, value)
        for test in first.ifs:
            evaluate(walk, test)
            walk.assume(test, True)
        yield from _elements(walk, node, rest)


def _conditional(walk: Interpreter, node: ast.IfExp) -> Values:
    evaluate(walk, node.test)
    with walk.guarded(node.test, True):
        body = evaluate(walk, node.body)
    with walk.guarded(node.test, False):
        orelse = evaluate(walk, node.orelse)
    return join(body, orelse)


def turns(walk: Interpreter, values: Values) -> list[Values]:
    """What the turns of a loop get: each element of a short tuple or list, else one turn that stands for all."""
    if len(values) == 1:
        (value,) = values
        if isinstance(value, TupleValue) and 1 < len(value.items) <= _MAX_TURNS:
            return list(value.items)
    return [iterate(walk, values)]


def iterate(walk: Interpreter, values: Values) -> Values:
    """What one turn of a loop over these values gets."""
    found: list[Values] = []
    for value in values:
        match value:
            case Items():
                found.append(value.element)
            case TupleValue():
                found.append(join(*value.items))
            case Params():
                found.append(frozenset({Param(value.owner)}))
            case ObjectRef() | PartRef():
                found.append(walk.load(value, ITEM))
            case StateDict():
                found.append(frozenset({value}))  # a tensor of it is as full as the whole
    return join(*found)


DESCENDANT = "modules()"
_SAME = frozenset(
    {"to", "cuda", "cpu", "half", "float", "double", "bfloat16", "train", "eval", "requires_grad_", "to_empty", "apply"}
)
_SAME_TENSORS = frozenset({"detach", "to", "float", "cpu", "values", "clone"})
_SAME_STATE = frozenset(
    {"copy", "to", "cpu", "get", "values", "detach", "clone", "contiguous", "half", "float", "bfloat16"}
)
_COLLECTIONS = frozenset({"list", "tuple", "set", "sorted", "iter", "filter"})


def method_result(walk: Interpreter, call: ast.Call, event: ProgramEvent) -> Values | None:
    """What a well-known method returns; None where the method is not one of those."""
    if event.method in ("append", "add", "extend") and event.args:
        _append(walk, call, event)
    found = [values for one in event.receiver if (values := _returned_by(walk, call, event, one)) is not None]
    return join(*found) if found else None


def _returned_by(walk: Interpreter, call: ast.Call, event: ProgramEvent, one: Value) -> Values | None:
    name = event.method
    match one:
        case ObjectRef() | PartRef():
            return _returned_by_module(walk, call, name, one)
        case Param() | Params() | Items() if name in _SAME_TENSORS:
            return frozenset({one})
        case StateDict() if name in _SAME_STATE:
            return frozenset({one})
        case StateDict() if name == "items":
            return _pairs(frozenset({one}))
        case DictValue() if name == "update":
            _update(walk, call, event, one)
            return frozenset({Constant(None)})
        case DictValue() if name in ("get", "pop") and call.args:
            key = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
            entry = one.get(key) if isinstance(key, str) else None
            return entry.values if entry else UNKNOWN
    return None


def _returned_by_module(walk: Interpreter, call: ast.Call, name: str, one: ObjectRef | PartRef) -> Values | None:
    if isinstance(one, ObjectRef) and one.definition is not None and walk.find_method(one.definition, name) is not None:
        return None  # the class has one of its own
    if name in _SAME:
        return frozenset({one})
    if name == "state_dict":
        return frozenset({StateDict(one, call)})
    return _MODULE_METHODS[name](walk, one) if name in _MODULE_METHODS else None


def _append(walk: Interpreter, call: ast.Call, event: ProgramEvent) -> None:
    added = iterate(walk, event.args[0]) if event.method == "extend" else event.args[0]
    for one in event.receiver:
        if isinstance(one, ObjectRef | PartRef):
            walk.store(one, ITEM, added)
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(owner, ast.Name) and any(isinstance(one, TupleValue | Items) for one in event.receiver):
        elements = join(*(iterate(walk, frozenset({one})) for one in event.receiver), added)
        walk.env[owner.id] = frozenset({Items(elements)})


def _update(walk: Interpreter, call: ast.Call, event: ProgramEvent, table: DictValue) -> None:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    added = [DictEntry(key, argument.values, argument.node) for key, argument in event.keywords.items()]
    tables = [value for values in event.args for value in values if isinstance(value, DictValue)]
    added += [entry for one in tables for entry in one.entries]
    is_open = table.is_open or event.is_open or len(tables) < len(event.args)
    if isinstance(owner, ast.Name):
        walk.env[owner.id] = frozenset({DictValue((*table.entries, *added), is_open)})


def _pairs(values: Values) -> Values:
    return frozenset({Items(frozenset({TupleValue((UNKNOWN, values))}))})


_MODULE_METHODS: dict[str, Callable[[Interpreter, ObjectRef | PartRef], Values]] = {
    "parameters": lambda walk, one: frozenset({Params(one)}),
    "named_parameters": lambda walk, one: _pairs(frozenset({Param(one)})),
    "modules": lambda walk, one: frozenset({Items(frozenset({attribute(one, DESCENDANT)}))}),
    "named_modules": lambda walk, one: _pairs(frozenset({attribute(one, DESCENDANT)})),
    "children": lambda walk, one: frozenset({Items(walk.load(one, ITEM))}),
    "named_children": lambda walk, one: _pairs(walk.load(one, ITEM)),
    "values": lambda walk, one: frozenset({Items(walk.load(one, ITEM))}),
    "items": lambda walk, one: _pairs(walk.load(one, ITEM)),
}


def builtin_result(walk: Interpreter, event: ProgramEvent) -> Values | None:
    """What Python's own functions on iterables return."""
    if event.origins or not event.args:
        return frozenset({Items(UNKNOWN)}) if event.method in ("list", "set") and not event.origins else None
    name, last = event.method, event.args[-1]
    if name in _COLLECTIONS:
        return last
    if name == "reversed":
        return frozenset({Items(iterate(walk, last), is_reversed=True)})
    if name == "enumerate":
        return _pairs(iterate(walk, event.args[0]))
    if name == "zip":
        return frozenset({Items(frozenset({TupleValue(tuple(iterate(walk, arg) for arg in event.args))}))})
    if name == "getattr" and len(event.args) >= 2:
        names = [value.value for value in event.args[1] if isinstance(value, Constant)]
        owners = [one for one in event.args[0] if isinstance(one, ObjectRef | PartRef)]
        return join(*(walk.load(one, str(name)) for one in owners for name in names))
    return None
