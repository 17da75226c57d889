"""From a Python function to its syntax tree. Reads source files; runs nothing."""

import ast
import functools
import inspect
import linecache
import types
from typing import Any

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def find_node(function: types.FunctionType) -> FunctionNode | None:
    """The syntax tree of a function, or None where its source is not to be had."""
    code = function.__code__
    return _functions_in(code.co_filename).get((code.co_firstlineno, code.co_name))


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


@functools.lru_cache(maxsize=256)
def _functions_in(filename: str) -> dict[tuple[int, str], FunctionNode]:
    source = "".join(linecache.getlines(filename))
    if not source:
        return {}
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    found: dict[tuple[int, str], FunctionNode] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            found[node.lineno, "<lambda>"] = node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[first, node.name] = node
    return found
