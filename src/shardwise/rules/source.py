"""FileContext: one source file, parsed once, and what its names mean. No torch, nothing is run."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from shardwise.errors import SourceError
from shardwise.rules.names import FSDP1_NAMES, FSDP2_NAMES, STATE_DICT_NAMES, canonical
from shardwise.rules.positions import Positions
from shardwise.rules.scopes import Binding, Function, Scope, ScopeNode, read_scopes

_PARTIAL = "functools.partial"
_STARS = {
    "torch.distributed.fsdp": FSDP1_NAMES | FSDP2_NAMES,
    "torch.distributed.checkpoint.state_dict": STATE_DICT_NAMES,
    "torch.distributed.device_mesh": frozenset({"init_device_mesh", "DeviceMesh"}),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": frozenset(
        {
            "apply_activation_checkpointing",
            "checkpoint_wrapper",
            "offload_wrapper",
            "CheckpointWrapper",
            "CheckpointImpl",
        }
    ),
}
"""What `from module import *` brings."""


@dataclass(frozen=True, slots=True)
class Callee:
    """What a call calls: the names it may have, and arguments that a `partial` has bound before."""

    origins: frozenset[str]
    args: tuple[ast.expr, ...] = ()
    keywords: tuple[ast.keyword, ...] = ()


class FileContext:
    """A parsed file: its syntax tree, parents, scopes and the meaning of names.

    Args:
        text: The file's text, line ends as they are.
        path: For messages.

    Raises:
        SourceError: The text is not Python that this interpreter can parse.
    """

    def __init__(self, text: str, path: str = "-") -> None:
        self.path, self.text = path, text
        self.tree = _parse(text, path)
        self.positions = Positions(text)
        self.scopes, self.parents = read_scopes(self.tree)
        self._known: dict[tuple[int, str], frozenset[str]] = {}
        self._scope_of: dict[ast.AST, Scope] = {}

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call, in source order."""
        found = [node for node in self.parents if isinstance(node, ast.Call)]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    @cached_property
    def functions(self) -> list[Function]:
        """Every function, methods and nested ones too, in source order."""
        found = [node for node in self.parents if isinstance(node, Function)]
        return sorted(found, key=lambda function: function.lineno)

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes of the file by name, wherever they are defined."""
        return {node.name: node for node in self.parents if isinstance(node, ast.ClassDef)}

    def source(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node, exactly as written."""
        start, end = self.positions.span(node)
        return self.text[start:end]

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around `node`, innermost first, the module last."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def enclosing_function(self, node: ast.AST) -> Function | None:
        """The function whose body `node` is in; None at module or class level."""
        return next((one for one in self.ancestors(node) if isinstance(one, Function)), None)

    def enclosing_class(self, node: ast.AST) -> ast.ClassDef | None:
        """The class whose body `node` is in, at any depth."""
        return next((one for one in self.ancestors(node) if isinstance(one, ast.ClassDef)), None)

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that `node` is part of."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def scope(self, node: ast.AST) -> Scope:
        """The scope in which the names inside `node` are looked up."""
        if node in self._scope_of:
            return self._scope_of[node]
        child, found = node, self.scopes[self.tree]
        for parent in self.ancestors(node):
            if isinstance(parent, ScopeNode) and _is_inside(parent, child):
                found = self.scopes[parent]
                break
            child = parent
        self._scope_of[node] = found
        return found

    def bindings(self, name: ast.Name) -> list[Binding]:
        """Every place that gives this name a value, as seen from where it stands."""
        found = self.scope(name).find(name.id)
        return found[1] if found else []

    def origins(self, node: ast.AST | None, *, raw: bool = False) -> frozenset[str]:
        """The dotted names that an expression may stand for, through imports, aliases and assignments.

        Names of torch get their public spelling unless `raw`. A name that is also bound to something unknown keeps
        the origins that are known; a name bound by nothing but parameters and computed values has none.
        """
        match node:
            case ast.Name():
                found = self._origins_of_name(node)
            case ast.Attribute():
                found = frozenset(f"{origin}.{node.attr}" for origin in self.origins(node.value, raw=True))
            case ast.IfExp():
                found = self.origins(node.body, raw=True) | self.origins(node.orelse, raw=True)
            case ast.BoolOp():
                found = frozenset().union(*(self.origins(value, raw=True) for value in node.values))
            case ast.NamedExpr():
                found = self.origins(node.value, raw=True)
            case _:
                found = frozenset()
        return found if raw else frozenset(map(canonical, found))

    def _origins_of_name(self, node: ast.Name) -> frozenset[str]:
        scope = self.scope(node)
        found = scope.find(node.id)
        if found is None:
            return frozenset(f"{module}.{node.id}" for module in self._stars(scope) if node.id in _STARS[module])
        key = (id(found[0]), node.id)
        if key not in self._known:
            # While a name is being looked up it has no origins: `model = model.half()` leads nowhere new.
            self._known[key] = frozenset()
            origins: set[str] = set()
            for binding in found[1]:
                if binding.origin:
                    origins.add(binding.origin)
                elif binding.value is not None:
                    origins |= self.origins(binding.value, raw=True)
            self._known[key] = frozenset(origins)
        return self._known[key]

    def _stars(self, scope: Scope) -> Iterator[str]:
        around: Scope | None = scope
        while around is not None:
            yield from (module for module in around.stars if module in _STARS)
            around = around.parent

    def is_any(self, node: ast.AST | None, names: Collection[str]) -> bool:
        """Whether an expression may stand for one of these public names."""
        return not self.origins(node).isdisjoint(names)

    def callee(self, call: ast.Call) -> Callee:
        """What a call calls; `partial(f, x, a=1)` bound to a name, or called at once, counts as `f`."""
        origins = self.origins(call.func)
        if origins:
            return Callee(origins)
        partial = self._partial(call.func)
        if partial is None:
            return Callee(frozenset())
        return Callee(self.origins(partial.args[0]), tuple(partial.args[1:]), tuple(partial.keywords))

    def _partial(self, function: ast.expr) -> ast.Call | None:
        candidates: list[ast.expr | None] = [function]
        if isinstance(function, ast.Name):
            candidates = [binding.value for binding in self.bindings(function)]
        for one in candidates:
            if isinstance(one, ast.Call) and one.args and self.is_any(one.func, {_PARTIAL}):
                return one
        return None

    def calls_to(self, *names: str) -> Iterator[ast.Call]:
        """Every call of one of these public names, in source order."""
        wanted = frozenset(names)
        return (call for call in self.calls if not self.callee(call).origins.isdisjoint(wanted))

    def definition(self, node: ast.AST) -> Function | ast.ClassDef | None:
        """The function or class of this file that a name stands for, where it stands for only one."""
        if not isinstance(node, ast.Name):
            return None
        found = self.bindings(node)
        return found[0].definition if len(found) == 1 else None


def decode(data: bytes, path: str) -> tuple[str, str]:
    """The text of a source file and its encoding: by byte order mark or coding line, as Python does.

    Raises:
        SourceError: The file is not in the encoding it names, or in UTF-8 where it names none.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding), encoding
    except SyntaxError as error:
        raise SourceError(f"cannot be decoded: {error.msg}", where=f"{path}:1:1") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SourceError(
            f"cannot be decoded: byte {error.start} is not {error.encoding}", where=f"{path}:{line}:1"
        ) from None


def _parse(text: str, path: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes of the code read are not ours to report
            return ast.parse(text.removeprefix("\ufeff"), path)
    except SyntaxError as error:
        where = f"{path}:{error.lineno or 1}:{error.offset or 1}"
        raise SourceError(f"cannot be parsed: {error.msg}", where=where) from None
    except ValueError as error:  # null bytes
        raise SourceError(f"cannot be parsed: {error}", where=f"{path}:1:1") from None
    except (RecursionError, MemoryError):
        raise SourceError("nested too deeply to be parsed", where=f"{path}:1:1") from None


def _is_inside(scope: ScopeNode, child: ast.AST) -> bool:
    """Whether a child of a scope's node is looked up inside it: decorators, defaults and bases are not."""
    if isinstance(scope, ast.Module):
        return True
    if isinstance(scope, ast.Lambda):
        return child is scope.body
    return any(child is statement for statement in scope.body)
