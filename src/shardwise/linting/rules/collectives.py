"""The rule about collectives that only some ranks reach, and how a test for rank 0 is recognised."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source import facts
from shardwise.source.syntax import FULLY_SHARD, FileContext, last_name, tested_classes
from shardwise.source.trace import Trace
from shardwise.source.values import BranchTest, Param, ProgramEvent, StateDict, modules, owners_of_params

_RANK = re.compile(r"^_?((global|world|local|node|process)_)?rank$|^(local_)?process_index$", re.IGNORECASE)
_MAIN = re.compile(
    r"^_?(is_)?(global_|local_)?(main|master|rank_?(0|zero)|chief|coordinator)(_process|_rank)?$"
    r"|^is_(rank_zero|global_zero|main_process|local_main_process|world_process_zero|first_rank)$|^should_(save|log)_on_rank_0$"
)
_RANK_CALLS = frozenset({"torch.distributed.get_rank", "torch.distributed.get_node_local_rank"})
_RANK_VARIABLES = ("RANK", "LOCAL_RANK")
_RANK_ZERO_DECORATORS = re.compile(r"^(rank_zero_only|only_on_rank_zero|on_main_process|main_process_only)$")
_CHECKPOINT = "torch.distributed.checkpoint"
_ALWAYS_COLLECTIVE = (f"{_CHECKPOINT}.save", f"{_CHECKPOINT}.load", f"{_CHECKPOINT}.async_save", FULLY_SHARD)
_CLIP = "torch.nn.utils.clip_grad_norm_"
_OURS = re.compile(
    r"^shardwise\.((save|load)_(weights|full)|full_params|iter_full_tensors|shard|materialize|clip_grad_norm_|parity"
    r"|token_mean|mean_over_ranks)$"
)
_CHECKPOINTER, _ITS_COLLECTIVES = "shardwise.Checkpointer", frozenset({"save", "load", "latest", "prepare"})
# Where each takes its group: with one, the ranks that come here may be all that it needs.
_GROUP_POSITION = {
    f"torch.distributed.{name}": position
    for position, names in {
        0: "barrier monitored_barrier",
        2: "all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all broadcast broadcast_object_list",
        3: "reduce reduce_scatter reduce_scatter_tensor gather gather_object scatter scatter_object_list",
        4: "all_to_all_single",
    }.items()
    for name in names.split()
}


@rule("SW222", fix="call it on every rank and keep only the writing under the test")
def collective_on_some_ranks(context: LintContext) -> Iterator[Hit]:
    """A call that all ranks must make together stands under `if rank == 0`.

    Why: collectives, gathered state dicts, full tensors, checkpoints and the forward of a sharded model communicate;
    the rank that is alone in one waits for the others until the watchdog ends the run.
    """
    for trace, event in context.events:
        what = _collective(context.file, trace, event) if not event.is_store else ""
        test = _parting_test(context.file, event) if what else None
        if test is not None and not _others_do_it_too(context.file, trace, event):
            message = f"{what} needs every rank, but the test on line {test.lineno} lets only some through"
            yield Hit(event.node, message)


def _collective(file: FileContext, trace: Trace, event: ProgramEvent) -> str:
    """What a call does that needs every rank; empty where it needs none."""
    name = event.method
    if event.is_call_to(*_ALWAYS_COLLECTIVE):
        return "" if event.keywords.keys() & {"no_dist", "process_group"} else f"{name}()"
    if event.is_call_to(*facts.GETTERS, *facts.SETTERS):
        return f"{name}()" if _gathers(trace, event) else ""
    if any(map(_OURS.match, event.origins)):
        return f"{name}()"
    for origin in event.origins & _GROUP_POSITION.keys():
        has_group = "group" in event.keywords or len(event.args) > _GROUP_POSITION[origin] or event.is_open
        return "" if has_group else f"{origin.rpartition('.')[2]}()"
    if name in _ITS_COLLECTIVES and any(_CHECKPOINTER in one.origins for one in modules(event.receiver)):
        return f"Checkpointer.{name}()"
    if name == "full_tensor" and not event.args:
        # Under `isinstance(p, DTensor)` only where the parameter's model is known to be sharded.
        owners = [value.owner for value in event.receiver if isinstance(value, Param | StateDict)]
        is_sharded = any(trace.holds_shards(owner, event) is not None for owner in owners)
        is_tested = any("DTensor" in tested_classes(file, guard.test) for guard in event.guards)
        return "full_tensor()" if is_sharded or not is_tested else ""
    if event.is_call_to(_CLIP):
        owners = owners_of_params(event.argument(0, "parameters"))
        return f"{name}() of sharded parameters" if any(trace.holds_shards(o, event) for o in owners) else ""
    if not event.origins and any(trace.is_sharded(module, event) for module in modules(event.called)):
        return "the forward of a sharded model"
    return ""


def _gathers(trace: Trace, event: ProgramEvent) -> bool:
    if "options" not in event.keywords:
        return False
    full, broadcast = (facts.option(event.argument(None, "options"), name) for name in _GATHERING)
    if full or broadcast:
        return True
    owners = modules(event.argument(0, "model"))
    return full is None and any(trace.holds_shards(owner, event) is not None for owner in owners)


_GATHERING = ("full_state_dict", "broadcast_from_rank0")


def _others_do_it_too(file: FileContext, trace: Trace, event: ProgramEvent) -> bool:
    """Whether the ranks that the test keeps out make the same call in the other branch, or under the opposite test."""
    guards = [(guard, side) for guard in event.guards if (side := _side(file, guard)) is not None]
    others = [one for one in trace.events if one is not event and one.method == event.method and not one.is_store]
    return any(
        _is_other_branch(twin, guard) or _side(file, twin) is (not side)
        for other in others
        for twin in other.guards
        for guard, side in guards
    )


def _side(file: FileContext, guard: BranchTest) -> bool | None:
    """True where only the first rank passes, False where all but it do, None where the test is no such."""
    asked = asks_for_rank_zero(file, guard.test)
    return None if asked is None else asked is guard.taken


def _is_other_branch(one: BranchTest, other: BranchTest) -> bool:
    if one.branch[0] is other.branch[0]:
        return one.branch[1] != other.branch[1]
    return one.key == other.key and one.taken != other.taken


def _parting_test(file: FileContext, event: ProgramEvent) -> ast.expr | None:
    """The test, or decorator, that keeps an event from happening on every rank; None where there is none."""
    for guard in event.guards:
        if isinstance(guard.test, ast.expr) and asks_for_rank_zero(file, guard.test) is not None:
            return guard.test
    functions = [file.enclosing_function(node) for node in (event.node, *event.chain)]
    decorators = [one for function in functions if function is not None for one in function.decorator_list]
    return next((one for one in decorators if _RANK_ZERO_DECORATORS.match(last_name(one))), None)


def asks_for_rank_zero(file: FileContext, test: ast.AST, hops: int = 4) -> bool | None:
    """True if a test holds on one rank only, False if on all but one, None if it asks for something else."""
    if _is_rank(file, test):
        return False  # `if rank:` is all but rank 0
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = asks_for_rank_zero(file, operand, hops)
            return None if inner is None else not inner
        case ast.Compare(left=left, ops=[operation], comparators=[right]) if _is_rank(file, left):
            return _compares_to_zero(operation, right)
        case ast.Name() | ast.Attribute():
            if _MAIN.match(last_name(test)):
                return True
            values = file.assigned(test) if hops and isinstance(test, ast.Name) else []
            if len(values) == 1 and not isinstance(values[0], ast.Name | ast.Constant):
                return asks_for_rank_zero(file, values[0], hops - 1)
        case ast.Call(func=function, args=[]) if _MAIN.match(last_name(function)):
            return True
        case ast.BoolOp(op=ast.And(), values=values):
            return True if any(asks_for_rank_zero(file, value, hops) for value in values) else None
    return None


def _compares_to_zero(operation: ast.cmpop, right: ast.expr) -> bool | None:
    """What `rank == 0`, `rank in (0, -1)`, `rank > 0` and the like ask for."""
    if isinstance(right, ast.List | ast.Tuple):
        some = [ast.unparse(one) for one in right.elts]
        is_member = isinstance(operation, ast.In | ast.NotIn) and set(some) <= {"0", "-1"}
        return isinstance(operation, ast.In) if is_member else None
    if not isinstance(right, ast.Constant):
        return None
    if isinstance(operation, ast.Eq | ast.Is):
        return True
    if right.value == 0 and isinstance(operation, ast.NotEq | ast.IsNot | ast.Gt):
        return False
    return True if right.value == 0 and isinstance(operation, ast.LtE) else None


def _is_rank(file: FileContext, node: ast.AST) -> bool:
    match node:
        case ast.Name() | ast.Attribute():
            return bool(_RANK.match(last_name(node)))
        case ast.Call(args=[], keywords=[]):  # of the world, not of a group
            return file.is_any(node.func, _RANK_CALLS) or getattr(node.func, "attr", "") == "get_rank"
        case ast.Call(func=ast.Name(id="int"), args=[inner]):
            return _is_rank(file, inner)
        case ast.Call(func=ast.Attribute(attr="get" | "getenv"), args=[ast.Constant(value=name), *_]):
            return name in _RANK_VARIABLES
        case ast.Subscript(slice=ast.Constant(value=name)):
            return name in _RANK_VARIABLES
    return False
