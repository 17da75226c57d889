"""The values of a file's expressions: names, attributes, items, containers, and what calls return and hand on."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from shardwise.fsdp1.codemod.program import WRAP, Reaching
from shardwise.source.syntax import (
    FSDP1,
    Comprehension,
    FileContext,
    Function,
    argument_of,
    checked_types,
    given_to,
    last_name,
)
from shardwise.source.values import ObjectRef

if TYPE_CHECKING:
    from shardwise.fsdp1.codemod.flow import ProgramFlow

Values = frozenset[ObjectRef]
Callable = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Target = tuple[FileContext, Callable | ast.ClassDef, ObjectRef | None]
_Given = list[tuple[str | None, Values]]
"""The arguments of a call: by position under `""`, spread by `*` or `**`, or by keyword."""
WRAPPED = frozenset({FSDP1})
"""Origins of models that the program wraps."""
NOTHING: Values = frozenset()
SAME = {"to", "cuda", "cpu", "train", "eval", "half", "float", "bfloat16", "requires_grad_", "to_empty"}
"""Methods of a module that return it."""
INNER = {"module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}
"""Attributes of wrappers that are the wrapped model."""
_PASS_ON = {"torch.compile", "copy.deepcopy", "copy.copy", "typing.cast", "torch.nn.ModuleDict", "torch.nn.ModuleList"}
_PARAMETERS = {"parameters", "named_parameters"}
_CONTENTS = {"list", "tuple", "set", "sorted", "iter", "reversed", "filter", "values", "copy", "modules", "children"}
_COMMON = {*dir(dict), *dir(list), *dir(str), *dir(set), *SAME, *_PARAMETERS, "forward", "step", "zero_grad"}
_COMMON |= {"state_dict", "load_state_dict", "backward", "item", "detach", "size", "apply", "modules", "children"}
"""Methods that objects of no class of the program have as well."""
_RUNNERS = {"Thread", "Timer", "Process", "submit", "to_thread", "run_in_executor", "apply_async", "spawn"}
_NO_MODULES = {"config", "tokenizer", "device", "dtype", "training", "generation_config", "__class__", "__name__"}
_NO_MODULES |= {"params", "args", "hparams", "cfg", "shape", "ndim"}
_NO_MODULES |= {"process_group", "rank", "world_size", "compute_device", "mixed_precision", "sharding_strategy"}
"""Attributes of models that hold no parameters."""
_ITEM, _ANY = "[]", "*"
"""Some item, and some attribute: `setattr(self, name, model)`."""
_CONTAINERS = ast.Tuple | ast.List | ast.Set | ast.Dict | Comprehension
_MAX_PATH = 2


def is_of_wrapped(value: ObjectRef) -> bool:
    """Whether a value is a wrapped model or a part of one."""
    return FSDP1 in value.whole.origins


def is_function(value: ObjectRef) -> bool:
    """Whether a value is a function of the program; the unknown value of a variable in one only has its site."""
    return not value.path and not value.origins and isinstance(value.site, ast.Lambda | Function)


def instance(definition: ast.ClassDef) -> ObjectRef:
    """Any object of a class of the program."""
    return ObjectRef(definition, definition=definition)


class Evaluator:
    """The values of one file's expressions.

    Args:
        context: The file.
        flow: The values of all files.
    """

    def __init__(self, context: FileContext, flow: ProgramFlow) -> None:
        self.context, self.flow, self.program = context, flow, flow.program
        self.reaching = Reaching(context)
        self._known: dict[ast.AST | None, Values] = {}
        self._reaching: dict[ast.Name, list[ast.AST]] = {}
        self._resolved: dict[ast.AST, tuple[FileContext, Function | ast.ClassDef] | None] = {}

    @cached_property
    def constructors(self) -> dict[ast.Call, bool]:
        """Every call of FSDP's constructor, and every `partial` of it (True), in source order."""
        found, is_fsdp = {}, functools.partial(self.program.is_fsdp, self.context)
        for call in self.context.calls:
            is_partial = not is_fsdp(call.func)
            if not is_partial or (
                call.args and is_fsdp(call.args[0]) and self.context.is_any(call.func, {"functools.partial"})
            ):
                found[call] = is_partial
        return found

    def read(self) -> None:
        """Follow every assignment, call and return of the file once."""
        self._known.clear()
        for node in self.context.parents:
            match node:
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self._bind(target, self.values(value))
                case (
                    ast.AnnAssign(target=target, value=ast.expr() as value)
                    | ast.AugAssign(target=target, value=value)
                    | ast.NamedExpr(target=target, value=value)
                ):
                    self._bind(target, self.values(value))
                case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                    self._bind(target, self.values(value))
                case ast.For(target=target, iter=iterable) | ast.AsyncFor(target=target, iter=iterable):
                    self._bind(target, self._items(self.values(iterable), node))
                case ast.comprehension(target=target, iter=iterable):
                    self._bind(target, self._items(self.values(iterable), iterable))
                case ast.Return(value=ast.expr() as value) | ast.Yield(value=ast.expr() as value):
                    if (function := self.context.enclosing_function(node)) is not None:
                        self.flow.add(function, self.values(value))
                case ast.Lambda(body=value):
                    self.flow.add(node, self.values(value))
                case ast.arguments(defaults=defaults):
                    positional = [*node.posonlyargs, *node.args]
                    pairs = [*zip(reversed(positional), reversed(defaults), strict=False)]
                    pairs += [(one, made) for one, made in zip(node.kwonlyargs, node.kw_defaults, strict=True) if made]
                    for parameter, default in pairs:
                        if self.flow.matters(self.values(default)):
                            self._hand(self, parameter, self.values(default))
                case ast.Call():
                    self.values(node)

    def forget(self) -> None:
        """Let expressions be evaluated anew."""
        self._known.clear()
        self._reaching.clear()

    def values(self, node: ast.AST | None) -> Values:
        """The objects that an expression may be."""
        if node not in self._known:
            self._known[node] = NOTHING  # of a recursive one, for the time being
            self._known[node] = self._evaluate(node)
        return self._known[node]

    def _evaluate(self, node: ast.AST | None) -> Values:
        match node:
            case ast.Name():
                return self._of_name(node)
            case ast.Attribute(value=inner, attr=name):
                found = self.values(inner)
                return _union(self._load(one, name, node) for one in found) if found else self._of_module(node)
            case ast.Subscript(value=inner, slice=key):
                return _union(self._item(one, key, node) for one in self.values(inner))
            case ast.Call():
                return self._of_call(node)
            case ast.IfExp(body=one, orelse=other):
                return self.values(one) | self.values(other)
            case ast.BoolOp(values=several):
                return _union(map(self.values, several))
            case ast.BinOp(left=one, right=other, op=ast.Add() | ast.BitOr()):
                return self.values(one) | self.values(other)
            case ast.NamedExpr(value=inner) | ast.Await(value=inner) | ast.Starred(value=inner):
                return self.values(inner)
            case ast.Lambda():
                return frozenset({ObjectRef(node)})
            case _ if isinstance(node, _CONTAINERS):
                return frozenset({self._container(node)})
        return NOTHING

    def _container(self, node: ast.expr) -> ObjectRef:
        made = ObjectRef(node)
        match node:
            case ast.Dict():
                for key, value in zip(node.keys, node.values, strict=True):
                    if key is None:
                        self._copy_items([made], self.values(value), value)
                    else:
                        self._store_item(made, key, self.values(value), value)
            case ast.Tuple() | ast.List() | ast.Set():
                for position, value in enumerate(node.elts):
                    if isinstance(value, ast.Starred):
                        self.flow.store(made, _ITEM, self._items(self.values(value), value), value)
                    else:
                        self.flow.store(made, f"[{position}]", self.values(value), value)
            case ast.DictComp(value=value):
                self.flow.store(made, _ITEM, self.values(value), node)
            case ast.ListComp(elt=value) | ast.SetComp(elt=value) | ast.GeneratorExp(elt=value):
                self.flow.store(made, _ITEM, self.values(value), node)
        return made

    def _store_item(self, owner: ObjectRef, key: ast.expr, values: Values, place: ast.AST) -> None:
        """`owner[key] = value`; under the name of an attribute too, as `__dict__` and many containers have it."""
        self.flow.store(owner, _key(key), values, place)
        name = getattr(key, "value", None)
        if isinstance(name, str) and name.isidentifier() and self.flow.matters(values):
            self.flow.store(owner, name, values, place)

    def _copy_items(self, owners: Iterable[ObjectRef], values: Values, place: ast.AST) -> None:
        items: dict[str, Values] = {}
        for value in values:
            for name, by in self.flow.stored(value).items():
                items[name] = items.get(name, NOTHING).union(*by.values())
        for owner in owners if items else ():
            for name, found in items.items():
                self.flow.store(owner, name, found, place)

    def _of_name(self, node: ast.Name) -> Values:
        if isinstance(node.ctx, ast.Store):
            return frozenset(self.flow.look_up(node))
        found = self.context.scope(node).find(node.id)
        values = _union(frozenset(self.flow.look_up(place)) for place in self._places(node))
        if any(map(is_of_wrapped, values)) and self._is_no_module(node):
            values = frozenset(one for one in values if not is_of_wrapped(one))
        if not values and not hasattr(builtins, node.id):
            values |= {ObjectRef(self._variable(node)[0], origins=frozenset({f"unbound {node.id}"}))}
        if found is None:
            return values | self._of_module(node)
        defined = [one.definition for one in found[1] if isinstance(one.definition, Function)]
        values |= {ObjectRef(one) for one in defined}
        return values | (self._of_module(node) if any(one.origin for one in found[1]) else NOTHING)

    def _is_no_module(self, node: ast.Name) -> bool:
        """Whether an isinstance() on the way to a variable says that it is no module there."""
        for test, is_so, _ in self.context.tests_before(node) if "isinstance(" in self.context.text else ():
            if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                test, is_so = test.operand, not is_so
            kinds = [self.context.origins(one) for one in checked_types(test)]
            if not kinds or getattr(test.args[0], "id", "") != node.id:  # pyrefly: ignore
                continue
            says = all(map(_is_no_kind_of_module, kinds)) if is_so else {"torch.nn.Module"} in kinds
            again = (one.node for one in self.context.bindings(node))
            if says and not any(test.lineno < getattr(one, "lineno", 0) < node.lineno for one in again):
                return True
        return False

    def _places(self, node: ast.Name) -> list[ast.AST]:
        """The bindings of a name whose value may be the one that is used."""
        if node not in self._reaching:
            self._reaching[node] = self._find_places(node)
        return self._reaching[node]

    def _find_places(self, node: ast.Name) -> list[ast.AST]:
        scope, bindings = self.context.scope(node).find(node.id) or (self.context.scopes[self.context.tree], [])
        places = [one.node for one in bindings if one.definition is None and not one.origin]
        for place in places:
            self._open(place)
        places += self._in_place.get((scope.node, node.id), [])
        return self.reaching.those_that_reach(places, node)

    @cached_property
    def _in_place(self) -> dict[tuple[ast.AST, str], list[ast.AST]]:
        """The constructors that make the model of a name a wrapped one: `fully_shard` does so in place."""
        found: dict[tuple[ast.AST, str], list[ast.AST]] = {}
        for call, is_partial in self.constructors.items():
            module = argument_of(call, 0, "module")
            if isinstance(module, ast.Name) and not is_partial:
                found.setdefault(self._variable(module), []).append(call)
        return found

    def _variable(self, name: ast.Name) -> tuple[ast.AST, str]:
        """The scope and name of a variable; of one that nothing binds, the module's."""
        found = self.context.scope(name).find(name.id)
        return found[0].node if found else self.context.tree, name.id

    def _open(self, place: ast.AST) -> None:
        """A parameter may be an object of which nothing is known; the first one of a method is its class's."""
        if isinstance(place, ast.arg) and place not in self.flow.values:
            owner = self._owner_of(place)
            self.flow.add(place, frozenset({instance(owner) if owner is not None else ObjectRef(place)}))

    def _owner_of(self, parameter: ast.AST) -> ast.ClassDef | None:
        """The class of which the first parameter of a method is an object, or the class itself."""
        function = self.context.parents[self.context.parents[parameter]]
        owner = self.context.parents.get(function)
        first = [*function.args.posonlyargs, *function.args.args][:1] if isinstance(function, Function) else []
        is_static = "staticmethod" in map(last_name, getattr(function, "decorator_list", []))
        return owner if isinstance(owner, ast.ClassDef) and parameter in first and not is_static else None

    def _of_module(self, node: ast.expr) -> Values:
        """A variable of another file, by its imported name."""
        found = NOTHING
        for origin in self.context.origins(node) if not isinstance(node, ast.Call) else ():
            module, _, name = origin.rpartition(".")
            other = (
                None if origin.startswith("torch.") or not module else self.program.find_module(self.context, module)
            )
            bindings = other.scopes[other.tree].names.get(name, []) if other is not None else []
            found |= _union(frozenset(self.flow.look_up(one.node)) for one in bindings)
            found |= {ObjectRef(one.definition) for one in bindings if isinstance(one.definition, Function)}
        return found

    def _load(self, owner: ObjectRef, name: str, node: ast.AST) -> Values:
        """An attribute or item of an object, with all that was stored there and may still be."""
        if name == "__dict__" or (name in INNER and is_of_wrapped(owner)):
            return frozenset({owner})
        if name in _NO_MODULES and is_of_wrapped(owner):
            return NOTHING
        found = NOTHING
        for key in self.flow.owners(owner):
            by = self.flow.stored_as(key, name)
            found |= _union(frozenset(by[place]) for place in self.reaching.those_that_reach(by, node))
            found |= _union(map(frozenset, self.flow.stored_as(key, _ANY).values())) if not by else NOTHING
        if not is_of_wrapped(owner) and (not found or (owner.definition is not None and not owner.path)):
            loose = self.flow.stored_loosely(name, self.context)
            found |= _union(frozenset(loose[place]) for place in self.reaching.those_that_reach(loose, node))
        if owner.definition is not None and not owner.path:
            found |= _union(
                frozenset(self.flow.look_up(one))
                for _, one in self._methods_of(owner.definition, name)
                if "property" in "".join(map(last_name, one.decorator_list))
            )
            owner = instance(owner.definition)
        return found | {_part(owner, name)}

    def _item(self, owner: ObjectRef, key: ast.expr, node: ast.AST) -> Values:
        name = _key(key)
        return (
            self._items(frozenset({owner}), node)
            if name == _ITEM
            else self._load(owner, name, node) | self._stored(owner, _ITEM, node)
        )

    def _stored(self, owner: ObjectRef, name: str, node: ast.AST) -> Values:
        by = self.flow.stored_as(owner, name)
        return _union(frozenset(by[place]) for place in by if self.reaching.may_reach(place, node))

    def _items(self, values: Values, node: ast.AST) -> Values:
        """What a loop over these values gets."""
        found = NOTHING
        for one in values:
            names = [name for name in self.flow.stored(one) if name.startswith("[")]
            found |= _union(self._stored(one, name, node) for name in names)
            if not isinstance(one.site, _CONTAINERS) or one.path:
                found |= {_part(one, _ITEM)}
        return found

    def _bind(self, target: ast.AST, values: Values) -> None:
        """Give a target its values, element by element where it has several."""
        match target:
            case ast.Name():
                self.flow.add(target, values)
            case ast.Starred(value=inner):
                self._bind(inner, values)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for position, element in enumerate(elements):
                    if isinstance(element, ast.Starred):
                        self._bind(element.value, values)
                        continue
                    key = ast.Constant(position)
                    self._bind(element, _union(self._item(one, key, target) for one in values))
            case ast.Attribute(value=inner, attr=name):
                for owner in self.values(inner):
                    self.flow.store(owner, name, values, target)
            case ast.Subscript(value=inner, slice=key):
                for owner in self.values(inner):
                    self._store_item(owner, key, values, target)

    def _of_call(self, call: ast.Call) -> Values:
        """What a call returns; what it is given comes to the parameters of the functions that it enters."""
        context, function = self.context, call.func
        wrapped = ObjectRef(call, origins=WRAPPED)
        if call in self.constructors:
            if self.constructors[call]:
                return frozenset({ObjectRef(call, origins=frozenset({"partial"}))})
            return self._wrap(call, wrapped)
        origins = context.origins(function)
        if WRAP in origins:
            return frozenset({wrapped})
        if origins & _PASS_ON and call.args:
            return self.values(call.args[-1 if "typing.cast" in origins else 0])
        if origins & {"itertools.chain", "torch.nn.Sequential"}:
            return self._joined(call, is_chain="itertools.chain" in origins)
        name = last_name(function)
        receivers = self.values(function.value) if isinstance(function, ast.Attribute) else NOTHING
        unread = [self.flow.classes[one.definition] for one in receivers if one.definition in self.flow.classes]
        if unread and any(self.flow.matters(self.values(one)) for one in given_to(call)):
            for file in unread:  # `saver = Saver(path)` and, later, `saver.save(model)`
                self.flow.activate(file)
        builtin = None
        if not origins and not isinstance(function, ast.Attribute):
            builtin = self._of_function(call, name)
        elif not origins and not self._has_own(receivers, name):  # else the class has one of its own
            builtin = self._of_method(call, name, receivers)
        if builtin is not None:
            return builtin
        called = self.values(function)
        if any("partial" in one.origins for one in called):
            return self._wrap(call, wrapped)
        if "functools.partial" in origins and call.args:
            made = self.values(call.args[0])
            for one in self._functions(made):
                self._enter(call, one, self._given(call)[1:])
            return made
        targets = list(self._targets(call, name, receivers, called))
        given = self._given(call) if targets else []
        found = _union(self._enter(call, one, given) for one in targets)
        if not found or not self._resolve(function):
            found |= {self._unknown(call, origins)} if not found else NOTHING
            first = call.args[0] if call.args else None
            names = map(context.source, context.targets(call)[:1])
            if first is not None and context.source(first) in names:  # `model = prepare(model)`
                found |= self.values(first)
        return found

    def _given(self, call: ast.Call) -> _Given:
        by_position = [("*" if isinstance(one, ast.Starred) else "", self.values(one)) for one in call.args]
        return [*by_position, *((one.arg or "**", self.values(one.value)) for one in call.keywords)]

    def _joined(self, call: ast.Call, *, is_chain: bool) -> Values:
        """`itertools.chain(some, others)` has the items of each, `nn.Sequential(one, other)` the modules."""
        made = ObjectRef(call)
        for one in call.args:
            spread = is_chain or isinstance(one, ast.Starred)
            self.flow.store(made, _ITEM, self._items(self.values(one), call) if spread else self.values(one), call)
        return frozenset({made})

    def _unknown(self, call: ast.Call, origins: Collection[str]) -> ObjectRef:
        """What a function that is not given makes: it has its keyword arguments; threads call what they get."""
        made, runs = ObjectRef(call, origins=frozenset(origins)), last_name(call.func) in _RUNNERS
        is_method = isinstance(call.func, ast.Attribute) and not origins
        if not runs and (is_method or not call.keywords or any(one.startswith("torch.") for one in origins)):
            return made
        given = self._given(call)
        handed = [(name, values) for name, values in given if self.flow.matters(values)]
        for name, values in handed:
            if name and name.isidentifier():
                self.flow.store(made, name, values, call)
        inner = _union(values | self._items(values, call) for _, values in handed)
        for _, target, _ in self._functions(_union(values for _, values in given) if runs and handed else NOTHING):
            file = self.flow.file_of(target)
            for parameter in target.args.args if file is not None and isinstance(target, Callable) else ():
                self._hand(file, parameter, inner)  # pyrefly: ignore
        return made

    def _wrap(self, call: ast.Call, wrapped: ObjectRef) -> Values:
        """What a constructor gives; the model that it is given is sharded in place, so that its name has it too."""
        module = argument_of(call, 0, "module")
        self.flow.wrapped.setdefault(call, set()).update(self.values(module))
        self.flow.add(call, frozenset({wrapped}))
        if isinstance(module, ast.Attribute):
            for owner in self.values(module.value):
                self.flow.store(owner, module.attr, frozenset({wrapped}), call)
        return frozenset({wrapped})

    def _of_method(self, call: ast.Call, name: str, receivers: Values) -> Values | None:
        """What methods of modules and containers return; None for any other."""
        given = call.args
        if name in _PARAMETERS:
            made = ObjectRef(call, origins=frozenset({"parameters"}))
            self.flow.store(made, _ITEM, frozenset({made.part(_ITEM)}), call)
            if name == "named_parameters":
                self.flow.store(made.part(_ITEM), "[1]", frozenset({made}), call)
            return frozenset({made})
        if name in SAME:
            return receivers
        if name in ("append", "add", "extend", "insert", "update") and (given or call.keywords):
            added = self.values(given[-1]) if given else NOTHING
            if name == "update":
                self._copy_items(receivers, added, call)
            for one in receivers:
                for keyword in call.keywords if name == "update" else ():
                    self._store_item(one, ast.Constant(keyword.arg), self.values(keyword.value), call)
                if name != "update":
                    self.flow.store(one, _ITEM, self._items(added, call) if name == "extend" else added, call)
            return NOTHING if name != "update" else None
        if name in ("get", "pop", "setdefault") and given:
            return _union(self._item(one, given[0], call) for one in receivers) | _union(map(self.values, given[1:]))
        if name in ("items", "named_children", "named_modules"):
            return frozenset({self._pairs(call, (NOTHING, self._items(receivers, call)))})
        return receivers if name in _CONTENTS else None

    def _of_function(self, call: ast.Call, name: str) -> Values | None:
        """What Python's own functions return; None for any other."""
        given = call.args
        if name == "dict":
            made = ObjectRef(call)
            for keyword in call.keywords:
                self._store_item(made, ast.Constant(keyword.arg), self.values(keyword.value), call)
            copied = self.values(given[0]) if given else NOTHING
            self._copy_items([made], copied, call)
            for pair in self._items(copied, call) if self.flow.matters(copied) else ():
                self.flow.store(made, _ITEM, self._item(pair, ast.Constant(1), call), call)
            return frozenset({made})
        if name == "super":
            own = self.context.enclosing_class(call)
            return frozenset({instance(own)}) if own is not None else NOTHING
        if not given:
            return None
        first = self.values(given[0])
        if name in _CONTENTS:
            return self.values(given[-1])
        if name in ("enumerate", "zip"):
            columns = [self._items(self.values(one), call) for one in given]
            return frozenset({self._pairs(call, (NOTHING, columns[0]) if name == "enumerate" else columns)})
        if name == "map" and len(given) > 1:
            made = ObjectRef(call)
            items: _Given = [("", self._items(self.values(one), call)) for one in given[1:]]
            results = _union(self._enter(call, one, items) for one in self._functions(first))
            self.flow.store(made, _ITEM, results, call)
            return frozenset({made})
        if name == "next":
            return self._items(first, call)
        if name == "vars":
            return first
        if name in ("getattr", "setattr") and len(given) > 1:
            named = isinstance(given[1], ast.Constant)
            attribute = str(given[1].value) if isinstance(given[1], ast.Constant) else _ANY
            if name == "getattr":
                owners = [owner for one in first for owner in self.flow.owners(one)] if not named else []
                stored = [by for owner in owners for by in self.flow.stored(owner).values()]
                some = frozenset(filter(is_of_wrapped, _union(found for by in stored for found in by.values())))
                return some | _union(self._load(one, attribute, call) for one in first)
            for one in first:
                self.flow.store(one, attribute, self.values(given[2]), call)
            return NOTHING
        return None

    def _pairs(self, call: ast.Call, columns: Iterable[Values]) -> ObjectRef:
        """An iterable of tuples with these elements."""
        made = ObjectRef(call)
        self.flow.store(made, _ITEM, frozenset({made.part(_ITEM)}), call)
        for position, values in enumerate(columns):
            self.flow.store(made.part(_ITEM), f"[{position}]", values, call)
        return made

    def _resolve(self, node: ast.expr) -> tuple[FileContext, Function | ast.ClassDef] | None:
        if node not in self._resolved:
            self._resolved[node] = self.program.definition(self.context, node) or self._own_class(node)
        return self._resolved[node]

    def _own_class(self, node: ast.expr) -> tuple[FileContext, ast.ClassDef] | None:
        """The class that `cls` of a class method, `type(self)` and `self.__class__` stand for."""
        bindings = self.context.bindings(node) if isinstance(node, ast.Name) else []
        own = None
        if len(bindings) == 1 and isinstance(bindings[0].node, ast.arg):
            function = self.context.parents[self.context.parents[bindings[0].node]]
            is_class = "classmethod" in map(last_name, getattr(function, "decorator_list", []))
            own = self._owner_of(bindings[0].node) if is_class else None
        match node:
            case (
                ast.Attribute(attr="__class__", value=ast.Name(id="self"))
                | ast.Call(func=ast.Name(id="type"), args=[ast.Name(id="self")])
            ):
                own = self.context.enclosing_class(node)
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls")):  # a class inside of the class
                around = self.context.enclosing_class(node)
                inside = [one for one in getattr(around, "body", ()) if isinstance(one, ast.ClassDef)]
                own = next((one for one in inside if one.name == name), None)
        return (self.context, own) if own is not None else None

    def _functions(self, values: Values) -> Iterator[_Target]:
        """The functions of the program among some values."""
        for one in values:
            if is_function(one):
                home = self if one.site in self.context.parents else self.flow.file_of(one.site)
                if home is not None:
                    yield home.context, one.site, None  # pyrefly: ignore

    def _targets(self, call: ast.Call, name: str, receivers: Values, called: Values) -> Iterator[_Target]:
        """The functions and classes of the program that a call enters, each with the object that it is bound to."""
        found = self._resolve(call.func)
        if found is not None:
            yield *found, None
            return
        if functions := list(self._functions(called)):
            yield from functions
            return
        objects = [one for one in called if one.definition is not None and not one.path and not is_of_wrapped(one)]
        for one in objects:
            yield from ((file.context, method, one) for file, method in self._methods_of(one.definition, "__call__"))
        if not isinstance(call.func, ast.Attribute):
            chosen = [] if objects else self._chosen(call.func, called)
            if chosen and any(self.flow.matters(self.values(one)) for one in given_to(call)):
                yield from ((context, definition, None) for context, definition in self.flow.named_in(chosen))
            return
        owner = self._resolve(call.func.value) if isinstance(call.func.value, ast.Name | ast.Attribute) else None
        hands_on = (self.flow.matters(self.values(one)) for one in given_to(call))
        if owner is not None and isinstance(owner[1], ast.ClassDef):  # `Trainer.build(model)`
            if any(hands_on):
                self.flow.activate(owner[0])
            for file, method in self._methods_of(owner[1], name):
                is_bound = "classmethod" in map(last_name, method.decorator_list)
                yield file.context, method, instance(owner[1]) if is_bound else None
            return
        known = [one for one in receivers if one.definition is not None and not one.path]
        for one in known:
            for file, method in self._methods_of(one.definition, name):
                is_static = "staticmethod" in map(last_name, method.decorator_list)
                yield file.context, method, None if is_static else one
        if not known and name not in _COMMON and not self.context.origins(call.func):
            is_handed = any(hands_on)
            if is_handed:
                self.flow.activate_methods(name, self.context)
            for file, method in self.flow.methods.get(name, []):
                owner_class = file.context.parents[method]
                is_linked = is_handed or self.flow.matters(self.flow.look_up(method))  # what it gives back
                if is_linked and isinstance(owner_class, ast.ClassDef) and self._is_near(file):
                    yield file.context, method, instance(owner_class)

    def _chosen(self, function: ast.expr, called: Values) -> list[FileContext]:
        """The files of the table or of the program's functions that a function or class is taken from at run time."""
        if isinstance(function, ast.Subscript):
            return [self.context]
        made = ((self.flow.file_of(one.whole.site), one.whole.site) for one in called)
        found = [file._resolve(site.func) for file, site in made if file is not None and isinstance(site, ast.Call)]
        return [one[0] for one in found if one is not None]

    def _is_near(self, other: Evaluator) -> bool:
        """Whether an object of a class of another file can have come here, as far as imports show."""
        here, there = self.context, other.context
        imports = self.flow.imports
        return here is there or there.path in imports(here) or here.path in imports(there)

    def _has_own(self, values: Values, method: str) -> bool:
        return any(not one.path and self._methods_of(one.definition, method) for one in values)

    def _methods_of(self, definition: ast.ClassDef | None, name: str) -> list[tuple[Evaluator, Function]]:
        """The methods of this name of a class, of the classes above and of those below."""
        family = self.flow.relatives(definition) if definition is not None else set()
        methods = self.flow.methods.get(name, []) if family else []
        return [(file, method) for file, method in methods if file.context.parents[method] in family]

    def _enter(self, call: ast.Call, to: _Target, given: _Given) -> Values:
        """Give the parameters of a function its arguments; what it returns."""
        context, target, owner = to
        if context.path not in self.flow.files and not any(self.flow.matters(values) for _, values in given):
            if isinstance(target, ast.ClassDef):
                self.flow.classes[target] = context
                return frozenset({ObjectRef(call, definition=target)})
            if "parameters(" not in context.source(target):
                return NOTHING
        file = self.flow.activate(context)
        if isinstance(target, ast.ClassDef):
            return frozenset({self._make(call, context, target, given)})
        self.flow.sites.setdefault(target, {})[call] = self  # pyrefly: ignore
        arguments, num_bound = target.args, int(owner is not None)
        positional = [*arguments.posonlyargs, *arguments.args][num_bound:]
        by_name = {one.arg: one for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
        for position, (name, values) in enumerate(given):
            if name == "*":
                for parameter in positional[position:]:
                    self._hand(file, parameter, self._items(values, call))
            elif name == "**":
                for key, parameter in by_name.items():
                    self._hand(file, parameter, _union(self._stored(one, f"[{key!r}]", call) for one in values))
            elif not name and position < len(positional):
                self._hand(file, positional[position], values)
            elif name in by_name:
                self._hand(file, by_name[name], values)
            else:
                more, key = (arguments.kwarg, repr(name)) if name else (arguments.vararg, position - len(positional))
                if more is not None:
                    self.flow.store(ObjectRef(more), f"[{key}]", self.flow.crossing(values), call)
                    self.flow.add(more, frozenset({ObjectRef(more)}))
        returned = frozenset(self.flow.look_up(target))
        kept = self.flow.crossing(returned, is_returned=True)
        return kept if len(kept) == len(returned) else kept | {ObjectRef(call)}

    def _make(self, call: ast.Call, context: FileContext, target: ast.ClassDef, given: _Given) -> ObjectRef:
        """A new object of a class of the program."""
        wraps = self.program.inherits(context, target)
        made = ObjectRef(call, definition=target, origins=WRAPPED if wraps else frozenset())
        found = self._methods_of(target, "__init__")
        own = [one for one in found if one[0].context.parents[one[1]] is target]
        for home, method in own or found:
            self._enter(call, (home.context, method, made), given)
        # A class without a constructor of its own keeps its arguments under their names, a tuple in their order.
        fields = [one.target for one in target.body if isinstance(one, ast.AnnAssign) and not own]
        names = [one.id for one in fields if isinstance(one, ast.Name)]
        for position, (name, values) in enumerate(given if not own else ()):
            key = names[position] if not name and position < len(names) else name
            for one in (key, f"[{names.index(key)}]") if key in names else (key,) if key else ():
                self.flow.store(made, one, self.flow.crossing(values), call)
        return made

    def _hand(self, file: Evaluator, parameter: ast.arg, values: Values) -> None:
        file._open(parameter)
        self.flow.add(parameter, self.flow.crossing(values))


def _part(value: ObjectRef, name: str) -> ObjectRef:
    """An attribute or item of which nothing else is known; those of parts of wrapped models are not told apart."""
    return value if len(value.path) >= (1 if is_of_wrapped(value) else _MAX_PATH) else value.part(name)


def _is_no_kind_of_module(origins: frozenset[str]) -> bool:
    return bool(origins) and all(one.startswith(("torch.optim.", "torch.utils.data.")) for one in origins)


def _union(sets: Iterable[Iterable[ObjectRef]]) -> Values:
    return frozenset().union(*sets)


def _key(node: ast.expr) -> str:
    value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
    return f"[{value!r}]" if isinstance(value, str | int) else _ITEM
