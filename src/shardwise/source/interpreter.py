"""Abstract interpretation of a program, function by function: the values of its names, and its calls."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from shardwise.source import facts
from shardwise.source import values as v
from shardwise.source.syntax import Comprehension, FileContext, Function, all_parameters, last_name
from shardwise.source.trace import Trace
from shardwise.source.values import UNKNOWN, DictValue, Items, ObjectRef, ProgramEvent, Values, either, join, modules

ITEM = "[]"
DESCENDANT = "modules()"
_Test = ast.expr | ast.ExceptHandler
_MAX_DEPTH = 8
_MAX_EVENTS = 20_000  # per trace; the rest of the file is not read
_MAX_TURNS = 4
_CASTS = frozenset({"to", "cuda", "cpu", "half", "float", "double", "bfloat16"})
_TENSOR_METHODS = frozenset({"detach", "to", "float", "cpu", "values", "clone"})
_SAME_OBJECT: dict[type, frozenset[str]] = {  # methods that return the object itself, by type of the value
    ObjectRef: _CASTS | {"train", "eval", "requires_grad_", "to_empty", "apply"},
    v.Param: _TENSOR_METHODS,
    Items: _TENSOR_METHODS,
    v.StateDict: _TENSOR_METHODS | {"copy", "get", "contiguous", "half", "bfloat16"},
}
_CONTENTS = frozenset({"parameters", "modules", "children", "values", "items"})
_COLLECTIONS = frozenset({"list", "tuple", "set", "sorted", "iter", "filter"})
_READERS = frozenset({"print", "len", "str", "repr", "isinstance", "sorted", "list", "tuple", "dict", "bool"})


def read_program(file: FileContext) -> list[Trace]:
    """Return the traces of a file; each event is in one trace, except those of functions called several times."""
    main = _Interpreter(file, file.tree)
    with suppress(_OutOfBudget):
        main.block(file.tree.body)
    traces, reached = [main.trace], set(main.reached)
    for functions in _roots(file):
        unreached = [function for function in functions if function not in reached]
        if unreached:
            interpreter = _Interpreter(file, unreached[0], main.module_env)
            # A method that another method of the class calls is read at that call, with its arguments.
            for function in unreached:
                if function not in interpreter.reached:
                    interpreter.read_root(function)
            traces.append(interpreter.trace)
            reached |= interpreter.reached
    return [trace for trace in traces if trace.events]


def _roots(file: FileContext) -> Iterator[list[Function]]:
    """Yield functions to start from: methods of one class together, callers before callees."""
    called = [getattr(call.func, "id", "") or getattr(call.func, "attr", "") for call in file.calls]
    for node in file.tree.body:
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, Function)]
            yield sorted(methods, key=lambda one: (one.name not in ("__init__", "setup"), called.count(one.name)))
    tops = [one for one in file.functions if not isinstance(file.parents[one], ast.ClassDef | Function)]
    for function in sorted(tops, key=lambda one: (called.count(one.name), one.lineno)):
        yield [function]


class _OutOfBudget(Exception):
    """Raised when a trace has the maximum number of events; the events so far are kept."""


class _Interpreter(ast.NodeVisitor):
    """Reads one trace. `visit` returns the values of an expression; for a statement, whether control flow ends there.

    Args:
        file: The file to read.
        root: The module or function where reading starts.
        module_env: The module's names; None if `root` is the module.
    """

    def __init__(self, file: FileContext, root: ast.AST, module_env: v.Env | None = None) -> None:
        self.file, self.root = file, root
        self.env: v.Env = {}
        self.module_env = self.env if module_env is None else module_env
        self.trace = Trace()
        self.reached: set[Function] = set()
        self._heap: dict[tuple[ObjectRef, str], Values] = {}  # attributes and items that were assigned
        self._guards: list[v.BranchTest] = []
        self._contexts: list[ProgramEvent] = []
        self._loops: list[ast.For | ast.AsyncFor | ast.While] = []
        self._chain: list[ast.Call] = []
        self._active: list[Function] = []  # the functions being read, outermost first
        self._returned: list[Values] = []
        self._turn: tuple[int, ...] = ()  # indices of the loop iterations that are read separately
        self._meta_depth = 0

    def read_root(self, function: Function) -> None:
        """Read a function that nothing calls, with a new object for each argument."""
        self.root = function
        self.env = {one.arg: frozenset({ObjectRef(one)}) for one in all_parameters(function.args)}
        owner, positional = self.file.parents[function], [*function.args.posonlyargs, *function.args.args]
        if isinstance(owner, ast.ClassDef) and positional:
            self.env[positional[0].arg] = frozenset({ObjectRef(owner, definition=owner)})  # shared by all methods
        self.reached.add(function)
        with suppress(_OutOfBudget):
            self._body(function)

    def _emit(self, node: ast.Call | ast.Attribute, **details: Any) -> ProgramEvent:
        if len(self.trace.events) >= _MAX_EVENTS:
            raise _OutOfBudget
        event = ProgramEvent(
            node=node,
            order=len(self.trace.events),
            root=self.root,
            guards=tuple(self._guards),
            chain=tuple(self._chain),
            contexts=tuple(self._contexts),
            loop=self._loops[-1] if self._loops else None,
            **details,
        )
        self.trace.events.append(event)
        return event

    @contextmanager
    def _guarded(self, test: _Test, taken: bool) -> Iterator[None]:
        """Record inside the block that the test had this outcome."""
        length = len(self._guards)
        self._assume(test, taken)
        yield
        del self._guards[length:]

    def _assume(self, test: _Test, taken: bool, branch: tuple[ast.AST, bool] | None = None) -> None:
        """Record until the end of the current block that the test had this outcome."""
        branch = branch or (test, taken)
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, taken = test.operand, not taken
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == taken:
            # If an `and` holds, so do all its operands; if an `or` fails, so do all its operands.
            for value in test.values:
                self._assume(value, taken, branch)
        else:
            self._guards.append(v.BranchTest(test, taken, self.file.tested_text(test), branch))

    def _load(self, owner: ObjectRef, name: str) -> Values:
        """Return the values of an attribute of an object, or of any item if the name is `[]`."""
        stored = self._heap.get((owner, name))
        return stored if stored is not None else frozenset({owner.part(name)})

    def _store(self, owner: ObjectRef, name: str, values: Values) -> None:
        """Set an attribute or item; under a test, the previous values remain possible."""
        for value in modules(values):
            if value != owner:
                self.trace.owners.setdefault(value, set()).add(owner)
        before = self._heap.get((owner, name), UNKNOWN)
        self._heap[owner, name] = join(before, values) if self._guards or name == ITEM else values

    def _rebind(self, node: ast.expr, values: Values) -> None:
        """Set the name or attribute that refers to a dictionary or list to its new content."""
        if isinstance(node, ast.Name):
            self.env[node.id] = values
        elif isinstance(node, ast.Attribute):
            for owner in modules(self.visit(node.value)):
                self._heap[owner, node.attr] = values

    def _find_method(self, definition: ast.ClassDef | None, name: str) -> Function | None:
        """Return a method of a class, or of its bases in this file."""
        for _ in range(_MAX_DEPTH):
            if definition is None:
                break
            for statement in definition.body:
                if isinstance(statement, Function) and statement.name == name:
                    return statement
            bases = [self.file.definition(base) for base in definition.bases]
            definition = next((one for one in bases if isinstance(one, ast.ClassDef)), None)
        return None

    def _item(self, value: v.Value, key: object = None) -> Values:
        """Return the values of `value[key]`, or of any item if the key is None."""
        match value:
            case ObjectRef():
                return self._load(value, ITEM if key is None else f"[{key!r}]")  # `layers[0]` is not an arbitrary item
            case Items():
                return value.element
            case v.TupleValue(items) if isinstance(key, int) and -len(items) <= key < len(items):
                return items[key]
            case v.TupleValue(items):
                return join(*items)
            case DictValue():
                return value.get(key if isinstance(key, str) else None)
            case v.StateDict():
                return frozenset({value})  # a tensor of a state dict is full if the state dict is
        return UNKNOWN

    def _iterate(self, values: Values) -> Values:
        """Return the values of one iteration over these; keys of dictionaries are unknown."""
        return join(*(self._item(value) for value in values if not isinstance(value, DictValue)))

    def _turns(self, values: Values) -> Iterator[Values]:
        """Yield the values of each iteration: separately for a short tuple or list, else once for all iterations.

        Objects created in separate iterations are different objects.
        """
        value = next(iter(values)) if len(values) == 1 else None
        if not (isinstance(value, v.TupleValue) and 1 < len(value.items) <= _MAX_TURNS):
            yield self._iterate(values)
            return
        for number, element in enumerate(value.items):
            outer, self._turn = self._turn, (*self._turn, number)
            yield element
            self._turn = outer

    def generic_visit(self, node: ast.AST) -> Values:
        """Evaluate the expressions in a node whose own value is unknown."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.visit(child)
        return UNKNOWN

    def visit_Constant(self, node: ast.Constant) -> Values:
        return frozenset({v.Constant(node.value)}) if v.is_plain(node.value) else UNKNOWN

    def visit_Name(self, node: ast.Name) -> Values:
        if node.id in self.env or self.module_env.get(node.id):
            return self.env[node.id] if node.id in self.env else self.module_env[node.id]
        origins = self.file.origins(node)
        return frozenset({v.ImportedName(origins)}) if origins else UNKNOWN

    def visit_Attribute(self, node: ast.Attribute) -> Values:
        found: list[Values] = []
        for owner in self.visit(node.value):
            match owner:
                case ObjectRef():
                    found.append(self._load(owner, node.attr))
                case v.Param() if node.attr in ("data", "grad"):
                    found.append(frozenset({owner}))
                case v.ImportedName(origins):
                    found.append(frozenset({v.ImportedName(frozenset(f"{origin}.{node.attr}" for origin in origins))}))
        origins = self.file.origins(node)
        return frozenset({v.ImportedName(origins)}) if origins and not found else join(*found)

    def visit_Subscript(self, node: ast.Subscript) -> Values:
        owners = self.visit(node.value)
        self.visit(node.slice)
        return join(*(self._item(owner, v.literal_key(node.slice)) for owner in owners))

    def visit_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Values:
        items = [self.visit(element) for element in node.elts]
        starred = [isinstance(element, ast.Starred) for element in node.elts]
        if any(starred):
            rows = [self._iterate(one) if is_many else one for one, is_many in zip(items, starred, strict=True)]
            return frozenset({Items(join(*rows))})
        return frozenset({v.TupleValue(tuple(items))})

    visit_List = visit_Set = visit_Tuple

    def visit_Dict(self, node: ast.Dict) -> Values:
        for key in filter(None, node.keys):
            self.visit(key)
        names = [None if key is None else v.literal_key(key) or 0 for key in node.keys]
        return frozenset({self._entries(zip(names, node.values, strict=True))})

    def _entries(self, given: Iterable[tuple[str | int | None, ast.expr]]) -> DictValue:
        """Return the entries for keys or keyword arguments; key None: an unpacked value, a number: a computed key."""
        entries: list[v.DictEntry] = []
        is_open = False
        for key, value in given:
            values = self.visit(value)
            if key is None:
                spread = v.merged([values])
                entries += spread.entries
                is_open |= spread.is_open
            else:
                entries.append(v.DictEntry(key if isinstance(key, str) else "", values, value))
                is_open |= not isinstance(key, str)
        return DictValue(tuple(entries), is_open)

    def visit_BinOp(self, node: ast.BinOp) -> Values:
        """`a | b` of dictionaries and `a + b` of lists; any other result is unknown."""
        sides = [self.visit(node.left), self.visit(node.right)]
        if isinstance(node.op, ast.BitOr) and any(isinstance(value, DictValue) for values in sides for value in values):
            return frozenset({v.merged(sides)})
        rows = frozenset(value for values in sides for value in values if isinstance(value, v.TupleValue | Items))
        return frozenset({Items(self._iterate(rows))}) if isinstance(node.op, ast.Add) and rows else UNKNOWN

    def visit_ListComp(self, node: Comprehension) -> Values:
        outer, guards = dict(self.env), len(self._guards)
        element = join(*self._elements(node, list(node.generators)))
        del self._guards[guards:]
        self.env = outer
        return frozenset({Items(element)})

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def _elements(self, node: Comprehension, generators: list[ast.comprehension]) -> Iterator[Values]:
        """Yield the elements of a comprehension, iteration by iteration."""
        if not generators:
            if isinstance(node, ast.DictComp):
                self.visit(node.key)
            yield self.visit(node.value if isinstance(node, ast.DictComp) else node.elt)
            return
        first, *rest = generators
        for value in self._turns(self.visit(first.iter)):
            self._assign(first.target, value)
            for test in first.ifs:
                self.visit(test)
                self._assume(test, True)
            yield from self._elements(node, rest)

    def visit_IfExp(self, node: ast.IfExp) -> Values:
        self.visit(node.test)
        body = UNKNOWN
        if not self._is_off(node.test):
            with self._guarded(node.test, True):
                body = self.visit(node.body)
        with self._guarded(node.test, False):
            return join(body, self.visit(node.orelse))

    def _is_off(self, test: ast.expr) -> bool:
        """Whether a test is false because a parameter that it needs is None, False or empty in this call."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return any(map(self._is_off, test.values))
        if not isinstance(test, ast.Name) or not self._active:
            return False
        values = self.env.get(test.id, UNKNOWN)
        is_given = any(one.arg == test.id for one in all_parameters(self._active[-1].args))
        return is_given and bool(values) and all(isinstance(one, v.Constant) and not one.value for one in values)

    def visit_BoolOp(self, node: ast.BoolOp) -> Values:
        length, results = len(self._guards), []
        for value in node.values:  # evaluated only if the operands before it are all true (`and`) or all false (`or`)
            results.append(self.visit(value))
            self._assume(value, isinstance(node.op, ast.And))
        del self._guards[length:]
        return join(*results)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Values:
        self.env[node.target.id] = self.visit(node.value)
        return self.env[node.target.id]

    def visit_Await(self, node: ast.Await | ast.Starred) -> Values:
        return self.visit(node.value)

    visit_Starred = visit_Await

    def visit_Lambda(self, node: ast.Lambda) -> Values:
        return UNKNOWN

    def visit_Call(self, node: ast.Call) -> Values:
        """Evaluate the arguments, record the call, and return its result."""
        callee = self.file.callee(node)
        function, receiver = node.func, UNKNOWN
        if isinstance(function, ast.Attribute):
            receiver = self.visit(function.value)
            called = join(*(self._load(one, function.attr) for one in modules(receiver)))
        else:
            called = self.visit(function)
        args = tuple(self.visit(argument) for argument in (*callee.args, *node.args))
        given = self._entries((keyword.arg, keyword.value) for keyword in (*callee.keywords, *node.keywords))
        event = self._emit(
            node,
            origins=callee.origins or frozenset().union(*(f.origins for f in called if isinstance(f, v.ImportedName))),
            receiver=receiver,
            method=getattr(function, "attr", getattr(function, "id", "")),
            args=args,
            keywords={entry.key: entry for entry in given.entries if entry.key},
            is_open=given.is_open or any(isinstance(argument, ast.Starred) for argument in node.args),
            called=called,
        )
        result = self._result(node, event)
        object.__setattr__(event, "result", result)  # known only now: events inside the call come after this one
        return result

    def _result(self, call: ast.Call, event: ProgramEvent) -> Values:
        if event.is_call_to(*facts.RETURNS_FIRST):
            return event.argument(0, "module", "model")
        known = self._of_method(call, event) if isinstance(call.func, ast.Attribute) else self._of_builtin(event)
        if known is not None:
            return known
        if event.is_call_to(*facts.GETTERS):
            return facts.state_dict_of(event)
        functions = [value for value in event.called if isinstance(value, v.FunctionRef)]
        for one in modules(event.receiver):
            method = self._find_method(one.definition, event.method)
            if method is not None and not {"staticmethod", "property"} & set(map(last_name, method.decorator_list)):
                functions.append(v.FunctionRef(method, one))
        if len(functions) == 1:
            return self._inline(call, event, functions[0])
        if event.origins or event.method not in _READERS:
            self._open_dictionaries(call)
        return self._new_object(call, event)

    def _open_dictionaries(self, call: ast.Call) -> None:
        """Mark dictionaries passed to a function that cannot be read as open: it may add keys."""
        for argument in [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg is not None)]:
            if isinstance(argument, ast.Name) and argument.id in self.env:
                self.env[argument.id] = frozenset(
                    DictValue(value.entries, is_open=True) if isinstance(value, DictValue) else value
                    for value in self.env[argument.id]
                )

    def _inline(self, call: ast.Call, event: ProgramEvent, function: v.FunctionRef) -> Values:
        """Read the body of a function with the call's arguments."""
        definition = function.definition
        self.reached.add(definition)
        if definition in self._active or len(self._active) >= _MAX_DEPTH or definition.name == "forward":
            return UNKNOWN
        object.__setattr__(event, "is_inlined", True)
        outer, contexts, metas = self.env, len(self._contexts), self._meta_depth
        self.env = {**(function.env or {}), **self._bind(event, function)}
        self._chain.append(call)
        for decorator in definition.decorator_list:  # `@torch.no_grad()` acts as a `with` block around the body
            self._enter(decorator)
        returned = self._body(definition)
        # Keys that the function adds to a dictionary argument are also in the caller's dictionary.
        positional = [*definition.args.posonlyargs, *definition.args.args][function.bound_to is not None :]
        for parameter, argument in zip(positional, call.args, strict=False):
            name = argument.id if isinstance(argument, ast.Name) else ""
            if any(isinstance(value, DictValue) for value in outer.get(name, UNKNOWN)):
                outer[name] = self.env.get(parameter.arg, UNKNOWN)
        self._chain.pop()
        self.env, self._meta_depth = outer, metas
        del self._contexts[contexts:]
        return returned

    def _bind(self, event: ProgramEvent, function: v.FunctionRef) -> v.Env:
        """Return the parameters' values: arguments, else defaults, else a new object."""
        parameters = function.definition.args
        positional = [*parameters.posonlyargs, *parameters.args]
        args = [*([frozenset({function.bound_to})] if function.bound_to is not None else []), *event.args]
        env: v.Env = dict(zip((one.arg for one in positional), args, strict=False))
        env |= {name: entry.values for name, entry in event.keywords.items()}
        defaults: list[tuple[ast.arg, ast.expr | None]] = []
        defaults += zip(reversed(positional), reversed(parameters.defaults), strict=False)
        defaults += zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
        for parameter, default in defaults:
            if parameter.arg not in env and default is not None:
                env[parameter.arg] = self.visit(default)
        for parameter in all_parameters(parameters):
            env.setdefault(parameter.arg, frozenset({ObjectRef(parameter, tuple(self._chain))}))
        return env

    def _new_object(self, call: ast.Call, event: ProgramEvent) -> Values:
        """Return the new object that an unknown function or class returns."""
        if event.method == "dict" and not event.origins and not event.args:
            return frozenset({DictValue(tuple(event.keywords.values()), event.is_open)})
        place = {"site": call, "chain": tuple(self._chain), "turn": self._turn}
        if event.is_call_to("copy.deepcopy") and event.args:
            return frozenset(replace(one, **place, owner=None, path=()) for one in modules(event.args[0]))
        found = self.file.definition(call.func)
        definition = found if isinstance(found, ast.ClassDef) else None
        on_meta = self._meta_depth > 0 or any(facts.is_device(one, "meta") for one in event.argument(None, "device"))
        new = ObjectRef(**place, origins=event.origins, definition=definition, on_meta=on_meta)
        contents = event.args if event.is_call_to("torch.nn.Sequential") else ()
        contents = map(self._iterate, event.args[:1]) if event.is_call_to(*facts.LISTS) else contents
        for element in contents:
            self._store(new, ITEM, element)
        constructor = self._find_method(definition, "__init__")
        if constructor is not None:
            self._inline(call, event, v.FunctionRef(constructor, new))
        return frozenset({new})

    def _of_method(self, call: ast.Call, event: ProgramEvent) -> Values | None:
        """Return the result of a well-known method; None for any other method."""
        assert isinstance(call.func, ast.Attribute), "a method"
        if event.method in ("append", "add", "extend") and event.args:
            added = self._iterate(event.args[0]) if event.method == "extend" else event.args[0]
            for one in modules(event.receiver):
                self._store(one, ITEM, added)
            if any(isinstance(one, v.TupleValue | Items) for one in event.receiver):
                self._rebind(call.func.value, frozenset({Items(join(self._iterate(event.receiver), added))}))
        found = [values for one in event.receiver if (values := self._returned_by(call, event, one)) is not None]
        return join(*found) if found else None

    def _returned_by(self, call: ast.Call, event: ProgramEvent, one: v.Value) -> Values | None:
        name = event.method
        match one:
            case ObjectRef() if self._find_method(one.definition, name) is not None:
                return None  # the class defines the method itself
            case ObjectRef() if name == "state_dict":
                return frozenset({v.StateDict(one, call)})
            case ObjectRef() if (of := name.removeprefix("named_")) in _CONTENTS:
                parts = {"parameters": frozenset({v.Param(one)}), "modules": frozenset({one.part(DESCENDANT)})}
                content = parts.get(of) or self._load(one, ITEM)
                return v.pairs(content) if of != name or name == "items" else frozenset({Items(content)})
            case v.StateDict() if name == "items":
                return v.pairs(frozenset({one}))
            case DictValue() if name == "update":
                added = v.merged([frozenset({one}), *event.args])
                table = DictValue((*added.entries, *event.keywords.values()), added.is_open or event.is_open)
                self._rebind(getattr(call.func, "value", call), frozenset({table}))
                return frozenset({v.Constant(None)})
            case DictValue() if name in ("get", "pop") and call.args:
                key = v.literal_key(call.args[0])
                return one.get(key) if isinstance(key, str) else UNKNOWN
        return frozenset({one}) if name in _SAME_OBJECT.get(type(one), frozenset()) else None

    def _of_builtin(self, event: ProgramEvent) -> Values | None:
        """Return the result of Python's built-in functions on iterables; None for any other function."""
        name = "" if event.origins else event.method
        if not event.args:
            return frozenset({Items(UNKNOWN)}) if name in ("list", "set") else None
        if name in _COLLECTIONS:
            return event.args[-1]
        if name == "reversed":
            return frozenset({Items(self._iterate(event.args[-1]))})
        if name == "enumerate":
            return v.pairs(self._iterate(event.args[0]))
        if name == "zip":
            return frozenset({Items(frozenset({v.TupleValue(tuple(map(self._iterate, event.args)))}))})
        if name == "getattr" and len(event.args) >= 2:
            names = [str(value.value) for value in event.args[1] if isinstance(value, v.Constant)]
            return join(*(self._load(one, name) for one in modules(event.args[0]) for name in names))
        return None

    def block(self, statements: Sequence[ast.stmt]) -> bool:
        """Read statements; return True if control flow never reaches their end."""
        length = len(self._guards)
        ends = any(self.visit(statement) for statement in statements)
        del self._guards[length:]
        return ends

    def _body(self, function: Function) -> Values:
        """Read a function's body with the names set up for it; return its return values."""
        outer, self._returned = self._returned, []
        self._active.append(function)
        self.block(function.body)
        self._active.pop()
        returned, self._returned = join(*self._returned), outer
        return returned

    def visit_Return(self, node: ast.Return) -> bool:
        self._returned.append(self.visit(node.value) if node.value else UNKNOWN)
        return True

    def visit_Raise(self, node: ast.Raise | ast.Continue | ast.Break) -> bool:
        self.generic_visit(node)
        return True

    visit_Continue = visit_Break = visit_Raise

    def visit_If(self, node: ast.If) -> bool:
        self.visit(node.test)
        if self._is_off(node.test):
            return self.block(node.orelse)
        before = dict(self.env)
        with self._guarded(node.test, True):
            body_ends = self.block(node.body)
        after_body, self.env = self.env, before
        with self._guarded(node.test, False):
            else_ends = self.block(node.orelse)
        if body_ends and not else_ends:
            self._assume(node.test, False)  # `if x: return`: the statements after it are in the other branch
        elif else_ends and not body_ends:
            self._assume(node.test, True)
            self.env = after_body
        else:
            self.env = either(after_body, self.env)
        return body_ends and else_ends

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        for element in self._turns(self.visit(node.iter)):
            self._assign(node.target, element)
            self._loop(node)
        self.block(node.orelse)

    visit_AsyncFor = visit_For

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        if facts.asks_for_rank_zero(self.file, node.test) is None:  # other tests may change while the loop runs
            self._loop(node)
        else:
            with self._guarded(node.test, True):
                self._loop(node)
        self.block(node.orelse)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)
        self._assume(node.test, True)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        before = dict(self.env)
        self._loops.append(node)
        self.block(node.body)
        self._loops.pop()
        self.env = either(before, self.env)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> bool:
        contexts, metas = len(self._contexts), self._meta_depth
        for item in node.items:
            values = self._enter(item.context_expr)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, values)
        ends = self.block(node.body)
        self._meta_depth = metas
        del self._contexts[contexts:]
        return ends

    visit_AsyncWith = visit_With

    def _enter(self, context: ast.expr) -> Values:
        """Evaluate the context of a `with`, or a decorator; its calls are contexts of the following events."""
        before = len(self.trace.events)
        values = self.visit(context)
        self._contexts += self.trace.events[before:]
        self._meta_depth += any(map(facts.makes_meta, self.trace.events[before:]))
        return values

    def visit_Try(self, node: ast.Try | ast.TryStar) -> bool:
        before = dict(self.env)
        ends = self.block([*node.body, *node.orelse])
        after = self.env
        for handler in node.handlers:
            self.env = either(before, after)
            with self._guarded(handler, True):
                if not self.block(handler.body):
                    after, ends = either(after, self.env), False
        self.env = after
        return self.block(node.finalbody) or ends

    visit_TryStar = visit_Try

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        before, after = dict(self.env), dict(self.env)
        for case in node.cases:
            self.env = dict(before)
            unique = ast.Constant(f"pattern {case.pattern.lineno}:{case.pattern.col_offset}")
            value = case.pattern.value if isinstance(case.pattern, ast.MatchValue) else unique
            test = ast.Compare(left=node.subject, ops=[ast.Eq()], comparators=[value])
            with self._guarded(ast.copy_location(test, case.pattern), True):
                self.block(case.body)
            after = either(after, self.env)
        self.env = after

    def visit_FunctionDef(self, node: Function) -> None:
        self.env[node.name] = frozenset({v.FunctionRef(node, env=self.env if self._active else None)})

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.env.pop(node.name, None)

    def visit_Assign(self, node: ast.Assign) -> None:
        values = self.visit(node.value)
        for target in node.targets:
            self._assign(target, values)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.target, self.visit(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self.env[node.target.id] = UNKNOWN

    def _assign(self, target: ast.expr, values: Values) -> None:
        """Bind a target to values, element by element if the numbers of elements are known."""
        match target:
            case ast.Name():
                self.env[target.id] = values
            case ast.Starred():
                self._assign(target.value, UNKNOWN)
            case ast.Tuple() | ast.List():
                rows = [value for value in values if isinstance(value, v.TupleValue)]
                is_known = rows and all(len(row.items) == len(target.elts) for row in rows)
                for position, element in enumerate(target.elts):
                    parts = frozenset(one.part(f"[{position}]") for one in modules(values) if not one.path)
                    self._assign(element, join(*(row.items[position] for row in rows)) if is_known else parts)
            case ast.Attribute():
                owners = self.visit(target.value)
                self._emit(target, receiver=owners, method=target.attr, args=(values,))
                for owner in modules(owners):
                    self._store(owner, target.attr, values)
            case ast.Subscript():
                owners, key = self.visit(target.value), v.literal_key(target.slice)
                self.visit(target.slice)
                entry = v.DictEntry(key, values, target) if isinstance(key, str) else None
                tables = frozenset(
                    DictValue((*one.entries, *([entry] if entry else [])), one.is_open or entry is None)
                    for one in owners
                    if isinstance(one, DictValue)
                )
                if tables:
                    self._rebind(target.value, tables)
                for owner in modules(owners):
                    self._store(owner, ITEM, values)
