"""What a test in the code asks: is this rank 0, is this module of that class?"""

from __future__ import annotations

import ast
import re

from shardwise.rules.program.events import Event
from shardwise.rules.source import FileContext

_RANK = re.compile(r"^_?((global|world|local|node|process)_)?rank$|^(local_)?process_index$", re.IGNORECASE)
_MAIN = re.compile(
    r"^_?(is_)?(global_|local_)?(main|master|rank_?(0|zero)|chief|coordinator)(_process|_rank)?(_only)?$"
    r"|^is_(rank_zero|global_zero|main_process|local_main_process|world_process_zero|first_rank)$|^should_(save|log)_on_rank_0$"
)
_RANK_CALLS = frozenset({"torch.distributed.get_rank", "torch.distributed.get_node_local_rank"})
_RANK_ZERO_DECORATORS = re.compile(r"^(rank_zero_only|only_on_rank_zero|on_main_process|main_process_only)$")


def asks_for_rank_zero(file: FileContext, test: ast.AST, hops: int = 4) -> bool | None:
    """True if a test holds on one rank only, False if on all but one, None if it asks for something else."""
    if _is_rank(file, test):
        return False  # `if rank:` is all but rank 0
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = asks_for_rank_zero(file, operand, hops)
            return None if inner is None else not inner
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            if not (_is_rank(file, left) and isinstance(right, ast.Constant)):
                return None
            if isinstance(operator, ast.Eq | ast.Is):
                return True
            if right.value == 0 and isinstance(operator, ast.NotEq | ast.IsNot | ast.Gt):
                return False
            return True if isinstance(operator, ast.LtE) and right.value == 0 else None
        case ast.Name():
            if _MAIN.match(test.id):
                return True
            values = [binding.value for binding in file.bindings(test) if binding.value is not None]
            if hops and len(values) == 1 and not isinstance(values[0], ast.Name | ast.Constant):
                return asks_for_rank_zero(file, values[0], hops - 1)
            return None
        case ast.Attribute():
            return True if _MAIN.match(test.attr) else None
        case ast.Call(func=function, args=[]):
            name = getattr(function, "id", getattr(function, "attr", ""))
            return True if _MAIN.match(name) else None
        case ast.BoolOp(op=ast.And(), values=values):
            return True if any(asks_for_rank_zero(file, value, hops) is True for value in values) else None
    return None


def _is_rank(file: FileContext, node: ast.AST) -> bool:
    match node:
        case ast.Name():
            return bool(_RANK.match(node.id))
        case ast.Attribute():
            return bool(_RANK.match(node.attr))
        case ast.Call():
            if file.is_any(node.func, _RANK_CALLS) or getattr(node.func, "attr", "") == "get_rank":
                return not node.args and not node.keywords  # of the world, not of a group
            if getattr(node.func, "id", "") == "int" and len(node.args) == 1:
                return _is_rank(file, node.args[0])
            if getattr(node.func, "attr", "") in ("get", "getenv") and node.args:
                return getattr(node.args[0], "value", None) in ("RANK", "LOCAL_RANK")
        case ast.Subscript():
            return getattr(node.slice, "value", None) in ("RANK", "LOCAL_RANK")
    return False


def parting_test(file: FileContext, event: Event) -> ast.expr | None:
    """The test, or decorator, that keeps an event from happening on every rank; None where there is none."""
    for guard in event.guards:
        if isinstance(guard.test, ast.expr) and asks_for_rank_zero(file, guard.test) is not None:
            return guard.test
    for node in (event.node, *event.chain):
        function = file.enclosing_function(node)
        for decorator in function.decorator_list if function is not None else ():
            if _RANK_ZERO_DECORATORS.match(getattr(decorator, "id", getattr(decorator, "attr", ""))):
                return decorator
    return None


def tested_classes(file: FileContext, test: ast.AST) -> set[str]:
    """The classes that `isinstance(x, ...)` names, where the test is one."""
    if isinstance(test, ast.Call) and getattr(test.func, "id", "") == "isinstance" and len(test.args) == 2:
        return class_names(file, test.args[1])
    return set()


def class_names(file: FileContext, node: ast.AST) -> set[str]:
    """The last names of a class, or of each class of a tuple or set."""
    match node:
        case ast.Tuple() | ast.List() | ast.Set():
            return set().union(*(class_names(file, element) for element in node.elts))
        case ast.Name():
            values = [binding.value for binding in file.bindings(node) if binding.value is not None]
            if len(values) == 1 and isinstance(values[0], ast.Tuple | ast.Set | ast.List):
                return class_names(file, values[0])
            return {node.id}
        case ast.Attribute():
            return {node.attr}
        case ast.BinOp(op=ast.BitOr()):
            return class_names(file, node.left) | class_names(file, node.right)
        case ast.Call(args=[inner]):
            return class_names(file, inner)  # tuple({...})
    return set()
