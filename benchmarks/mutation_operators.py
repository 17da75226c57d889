"""Small wrong changes to source code: where they can be made, what they look like, and a seeded draw of them.

Left alone is what no behaviour depends on: docstrings, annotations, messages of errors and logs, help, `__repr__`.
"""

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from pathlib import Path

_SWAPPED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Is: (r"\bis\b", "is not"), ast.IsNot: (r"\bis\s+not\b", "is"),
    ast.In: (r"\bin\b", "not in"), ast.NotIn: (r"\bnot\s+in\b", "in"),
    ast.And: (r"\band\b", "or"), ast.Or: (r"\bor\b", "and"),
    ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "//"), ast.FloorDiv: ("//", "*"),
}  # fmt: skip
"""How each operator is written, and what is written instead."""
_NEGATED_BY_SWAP = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_SEQUENCES = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
_LOOKUPS = {"get", "pop", "setdefault"}
_TEXTS = {"what", "where", "why", "fix", "help", "description", "title", "metavar", "epilog", "rich_help_panel", "doc"}
"""Keyword arguments that hold text for people."""
_TYPES = {"TypeVar", "ParamSpec", "NewType", "cast", "Literal", "Annotated", "Callable", "ClassVar", "dataclass"}
_LOGS = {"log", "_log", "logger", "_logger", "logging"}


@dataclass(frozen=True)
class Mutant:
    """One change in one file."""

    file: str
    """Relative to src/shardwise."""
    line: int
    operator: str
    before: str
    """The lines that change, as they are."""
    after: str
    functions: tuple[str, ...]
    """Qualified names of the functions it lies in, innermost first; none for code that runs on import."""
    begin: int
    end: int
    text: bytes
    """What stands between the bytes `begin` and `end` afterwards."""

    @property
    def package(self) -> str:
        return package_of(self.file)

    def applied(self, source: bytes) -> bytes:
        """The file with the change made."""
        return source[: self.begin] + self.text + source[self.end :]

    def is_valid(self, source: bytes) -> bool:
        """Whether the change compiles and is one."""
        mutated = self.applied(source)
        try:
            compile(mutated, self.file, "exec", dont_inherit=True)
        except SyntaxError:
            return False
        return ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))


def package_of(file: str) -> str:
    """The folder below src/shardwise; the files beside the folders count as one package."""
    return file.partition("/")[0] if "/" in file else "(top)"


@dataclass(frozen=True)
class _Change:
    """`text` in place of the nodes from `first` to `last`; or, with `token`, of its match between the two."""

    operator: str
    first: ast.expr | ast.stmt
    last: ast.expr | ast.stmt
    text: str
    token: str = ""


def _changes(node: ast.AST) -> Iterator[_Change]:
    """What may be changed at a node itself, not below it."""
    match node:
        case ast.Compare():
            for kind, (left, right) in zip(node.ops, pairwise([node.left, *node.comparators]), strict=True):
                yield _swap("comparison", kind, left, right)
        case ast.BoolOp():
            for left, right in pairwise(node.values):
                yield _swap("and/or", node.op, left, right)
        case ast.BinOp(left=left, right=right) if not _is_sequence(left) and not _is_sequence(right):
            if type(node.op) in _SWAPPED:
                yield _swap("arithmetic", node.op, left, right)
        case ast.AugAssign():
            if type(node.op) in _SWAPPED and not _is_sequence(node.value):
                yield _swap("arithmetic", node.op, node.target, node.value)
            yield _Change("deleted", node, node, "pass")
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield from _negate(test)
        case ast.comprehension():
            for test in node.ifs:
                yield from _negate(test)
        case ast.Constant(value=int()):
            yield from _other_value("constant", node)
        case ast.FunctionDef(args=arguments) | ast.AsyncFunctionDef(args=arguments):
            for default in [*arguments.defaults, *arguments.kw_defaults]:
                yield from _other_value("default", default)
        case ast.ClassDef():
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign):
                    yield from _other_value("default", statement.value)
        case ast.Return(value=ast.AST() as value) if not (isinstance(value, ast.Constant) and value.value is False):
            yield _Change("return", value, value, "None")
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield _Change("deleted", node, node, "pass")
        case ast.Break() | ast.Continue():
            yield _Change("break/continue", node, node, "continue" if isinstance(node, ast.Break) else "break")
        case ast.ExceptHandler():
            yield _Change("handler", node.body[0], node.body[-1], "raise")
        case ast.Call():
            for keyword in node.keywords:
                if keyword.arg is not None and keyword.arg not in _TEXTS:
                    others = [other for other in node.keywords if other is not keyword]
                    yield _Change("keyword", node, node, ast.unparse(ast.Call(node.func, node.args, others)))
    for text in _strings_looked_up(node):
        yield from _other_value("string", text)


def _swap(operator: str, kind: ast.AST, left: ast.expr, right: ast.expr) -> _Change:
    token, text = _SWAPPED[type(kind)]
    return _Change(operator, left, right, text, token)


def _negate(test: ast.expr) -> Iterator[_Change]:
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield _Change("condition", test, test, f"({ast.unparse(operand)})")
        case ast.Compare(ops=[kind]) if isinstance(kind, _NEGATED_BY_SWAP):
            return
        case _:
            yield _Change("condition", test, test, f"not ({ast.unparse(test)})")


def _other_value(operator: str, node: ast.AST | None) -> Iterator[_Change]:
    match node:
        case ast.Constant(value=bool(value)):
            yield _Change(operator, node, node, str(not value))
        case ast.Constant(value=int(value)):
            yield _Change(operator, node, node, str(value + 1))
        case ast.Constant(value=float(value)):
            yield _Change(operator, node, node, repr(value * 2 or 1.0))
        case ast.Constant(value=str(value)):
            yield _Change(operator, node, node, repr(value + "_"))


def _strings_looked_up(node: ast.AST) -> list[ast.Constant]:
    """Strings that are keys or are compared."""
    used: list[ast.expr | None] = []
    match node:
        case ast.Dict(keys=keys):
            used = [*keys]
        case ast.Subscript(slice=key) | ast.MatchValue(value=key):
            used = [key]
        case ast.Compare(left=left, comparators=others):
            used = [left, *others]
            used += [item for side in others if isinstance(side, (ast.Tuple, ast.List, ast.Set)) for item in side.elts]
        case ast.Call(func=ast.Attribute(attr=name), args=[key, *_]) if name in _LOOKUPS:
            used = [key]
    return [text for text in used if isinstance(text, ast.Constant) and isinstance(text.value, str)]


def _is_sequence(node: ast.AST) -> bool:
    return isinstance(node, _SEQUENCES) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.Expr(value=ast.Constant()) | ast.FunctionDef(name="__repr__"):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__" | "__version__")]):
            return True
        case ast.Call(func=function):
            name = _last_name(function)
            is_message = name.endswith(("Error", "Exception", "Warning"))
            return is_message or name in _TYPES or _last_name(getattr(function, "value", None)) in _LOGS
        case ast.Expr(value=ast.Call() as call):
            return _is_left_alone(call)
        case ast.Subscript(value=value):
            return _last_name(value) in _TYPES
        case ast.keyword(arg=name):
            return name in _TEXTS
    return False


def _last_name(node: ast.AST | None) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _children(node: ast.AST) -> list[ast.AST]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [*node.body]  # its defaults are changed as its own, its decorators run outside
        case ast.AnnAssign():
            return [node.value] if node.value is not None else []
        case ast.If(test=test) if _last_name(test) == "TYPE_CHECKING":
            return [*node.orelse]
        case ast.Assert():
            return [node.test]
    return list(ast.iter_child_nodes(node))


class _Finder:
    """Collects the mutants of one file, in the order of its nodes."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]
        self.found: dict[tuple[int, int, bytes], Mutant] = {}
        self._visit(ast.parse(source), "", ())

    def _visit(self, node: ast.AST, prefix: str, functions: tuple[str, ...]) -> None:
        if _is_left_alone(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                self._visit(decorator, prefix, functions)
            functions = (prefix + node.name, *functions)
            prefix += f"{node.name}.<locals>."
        elif isinstance(node, ast.ClassDef):
            prefix += f"{node.name}."
        for change in _changes(node):
            self._add(change, functions)
        for child in _children(node):
            self._visit(child, prefix, functions)

    def _add(self, change: _Change, functions: tuple[str, ...]) -> None:
        begin, end = self._begin(change.first), self._end(change.last)
        if change.token:
            begin, end = self._end(change.first), self._begin(change.last)
            match = re.search(change.token.encode(), self.source[begin:end])
            if match is None:
                return
            begin, end = begin + match.start(), begin + match.end()
        text = change.text.encode()
        line_begin, line_end = self.source.rfind(b"\n", 0, begin) + 1, self.source.find(b"\n", end)
        before = self.source[line_begin:line_end]
        after = self.source[line_begin:begin] + text + self.source[end:line_end]
        line = self.source.count(b"\n", 0, begin) + 1
        mutant = Mutant(self.file, line, change.operator, _flat(before), _flat(after), functions, begin, end, text)
        self.found.setdefault((begin, end, text), mutant)

    def _begin(self, node: ast.expr | ast.stmt) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        return self.starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)


def _flat(code: bytes) -> str:
    return " ".join(code.decode().split())


def draw(folder: Path, seed: int, count: int) -> list[Mutant]:
    """`count` mutants of the files below, each package getting its share by lines; the same for a seed and a tree."""
    sources = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.py"))}
    pools: dict[str, list[Mutant]] = {}
    lines: dict[str, int] = {}
    for file, source in sources.items():
        pools.setdefault(package_of(file), []).extend(_Finder(file, source).found.values())
        lines[package_of(file)] = lines.get(package_of(file), 0) + source.count(b"\n")
    drawn: list[Mutant] = []
    for package, share in sorted(_shares(lines, count).items()):
        pool = pools[package]
        random.Random(f"{seed} {package}").shuffle(pool)
        drawn += islice((mutant for mutant in pool if mutant.is_valid(sources[mutant.file])), share)
    random.Random(seed).shuffle(drawn)
    return drawn


def _shares(lines: dict[str, int], count: int) -> dict[str, int]:
    """How many of `count` each package gets: one each, largest first, then by lines."""
    shares = {package: int(rank < count) for rank, package in enumerate(sorted(lines, key=lambda p: -lines[p]))}
    for _ in range(count - sum(shares.values())):
        shares[max(lines, key=lambda package: lines[package] / (shares[package] + 0.5))] += 1
    return shares
