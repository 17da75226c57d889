"""An FSDP1 program: its files, names and values, and which of its variables hold a wrapped model."""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from shardwise.config.fsdp1_names import STRATEGIES
from shardwise.errors import SourceError
from shardwise.source.syntax import FSDP1, FileContext, Function, all_parameters, canonical, checked_types

_FSDP = "torch.distributed.fsdp."
_CLASS = "FullyShardedDataParallel"
Key = tuple[object, str]
"""A variable: its scope and name, or its class and attribute."""
_T = TypeVar("_T")


def is_none(node: ast.expr | None) -> bool:
    """Whether an expression is the literal None, or absent."""
    return node is None or is_constant(node, None)


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Whether an expression is this literal."""
    return isinstance(node, ast.Constant) and node.value is value


def fsdp_name(context: FileContext, node: ast.AST | None) -> str:
    """`MixedPrecision` for any spelling of `torch.distributed.fsdp.MixedPrecision`; empty for other things."""
    found = context.origins(node)
    return next(iter(found)).partition(_FSDP)[2] if len(found) == 1 and min(found).startswith(_FSDP) else ""


def called_fsdp_name(context: FileContext, node: ast.AST | None) -> str:
    """The FSDP name that an expression calls."""
    return fsdp_name(context, node.func) if isinstance(node, ast.Call) else ""


def given_by_name(call: ast.Call, parameters: Sequence[str]) -> dict[str | None, ast.expr]:
    """The arguments of a call by parameter; None stands for `**`."""
    given: dict[str | None, ast.expr] = dict(zip(parameters, call.args, strict=False))
    return given | {keyword.arg: keyword.value for keyword in call.keywords}


def single_value(context: FileContext, node: ast.expr) -> ast.expr:
    """The expression a name stands for, where it is given its value once and in the same function or the module.

    Anything else stands for itself.
    """
    for _ in range(4):
        bindings = context.bindings(node) if isinstance(node, ast.Name) else []
        if len(bindings) != 1 or bindings[0].value is None or _in_loop(context, bindings[0].node, node):
            break
        node = bindings[0].value
    return node


def _in_loop(context: FileContext, bound: ast.AST, used: ast.AST) -> bool:
    """Whether the assignment may not have happened, or happened with other values, when the name is used."""
    around_use = set(context.ancestors(used))
    for parent in context.ancestors(bound):
        if isinstance(parent, Function | ast.Module | ast.Lambda | ast.ClassDef):
            break
        if isinstance(parent, ast.For | ast.While | ast.If | ast.Try) and parent not in around_use:
            return not isinstance(parent, ast.If)  # bound under an `if` alone: bound so, or an error anyway
    return False


def strategy(context: FileContext, node: ast.expr | None) -> str | None:
    """The name of the ShardingStrategy that an expression is; None where it is only known at run time."""
    if node is None or is_none(node := single_value(context, node)):
        return "FULL_SHARD"
    name = fsdp_name(context, node) if isinstance(node, ast.Attribute) else ""
    return next((one for one in STRATEGIES if name == f"ShardingStrategy.{one}"), None)


def is_private(context: FileContext, node: ast.AST) -> bool:
    """Whether an expression is of a private module of FSDP1."""
    return any(origin.startswith(f"{_FSDP}_") for origin in context.origins(node, raw=True))


def iterated(node: ast.AST) -> list[ast.expr]:
    """What a loop or comprehension goes over; nothing for other nodes."""
    return [one.iter for one in ([node] if isinstance(node, ast.For) else getattr(node, "generators", []))]


def is_simple(node: ast.expr) -> bool:
    """Whether an expression may be written twice: it does nothing, and is short."""
    if isinstance(node, ast.Attribute):
        return is_simple(node.value)
    return isinstance(node, ast.Name | ast.Constant)


def once(work: Callable[[Program], _T]) -> Callable[[Program], _T]:
    """Let a question about the whole program be answered once."""

    @functools.wraps(work)
    def ask(program: Program) -> _T:
        if work not in program.answers:
            program.answers[work] = work(program)
        return program.answers[work]

    return ask


_SHORT = (_CLASS, "FSDP", "FSDP1")
_MAX_HOPS = 6


class Program:
    """The files that are read together, each parsed when it is first asked for.

    Args:
        texts: By path.
    """

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.answers: dict[Callable[[Program], Any], Any] = {}
        self._files: dict[str, FileContext | SourceError] = {}
        self._sharded: dict[str, Sharded] = {}
        self._handed: dict[str, set[Key]] | None = None
        self._by_tail: dict[tuple[str, ...], list[str]] = {}
        for path in texts:
            parts = Path(path).with_suffix("").parts
            parts = parts[:-1] if parts[-1:] == ("__init__",) else parts
            for start in range(len(parts)):
                self._by_tail.setdefault(parts[start:], []).append(path)

    def file(self, path: str) -> FileContext:
        """A file by its path.

        Raises:
            SourceError: It cannot be parsed.
        """
        if path not in self._files:
            try:
                self._files[path] = FileContext(self.texts[path], path)
            except SourceError as error:
                self._files[path] = error
        found = self._files[path]
        if isinstance(found, SourceError):
            raise found
        return found

    def _parsed(self, path: str) -> FileContext | None:
        with contextlib.suppress(SourceError):
            return self.file(path)
        return None

    def files(self, concerns: Callable[[str], object]) -> Iterator[FileContext]:
        """The files whose text concerns the caller, as far as they can be parsed."""
        for path, text in self.texts.items():
            if concerns(text) and (context := self._parsed(path)) is not None:
                yield context

    def sharded(self, context: FileContext) -> Sharded:
        """Which of a file's variables hold a wrapped model."""
        if context.path not in self._sharded:
            self._sharded[context.path] = Sharded(context, self)
        return self._sharded[context.path]

    def handed(self, path: str) -> set[Key]:
        """The functions of a file that callers hand a wrapped model, each with the name of the parameter."""
        if self._handed is None:
            self._handed = {}
            self._follow_calls(self._handed)
            self._sharded.clear()  # what was read before all was known
        return self._handed.get(path, set())

    def _follow_calls(self, found: dict[str, set[Key]]) -> None:
        """Fill `found`, which `Sharded` reads while it is being filled: what one round finds, the next one follows."""
        paths = {path for path, text in self.texts.items() if "FSDP" in text or _CLASS in text}
        for _ in range(4):  # main() -> train() -> save() -> write()
            parsed = [context for path in sorted(paths) if (context := self._parsed(path)) is not None]
            fresh = {one for context in parsed for one in self.sharded(context).handed_on()}
            fresh = {(path, key) for path, key in fresh if key not in found.get(path, set())}
            paths = {path for path, _ in fresh}
            for path, key in fresh:
                found.setdefault(path, set()).add(key)
                self._sharded.pop(path, None)

    def is_fsdp(self, context: FileContext, node: ast.AST | None) -> bool:
        """Whether an expression may stand for FSDP1's class."""
        if isinstance(node, ast.Attribute) and node.attr not in _SHORT:
            return False  # most expressions: no need to know where they come from
        found = context.origins(node)
        if FSDP1 in found:
            return True
        # A re-export keeps the name, or shortens it as everybody does.
        others = [origin for origin in found if not origin.startswith("torch.")]
        return any(one.rpartition(".")[2] in _SHORT for one in others) and FSDP1 in self.origins(context, node)

    def checks_fsdp(self, context: FileContext, node: ast.AST) -> bool:
        """Whether `isinstance(x, ...)` asks for FSDP1's class."""
        return any(self.is_fsdp(context, one) for one in checked_types(node))

    def origins(self, context: FileContext, node: ast.AST | None) -> frozenset[str]:
        """As `FileContext.origins`, also through names that other files of the program import or define."""
        return frozenset().union(*(self._resolve(context, origin, 0) for origin in context.origins(node)))

    def _resolve(self, context: FileContext, origin: str, hops: int) -> frozenset[str]:
        module, name = _split(origin)
        is_known = origin.startswith("torch.") or hops > _MAX_HOPS
        other = None if is_known else self.find_module(context, module)
        if other is None or other is context:
            return frozenset({origin})
        scope, found = other.scopes[other.tree], set[str]()
        for binding in scope.names.get(name, []):
            inner = [canonical(binding.origin)] if binding.origin else other.origins(binding.value)
            found.update(*(self._resolve(other, one, hops + 1) for one in inner))
        found.update(*(self._resolve(other, f"{star}.{name}", hops + 1) for star in scope.stars))
        return frozenset(found or {origin})

    def find_module(self, context: FileContext, module: str) -> FileContext | None:
        """The file of a module as imported in `context`: relative names exactly, absolute ones by their ending."""
        if module.startswith("."):
            package = Path(context.path)
            for _ in range(len(module) - len(module.lstrip("."))):
                package = package.parent
            stem = package.joinpath(*module.strip(".").split("."))
            paths = [path for path in (f"{stem}.py", str(stem / "__init__.py")) if path in self.texts]
            return self._parsed(paths[0]) if paths else None
        around = set(Path(context.path).parents)
        paths = self._by_tail.get(tuple(module.split(".")), [])
        nearest = max(paths, key=lambda path: len(around.intersection(Path(path).parents)), default=None)
        return self._parsed(nearest) if nearest else None

    def definition(self, context: FileContext, node: ast.AST) -> tuple[FileContext, Function | ast.ClassDef] | None:
        """The function or class of the program that a name stands for, where only one can be meant."""
        own = context.definition(node)
        if own is not None:
            return context, own
        found = (self._definition_at(context, origin) for origin in context.origins(node))
        return next((one for one in found if one is not None), None)

    def function(self, context: FileContext, node: ast.AST) -> tuple[FileContext, Function] | None:
        """The function of the program that a name or attribute stands for, where only one can be meant."""
        found = self.definition(context, node)
        return (found[0], found[1]) if found is not None and isinstance(found[1], Function) else None

    def _definition_at(
        self, context: FileContext, origin: str, hops: int = 0
    ) -> tuple[FileContext, Function | ast.ClassDef] | None:
        module, name = _split(origin)
        other = self.find_module(context, module) if module and hops < _MAX_HOPS else None
        if other is None:
            return None
        scope = other.scopes[other.tree]
        found = scope.names.get(name, [])
        if len(found) == 1 and found[0].definition is not None:
            return other, found[0].definition
        onward = [one.origin for one in found if len(found) == 1 and one.origin]  # re-exported
        onward += [] if found else [f"{star}.{name}" for star in scope.stars]
        inner = (self._definition_at(other, one, hops + 1) for one in onward)
        return next((one for one in inner if one is not None), None)


def _split(origin: str) -> tuple[str, str]:
    """Module and name; `..x` is `x` of the package above."""
    module, _, name = origin.rpartition(".")
    return (f"{module}." if origin.startswith(".") and not module.strip(".") else module), name


_STATIC = ("state_dict_type", "set_state_dict_type", "optim_state_dict", "summon_full_params", "fsdp_modules")
_STATIC += ("optim_state_dict_to_load", "full_optim_state_dict", "sharded_optim_state_dict", "get_state_dict_type")
_OTHER_WRAPPERS = {
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel",
}
WRAP, ENABLE_WRAP = "torch.distributed.fsdp.wrap.wrap", "torch.distributed.fsdp.wrap.enable_wrap"


class Holds(enum.IntEnum):
    """Whether an expression is a wrapped model."""

    NEVER = 0
    SOMETIMES = 1
    """On some runs or branches; on others it is a plain model, or DDP."""
    ALWAYS = 2


class Sharded:
    """The wrapped models of one file.

    Args:
        context: The file.
        program: All files given.
    """

    def __init__(self, context: FileContext, program: Program) -> None:
        self.context, self.program = context, program
        self._busy: set[ast.AST] = set()

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
        key = self._key(node)
        if key is None:
            return self._of_value(node)
        bound = [one for one in self._bound.get(key, []) if self._may_reach(one[0], node)]
        if not any(kind for _, kind in bound):
            return Holds.SOMETIMES if key in self._told and not bound else Holds.NEVER
        always = [place for place, kind in bound if kind is Holds.ALWAYS]
        is_sure = all(kind for _, kind in bound) and any(self._always_reaches(place, node) for place in always)
        return Holds.ALWAYS if is_sure else Holds.SOMETIMES

    def _key(self, node: ast.expr) -> Key | None:
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
                return self.context.enclosing_class(node), f"self.{attribute}"
            case ast.Name(id=name) as base:
                pass
            case ast.Attribute(value=ast.Name() as base, attr=attribute):
                name = f"{base.id}.{attribute}"
            case _:
                return None
        found = self.context.scope(base).find(base.id)
        return found[0].node if found else self.context.tree, name

    @cached_property
    def _bound(self) -> dict[Key, list[tuple[ast.AST, Holds]]]:
        """For each variable, the places that give it a wrapped model, or something else that is wrapped."""
        found: dict[Key, list[tuple[ast.AST, Holds]]] = {}
        for _ in range(3):  # a = FSDP(m); b = a; self.c = b
            self.__dict__["_bound"] = found
            again: dict[Key, list[tuple[ast.AST, Holds]]] = {}
            for target, value in self._assignments():
                key, kind = self._key(target), self._of_value(value)
                is_other = isinstance(value, ast.Call) and self.context.is_any(value.func, _OTHER_WRAPPERS)
                if key is not None and (kind or is_other):
                    again.setdefault(key, []).append((value, kind))
            if again == found:
                break
            found = again
        return found

    def _assignments(self) -> Iterator[tuple[ast.expr, ast.expr]]:
        for node in self.context.parents:
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                yield node.target, node.value
            pairs = [(target, node.value) for target in node.targets] if isinstance(node, ast.Assign) else []
            for pair in pairs:
                match pair:
                    case ast.Tuple(elts=targets), ast.Tuple(elts=values):
                        yield from zip(targets, values, strict=False)
                    case ast.Tuple(elts=targets), value:
                        yield from ((one, value) for one in targets if "model" in self.context.source(one).lower())
                    case _:
                        yield pair

    def _of_value(self, node: ast.expr) -> Holds:
        match node:
            case ast.Call() if self.constructors.get(node) is False:
                return Holds.ALWAYS
            case ast.Call(func=ast.Attribute(attr="to" | "cuda" | "train" | "eval" | "cpu", value=inner)):
                return self.holds(inner)
            case ast.Call() if self.context.is_any(node.func, {WRAP}):
                return Holds.ALWAYS if self._under_enable_wrap(node) else Holds.SOMETIMES
            case ast.Call() if self.context.is_any(node.func, {"torch.compile"}) and node.args:
                return self.holds(node.args[0])
            case ast.Call():
                return self._of_function(node)
            case ast.IfExp():
                kinds = {self.holds(node.body), self.holds(node.orelse)}
                return kinds.pop() if len(kinds) == 1 else Holds.SOMETIMES
            case ast.Name() | ast.Attribute() if (key := self._key(node)) in self._bound or key in self._told:
                return self.holds(node)
        return Holds.NEVER

    def _under_enable_wrap(self, node: ast.AST) -> bool:
        """Whether `wrap` wraps here: elsewhere it hands the module back as it is."""
        blocks = [one for one in self.context.ancestors(node) if isinstance(one, ast.With)]
        entered = [getattr(item.context_expr, "func", None) for one in blocks for item in one.items]
        return any(self.context.is_any(one, {ENABLE_WRAP}) for one in entered)

    def _of_function(self, call: ast.Call) -> Holds:
        """What a function of the program returns, if it wraps a model itself."""
        found = self.program.function(self.context, call.func)
        if found is None or call in self._busy or not any(word in found[0].text for word in ("FSDP", _CLASS)):
            return Holds.NEVER
        context, function = found
        returns = [one for one in ast.walk(function) if isinstance(one, ast.Return) and one.value is not None]
        values = [one.value for one in returns if context.enclosing_function(one) is function]
        first = [value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value for value in values]
        self._busy.add(call)
        sharded = self.program.sharded(context)
        kinds = [sharded.holds(value) for value in first if value is not None]
        self._busy.discard(call)
        return min(kinds) or Holds(min(max(kinds), Holds.SOMETIMES)) if kinds else Holds.NEVER

    @cached_property
    def _told(self) -> set[Key | None]:
        """Variables that FSDP's own functions, a type or a caller say may hold a wrapped model."""
        context = self.context
        found: set[Key | None] = {*self.program.handed(context.path)}
        for call in context.calls:
            owner, _, method = fsdp_name(context, call.func).partition(".")
            is_static = owner == _CLASS and method in _STATIC and call.args
            if is_static or any(map(self._names_fsdp, checked_types(call))):
                found.add(self._key(call.args[0]))
        for function in context.functions:
            for one in all_parameters(function.args):
                if one.annotation is not None and any(map(self._names_fsdp, ast.walk(one.annotation))):
                    found.add((function, one.arg))
        loops = [one for one in context.parents if isinstance(one, ast.For)]
        units = [one for one in loops if called_fsdp_name(context, one.iter) == f"{_CLASS}.fsdp_modules"]
        return (found | {self._key(one.target) for one in units}) - {None}

    def _names_fsdp(self, node: ast.AST) -> bool:
        return fsdp_name(self.context, node) == _CLASS

    def _may_reach(self, bound: ast.AST, used: ast.AST) -> bool:
        """Whether a value given at one place can be what is used at another."""
        context = self.context
        if context.enclosing_function(bound) is not context.enclosing_function(used):
            return True
        if getattr(bound, "lineno", 0) > getattr(used, "lineno", 0):
            loops = {one for one in context.ancestors(bound) if isinstance(one, ast.For | ast.While)}
            return not loops.isdisjoint(context.ancestors(used))
        return not context.are_exclusive(bound, used)

    def _always_reaches(self, bound: ast.AST, used: ast.AST) -> bool:
        """Whether the assignment happens on every way to the use, within one function."""
        around = set(self.context.ancestors(used))
        for parent in self.context.ancestors(bound):
            if isinstance(parent, Function | ast.Module | ast.ClassDef):
                return True
            if isinstance(parent, ast.If | ast.Try | ast.For | ast.While) and parent not in around:
                return False
        return True

    def handed_on(self) -> Iterator[tuple[str, Key]]:
        """The parameters, with the path of their file, that calls of this file hand a wrapped model."""
        has_any = bool(self._bound or self._told)
        for call in self.context.calls if has_any else ():
            given = [*enumerate(call.args), *((one.arg, one.value) for one in call.keywords)]
            wrapped = [place for place, one in given if self._key(one) is not None and self.holds(one)]
            target = self._target(call.func) if wrapped and call not in self.constructors else None
            if target is None:
                continue
            path, function, num_bound = target
            names = [one.arg for one in [*function.args.posonlyargs, *function.args.args]][num_bound:]
            known: dict[object, str] = dict(enumerate(names))
            known |= {name: name for name in [*names, *(one.arg for one in function.args.kwonlyargs)]}
            yield from ((path, (function, known[place])) for place in wrapped if place in known)

    def _target(self, node: ast.expr) -> tuple[str, Function, int] | None:
        """The function that a call enters, its file, and how many of its parameters the call does not give (`self`)."""
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                found = self.context, self.context.enclosing_class(node)
            case _:
                found, name = self.program.definition(self.context, node) or (self.context, None), "__init__"
        path, definition = found[0].path, found[1]
        if isinstance(definition, Function):
            return path, definition, 0
        body = definition.body if definition is not None else []
        methods = [one for one in body if isinstance(one, Function) and one.name == name]
        return (path, methods[0], 1) if methods else None
