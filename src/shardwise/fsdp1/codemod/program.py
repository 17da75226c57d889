"""An FSDP1 program: its files, what their names stand for, and which assignments reach a use."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shardwise.config.fsdp1_names import STRATEGIES
from shardwise.errors import SourceError
from shardwise.findings import Edit
from shardwise.source.edits import apply, change
from shardwise.source.syntax import FSDP1, Comprehension, FileContext, Function, canonical, checked_types

_FSDP = "torch.distributed.fsdp."
_CLASS = "FullyShardedDataParallel"
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
    return any(
        origin.startswith(f"{_FSDP}_") and not origin.startswith(f"{_FSDP}_fully_shard")
        for origin in context.origins(node, raw=True)
    )


def iterated(node: ast.AST) -> list[ast.expr]:
    """What a loop or comprehension goes over; nothing for other nodes."""
    return [one.iter for one in ([node] if isinstance(node, ast.For) else getattr(node, "generators", []))]


def iterated_around(context: FileContext, node: ast.AST) -> list[str]:
    """What the loops around a node go over within its function, as text."""
    around = itertools.takewhile(lambda one: not isinstance(one, Function), context.ancestors(node))
    return [context.source(one) for outer in around for one in iterated(outer)]


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
_IMPORT = re.compile(r"^[ \t]*(?:from|import)\b( \.+ import)?([^\n]*)", re.MULTILINE)
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
        self._modules: dict[tuple[str, str], FileContext | None] = {}
        self._inherited: dict[ast.ClassDef, frozenset[str]] = {}
        self._paths = {Path(path): path for path in texts}  # `./a.py` is `a.py`
        self._by_tail: dict[tuple[str, ...], list[str]] = {}
        for path in texts:
            parts = Path(path).with_suffix("").parts
            parts = parts[:-1] if parts[-1:] == ("__init__",) else parts
            for start in range(len(parts)):
                self._by_tail.setdefault(parts[start:], []).append(path)

    def file(self, path: str) -> FileContext:
        """A file by its path, with `model.no_sync()` in place of `FSDP.no_sync(model)`: the same, on the same lines.

        Raises:
            SourceError: It cannot be parsed.
        """
        if path not in self._files:
            try:
                context = FileContext(self.texts[path], path)
                edits = [one for call in context.calls for one in _bound(context, call)] if _named_in(context) else []
                self._files[path] = FileContext(apply(context.text, edits), path) if edits else context
            except SourceError as error:
                self._files[path] = error
        found = self._files[path]
        if isinstance(found, SourceError):
            raise found
        return found

    def parsed(self, path: str) -> FileContext | None:
        """A file by its path; None if it cannot be parsed."""
        with contextlib.suppress(SourceError):
            return self.file(path)
        return None

    def files(self, concerns: Callable[[str], object], paths: Iterable[str] | None = None) -> Iterator[FileContext]:
        """The files, of all or of these, whose text concerns the caller, as far as they can be parsed."""
        for path in self.texts if paths is None else paths:
            if concerns(self.texts[path]) and (context := self.parsed(path)) is not None:
                yield context

    def importers(self, *words: str) -> list[str]:
        """The files that have one of these words in a line that imports; `.` stands for the package itself."""
        found = set().union(*(self._importers.get(word, ()) for word in words))
        return [path for path in self.texts if path in found]

    @functools.cached_property
    def _importers(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for path, text in self.texts.items():
            for dots, line in _IMPORT.findall(text):
                for word in [*re.findall(r"\w+", line), *(["."] if dots else [])]:
                    found.setdefault(word, set()).add(path)
        return found

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

    def inherited(self, context: FileContext, node: ast.ClassDef) -> frozenset[str]:
        """The dotted names of what a class inherits from, through classes of the program."""
        if node not in self._inherited:
            self._inherited[node] = frozenset()  # of one above itself, for the time being
            found = frozenset().union(*(self.origins(context, base) for base in node.bases))
            above = [one for base in node.bases if (one := self.definition(context, base)) is not None]
            outer = [self.inherited(other, one) for other, one in above if isinstance(one, ast.ClassDef)]
            self._inherited[node] = found.union(*outer)
        return self._inherited[node]

    def inherits(self, context: FileContext, node: ast.ClassDef) -> bool:
        """Whether a class is a subclass of FSDP1's, through classes of the program."""
        return FSDP1 in self.inherited(context, node)

    def is_optimizer(self, context: FileContext, node: ast.ClassDef) -> bool:
        """Whether a class is a subclass of an optimizer of torch's, through classes of the program."""
        inherited = self.inherited(context, node)
        return any(one.startswith("torch.optim.") and "lr_scheduler" not in one for one in inherited)

    def subclass(self, context: FileContext, node: ast.AST) -> ast.ClassDef | None:
        """The subclass of FSDP1's class that a name stands for."""
        found = self.definition(context, node) if isinstance(node, ast.Name | ast.Attribute) else None
        is_one = found is not None and isinstance(found[1], ast.ClassDef) and self.inherits(found[0], found[1])
        return found[1] if found is not None and is_one else None  # pyrefly: ignore

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
        key = os.path.dirname(context.path), module
        if key not in self._modules:
            self._modules[key] = self._find_module(context, module)
        return self._modules[key]

    def _find_module(self, context: FileContext, module: str) -> FileContext | None:
        if module.startswith("."):
            package = Path(context.path)
            for _ in range(len(module) - len(module.lstrip("."))):
                package = package.parent
            stem = package.joinpath(*module.strip(".").split("."))
            paths = [self._paths[one] for one in (Path(f"{stem}.py"), stem / "__init__.py") if one in self._paths]
            return self.parsed(paths[0]) if paths else None
        around = set(Path(context.path).parents)
        paths = self._by_tail.get(tuple(module.split(".")), [])
        nearest = max(paths, key=lambda path: len(around.intersection(Path(path).parents)), default=None)
        return self.parsed(nearest) if nearest else None

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


def _named_in(context: FileContext) -> bool:
    return any(name in context.text for name in _SHORT[:2])


_OF_MODELS = {"clip_grad_norm_", "no_sync", "forward", "state_dict", "load_state_dict", "register_comm_hook", "apply"}
_OF_MODELS |= {"parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children"}
_OF_MODELS |= {"train", "eval", "to", "cuda", "cpu", "zero_grad", "requires_grad_", "check_is_root"}
"""Methods of FSDP1's models; the others are functions of the class."""
_COMMA = re.compile(r"[ \t]*,[ \t]*")


def _bound(context: FileContext, call: ast.Call) -> list[Edit]:
    """The edits that call a method of FSDP1's class on the model that it is given first; on `super()` for `self`."""
    owner, _, name = next(iter(context.origins(call.func)), "").rpartition(".")
    model = call.args[0] if call.args else None
    if owner.rpartition(".")[2] not in _SHORT or name not in _OF_MODELS:
        return []
    if not isinstance(model, ast.Name | ast.Attribute):
        return []
    (start, end), written = context.positions.span(model), context.source(model)
    written = "super()" if written == "self" else written
    comma = _COMMA.match(context.text, end)
    return [
        change(*context.positions.span(call.func), f"{written}.{name}"),
        change(start, comma.end() if comma else end, ""),
    ]


def _split(origin: str) -> tuple[str, str]:
    """Module and name; `..x` is `x` of the package above."""
    module, _, name = origin.rpartition(".")
    return (f"{module}." if origin.startswith(".") and not module.strip(".") else module), name


WRAP, ENABLE_WRAP = "torch.distributed.fsdp.wrap.wrap", "torch.distributed.fsdp.wrap.enable_wrap"


_LEAVES = ast.Return | ast.Raise | ast.Continue | ast.Break
_CONDITIONS = ast.If | ast.Try | ast.TryStar | ast.For | ast.While | ast.AsyncFor | ast.match_case
_LOOPS = ast.For | ast.While | ast.AsyncFor


class Reaching:
    """The order of assignments and uses in one file; places of other files reach every use.

    Args:
        context: The file.
    """

    def __init__(self, context: FileContext) -> None:
        self.context = context
        self._reach: dict[tuple[ast.AST, ast.AST], bool] = {}

    def may_reach(self, place: ast.AST, used: ast.AST) -> bool:
        """Whether a value given at one place can be what is used at another."""
        key = place, used
        if key not in self._reach:
            self._reach[key] = self._can_come(place, used)
        return self._reach[key]

    def _can_come(self, place: ast.AST, used: ast.AST) -> bool:
        context = self.context
        if (
            isinstance(place, ast.arg)
            or place not in context.parents
            or context.enclosing_function(place) is not context.enclosing_function(used)
        ):
            return True
        around = set(context.ancestors(used))
        inside = next((one for one in context.ancestors(place) if isinstance(one, Comprehension | ast.stmt)), None)
        if isinstance(inside, Comprehension) and isinstance(place, ast.Name):
            return inside in around  # its variable
        is_target = isinstance(getattr(place, "ctx", None), ast.Store)
        if not is_target and place not in around and context.statement(place) is context.statement(used):
            return True  # made in the same statement: `first, second = FSDP(model), None`
        if _end(context, place) > _start(used):
            loops = {one for one in context.ancestors(place) if isinstance(one, _LOOPS)}
            return not loops.isdisjoint(around)
        statement = context.statement(place)
        for outer in (statement, *context.ancestors(statement)):
            if outer in around or not isinstance(outer, ast.stmt):
                break
            block = context.block(outer)
            if isinstance(block[-1], _LEAVES) and context.parents.get(outer) not in around:
                return False  # `if sharded: model = FSDP(model); return model`
        return not context.are_exclusive(place, used)

    def those_that_reach(self, places: Iterable[ast.AST], used: ast.AST) -> list[ast.AST]:
        """The places whose value may be the one used: no other always takes its place before the use."""
        found = [place for place in places if self.may_reach(place, used)]
        own = [one for one in found if one in self.context.parents]  # an attribute may have hundreds in other files
        replaced = {one for one in own if any(self._replaces(other, one, used) for other in own if other is not one)}
        return [one for one in found if one not in replaced]

    def _replaces(self, other: ast.AST, place: ast.AST, used: ast.AST) -> bool:
        context = self.context
        if isinstance(other, ast.arg):
            return False
        home = (
            context.enclosing_function(place)
            if not isinstance(place, ast.arg)
            else context.parents[context.parents[place]]
        )
        statement = context.statement(other)
        around_other = itertools.takewhile(lambda one: one is not statement, context.ancestors(other))
        if any(isinstance(one, Comprehension | ast.IfExp | ast.BoolOp) for one in around_other):
            return False
        if context.enclosing_function(other) is not home or isinstance(
            statement, ast.AugAssign | ast.For | ast.AsyncFor
        ):
            return False
        is_local = context.enclosing_function(used) is home
        before = isinstance(place, ast.arg) or _end(context, place) <= _start(statement)
        if not before or context.are_exclusive(other, place) or (is_local and _end(context, other) > _start(used)):
            return False
        around = set(context.ancestors(place if not is_local else used))
        return all(one in around for one in context.ancestors(other) if isinstance(one, _CONDITIONS)) or (
            is_local and self.always_reaches(other, used)
        )

    def always_reaches(self, place: ast.AST, used: ast.AST) -> bool:
        """Whether the assignment happens on every way to the use, within one function."""
        around = set(self.context.ancestors(used))
        for parent in self.context.ancestors(place):
            if isinstance(parent, Function | ast.Module | ast.ClassDef):
                return True
            if isinstance(parent, _CONDITIONS) and parent not in around:
                return False
        return True


def _start(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _end(context: FileContext, place: ast.AST) -> tuple[int, int]:
    """Where a store has happened: at the end of its assignment."""
    statement = context.statement(place)
    node = statement if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr) else place
    return getattr(node, "end_lineno", 0) or 0, getattr(node, "end_col_offset", 0) or 0
