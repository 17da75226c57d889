"""What a program does with its models, and under which conditions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shardwise.source import facts
from shardwise.source.syntax import FULLY_SHARD, FileContext
from shardwise.source.values import (
    BranchTest,
    Items,
    ObjectRef,
    PartRef,
    ProgramEvent,
    Trace,
    TupleValue,
    Value,
    Values,
    exclude_each_other,
    owners_of_params,
)

_RANK = re.compile(r"^_?((global|world|local|node|process)_)?rank$|^(local_)?process_index$", re.IGNORECASE)
_MAIN = re.compile(
    r"^_?(is_)?(global_|local_)?(main|master|rank_?(0|zero)|chief|coordinator)(_process|_rank)?$"
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
        case ast.Compare(
            left=left, ops=[ast.In() | ast.NotIn() as operator], comparators=[ast.List() | ast.Tuple() as some]
        ):
            zero = all(ast.unparse(one) in ("0", "-1") for one in some.elts) and _is_rank(file, left)
            return isinstance(operator, ast.In) if zero else None
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


def parting_test(file: FileContext, event: ProgramEvent) -> ast.expr | None:
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


Module = ObjectRef | PartRef
_OPTIMIZERS = re.compile(r"optim|adam|sgd|lion|muon|shampoo|adafactor|adagrad|rmsprop|lamb$|soap", re.IGNORECASE)
_NOT_OPTIMIZERS = re.compile(r"zero_grad|clip|step|sched|state|log|print|wrap|offload", re.IGNORECASE)
_IS_SHARDED = re.compile(r"isinstance\(.*\b(FSDPModule|DTensor)\b")
_BUILDS_OPTIMIZER = re.compile(r"(build|make|create|get|configure|set_?up|init)\w*optim", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Shard:
    """One module being sharded."""

    event: ProgramEvent
    subject: Module
    together: frozenset[Value]
    """All modules of the same call: `fully_shard([a, b])` makes one group."""

    @property
    def is_automatic(self) -> bool:
        """By shardwise, which decides the groups itself."""
        return not self.event.is_call_to(FULLY_SHARD)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer being built over the parameters of modules."""

    event: ProgramEvent
    owners: frozenset[Module]


def modules(values: Values) -> list[Module]:
    """Those of the values that can be modules."""
    return [value for value in values if isinstance(value, ObjectRef | PartRef)]


class Usage:
    """What happens to the models of one trace.

    Args:
        trace: Events in order, of one run of the program.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.events = trace.events

    @cached_property
    def shards(self) -> list[Shard]:
        """Every module that is sharded, in order."""
        names = {FULLY_SHARD, *facts.SHARDWISE_SHARD}
        return [shard for event in self.trace.calls_to(*names) for shard in _shards_of(event)]

    @cached_property
    def optimizers(self) -> list[Optimizer]:
        """Every optimizer that is built on known modules, in order."""
        return [found for event in self.events if (found := _optimizer_of(event)) is not None]

    @cached_property
    def entered(self) -> list[tuple[ProgramEvent, Module]]:
        """Every call of an object itself, `model(x)`, in order."""
        return [
            (event, module)
            for event in self.events
            if isinstance(event.node, ast.Call) and not event.origins
            for module in self._called(event)
        ]

    @cached_property
    def forwards(self) -> list[tuple[ProgramEvent, Module]]:
        """Those, and every call of `forward`, which runs no hooks; not in order."""
        directly = [event for event in self.events if event.method == "forward" and not event.is_store]
        return self.entered + [(event, module) for event in directly for module in modules(event.receiver)]

    def _called(self, event: ProgramEvent) -> Iterator[Module]:
        function = event.node.func if isinstance(event.node, ast.Call) else None
        if isinstance(function, ast.Name | ast.Attribute | ast.Subscript):
            yield from modules(event.called)

    def is_sharded(self, value: Value, at: ProgramEvent) -> bool:
        """Whether this very module has been sharded when `at` happens."""
        return any(shard.subject == value and self.follows(at, shard.event) for shard in self.shards)

    def is_sharded_by_hand(self, value: Value, at: ProgramEvent) -> bool:
        """By `fully_shard` itself; shardwise takes care of ways in, `.data` and parameters that stay gathered."""
        mine = [shard for shard in self.shards if shard.subject == value and self.follows(at, shard.event)]
        return bool(mine) and not any(shard.is_automatic for shard in mine)

    def is_gathered_by_hand(self, value: Value, at: ProgramEvent) -> bool:
        """Whether `value.unshard()` was called before, and so its parameters are there without hooks."""
        return any(
            event.method == "unshard" and value in event.receiver and self.trace.precedes(event, at)
            for event in self.events
        )

    def holds_shards(self, value: Value, at: ProgramEvent) -> Shard | None:
        """The sharding of this module, of one inside it or of one around it, that precedes `at`."""
        for shard in self.shards:
            if self.follows(at, shard.event) and self.trace.are_related(shard.subject, value):
                return shard
        return None

    def follows(self, later: ProgramEvent, earlier: ProgramEvent) -> bool:
        """Whether `later` happens after a sharding; methods of a class, other than its first, may run in any order."""
        if any(_denies_sharding(guard) for guard in later.guards):
            return False
        if later.root is not earlier.root:
            return getattr(later.root, "name", "") != "__init__"
        return earlier.order < later.order and not exclude_each_other(earlier, later)


def _denies_sharding(guard: BranchTest) -> bool:
    """The other branch of `isinstance(model, FSDPModule)`."""
    return not guard.taken and _IS_SHARDED.search(guard.key) is not None


def _shards_of(event: ProgramEvent) -> Iterator[Shard]:
    given = event.argument(0, "module") or event.argument(0, "model")
    together = frozenset(_flatten(given))
    for subject in together:
        if isinstance(subject, ObjectRef | PartRef):
            yield Shard(event, subject, together)


def _flatten(values: Values) -> Iterator[Value]:
    for value in values:
        if isinstance(value, TupleValue):
            for item in value.items:
                yield from item
        elif isinstance(value, Items):
            yield from value.element
        else:
            yield value


def _optimizer_of(event: ProgramEvent) -> Optimizer | None:
    if event.is_store or event.is_inlined:
        return None
    names = [origin.rpartition(".")[2] for origin in event.origins] or [event.method]
    given = [*event.args, *(argument.values for argument in event.keywords.values())]
    everything = frozenset().union(*given)
    if any(_OPTIMIZERS.search(name) and not _NOT_OPTIMIZERS.search(name) for name in names):
        owners = owners_of_params(everything)
        if not owners and any(map(_BUILDS_OPTIMIZER.match, names)):
            owners = set(modules(event.argument(0, "model")))
        if owners:
            return Optimizer(event, frozenset(owners))
    return None
