"""The values of a file's expressions: which of them are wrapped models, and what is done to get there."""

from __future__ import annotations

import ast
import builtins
import enum
import functools
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from shardwise.fsdp1.codemod.program import ENABLE_WRAP, WRAP, fsdp_name
from shardwise.fsdp1.codemod.reaching import Reaching
from shardwise.source.syntax import (
    FSDP1,
    Comprehension,
    FileContext,
    Function,
    all_parameters,
    argument_of,
    checked_types,
    given_to,
    last_name,
)
from shardwise.source.values import ObjectRef

if TYPE_CHECKING:
    from shardwise.fsdp1.codemod.flow import Flow

Values = frozenset[ObjectRef]
Callable = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_WRAPPED, _HINTED = frozenset({FSDP1}), frozenset({FSDP1, "isinstance"})
"""Origins of models that the program wraps, and of those that it only takes for wrapped ones."""
ANYWHERE = ast.Module(body=[], type_ignores=[])
_NOTHING: Values = frozenset()
_CLASS = FSDP1.rpartition(".")[2]
STATIC = ("state_dict_type", "set_state_dict_type", "optim_state_dict", "summon_full_params", "fsdp_modules")
STATIC += ("optim_state_dict_to_load", "full_optim_state_dict", "sharded_optim_state_dict", "get_state_dict_type")
"""FSDP1's methods that are called on the class."""
METHODS = {*STATIC, "clip_grad_norm_", "no_sync", "check_is_root", "register_comm_hook", "apply"}
_SAME = {"to", "cuda", "cpu", "train", "eval", "half", "float", "bfloat16", "requires_grad_", "to_empty"}
"""Methods of a module that return it."""
_INNER = {"module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}
"""Attributes of wrappers that are the wrapped model."""
_PASS_ON = {"torch.compile", "copy.deepcopy", "copy.copy", "typing.cast"}
_PARAMETERS = {"parameters", "named_parameters"}
_CONTENTS = {"list", "tuple", "set", "sorted", "iter", "reversed", "filter", "values", "copy", "modules", "children"}
_COMMON = {*dir(dict), *dir(list), *dir(str), *dir(set), *_SAME, *_PARAMETERS, "forward", "step", "zero_grad"}
_COMMON |= {"state_dict", "load_state_dict", "backward", "item", "detach", "size", "apply", "modules", "children"}
"""Methods that objects of no class of the program have as well."""
_ITEM = "[]"
_MAX_PATH = 2


class Holds(enum.IntEnum):
    """Whether an expression is a wrapped model."""

    NEVER = 0
    SOMETIMES = 1
    """On some runs or branches; on others it is a plain model, or DDP."""
    ALWAYS = 2


def is_wrapped(value: ObjectRef) -> bool:
    """Whether a value is a wrapped model itself, not a part of one."""
    return FSDP1 in value.origins and not value.path


def is_of_wrapped(value: ObjectRef) -> bool:
    """Whether a value is a wrapped model or a part of one."""
    return FSDP1 in value.whole.origins


def instance(definition: ast.ClassDef) -> ObjectRef:
    """Any object of a class of the program."""
    return ObjectRef(definition, definition=definition)


class Sharded:
    """The values of one file's expressions.

    Args:
        context: The file.
        flow: The values of all files.
    """

    def __init__(self, context: FileContext, flow: Flow) -> None:
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

    def holds(self, node: ast.expr) -> Holds:
        """Whether an expression is a wrapped model where it stands."""
        values = self.values(node)
        if not any(map(is_wrapped, values)):
            return Holds.NEVER
        is_sure = not any(map(_is_other, values)) and self._is_reached_always(node)
        return Holds.ALWAYS if is_sure else Holds.SOMETIMES

    def holds_part(self, node: ast.expr) -> bool:
        """Whether an expression may be a wrapped model or a part of one."""
        return any(map(is_of_wrapped, self.values(node)))

    def has_inside(self, node: ast.expr) -> bool:
        """Whether an expression may be a wrapped model, or an object that has one."""
        return self.flow.matters(self.values(node))

    def has_own(self, node: ast.expr, method: str) -> bool:
        """Whether an expression may be an object whose class, of the program, has this method."""
        return any(not one.path and self._methods_of(one.definition, method) for one in self.values(node))

    def wrapped_by(self, call: ast.Call) -> set[ObjectRef]:
        """The models, as they were before, that a constructor wraps."""
        return {one for one in self.flow.wrapped.get(call, ()) if not is_of_wrapped(one)}

    def taken_from(self, values: Iterable[ObjectRef]) -> Iterator[tuple[Sharded, ast.Call, set[ObjectRef]]]:
        """The calls that took the parameters among the values, each with its file and the objects it took them of."""
        seen, waiting = set[ObjectRef](), list(values)
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            waiting += [one for by in self.flow.stored(value).values() for found in by.values() for one in found]
            taken = value.whole.site
            file = self.flow.file_of(taken) if "parameters" in value.whole.origins else None
            if file is None or not (isinstance(taken, ast.Call) and isinstance(taken.func, ast.Attribute)):
                continue
            yield file, taken, set(file.values(taken.func.value))
            for site, caller in self.flow.sites_of(file.context.enclosing_function(taken)):
                yield caller, site, {one for given in given_to(site) for one in caller.values(given)}

    def _is_reached_always(self, node: ast.expr) -> bool:
        """Whether a variable or attribute is given a wrapped model on every way to its use."""
        match node:
            case ast.Name():
                places = [place for place in self._places(node) if any(map(is_wrapped, self.flow.look_up(place)))]
            case ast.Attribute(attr=name) if name not in _INNER:
                stored = [
                    by
                    for value in self.values(node.value)
                    for owner in self.flow.owners(value)
                    for by in [self.flow.stored_as(owner, name)]
                ]
                places = [place for by in stored for place, found in by.items() if any(map(is_wrapped, found))]
                places = [place for place in places if self.reaching.may_reach(place, node)]
            case ast.Call(func=ast.Attribute(attr=name, value=inner)) if name in _SAME:
                return self._is_reached_always(inner)
            case ast.Attribute(value=inner):
                return self._is_reached_always(inner)
            case _:
                return not (
                    isinstance(node, ast.Call) and self.context.is_any(node.func, {WRAP})
                ) or self._under_enable_wrap(node)
        return any(self.reaching.always_reaches(place, node) for place in places)

    def _under_enable_wrap(self, node: ast.AST) -> bool:
        """Whether `wrap` wraps here: elsewhere it hands the module back as it is."""
        blocks = [one for one in self.context.ancestors(node) if isinstance(one, ast.With)]
        entered = [getattr(item.context_expr, "func", None) for one in blocks for item in one.items]
        return any(self.context.is_any(one, {ENABLE_WRAP}) for one in entered)

    @cached_property
    def units(self) -> dict[Function | None, list[ast.AST]]:
        """The nodes of the file by the function whose body they are in."""
        found: dict[Function | None, list[ast.AST]] = {}
        for node in self.context.parents:
            found.setdefault(self.reaching.function(node), []).append(node)
        return found

    def read(self, function: Function | None) -> None:
        """Follow every assignment, call and return of a function, or of what is outside of all, once."""
        for node in self.units[function]:
            self._known.pop(node, None)
        for node in self.units[function]:
            match node:
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self._bind(target, self.values(value))
                case (
                    ast.AnnAssign(target=target, value=ast.expr() as value) | ast.AugAssign(target=target, value=value)
                ):
                    self._bind(target, self.values(value))
                case ast.NamedExpr(target=target, value=value):
                    self._bind(target, self.values(value))
                case ast.For(target=target, iter=iterable) | ast.AsyncFor(target=target, iter=iterable):
                    self._bind(target, self._items(self.values(iterable), node))
                case ast.comprehension(target=target, iter=iterable):
                    self._bind(target, self._items(self.values(iterable), iterable))
                case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                    self._bind(target, self.values(value))
                case ast.Return(value=ast.expr() as value) | ast.Yield(value=ast.expr() as value):
                    if function is not None:
                        self.flow.add(function, self.values(value))
                case ast.Lambda(body=value):
                    self.flow.add(node, self.values(value))
                case ast.Call():
                    self.values(node)

    def forget(self) -> None:
        """Let expressions be evaluated anew."""
        self._known.clear()
        self._reaching.clear()

    def read_hints(self) -> list[tuple[ast.AST, ast.expr]]:
        """The expressions that only a type check or a function of FSDP's class takes for wrapped models."""
        self.forget()
        context, told = self.context, list[tuple[ast.AST, ast.expr]]()
        for call in context.calls:
            owner, _, method = fsdp_name(context, call.func).partition(".")
            is_static = owner == _CLASS and method in STATIC
            model = argument_of(call, 0, "module" if "type" in method else "model") if is_static else None
            if any(map(self._names_fsdp, checked_types(call))):
                model = call.args[0]
            if model is not None and not any(map(is_wrapped, self.values(model))):
                told.append((call, model))
            match context.parents[call]:
                case ast.For(target=target, iter=iterated) if iterated is call and method == "fsdp_modules":
                    told.append((call, target))
        return told

    def follow_hints(self, told: list[tuple[ast.AST, ast.expr]]) -> None:
        """Take a hint or an annotation for the truth."""
        for call, model in told:
            wrapped = frozenset({ObjectRef(ANYWHERE, origins=_HINTED)})
            match model:
                case ast.Name(ctx=ast.Load()):
                    for place in self._places(model) or [call]:
                        self.flow.add(place, wrapped)
                    if not self.context.scope(model).find(model.id):
                        self._in_place.setdefault(self._variable(model), []).append(call)
                case ast.Attribute(value=inner, attr=name):
                    for owner in self.values(inner):
                        self.flow.store(owner, name, wrapped, ANYWHERE)
                case ast.Name():
                    self.flow.add(model, wrapped)
        self.forget()
        for function in self.context.functions:
            for one in all_parameters(function.args):
                if one.annotation is not None and any(map(self._names_fsdp, ast.walk(one.annotation))):
                    self.flow.add(one, frozenset({ObjectRef(ANYWHERE, origins=_HINTED)}))

    def _names_fsdp(self, node: ast.AST) -> bool:
        return fsdp_name(self.context, node) == _CLASS

    def values(self, node: ast.AST | None) -> Values:
        """The objects that an expression may be."""
        if node not in self._known:
            self._known[node] = _NOTHING  # of a recursive one, for the time being
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
            case ast.Tuple() | ast.List() | ast.Set() | ast.Dict() | ast.ListComp() | ast.SetComp() | ast.DictComp():
                return frozenset({self._container(node)})
            case ast.GeneratorExp():
                return frozenset({self._container(node)})
            case ast.Lambda():
                return frozenset({ObjectRef(node)})
        return _NOTHING

    def _container(self, node: ast.expr) -> ObjectRef:
        made = ObjectRef(node)
        match node:
            case ast.Dict():
                for key, value in zip(node.keys, node.values, strict=True):
                    if key is None:
                        self._copy_items(made, self.values(value), value)
                    else:
                        self.flow.store(made, _key(key), self.values(value), value)
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

    def _copy_items(self, owner: ObjectRef, values: Values, place: ast.AST) -> None:
        for value in values:
            for name, by in list(self.flow.stored(value).items()):
                self.flow.store(owner, name, _union(map(frozenset, by.values())), place)

    def _of_name(self, node: ast.Name) -> Values:
        if isinstance(node.ctx, ast.Store):
            return frozenset(self.flow.look_up(node))
        found = self.context.scope(node).find(node.id)
        values = _union(frozenset(self.flow.look_up(place)) for place in self._places(node))
        if not values and not hasattr(builtins, node.id):
            values |= {ObjectRef(self._variable(node)[0], origins=frozenset({f"unbound {node.id}"}))}
        if found is None:
            return values | self._of_module(node)
        defined = [one.definition for one in found[1] if isinstance(one.definition, Function)]
        values |= {ObjectRef(one) for one in defined}
        return values | (self._of_module(node) if any(one.origin for one in found[1]) else _NOTHING)

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
            function = self.context.parents[self.context.parents[place]]
            owner = self.context.parents.get(function)
            first = [*function.args.posonlyargs, *function.args.args][:1] if isinstance(function, Function) else []
            is_self = isinstance(owner, ast.ClassDef) and place in first
            is_self = is_self and "staticmethod" not in map(last_name, getattr(function, "decorator_list", []))
            own = instance(owner) if is_self and isinstance(owner, ast.ClassDef) else ObjectRef(place)
            self.flow.add(place, frozenset({own}))

    def _of_module(self, node: ast.expr) -> Values:
        """A variable of another file, by its imported name."""
        found = _NOTHING
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
        if name in _INNER and is_of_wrapped(owner):
            return frozenset({owner})
        found = _NOTHING
        for key in self.flow.owners(owner):
            by = self.flow.stored_as(key, name)
            found |= _union(frozenset(by[place]) for place in self.reaching.those_that_reach(by, node))
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
        found = _NOTHING
        for one in values:
            names = [name for name in self.flow.stored(one) if name.startswith("[")]
            found |= _union(self._stored(one, name, node) for name in names)
            if not isinstance(one.site, ast.Tuple | ast.List | ast.Set | ast.Dict | Comprehension) or one.path:
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
                    self._bind(element, _union(self._element(one, position, target) for one in values))
            case ast.Attribute(value=inner, attr=name):
                for owner in self.values(inner):
                    self.flow.store(owner, name, values, target)
            case ast.Subscript(value=inner, slice=key):
                for owner in self.values(inner):
                    self.flow.store(owner, _key(key), values, target)

    def _element(self, owner: ObjectRef, position: int, target: ast.AST) -> Values:
        """What `a, b = owner` gives to one of them; in `a, b = c, d` the values stand behind the names."""
        if owner.site in self.context.parents and owner.site is getattr(self.context.parents[target], "value", None):
            return _union(map(frozenset, self.flow.stored_as(owner, f"[{position}]").values()))
        return self._item(owner, ast.Constant(position), target)

    def _of_call(self, call: ast.Call) -> Values:
        """What a call returns; what it is given comes to the parameters of the functions that it enters."""
        context, function = self.context, call.func
        wrapped = ObjectRef(call, origins=_WRAPPED)
        if call in self.constructors:
            if self.constructors[call]:
                return frozenset({ObjectRef(call, origins=frozenset({"partial"}))})
            return self._wrap(call, wrapped)
        origins = context.origins(function)
        if WRAP in origins:
            return frozenset({wrapped})
        if origins & _PASS_ON and call.args:
            return self.values(call.args[-1 if "typing.cast" in origins else 0])
        name = last_name(function)
        receivers = self.values(function.value) if isinstance(function, ast.Attribute) else _NOTHING
        builtin = self._of_builtin(call, name, receivers, bool(origins))
        if builtin is not None:
            return builtin
        called = self.values(function)
        if any("partial" in one.origins for one in called):
            return self._wrap(call, wrapped)
        found = _union(self._enter(call, *one) for one in self._targets(call, name, receivers, called))
        if not found or not self._resolve(function):
            found |= {ObjectRef(call, origins=frozenset(origins))} if not found else _NOTHING
            given = call.args[0] if call.args else None
            if given is not None and context.source(given) == self._bound_to(call):  # `model = prepare(model)`
                found |= self.values(given)
        return found

    def _bound_to(self, call: ast.Call) -> str:
        parent = self.context.parents.get(call)
        return self.context.source(parent.targets[0]) if isinstance(parent, ast.Assign) else ""

    def _wrap(self, call: ast.Call, wrapped: ObjectRef) -> Values:
        """What a constructor gives; the model that it is given is sharded in place, so that its name has it too."""
        module = argument_of(call, 0, "module")
        self.flow.wrap(call, self.values(module))
        self.flow.add(call, frozenset({wrapped}))
        if isinstance(module, ast.Attribute):
            for owner in self.values(module.value):
                self.flow.store(owner, module.attr, frozenset({wrapped}), call)
        return frozenset({wrapped})

    def _of_builtin(self, call: ast.Call, name: str, receivers: Values, is_known: bool) -> Values | None:
        """What methods of modules and containers, and Python's own functions, return; None for any other call."""
        given, is_method = call.args, isinstance(call.func, ast.Attribute)
        if isinstance(call.func, ast.Attribute) and self.has_own(call.func.value, name):
            return None  # the class has one of its own
        if is_method and name in _PARAMETERS and not is_known:
            made = ObjectRef(call, origins=frozenset({"parameters"}))
            is_named = name == "named_parameters"
            self.flow.store(made, _ITEM, frozenset({made.part(_ITEM)}), call)
            if is_named:
                self.flow.store(made.part(_ITEM), "[1]", frozenset({made}), call)
            return frozenset({made})
        if is_method and name in _SAME and not is_known:
            return receivers
        if is_method and name in ("append", "add", "extend", "insert", "update") and given:
            added = self.values(given[-1])
            for one in receivers:
                if name == "update":
                    self._copy_items(one, added, call)
                else:
                    self.flow.store(one, _ITEM, self._items(added, call) if name == "extend" else added, call)
            for keyword in call.keywords if name == "update" else ():
                for one in receivers:
                    self.flow.store(one, f"[{keyword.arg!r}]", self.values(keyword.value), call)
            return _NOTHING if name != "update" else None
        if is_method and name in ("get", "pop", "setdefault") and given and not is_known:
            return _union(self._item(one, given[0], call) for one in receivers) | _union(map(self.values, given[1:]))
        if is_method and name in ("items", "named_children", "named_modules") and not is_known:
            return frozenset({self._pairs(call, (_NOTHING, self._items(receivers, call)))})
        if name in _CONTENTS and not is_known and (is_method or given):
            return receivers if is_method else self.values(given[-1])
        if is_method or is_known or not given:
            if name == "dict" and not is_method and not is_known:
                made = ObjectRef(call)
                for keyword in call.keywords:
                    self.flow.store(made, f"[{keyword.arg!r}]", self.values(keyword.value), call)
                return frozenset({made})
            return None
        if name in ("enumerate", "zip"):
            columns = [self._items(self.values(one), call) for one in given]
            return frozenset({self._pairs(call, (_NOTHING, columns[0]) if name == "enumerate" else columns)})
        if name == "next":
            return self._items(self.values(given[0]), call)
        if name == "getattr" and len(given) > 1 and isinstance(given[1], ast.Constant):
            return _union(self._load(one, str(given[1].value), call) for one in self.values(given[0]))
        if name == "setattr" and len(given) > 2:
            attribute = str(given[1].value) if isinstance(given[1], ast.Constant) else _ITEM
            for one in self.values(given[0]):
                self.flow.store(one, attribute, self.values(given[2]), call)
            return _NOTHING
        if name == "super":
            return _NOTHING
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
            self._resolved[node] = self.program.definition(self.context, node)
        return self._resolved[node]

    def _targets(
        self, call: ast.Call, name: str, receivers: Values, called: Values
    ) -> Iterator[tuple[FileContext, Callable | ast.ClassDef, ObjectRef | None]]:
        """The functions and classes of the program that a call enters, each with the object that it is bound to."""
        found = self._resolve(call.func)
        if found is not None:
            yield *found, None
            return
        functions = [one.site for one in called if not one.path and isinstance(one.site, ast.Lambda | Function)]
        if functions:
            for one in functions:
                home = self._home(one)
                if home is not None:
                    yield home, one, None
            return
        if not isinstance(call.func, ast.Attribute):
            return
        match call.func.value:
            case ast.Call(func=ast.Name(id="super")):
                own = self.context.enclosing_class(call)
                receivers = frozenset({instance(own)}) if own is not None else receivers
        owner = self._resolve(call.func.value) if isinstance(call.func.value, ast.Name | ast.Attribute) else None
        if owner is not None and isinstance(owner[1], ast.ClassDef):  # `Trainer.build(model)`
            for file, method in self._methods_of(owner[1], name):
                is_bound = "classmethod" in map(last_name, method.decorator_list)
                yield file.context, method, instance(owner[1]) if is_bound else None
            return
        known = [one for one in receivers if one.definition is not None and not one.path]
        for one in known:
            for file, method in self._methods_of(one.definition, name):
                is_static = "staticmethod" in map(last_name, method.decorator_list)
                yield file.context, method, None if is_static else one
        if not known and name not in _COMMON and not self.context.origins(call.func) and self._hands_on(call):
            self.flow.note(("function", name))
            for file, method in self.flow.methods.get(name, []):
                owner_class = file.context.parents[method]
                if isinstance(owner_class, ast.ClassDef) and self._is_near(file):
                    yield file.context, method, instance(owner_class)

    def _is_near(self, other: Sharded) -> bool:
        """Whether an object of a class of another file can have come here, as far as imports show."""
        here, there = self.context, other.context
        imports = self.flow.imports
        return here is there or there.path in imports(here) or here.path in imports(there)

    def _hands_on(self, call: ast.Call) -> bool:
        return any(self.flow.matters(self.values(one)) for one in given_to(call))

    def _home(self, function: Callable) -> FileContext | None:
        self.flow.note(("function", getattr(function, "name", "")))
        files = (one.context for one in self.flow.files.values() if function in one.context.parents)
        return self.context if function in self.context.parents else next(files, None)

    def _methods_of(self, definition: ast.ClassDef | None, name: str) -> list[tuple[Sharded, Function]]:
        """The methods of this name of a class, of the classes above and of those below."""
        family = self.flow.relatives(definition) if definition is not None else set()
        return [found for one in family for found in self.flow.own_methods.get((one, name), [])]

    def _enter(
        self, call: ast.Call, context: FileContext, target: Callable | ast.ClassDef, owner: ObjectRef | None
    ) -> Values:
        """Give the parameters of a function its arguments; what it returns."""
        if context.path not in self.flow.files and not self._hands_on(call):
            self.flow.note(("file", context.path))
            if isinstance(target, ast.ClassDef):
                self.flow.classes[target] = context
                return frozenset({ObjectRef(call, definition=target)})
            if "parameters(" not in context.source(target):
                return _NOTHING
        file = self.flow.activate(context)
        if isinstance(target, ast.ClassDef):
            wraps = self.program.inherits(context, target)
            made = ObjectRef(call, definition=target, origins=_WRAPPED if wraps else frozenset())
            found = self._methods_of(target, "__init__")
            own = [one for one in found if one[0].context.parents[one[1]] is target]
            for home, method in own or found:
                self._enter(call, home.context, method, made)
            if not own:
                self._fill_fields(call, target, made)
            return frozenset({made})
        self.flow.enter(self, call, target)
        arguments, num_bound = target.args, int(owner is not None)
        positional = [*arguments.posonlyargs, *arguments.args][num_bound:]
        for position, one in enumerate(call.args):
            values = self.values(one)
            if isinstance(one, ast.Starred):
                for parameter in positional[position:]:
                    self._hand(file, parameter, self._items(values, call))
            elif position < len(positional):
                self._hand(file, positional[position], values)
            elif arguments.vararg is not None:
                rest = ObjectRef(arguments.vararg)
                self.flow.store(rest, f"[{position - len(positional)}]", self.flow.crossing(values), call)
                self.flow.add(arguments.vararg, frozenset({rest}))
        by_name = {one.arg: one for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
        for keyword in call.keywords:
            values = self.values(keyword.value)
            if keyword.arg is None:
                for name, parameter in by_name.items():
                    self._hand(file, parameter, _union(self._stored(one, f"[{name!r}]", call) for one in values))
            elif keyword.arg in by_name:
                self._hand(file, by_name[keyword.arg], values)
            elif arguments.kwarg is not None:
                rest = ObjectRef(arguments.kwarg)
                self.flow.store(rest, f"[{keyword.arg!r}]", self.flow.crossing(values), call)
                self.flow.add(arguments.kwarg, frozenset({rest}))
        returned = frozenset(self.flow.look_up(target))
        kept = self.flow.crossing(returned, is_returned=True)
        return kept if len(kept) == len(returned) else kept | {ObjectRef(call)}

    def _hand(self, file: Sharded, parameter: ast.arg, values: Values) -> None:
        file._open(parameter)
        self.flow.add(parameter, self.flow.crossing(values))

    def _fill_fields(self, call: ast.Call, target: ast.ClassDef, made: ObjectRef) -> None:
        """A class without a constructor of its own keeps its arguments under their names."""
        names = [
            one.target.id for one in target.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        ]
        given = [*zip(names, call.args, strict=False), *((one.arg, one.value) for one in call.keywords if one.arg)]
        for name, value in given:
            self.flow.store(made, name, self.flow.crossing(self.values(value)), call)


def _is_other(value: ObjectRef) -> bool:
    """Whether a value is an object of its own other than a wrapped model; parts may be it without our knowing."""
    return (not is_wrapped(value) or value.origins == _HINTED) and not value.path


def _part(value: ObjectRef, name: str) -> ObjectRef:
    """An attribute or item of which nothing else is known; those of parts of wrapped models are not told apart."""
    return value if len(value.path) >= (1 if is_of_wrapped(value) else _MAX_PATH) else value.part(name)


def _union(sets: Iterable[Iterable[ObjectRef]]) -> Values:
    return frozenset().union(*sets)


def _key(node: ast.expr) -> str:
    value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
    return f"[{value!r}]" if isinstance(value, str | int) else _ITEM
