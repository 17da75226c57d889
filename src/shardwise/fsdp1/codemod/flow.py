"""Where wrapped models go in a program: a fixpoint over variables, attributes, items, parameters and return values.

An expression has values: the objects that the program may have there. Nothing depends on the order in which files or
functions are read. No torch, no I/O.
"""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Iterable, Iterator

from shardwise.fsdp1.codemod.evaluating import (
    INNER,
    SAME,
    Callable,
    Evaluator,
    Values,
    instance,
    is_function,
    is_of_wrapped,
)
from shardwise.fsdp1.codemod.program import ENABLE_WRAP, WRAP, Program, fsdp_name, once
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
    name_on_self,
)
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

    def is_parameter(self, node: ast.expr) -> bool:
        """Whether an expression is a parameter or gradient of a wrapped model, or several of them."""
        return any(self._is_parameter(one) for one in self.values(node))

    def _is_parameter(self, value: ObjectRef) -> bool:
        if is_of_wrapped(value):
            return value.path[-1:] in (("weight",), ("bias",), ("_parameters",))
        taken = value.whole.site if "parameters" in value.whole.origins else None
        file = self.flow.file_of(taken) if isinstance(taken, ast.Call) else None
        return file is not None and isinstance(taken.func, ast.Attribute) and file.has_inside(taken.func.value)  # pyrefly: ignore

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
            case ast.Attribute(attr=name) if name in self.flow.methods:
                return False  # of a class that this one is mixed with
            case function if self._resolve(function) is not None:
                return False  # of the program
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
            case ast.Call(func=function) if self.context.is_any(function, {WRAP}):
                # Outside of `enable_wrap` it hands the module back as it is.
                entered = (one.func for _, one in self.context.entered_calls(node))
                return any(self.context.is_any(one, {ENABLE_WRAP}) for one in entered)
            case _:
                return True
        return any(self.reaching.always_reaches(place, node) for place in places)

    def read_hints(self) -> list[tuple[ast.AST, ast.expr | ast.arg]]:
        """What only an annotation, a type check or a function of FSDP's class takes for wrapped models."""
        self.forget()
        context = self.context
        parameters = (one for function in context.functions for one in all_parameters(function.args))
        told: list[tuple[ast.AST, ast.expr | ast.arg]] = [
            (one, one)
            for one in parameters
            if one.annotation is not None and any(map(self._names_fsdp, ast.walk(one.annotation)))
        ]
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

    def follow_hints(self, told: list[tuple[ast.AST, ast.expr | ast.arg]]) -> None:
        """Take hints for the truth."""
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
                case ast.Name() | ast.arg():
                    self.flow.add(model, wrapped)
        self.forget()

    def _names_fsdp(self, node: ast.AST) -> bool:
        return fsdp_name(self.context, node) == _CLASS


def _is_other(value: ObjectRef) -> bool:
    """Whether a value is an object of its own other than a wrapped model; parts may be it without our knowing."""
    return (not is_wrapped(value) or value.origins == _HINTED) and not value.path


_FSDP = re.compile(r"FSDP|FullyShardedDataParallel")
_USES = re.compile(r"state_dict|\.module\b|_fsdp|no_sync|clip_grad_norm_|numel\(")
"""What a file does that is worth reading it for."""
_MAX_HOPS = 3
_MAX_VALUES = 24
"""Beyond this number of values at one place only wrapped models are followed; large frameworks would take minutes."""


class ProgramFlow:
    """The values of a whole program.

    Only files that name FSDP, or that a wrapped model comes to, are read.

    Args:
        program: All files given.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values: dict[ast.AST, set[ObjectRef]] = {}
        """By the node that binds a variable or parameter, and by the function that returns them."""
        self.fields: dict[object, dict[str, dict[ast.AST, set[ObjectRef]]]] = {}
        """By object or class, attribute or item, and the place of the store; `ANYWHERE` stands for any object."""
        self.sites: dict[Callable, dict[ast.Call, Sharded]] = {}
        """The calls of each function."""
        self.wrapped: dict[ast.Call, set[ObjectRef]] = {}
        """What each constructor wraps."""
        self.files: dict[str, Sharded] = {}
        self._unread: dict[str, Sharded] = {}
        self.methods: dict[str, list[tuple[Sharded, Function]]] = {}
        self.classes: dict[ast.ClassDef, FileContext] = {}
        """Classes of files that are not read yet."""
        self._bases: dict[ast.ClassDef, set[ast.ClassDef]] = {}
        self._family: dict[ast.ClassDef, set[ast.ClassDef]] = {}
        self._seen: set[str] = set()
        self._seen_loosely: set[str] = set()
        self._tags: dict[object, set[str]] = {}
        self._imports: dict[str, set[str]] = {}
        self._linked: dict[str, set[str]] = {}
        self._loose: dict[ast.AST, str] = {}
        """Stores of a wrapped model to an attribute of who knows which object, and the file of each."""
        self._readers: dict[object, dict[Sharded, None]] = {}
        self._reading: Sharded | None = None
        self._waiting: dict[Sharded, None] = {}
        """Files to read, for the first time or because something that they have read has changed."""
        for context in program.files(_FSDP.search):
            self.activate(context)
        imported = set().union(*(self.imports(file.context) for file in self.files.values()))
        for path, file in self.files.items():
            wraps = file.constructors or any(file.context.calls_to(WRAP))
            if not wraps and not self.imports(file.context) and path not in imported:
                del self._waiting[file]  # nothing comes to it
        self._settle()
        hints = {file: told for file in list(self.files.values()) if (told := file.read_hints())}
        for file, told in hints.items():
            file.follow_hints(told)
            self._waiting[file] = None
        self._settle()
        for file in self.files.values():
            file.forget()

    def file(self, context: FileContext) -> Sharded:
        """The values of a file's expressions."""
        return self.files.get(context.path) or self._unread.setdefault(context.path, Sharded(context, self))

    def file_of(self, node: ast.AST) -> Sharded | None:
        """The file that a node is in."""
        return next((one for one in self.files.values() if node in one.context.parents), None)

    def sites_of(self, function: Callable | None) -> list[tuple[ast.Call, Sharded]]:
        """The calls of a function, each with its file."""
        return list(self.sites.get(function, {}).items()) if function is not None else []

    def may_precede(
        self, early: tuple[Sharded, ast.AST], late: tuple[Sharded, ast.AST], *, is_known: bool = False
    ) -> bool:
        """Whether one place can come before another in a run, as far as the function from which both are reached shows.

        Without such a function, only the order of a class's constructor and its other methods is known; not if the
        order `is_known`, which takes such a function.
        """
        owners = [file.context.enclosing_class(node) for file, node in (early, late)]
        if self._are_siblings(*owners):
            return False  # `FSDPStrategy` and `DDPStrategy`: an object is one of the two
        one, other = self.reached_from(*early), self.reached_from(*late)
        hops = {key: one[key][0] + other[key][0] for key in one.keys() & other.keys()}
        if hops:
            nearest = [(one[key], other[key][2]) for key, number in hops.items() if number == min(hops.values())]
            return any(
                file.reaching.may_reach(node, later)
                for (_, file, nodes), others in nearest
                for node in nodes
                for later in others
            )
        functions = [file.context.enclosing_function(node) for file, node in (early, late)]
        if is_known:
            return False
        return not (owners[0] is owners[1] is not None and getattr(functions[1], "name", "") == "__init__")

    def _are_siblings(self, one: ast.ClassDef | None, other: ast.ClassDef | None) -> bool:
        """Whether two classes have a class above in common, and neither is above the other."""
        if one is None or other is None or other in self.relatives(one):
            return False
        return not self.relatives(one).isdisjoint(self.relatives(other))

    def reached_from(
        self, file: Sharded, node: ast.AST
    ) -> dict[tuple[str, Function | None], tuple[int, Sharded, list[ast.AST]]]:
        """By function, the calls in it through which a place is reached, and how many calls are in between."""
        found = {(file.context.path, file.context.enclosing_function(node)): (0, file, [node])}
        for hops in range(_MAX_HOPS):
            for _, function in [key for key, one in found.items() if one[0] == hops]:
                for site, caller in self.sites_of(function):
                    key = caller.context.path, caller.context.enclosing_function(site)
                    known = found.setdefault(key, (hops + 1, caller, []))
                    if known[0] == hops + 1:
                        known[2].append(site)
        return found

    def _settle(self) -> None:
        """Read each file again until nothing that it has read changes."""
        while self._waiting:
            while self._waiting:
                self._reading = next(iter(self._waiting))
                del self._waiting[self._reading]
                self._reading.read()
            self._reading = None
            self._activate_importers()

    def _note(self, key: object) -> None:
        """Read the file that is being read once more when what the key stands for has changed."""
        if self._reading is not None:
            self._readers.setdefault(key, {})[self._reading] = None

    def _changed(self, *keys: object) -> None:
        for key in keys:
            self._waiting |= self._readers.get(key, {})

    def look_up(self, key: ast.AST) -> set[ObjectRef]:
        """The values of a variable, parameter or function so far."""
        self._note(key)
        return self.values.get(key, set())

    def stored(self, owner: object) -> dict[str, dict[ast.AST, set[ObjectRef]]]:
        """The attributes and items of an object or class so far."""
        self._note(owner)
        return self.fields.get(owner, {})

    def stored_as(self, owner: object, name: str) -> dict[ast.AST, set[ObjectRef]]:
        """One attribute or item of an object or class so far, by the place of the store."""
        self._note((owner, name))
        return self.fields.get(owner, {}).get(name, {})

    def activate(self, context: FileContext) -> Sharded:
        """Read a file from now on."""
        if context.path not in self.files:
            file = self.files[context.path] = Sharded(context, self)
            self._waiting |= dict.fromkeys(self.files.values())  # they may call its functions
            for node in context.nodes(ast.ClassDef):
                for method in (one for one in node.body if isinstance(one, Function)):
                    self.methods.setdefault(method.name, []).append((file, method))
                above = [self.program.definition(context, base) for base in node.bases]
                self._bases[node] = {one[1] for one in above if one is not None and isinstance(one[1], ast.ClassDef)}
                self._family.clear()
                for other, _ in filter(None, above):
                    self.activate(other)
        return self.files[context.path]

    def activate_methods(self, name: str, context: FileContext) -> None:
        """Read the files that a file imports from and that have a class with a method of this name."""
        for path in self.imports(context) - self.files.keys():
            other = self.program.parsed(path)
            if other is not None and any(name == one.name for one in other.functions if other.enclosing_class(one)):
                self.activate(other)

    def named_in(self, places: Iterable[FileContext]) -> Iterator[tuple[FileContext, ast.ClassDef]]:
        """The classes of the program that some files have in tables or return, also by name in a string."""
        names = {name for context in places for name in _offered(context) if re.fullmatch(r"[A-Z]\w+", name)}
        defined = re.compile(rf"^class (?:{'|'.join(sorted(names))})\b", re.MULTILINE)
        for context in self.program.files(defined.search) if names else ():
            yield from ((context, one) for name, one in context.classes.items() if name in names)

    def _activate_importers(self) -> None:
        """Read the files that import a function which returns a wrapped model, or a class or variable that has one."""
        names = {one.name: True for one in self.values if isinstance(one, Function) and self.matters(self.values[one])}
        names |= {
            one.name: False for one in self._tags if isinstance(one, ast.ClassDef) and self.matters([instance(one)])
        }
        for one in self._tags:  # functions that give an object of their caller a wrapped model
            if isinstance(one, ObjectRef) and isinstance(one.site, ast.arg) and self.matters([one]):
                file = self.file_of(one.site)
                function = file.context.parents[file.context.parents[one.site]] if file is not None else None
                names |= {function.name: True} if isinstance(function, Function) else {}
        for file in self.files.values():
            for name, bindings in file.context.scopes[file.context.tree].names.items():
                if any(self.matters(self.values.get(one.node, ())) for one in bindings):
                    names[name] = True
        fresh = {name: always for name, always in names.items() if name not in self._seen}
        self._seen |= set(fresh)
        pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(fresh)))})\b") if fresh else None

        def concerns(text: str) -> bool:
            found = set(pattern.findall(text)) if pattern else set()
            return any(fresh[name] for name in found) or bool(found and _USES.search(text))

        for context in self.program.files(concerns) if fresh else ():
            if context.path not in self.files and not self.imports(context).isdisjoint(self.files):
                self.activate(context)
        given = {name for name in self.fields.get(ANYWHERE, {}) if name not in self._seen_loosely}
        self._seen_loosely |= given
        attributes = [
            re.escape(f".{name}") + r"\b" if name.isidentifier() else re.escape(name) for name in sorted(given)
        ]
        used = re.compile("|".join(attributes)) if given else None
        for context in self.program.files(lambda text: used and used.search(text) and _USES.search(text)):
            if context.path not in self.files and any(
                self._are_linked(one, context.path) for one in self._loose.values()
            ):
                self.activate(context)

    def imports(self, context: FileContext) -> set[str]:
        """The files of the program that a file imports from."""
        if context.path not in self._imports:
            aliases = (one.origin for bindings in context.scopes[context.tree].names.values() for one in bindings)
            modules = {part for origin in aliases if origin for part in (origin, origin.rpartition(".")[0])}
            found = (self.program.find_module(context, one) for one in modules if one and not one.startswith("torch"))
            self._imports[context.path] = {one.path for one in found if one is not None}
        return self._imports[context.path]

    def tags(self, value: ObjectRef) -> set[str]:
        """Whether a value is, or has somewhere inside, a wrapped model (`FSDP1`) or parameters."""
        found = set(value.whole.origins & {FSDP1, "parameters"})
        for owner in self.owners(value):
            self._note(("tags", owner))
            found |= self._tags.get(owner, set())
        return found

    def matters(self, values: Iterable[ObjectRef]) -> bool:
        """Whether a wrapped model is among the values or can be reached from them."""
        return any(FSDP1 in self.tags(one) for one in values)

    def crossing(self, values: Values, *, is_returned: bool = False) -> Values:
        """Those values that are followed from one function to another; parameters only to a caller."""
        kept, followed = set(), {FSDP1, "parameters"} if is_returned else {FSDP1}
        for one in values:
            if is_of_wrapped(one):  # by whichever constructor
                anyone = ObjectRef(ANYWHERE, origins=one.whole.origins, definition=one.whole.definition)
                kept.add(anyone.part(one.path[0]) if one.path else anyone)
            elif one.definition is not None and not one.path:
                kept.add(instance(one.definition))
            elif self.tags(one) & followed or is_function(one):
                kept.add(one)
        return frozenset(kept)

    def owners(self, value: ObjectRef) -> Iterable[object]:
        """Under what the attributes of an object are kept."""
        if value.definition is None or value.path:
            return (value,)
        return self.relatives(value.definition)

    def relatives(self, definition: ast.ClassDef) -> set[ast.ClassDef]:
        """The classes above and below a class, itself included; attributes of its siblings are not its own."""
        if definition not in self._family:
            below = {one for one in self._bases if definition in self._above(one)}
            self._family[definition] = self._above(definition) | below
        return self._family[definition]

    def _above(self, definition: ast.ClassDef) -> set[ast.ClassDef]:
        found, waiting = {definition}, [definition]
        while waiting:
            fresh = self._bases.get(waiting.pop(), set()) - found
            found |= fresh
            waiting += fresh
        return found

    def add(self, key: ast.AST, values: Values) -> None:
        """Let a variable, parameter or function have these values too."""
        self._grow(self.values.setdefault(key, set()), values, key)

    def store(self, owner: ObjectRef, name: str, values: Values, place: ast.AST) -> None:
        """Let an attribute or item have these values too."""
        key = owner.definition if owner.definition is not None and not owner.path else owner
        tags = set().union(*map(self.tags, values))
        if FSDP1 in tags and key in self.classes:
            self.activate(self.classes[key])
        for one in (key, owner.whole, owner.parent) if owner.path else (key,):
            known = self._tags.setdefault(one, set()) if tags else tags
            if not tags <= known:
                known |= tags
                self._changed(("tags", one))
        known = self.fields.setdefault(key, {}).setdefault(name, {}).setdefault(place, set())
        self._grow(known, values, key, (key, name))
        if self._reading is not None and _is_anyones(owner, name) and any(map(is_of_wrapped, values)):
            self._loose[place] = self._reading.context.path
            known = self.fields.setdefault(ANYWHERE, {}).setdefault(name, {}).setdefault(place, set())
            self._grow(known, frozenset(filter(is_of_wrapped, values)), (ANYWHERE, name))

    def stored_loosely(self, name: str, context: FileContext) -> dict[ast.AST, set[ObjectRef]]:
        """What some object was given under a name, in a file that has to do with this one."""
        found = self.stored_as(ANYWHERE, name)
        return {place: values for place, values in found.items() if self._are_linked(self._loose[place], context.path)}

    def _are_linked(self, one: str, other: str) -> bool:
        """Whether one file imports the other, itself or through others."""
        return one == other or other in self.reached_by(one) or one in self.reached_by(other)

    def reached_by(self, path: str) -> set[str]:
        """A file, and those that it imports, itself or through others."""
        if path not in self._linked:
            found, waiting = {path}, [path]
            while waiting:
                context = self.program.parsed(waiting.pop())
                fresh = (self.imports(context) if context is not None else set()) - found
                found |= fresh
                waiting += fresh
            self._linked[path] = found
        return self._linked[path]

    def fed_by(self, path: str, among: Iterable[str]) -> list[str]:
        """The files whose models may come to one: some file imports both, itself or through others; all, if none do."""
        among = list(among)
        return self.run_with(path, among, self.files) or among

    def run_with(self, path: str, among: Iterable[str], scripts: Iterable[str]) -> list[str]:
        """The files of `among` that one of these scripts imports together with a file, itself or through others."""
        around = [one for one in map(self.reached_by, scripts) if path in one]
        return [one for one in among if any(one in reached for reached in around)]

    def _grow(self, known: set[ObjectRef], values: Values, *keys: object) -> None:
        if len(known) + len(values) > _MAX_VALUES:
            values = frozenset(filter(is_of_wrapped, values))
        if not values <= known:
            known |= values
            self._changed(*keys)


def _offered(context: FileContext) -> Iterator[str]:
    """The last names of what a file has in dicts or returns: of classes, and in strings."""
    for outer in context.nodes(ast.Dict, ast.Return):
        for one in ast.walk(outer):
            if isinstance(one, ast.Name | ast.Attribute) and getattr(context.parents[one], "func", None) is not one:
                yield last_name(one)
            elif isinstance(one, ast.Constant) and isinstance(one.value, str):
                yield one.value.rpartition(".")[2]


def _is_anyones(owner: ObjectRef, name: str) -> bool:
    """Whether an attribute, or an item by a name, is stored on an object of which nothing is known."""
    is_named = name.isidentifier() or name.startswith("['")
    is_known = isinstance(owner.whole.site, ast.Dict | ast.List | ast.Tuple | ast.Set | Comprehension)
    return is_named and not is_known and not is_of_wrapped(owner) and (owner.definition is None or bool(owner.path))


@once
def flow_of(program: Program) -> ProgramFlow:
    """The values of a program, found once."""
    return ProgramFlow(program)


@once
def wraps_models(program: Program) -> bool:
    """Whether the program has an FSDP(...) call."""
    return any(file.constructors for file in flow_of(program).files.values())
