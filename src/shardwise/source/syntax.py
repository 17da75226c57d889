"""A parsed Python file for lint and the codemod: syntax tree, scopes, positions, and meanings of names. No torch."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from shardwise.errors import SourceError

FULLY_SHARD = "torch.distributed.fsdp.fully_shard"
FSDP1 = "torch.distributed.fsdp.FullyShardedDataParallel"
FSDP2_NAMES = frozenset(
    {
        "fully_shard",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "CPUOffloadPolicy",
        "UnshardHandle",
        "register_fsdp_forward_method",
        "share_comm_ctx",
    }
)
"""FSDP2's names in `torch.distributed.fsdp`."""
FSDP1_NAMES = frozenset(
    {
        "BackwardPrefetch",
        "CPUOffload",
        "FullOptimStateDictConfig",
        "FullStateDictConfig",
        "FullyShardedDataParallel",
        "LocalOptimStateDictConfig",
        "LocalStateDictConfig",
        "MixedPrecision",
        "OptimStateDictConfig",
        "OptimStateKeyType",
        "ShardedOptimStateDictConfig",
        "ShardedStateDictConfig",
        "ShardingStrategy",
        "StateDictConfig",
        "StateDictSettings",
        "StateDictType",
    }
)
"""FSDP1's names in `torch.distributed.fsdp`."""
STATE_DICT_NAMES = frozenset(
    {
        "StateDictOptions",
        "get_model_state_dict",
        "get_optimizer_state_dict",
        "get_state_dict",
        "set_model_state_dict",
        "set_optimizer_state_dict",
        "set_state_dict",
    }
)
"""Names in `torch.distributed.checkpoint.state_dict`."""

# Private or old paths, and the public paths of the same names, which are more stable.
_PUBLIC = [
    (re.compile(rf"^{private}(?=\.)"), public)
    for private, public in [
        (r"torch\.distributed\._composable\.fsdp(\.fully_shard(?=\.)|\._\w+)?", "torch.distributed.fsdp"),
        (r"torch\.distributed\._composable(?=\.fully_shard$)", "torch.distributed.fsdp"),
        (r"torch\.distributed\.fsdp\._fully_shard(\._\w+)*", "torch.distributed.fsdp"),
        (r"torch\.distributed\.fsdp\.(fully_sharded_data_parallel|api)", "torch.distributed.fsdp"),
        (r"torch\.distributed\._tensor(\.api)?", "torch.distributed.tensor"),
        (r"torch\.distributed\._device_mesh", "torch.distributed.device_mesh"),
        (r"torch\.distributed\.checkpoint\.(state_dict_saver|state_dict_loader)", "torch.distributed.checkpoint"),
        (r"torch\.distributed\.distributed_c10d", "torch.distributed"),
        (r"torch\.distributed\.tensor\.device_mesh", "torch.distributed.device_mesh"),
        (r"torch\.nn\.utils\.clip_grad", "torch.nn.utils"),
        (r"torch\.nn\.modules(\.[a-z_0-9]+)?", "torch.nn"),
        (r"torch\.optim\.(?!lr_scheduler|swa_utils)[a-z_]+(?=\.[A-Z])", "torch.optim"),
        (r"torch\.nn\.parallel\.distributed", "torch.nn.parallel"),
    ]
]


def canonical(dotted: str) -> str:
    """Return the public spelling of a dotted torch name; any other name unchanged."""
    if not dotted.startswith("torch."):
        return dotted
    for pattern, public in _PUBLIC:
        dotted = pattern.sub(public, dotted)
    return dotted


Located = ast.expr | ast.stmt | ast.alias | ast.keyword | ast.arg | ast.ExceptHandler
"""Nodes with a source position."""
_LINE_END = re.compile(r"\r\n|\r|\n")


class Positions:
    """Converts between offsets in a text, lines and columns, and the positions of `ast`.

    Args:
        text: The text that was parsed. Lines end as in Python's grammar, unlike in `str.splitlines`.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._is_ascii = text.isascii()

    @cached_property
    def starts(self) -> list[int]:
        """Offset of the start of each line."""
        return [0, *(match.end() for match in _LINE_END.finditer(self.text))]

    def line(self, number: int) -> str:
        """Return a line by its number, starting from 1, without its line end; empty if it does not exist."""
        if not 1 <= number <= len(self.starts):
            return ""
        start = self.starts[number - 1]
        end = self.starts[number] if number < len(self.starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n")

    def offset(self, line: int, byte_column: int) -> int:
        """Return the offset of an `ast` position (`lineno`, `col_offset`)."""
        start = self.starts[line - 1]
        if self._is_ascii:
            return start + byte_column
        return start + len(self.line(line).encode()[:byte_column].decode(errors="ignore"))

    def span(self, node: Located) -> tuple[int, int]:
        """Return the start and end offsets of a node."""
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return self.offset(node.lineno, node.col_offset), self.offset(end_line, end_column)

    def line_end(self, offset: int) -> int:
        """Return the offset after the line that contains `offset`, including its line end."""
        match = _LINE_END.search(self.text, offset)
        return match.end() if match else len(self.text)

    def column(self, line: int, offset: int) -> int:
        """Return the column of an offset on a line, in characters, starting from 1."""
        return offset - self.starts[line - 1] + 1


Function = ast.FunctionDef | ast.AsyncFunctionDef
_Node = TypeVar("_Node", bound=ast.AST)
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True, slots=True)
class Binding:
    """One place in the source that binds a name."""

    node: ast.AST
    """The alias, target, parameter or definition."""
    origin: str = ""
    """Dotted name, if the name is imported; relative imports start with a dot."""
    value: ast.expr | None = None
    """The assigned value, if it is a single expression."""
    definition: Function | ast.ClassDef | None = None
    """The function or class, if the name is defined by one."""


@dataclass(slots=True)
class Scope:
    """The names that a module, class, function or lambda binds."""

    node: ast.AST
    parent: Scope | None
    names: dict[str, list[Binding]] = field(default_factory=dict)
    elsewhere: dict[str, Scope | None] = field(default_factory=dict)
    """Names declared `global` (with the module's scope) or `nonlocal` (with None: an outer scope)."""
    stars: list[str] = field(default_factory=list)
    """Modules imported with `*`."""

    def bind(self, name: str, binding: Binding) -> None:
        """Add a binding of `name`."""
        target = self
        while name in target.elsewhere:
            outer = target.elsewhere[name] or target.parent
            if outer is None or outer is target:
                break
            target = outer
        target.names.setdefault(name, []).append(binding)

    def find(self, name: str) -> tuple[Scope, list[Binding]] | None:
        """Return the scope that binds `name`, as seen from this scope, and all its bindings."""
        scope: Scope | None = self
        while scope is not None:
            # Names in a class body are visible in the body itself, but not in functions inside it.
            if name in scope.names and (scope is self or not isinstance(scope.node, ast.ClassDef)):
                return scope, scope.names[name]
            scope = scope.parent
        return None


class _ScopeReader(ast.NodeVisitor):
    """Reads a module once: the parent of each node in source order, and the scope of its names."""

    def __init__(self, tree: ast.Module) -> None:
        self.module = self._scope = Scope(tree, None)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scopes: dict[ast.AST, Scope] = {tree: self._scope}
        self._bound: set[ast.Name] = set()
        self._read(tree, tree.body)

    def _read(self, parent: ast.AST, children: Iterable[ast.AST]) -> None:
        for child in children:
            self.parents[child] = parent
            self.scopes[child] = self._scope
            self.visit(child)

    def generic_visit(self, node: ast.AST) -> None:
        """Visit the children in source order, and record their parent."""
        self._read(node, ast.iter_child_nodes(node))

    def visit_FunctionDef(self, node: Function) -> None:
        self._scope.bind(node.name, Binding(node, definition=node))
        outside = [*node.decorator_list, *([node.returns] if node.returns else []), node.args]
        self._inside(node, outside, all_parameters(node.args), node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._inside(node, [node.args], all_parameters(node.args), [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.bind(node.name, Binding(node, definition=node))
        self._inside(node, [*node.decorator_list, *node.bases, *node.keywords], [], node.body)

    def _inside(
        self, node: ast.AST, outside: Sequence[ast.AST], parameters: Sequence[ast.arg], body: Sequence[ast.AST]
    ) -> None:
        self._read(node, outside)  # decorators, bases, defaults and annotations belong to the outer scope
        outer, self._scope = self._scope, Scope(node, self._scope)
        for parameter in parameters:
            self._scope.bind(parameter.arg, Binding(parameter))
        self._read(node, body)
        self._scope = outer

    def visit_Global(self, node: ast.Global) -> None:
        self._scope.elsewhere.update(dict.fromkeys(node.names, self.module))

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self._scope.elsewhere.update(dict.fromkeys(node.names, None))

    def visit_Import(self, node: ast.Import) -> None:
        self._read(node, node.names)
        for alias in node.names:
            top = alias.name.split(".")[0]
            self._scope.bind(alias.asname or top, Binding(alias, origin=alias.name if alias.asname else top))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        self._read(node, node.names)
        for alias in node.names:
            if alias.name == "*":
                self._scope.stars.append(module)
            else:
                joint = "" if module.endswith(".") else "."
                self._scope.bind(alias.asname or alias.name, Binding(alias, origin=f"{module}{joint}{alias.name}"))

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assign(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.target, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._assign(node.target, node.value)
        self.generic_visit(node)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        """Pair names with values; names that cannot be paired are bound without a value in `visit_Name`."""
        if isinstance(target, ast.Name):
            self._scope.bind(target.id, Binding(target, value=value))
            self._bound.add(target)  # so that visit_Name does not bind it again
        elif (
            isinstance(target, ast.Tuple | ast.List)
            and isinstance(value, ast.Tuple | ast.List)
            and len(target.elts) == len(value.elts)
            and not any(isinstance(e, ast.Starred) for e in [*target.elts, *value.elts])
        ):
            for one, its_value in zip(target.elts, value.elts, strict=True):
                self._assign(one, its_value)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load) and node not in self._bound:
            self._scope.bind(node.id, Binding(node))

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._scope.bind(node.name, Binding(node))
        self.generic_visit(node)


def all_parameters(parameters: ast.arguments) -> list[ast.arg]:
    """Return every parameter of a function, in the order of its signature."""
    extra = [one for one in (parameters.vararg, parameters.kwarg) if one is not None]
    return [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs, *extra]


def argument_of(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """Return a positional or keyword argument; None if it is absent."""
    if position < len(call.args):
        return call.args[position]
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def given_to(call: ast.Call) -> list[ast.expr]:
    """Return the values of all positional and keyword arguments."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def last_name(node: ast.AST | None) -> str:
    """Return the last component of a name, `c` of `a.b.c`; empty for anything else."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def name_on_self(node: ast.AST) -> str:
    """Return `name` of `self.name`; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self" else ""


def calls_in(node: ast.AST) -> list[ast.Call]:
    """Return every call inside a node, including the node itself."""
    return [one for one in ast.walk(node) if isinstance(one, ast.Call)]


def attributes_in(*nodes: ast.AST) -> set[str]:
    """Return the names of all attributes that are used inside the nodes."""
    return {inner.attr for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}


def checked_types(node: ast.AST) -> list[ast.expr]:
    """Return the types in the second argument of `isinstance(x, ...)`; empty for any other node."""
    match node:
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
            return [one for one in ast.walk(kinds) if isinstance(one, ast.Name | ast.Attribute)]
    return []


def _leaves(statement: ast.stmt) -> bool:
    """Whether statements after it are unreachable: it returns, raises, exits, or continues or breaks a loop."""
    match statement:
        case ast.Expr(value=ast.Call(func=function)):
            return last_name(function) in ("exit", "_exit", "quit")
    return isinstance(statement, ast.Return | ast.Raise | ast.Continue | ast.Break)


def tested_classes(file: FileContext, test: ast.AST) -> set[str]:
    """Return the last components of the classes tested by `isinstance(x, ...)`; empty for other tests."""
    nodes = [node for kind in checked_types(test) for one in (kind, *file.assigned(kind)) for node in ast.walk(one)]
    return {last_name(node) for node in nodes} - {""}


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
"""Names imported by `from module import *`."""


@dataclass(frozen=True, slots=True)
class Callee:
    """The called function: its possible names, and arguments bound by `partial`."""

    origins: frozenset[str]
    args: tuple[ast.expr, ...] = ()
    keywords: tuple[ast.keyword, ...] = ()


class FileContext:
    """A parsed file: its syntax tree, parents, scopes and the meanings of names.

    Args:
        text: The file's text, with its original line ends.
        path: Path for messages.

    Raises:
        SourceError: This interpreter cannot parse the text.
    """

    def __init__(self, text: str, path: str = "-") -> None:
        self.path, self.text = path, text
        self.tree = _parse(text, path)
        self.positions = Positions(text)
        reader = _ScopeReader(self.tree)
        self.parents, self.scopes = reader.parents, reader.scopes
        self._known: dict[tuple[int, str], frozenset[str]] = {}
        self._functions: dict[ast.AST, Function | None] = {}

    def nodes(self, *kinds: type[_Node]) -> list[_Node]:
        """Return every node of these kinds."""
        return [node for node in self.parents if isinstance(node, kinds)]

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call, in source order."""
        return sorted(self.nodes(ast.Call), key=lambda call: (call.lineno, call.col_offset))

    @cached_property
    def functions(self) -> list[Function]:
        """Every function, including methods and nested functions, in source order."""
        return sorted(self.nodes(ast.FunctionDef, ast.AsyncFunctionDef), key=lambda function: function.lineno)

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """All classes of the file by name, at any level."""
        return {node.name: node for node in self.nodes(ast.ClassDef)}

    def loads(self, name: str) -> list[ast.Name]:
        """Return every use of a name, in any scope."""
        return [node for node in self.nodes(ast.Name) if node.id == name and isinstance(node.ctx, ast.Load)]

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that contains a statement."""
        parent = self.parents.get(statement, self.tree)
        bodies = [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]
        return next((body for body in bodies if isinstance(body, list) and statement in body), [statement])

    def are_exclusive(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether two nodes are in different branches of the innermost `if` around both."""
        around = {node: inner for inner, node in itertools.pairwise([one, *self.ancestors(one)])}
        for inner, outer in itertools.pairwise([other, *self.ancestors(other)]):
            if isinstance(outer, ast.If) and outer in around:
                sides = [any(node is each for each in outer.body) for node in (around[outer], inner)]
                return sides[0] != sides[1] and outer.test not in (around[outer], inner)
        return False

    def tests_before(self, node: ast.AST) -> Iterator[tuple[ast.expr, bool, Sequence[ast.AST]]]:
        """Yield the tests on the way to a node in its function: test, outcome, and content of its other branch.

        These are tests around the node, and earlier tests whose body leaves the block: `if rank != 0: return`.
        """
        for inner, outer in itertools.pairwise([node, *self.ancestors(node)]):
            match outer:
                case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if inner is not test:
                    sides = [one if isinstance(one, list) else [one] for one in (outer.body, outer.orelse)]
                    yield test, inner in sides[0], sides[inner in sides[0]]
                case ast.BoolOp(values=values) if isinstance(inner, ast.expr):
                    yield from ((one, isinstance(outer.op, ast.And), ()) for one in values[: values.index(inner)])
            block = self.block(inner) if isinstance(inner, ast.stmt) else []
            for before in itertools.takewhile(lambda one, inner=inner: one is not inner, block):
                match before:
                    case ast.Assert(test=test):
                        yield test, True, ()
                    case ast.If(test=test, body=[*_, last], orelse=[]) if _leaves(last):
                        yield test, False, ()
            if isinstance(outer, Function):
                return

    def source(self, node: Located) -> str:
        """Return the text of a node as written."""
        start, end = self.positions.span(node)
        return self.text[start:end]

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around `node`, from the innermost to the module."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def enclosing_function(self, node: ast.AST) -> Function | None:
        """Return the function whose body contains `node`; None at module or class level."""
        if node not in self._functions:
            self._functions[node] = next((one for one in self.ancestors(node) if isinstance(one, Function)), None)
        return self._functions[node]

    def enclosing_class(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class whose body contains `node`, at any depth; None if there is none."""
        return next((one for one in self.ancestors(node) if isinstance(one, ast.ClassDef)), None)

    def entered_calls(self, node: ast.AST) -> Iterator[tuple[ast.With, ast.Call]]:
        """Yield the `with` statements around a node and the calls that they enter, innermost first."""
        for block in (one for one in self.ancestors(node) if isinstance(one, ast.With)):
            yield from ((block, one.context_expr) for one in block.items if isinstance(one.context_expr, ast.Call))

    def targets(self, node: ast.AST) -> list[ast.expr]:
        """Return the assignment targets of an expression; empty if it is only a part of the assigned value."""
        parent = self.parents.get(node)
        return parent.targets if isinstance(parent, ast.Assign) else []

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that contains `node`."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def scope(self, node: ast.AST) -> Scope:
        """Return the scope of the names inside `node`."""
        return self.scopes[node]

    def bindings(self, name: ast.Name) -> list[Binding]:
        """Return all bindings of this name, as seen from its position."""
        found = self.scope(name).find(name.id)
        return found[1] if found else []

    def assigned(self, node: ast.AST) -> list[ast.expr]:
        """Return the values assigned to a name; for any other expression, the expression itself."""
        if isinstance(node, ast.Name):
            return [binding.value for binding in self.bindings(node) if binding.value is not None]
        return [node] if isinstance(node, ast.expr) else []

    def tested_text(self, test: ast.expr | ast.ExceptHandler, hops: int = 4) -> str:
        """Return the text of a test; for `name := value` and for names bound once, the text of the value."""
        match test:
            case ast.NamedExpr():
                return self.tested_text(test.value, hops)
            case ast.UnaryOp(op=ast.Not()):
                return f"not {self.tested_text(test.operand, hops)}"
            case ast.Name():
                values = self.assigned(test)
                if hops and len(values) == 1 and not isinstance(values[0], ast.Constant):
                    return self.tested_text(values[0], hops - 1)
        return self.source(test)

    def origins(self, node: ast.AST | None, *, raw: bool = False) -> frozenset[str]:
        """Return the dotted names that an expression may refer to, through imports, aliases and assignments.

        Names of torch have their public spelling unless `raw`. Unknown bindings of a name are ignored; a name bound
        only to parameters and computed values has no origins.
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
            # Without origins while it is being looked up: stops the recursion for `model = model.half()`.
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
        """Whether an expression may refer to one of these public names."""
        return not self.origins(node).isdisjoint(names)

    def callee(self, call: ast.Call) -> Callee:
        """Return what a call calls; `partial(f, x, a=1)`, assigned to a name or called directly, counts as `f`."""
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
        """Yield every call of one of these public names, in source order."""
        wanted = frozenset(names)
        return (call for call in self.calls if not self.callee(call).origins.isdisjoint(wanted))

    def definition(self, node: ast.AST) -> Function | ast.ClassDef | None:
        """Return the function or class of this file that a name refers to, if it has only one binding."""
        if not isinstance(node, ast.Name):
            return None
        found = self.bindings(node)
        return found[0].definition if len(found) == 1 else None


def decode(data: bytes, path: str) -> tuple[str, str]:
    """Return the text of a source file and its encoding, by byte order mark or coding line as in Python.

    Raises:
        SourceError: The file cannot be decoded with its declared encoding, or with UTF-8 by default.
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
            warnings.simplefilter("ignore")  # warnings about the code being read are not reported
            return ast.parse(text.removeprefix("\ufeff"), path)
    except SyntaxError as error:
        where = f"{path}:{error.lineno or 1}:{error.offset or 1}"
        raise SourceError(f"cannot be parsed: {error.msg}", where=where) from None
    except ValueError as error:  # null bytes
        raise SourceError(f"cannot be parsed: {error}", where=f"{path}:1:1") from None
    except (RecursionError, MemoryError):
        raise SourceError("nested too deeply to be parsed", where=f"{path}:1:1") from None
