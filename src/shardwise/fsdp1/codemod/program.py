"""An FSDP1 program: its files, names and values."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.errors import SourceError
from shardwise.source.syntax import FSDP1, FileContext, Function, canonical, checked_types

if TYPE_CHECKING:
    from shardwise.fsdp1.codemod.sharded import Sharded


_FSDP = "torch.distributed.fsdp."
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def is_none(node: ast.expr | None) -> bool:
    """Whether an expression is the literal None, or absent."""
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Whether an expression is this literal."""
    return isinstance(node, ast.Constant) and node.value is value


def fsdp_name(context: FileContext, node: ast.AST | None) -> str | None:
    """`MixedPrecision` for whatever spelling of `torch.distributed.fsdp.MixedPrecision`; None for other things."""
    found = context.origins(node)
    if len(found) != 1:
        return None
    (origin,) = found
    return origin.removeprefix(_FSDP) if origin.startswith(_FSDP) else None


def called_fsdp_name(context: FileContext, node: ast.AST | None) -> str | None:
    """The FSDP name that an expression calls."""
    return fsdp_name(context, node.func) if isinstance(node, ast.Call) else None


def single_value(context: FileContext, node: ast.expr) -> ast.expr:
    """The expression a name stands for, where it is given its value once and in the same function or the module.

    Anything else stands for itself.
    """
    for _ in range(4):
        if not isinstance(node, ast.Name):
            return node
        bindings = context.bindings(node)
        if len(bindings) != 1 or bindings[0].value is None or _in_branch_or_loop(context, bindings[0].node, node):
            return node
        node = bindings[0].value
    return node


def _in_branch_or_loop(context: FileContext, bound: ast.AST, used: ast.AST) -> bool:
    """Whether the assignment may not have happened, or happened with other values, when the name is used."""
    around_use = set(context.ancestors(used))
    for parent in context.ancestors(bound):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module | ast.Lambda | ast.ClassDef):
            return False
        if isinstance(parent, ast.For | ast.While | ast.If | ast.Try) and parent not in around_use:
            return not isinstance(parent, ast.If)  # bound under an `if` alone: bound so, or an error anyway
    return False


def strategy(context: FileContext, node: ast.expr | None) -> str | None:
    """The name of the ShardingStrategy that an expression is; None where it is only known at run time."""
    if is_none(node):
        return "FULL_SHARD"
    assert node is not None
    node = single_value(context, node)
    if isinstance(node, ast.Constant) and node.value is None:
        return "FULL_SHARD"
    if not isinstance(node, ast.Attribute):
        return None
    name = fsdp_name(context, node)
    if name is None or not name.startswith("ShardingStrategy."):
        return None
    member = name.removeprefix("ShardingStrategy.")
    return member if member in STRATEGIES else None


def is_simple(node: ast.expr) -> bool:
    """Whether an expression may be written twice: it does nothing, and is short."""
    if isinstance(node, ast.Name | ast.Constant):
        return True
    return isinstance(node, ast.Attribute) and is_simple(node.value)


_SHORT = ("FullyShardedDataParallel", "FSDP", "FSDP1")
_MAX_HOPS = 6
_T = TypeVar("_T")


class Program:
    """The files that are read together, each parsed when it is first asked for.

    Args:
        texts: By path.
    """

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self._files: dict[str, FileContext | SourceError] = {}
        self._sharded: dict[str, Sharded] = {}
        self._aliases_of: dict[str, set[str]] = {}
        self._remembered: dict[str, Any] = {}
        self._handed: dict[str, set[tuple[int, str]]] | None = None
        self._by_tail: dict[tuple[str, ...], list[str]] = {}
        for path in texts:
            parts = _module_parts(path)
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

    def sharded(self, context: FileContext) -> Sharded:
        """Which of a file's variables hold a wrapped model."""
        if context.path not in self._sharded:
            from shardwise.fsdp1.codemod.sharded import Sharded

            self._sharded[context.path] = Sharded(context, self)
        return self._sharded[context.path]

    def handed(self, path: str) -> set[tuple[int, str]]:
        """The parameters of a file that callers hand a wrapped model: the function's line, and the name."""
        if self._handed is None:
            from shardwise.fsdp1.codemod.sharded import spread

            self._handed = {}
            spread(self, self._handed)
            self._sharded.clear()  # what was read before all was known
        return self._handed.get(path, set())

    def forget(self, path: str) -> None:
        """Read a file's wrapped models again."""
        self._sharded.pop(path, None)

    def remember(self, name: str, work: Callable[[Program], _T]) -> _T:
        """What `work` says about the whole program, asked once."""
        if name not in self._remembered:
            self._remembered[name] = work(self)
        return self._remembered[name]

    def files(self, concerns: Callable[[str], object]) -> Iterator[FileContext]:
        """The files whose text concerns the caller, as far as they can be parsed."""
        for path, text in self.texts.items():
            if concerns(text) and (context := self._parsed(path)) is not None:
                yield context

    def names_fsdp(self, context: FileContext, node: ast.AST) -> bool:
        """Whether `isinstance(x, ...)` asks for FSDP1's class."""
        return any(self.is_any(context, one, {FSDP1}) for one in checked_types(node))

    def _parsed(self, path: str) -> FileContext | None:
        try:
            return self.file(path)
        except SourceError:
            return None

    def origins(self, context: FileContext, node: ast.AST | None) -> frozenset[str]:
        """As `FileContext.origins`, also through names that other files of the program import or define."""
        return frozenset().union(*(self._resolve(context, origin, 0) for origin in context.origins(node)))

    def is_any(self, context: FileContext, node: ast.AST | None, names: Collection[str]) -> bool:
        """Whether an expression may stand for one of these public names."""
        last = {name.rpartition(".")[2] for name in names}
        if isinstance(node, ast.Attribute) and node.attr not in last and node.attr not in _SHORT:
            return False  # most expressions: no need to know where they come from
        if isinstance(node, ast.Name) and node.id not in self._aliases(context):
            return False
        found = context.origins(node)
        if not found.isdisjoint(names):
            return True
        if not found or all(origin.startswith("torch.") for origin in found):
            return False
        # A re-export keeps the name, or shortens it as everybody does.
        if not any(origin.rpartition(".")[2] in (*last, *_SHORT) for origin in found):
            return False
        return not self.origins(context, node).isdisjoint(names)

    def _aliases(self, context: FileContext) -> set[str]:
        """Names of a file that can have anything to do with FSDP's class: imported so, or given from such."""
        if context.path not in self._aliases_of:
            self._aliases_of[context.path] = _fsdp_names(context)
        return self._aliases_of[context.path]

    def _resolve(self, context: FileContext, origin: str, hops: int) -> frozenset[str]:
        if origin.startswith("torch.") or hops > _MAX_HOPS:
            return frozenset({origin})
        module, name = _split(origin)
        other = self.find_module(context, module) if module else None
        if other is None or other is context:
            return frozenset({origin})
        found: set[str] = set()
        scope = other.scopes[other.tree]
        for binding in scope.names.get(name, []):
            if binding.origin:
                found |= self._resolve(other, canonical(binding.origin), hops + 1)
            elif binding.value is not None:
                for inner in other.origins(binding.value):
                    found |= self._resolve(other, inner, hops + 1)
        for star in scope.stars:
            found |= (
                {f"{star}.{name}"} if star.startswith("torch.") else self._resolve(other, f"{star}.{name}", hops + 1)
            )
        return frozenset(found) or frozenset({origin})

    def find_module(self, context: FileContext, module: str) -> FileContext | None:
        """The file of a module as imported in `context`: relative names exactly, absolute ones by their ending."""
        if module.startswith("."):
            level = len(module) - len(module.lstrip("."))
            package = Path(context.path).parent
            for _ in range(level - 1):
                package = package.parent
            stem = package.joinpath(*[part for part in module.lstrip(".").split(".") if part])
            for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
                if str(candidate) in self.texts:
                    return self._parsed(str(candidate))
            return None
        candidates = self._by_tail.get(tuple(module.split(".")), [])
        nearest = max(candidates, key=lambda path: _shared(path, context.path), default=None)
        return self._parsed(nearest) if nearest else None

    def function(self, context: FileContext, node: ast.AST) -> tuple[FileContext, Function] | None:
        """The function of the program that a name or attribute stands for, where only one can be meant."""
        own = context.definition(node)
        if isinstance(own, Function):
            return context, own
        for origin in context.origins(node):
            if (found := self._function_at(context, origin)) is not None:
                return found
        return None

    def definition(self, context: FileContext, node: ast.AST) -> tuple[FileContext, Function | ast.ClassDef] | None:
        """The function or class of the program that a name stands for, in this file or where it is imported from."""
        own = context.definition(node)
        if own is not None:
            return context, own
        for origin in context.origins(node):
            module, name = _split(origin)
            other = self.find_module(context, module) if module else None
            found = other.scopes[other.tree].names.get(name, []) if other is not None else []
            if other is not None and len(found) == 1 and found[0].definition is not None:
                return other, found[0].definition
        return None

    def _function_at(self, context: FileContext, origin: str, hops: int = 0) -> tuple[FileContext, Function] | None:
        module, name = _split(origin)
        other = self.find_module(context, module) if module and hops < _MAX_HOPS else None
        if other is None:
            return None
        found = other.scopes[other.tree].names.get(name, [])
        if len(found) == 1 and isinstance(found[0].definition, Function):
            return other, found[0].definition
        if len(found) == 1 and found[0].origin:  # re-exported
            return self._function_at(other, found[0].origin, hops + 1)
        for star in other.scopes[other.tree].stars:
            if not found and (inner := self._function_at(other, f"{star}.{name}", hops + 1)) is not None:
                return inner
        return None


def _fsdp_names(context: FileContext) -> set[str]:
    """The names of a file that are imported as FSDP's class, or given their value by an expression that names it."""
    found = set(_SHORT)
    given: list[tuple[str, set[str]]] = []
    for scope in context.scopes.values():
        for name, bindings in scope.names.items():
            for one in bindings:
                if one.origin.rpartition(".")[2] in _SHORT:
                    found.add(name)
                elif one.value is not None and (words := _words(one.value)):
                    given.append((name, words))
    for _ in range(3):  # a = FSDP; b = a
        found |= {name for name, words in given if not found.isdisjoint(words)}
    return found


def _words(node: ast.expr) -> set[str]:
    """The names in an expression that can stand for a class: a name, an attribute, a choice among them."""
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.Attribute(value=inner, attr=name):
            return _words(inner) | {name}
        case ast.IfExp(body=first, orelse=second):
            return _words(first) | _words(second)
        case ast.BoolOp(values=values):
            return set().union(*map(_words, values))
        case ast.NamedExpr(value=inner):
            return _words(inner)
    return set()


def _split(origin: str) -> tuple[str, str]:
    """Module and name; `..x` is `x` of the package above."""
    module, _, name = origin.rpartition(".")
    if origin.startswith(".") and not module.strip("."):
        module += "."
    return module, name


def _module_parts(path: str) -> tuple[str, ...]:
    parts = Path(path).with_suffix("").parts
    return parts[:-1] if parts and parts[-1] == "__init__" else parts


def _shared(first: str, second: str) -> int:
    """How many leading folders two paths have in common."""
    count = 0
    for one, other in zip(Path(first).parts, Path(second).parts, strict=False):
        if one != other:
            break
        count += 1
    return count
