"""From a Python function to its syntax tree. Reads source files; runs nothing."""

import ast
import functools
import inspect
import linecache
import textwrap
import types
from typing import Any

_MOST_TRAILING_LINES = 40

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@functools.lru_cache(maxsize=4096)
def find_node(function: types.FunctionType) -> FunctionNode | None:
    """The syntax tree of a function, or None where its source is not to be had."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename)
    if code.co_name == "<lambda>":
        return _lambdas_in(code.co_filename).get(code.co_firstlineno)
    first = code.co_firstlineno - 1
    # Parsing the one function is far cheaper than parsing a file of five thousand lines for it.
    for last in range(_last_line(code), min(len(lines), _last_line(code) + _MOST_TRAILING_LINES) + 1):
        try:
            tree = ast.parse(textwrap.dedent("".join(lines[first:last])))
        except (SyntaxError, ValueError):
            continue  # the statement goes on: a closing bracket stands on a line without code
        node = tree.body[0] if tree.body else None
        found = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name
        return node if found else None  # type: ignore[return-value]
    return None


def _last_line(code: types.CodeType) -> int:
    """The last line that a function, or one nested in it, has code on."""
    last = max((line for *_, line in code.co_lines() if line is not None), default=code.co_firstlineno)
    return max([last, *(_last_line(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))])


def underlying(function: Any) -> tuple[types.FunctionType | None, Any]:
    """The plain function behind decorators and bindings, and the object it is bound to, if any."""
    receiver = None
    for _ in range(32):  # a chain of wrappers longer than this is a cycle
        if isinstance(function, types.MethodType):
            function, receiver = function.__func__, function.__self__
        elif isinstance(function, staticmethod | classmethod):
            function = function.__func__
        elif (inner := inspect.getattr_static(function, "__wrapped__", None)) is not None:
            function = inner
        else:
            break
    return (function if isinstance(function, types.FunctionType) else None), receiver


@functools.lru_cache(maxsize=4096)
def is_generator(node: FunctionNode) -> bool:
    """Whether the function yields; nested functions do not count."""
    pending: list[ast.AST] = list(node.body) if isinstance(node.body, list) else [node.body]
    while pending:
        inner = pending.pop()
        if isinstance(inner, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(inner, FunctionNode):
            pending.extend(ast.iter_child_nodes(inner))
    return False


@functools.lru_cache(maxsize=64)
def _lambdas_in(filename: str) -> dict[int, FunctionNode]:
    """The lambdas of a file by line; where a line has two, neither is known."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    found: dict[int, FunctionNode] = {}
    twice: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            twice |= {node.lineno} & found.keys()
            found[node.lineno] = node
    return {line: node for line, node in found.items() if line not in twice}
