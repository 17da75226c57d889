"""Which of a file's expressions are wrapped models, and what is done to get there."""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterable, Iterator

from shardwise.fsdp1.codemod.evaluating import INNER, SAME, Evaluator, is_of_wrapped
from shardwise.fsdp1.codemod.program import ENABLE_WRAP, WRAP, fsdp_name
from shardwise.source.syntax import FSDP1, Function, all_parameters, argument_of, checked_types, given_to
from shardwise.source.values import ObjectRef

_HINTED = frozenset({FSDP1, "isinstance"})
"""Origins of models that the program only takes for wrapped ones."""
ANYWHERE = ast.Module(body=[], type_ignores=[])
_CLASS = FSDP1.rpartition(".")[2]
STATIC = ("state_dict_type", "set_state_dict_type", "optim_state_dict", "summon_full_params", "fsdp_modules")
STATIC += ("optim_state_dict_to_load", "full_optim_state_dict", "sharded_optim_state_dict", "get_state_dict_type")
"""FSDP1's methods that are called on the class."""
METHODS = {*STATIC, "clip_grad_norm_", "no_sync", "check_is_root", "register_comm_hook", "apply"}


class Holds(enum.IntEnum):
    """Whether an expression is a wrapped model."""

    NEVER = 0
    SOMETIMES = 1
    """On some runs or branches; on others it is a plain model, or DDP."""
    ALWAYS = 2


def is_wrapped(value: ObjectRef) -> bool:
    """Whether a value is a wrapped model itself, not a part of one."""
    return FSDP1 in value.origins and not value.path


def name_on_self(node: ast.AST) -> str:
    """The name of `self.name`; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self" else ""


class Sharded(Evaluator):
    """The values of one file's expressions, and what is asked about them."""

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

    def is_foreign(self, call: ast.Call) -> bool:
        """Whether a call is of a function or class that is not of the program."""
        file = self.flow.file_of(call)
        return file is not None and file._resolve(call.func) is None

    def is_unknown(self, node: ast.expr) -> bool:
        """Whether nothing shows what an expression is: a parameter of a function that nobody calls, or set nowhere."""
        for one in self.values(node):
            match one.whole.site:
                case ast.arg() as parameter if parameter in self.context.parents:
                    function = self.context.parents[self.context.parents[parameter]]
                    sites = self.flow.sites_of(function)  # pyrefly: ignore
                    if all(caller.context.enclosing_function(site) is function for site, caller in sites):
                        return True  # `super().__init__()` is no caller
                case ast.ClassDef() if len(one.path) == 1:
                    if not any(self.flow.stored_as(owner, one.path[0]) for owner in self.flow.owners(one.whole)):
                        return True
        return False

    def is_handed_away(self, call: ast.Call) -> bool:
        """Whether a wrapped model, or a function that wraps one, goes to a function that comes from who knows where."""
        match call.func:
            case ast.Attribute(attr=name) if name in self.flow.methods or self._resolve(call.func) is not None:
                return False  # of a class that this one is mixed with, or a class inside of it
            case ast.Name() | ast.Attribute(value=ast.Name(id="self")) if self.is_unknown(call.func):
                return any(self.holds_part(one) or self._makes_wrapped(one) for one in given_to(call))
        return False

    def _makes_wrapped(self, node: ast.expr) -> bool:
        """Whether a function of the program that returns wrapped models."""
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                made = [one for _, one in self._methods_of(self.context.enclosing_class(node), name)]
            case ast.Name():
                made = [one for _, one in filter(None, [self.program.function(self.context, node)])]
            case _:
                made = []
        return any(is_of_wrapped(value) for one in made for value in self.flow.look_up(one))

    def has_own(self, node: ast.expr, method: str) -> bool:
        """Whether an expression may be an object whose class, of the program, has this method."""
        match node:
            case ast.Call(func=ast.Name(id="super")):  # of a class above
                own = self.context.enclosing_class(node)
                return any(file.context.parents[one] is not own for file, one in self._methods_of(own, method))
        return self._has_own(self.values(node), method)

    def own_methods(self, model: ast.expr, name: str) -> list[Function]:
        """The method of this name of the class that a model had before it was wrapped, and those it calls on `self`."""
        wrapped = self.flow.wrapped
        sites = {one.site for one in self.values(model) if is_wrapped(one)}
        inner = [wrapped[one] for one in wrapped if one in sites or not sites <= wrapped.keys()]
        found = list[Function]()
        for definition in {one.definition for several in inner for one in several if not one.path}:
            own = {one.name: one for one in getattr(definition, "body", ()) if isinstance(one, Function)}
            waiting = [name]
            while waiting:
                method = own.pop(waiting.pop(), None)
                if method is not None:
                    found.append(method)
                    waiting += {name_on_self(one) for one in ast.walk(method)} - {"forward"}
        return found

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
            case ast.Attribute(attr=name) if name not in INNER:
                stored = [
                    by
                    for value in self.values(node.value)
                    for owner in self.flow.owners(value)
                    for by in [self.flow.stored_as(owner, name)]
                ]
                places = [place for by in stored for place, found in by.items() if any(map(is_wrapped, found))]
                places = [place for place in places if self.reaching.may_reach(place, node)]
            case ast.Call(func=ast.Attribute(attr=name, value=inner)) if name in SAME:
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

    def read_hints(self) -> list[tuple[ast.AST, ast.expr]]:
        """The expressions that only a type check or a function of FSDP's class takes for wrapped models."""
        self.forget()
        context, told = self.context, list[tuple[ast.AST, ast.expr]]()
        if not self.constructors and "fully_shard(" in context.text:
            return told  # rewritten already; what is left of FSDP1 here tells nothing
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


def _is_other(value: ObjectRef) -> bool:
    """Whether a value is an object of its own other than a wrapped model; parts may be it without our knowing."""
    return (not is_wrapped(value) or value.origins == _HINTED) and not value.path
