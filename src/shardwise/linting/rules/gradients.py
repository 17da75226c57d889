"""Rules about gradients: synchronisation left off, norms of shards, counts multiplied by the world."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.findings import Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source.usage import Usage
from shardwise.source.values import DictValue, Param, ProgramEvent, Value, owners_of_params

_CLIP = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.get_total_norm")
_SWITCHES = ("set_requires_gradient_sync", "set_requires_all_reduce")
_NORMS = frozenset({"torch.norm", "torch.linalg.vector_norm", "torch.linalg.norm"})
_WORLD = re.compile(r"^(world_size|num_ranks|n_gpus|num_gpus)$")
_LOGS = re.compile(r"^(print|log|info|debug|warning|add_scalar|log_metrics|set_postfix)$")


@rule("SW232", "gradient-sync-left-off", severity=Severity.ERROR)
def gradient_sync_left_off(reading: LintContext) -> Iterator[Hit]:
    """`set_requires_gradient_sync(False)` stays until it is set to True again.

    Why: it is a switch, not a context manager. Without the way back no gradient is ever reduced: ranks train apart.
    """
    calls = [
        call for call in reading.file.calls if getattr(call.func, "attr", "") in _SWITCHES and _flag(call) is not None
    ]
    for switch in _SWITCHES:
        mine = [call for call in calls if getattr(call.func, "attr", "") == switch]
        if any(getattr(_flag(call), "value", None) is not False for call in mine):
            continue  # somewhere it is True, or computed
        for call in mine:
            yield Hit(
                node=call,
                message=f"{switch} is switched off and never on again",
                fix=f"call {switch}(is_last_micro_step) before each forward",
            )


def _flag(call: ast.Call) -> ast.expr | None:
    if call.args:
        return call.args[0]
    return next((k.value for k in call.keywords if k.arg in ("requires_gradient_sync", "requires_all_reduce")), None)


@rule("SW233", "norm-of-shards", severity=Severity.WARNING)
def norm_of_shards(reading: LintContext) -> Iterator[Hit]:
    """The norm of a sharded gradient is a DTensor; its local value is not the norm.

    Why: a norm computed by hand is a partial result of this rank's shard, too small by about the square root of the
    number of ranks; the norm that `clip_grad_norm_` returns is partial too on older torch, and cannot be formatted.
    """
    for usage in reading.usages:
        norms = {value: event for event in usage.events if _is_norm(usage, event) for value in event.result}
        gathered = {value for event in usage.events if event.method == "full_tensor" for value in event.receiver}
        for event in usage.events:
            for value, made in _norms_read(reading, event, norms):
                if value not in gathered:
                    yield Hit(
                        node=event.node,
                        message=f"the norm of line {made.node.lineno} is a DTensor; this reads it without gathering",
                        fix="call .full_tensor() on every rank before reading it",
                    )


def _is_norm(usage: Usage, event: ProgramEvent) -> bool:
    """Whether a call returns a norm over gradients of sharded parameters."""
    if event.is_call_to(*_CLIP):
        owners = owners_of_params(event.argument(0, "parameters") or event.argument(0, "tensors"))
    elif event.is_call_to(*_NORMS):
        owners = owners_of_params(event.argument(0, "input") or event.argument(0, "x"))
    elif event.method == "norm":
        owners = {value.owner for value in event.receiver if isinstance(value, Param)}
    else:
        return False
    return any(usage.holds_shards(owner, event) is not None for owner in owners)


def _norms_read(
    reading: LintContext, event: ProgramEvent, norms: dict[Value, ProgramEvent]
) -> Iterator[tuple[Value, ProgramEvent]]:
    """The norms that an event turns into numbers or text."""
    if event.method in ("item", "to_local", "tolist") and not event.args:
        yield from ((value, norms[value]) for value in event.receiver if value in norms)
    elif event.method == "float" and not event.receiver:
        yield from ((value, norms[value]) for values in event.args for value in values if value in norms)
    elif _LOGS.match(event.method) and norms:
        yield from ((value, norms[value]) for value in _logged(event) if value in norms)
        by_name = {_bound_name(reading, made.node): (value, made) for value, made in norms.items()}
        for name in _formatted_names(event.node):
            if name in by_name and by_name[name][1].order < event.order:
                yield by_name[name]


def _logged(event: ProgramEvent) -> Iterator[Value]:
    """What a logging call gets, by position or in a dictionary."""
    for value in frozenset().union(*event.args):
        if isinstance(value, DictValue):
            yield from frozenset().union(*(entry.values for entry in value.entries))
        else:
            yield value


def _formatted_names(node: ast.AST) -> Iterator[str]:
    """The names that f-strings give a format, as in `{norm:.3f}`: a DTensor has none."""
    for one in ast.walk(node):
        if isinstance(one, ast.FormattedValue) and one.format_spec is not None and isinstance(one.value, ast.Name):
            yield one.value.id


def _bound_name(reading: LintContext, node: ast.AST) -> str:
    statement = reading.file.statement(node)
    target = statement.targets[0] if isinstance(statement, ast.Assign) and statement.value is node else None
    return target.id if isinstance(target, ast.Name) else ""


@rule("SW234", "numel-times-world-size", severity=Severity.WARNING)
def numel_times_world_size(reading: LintContext) -> Iterator[Hit]:
    """A DTensor's `numel()` and `shape` are those of the whole tensor.

    Why: FSDP1's flat shards had to be multiplied by the number of ranks; FSDP2's parameters say their global size.
    """
    if not any(usage.shards for usage in reading.usages):
        return
    for node in reading.file.parents:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for count, world in ((node.left, node.right), (node.right, node.left)):
                if _is_world(reading, world) and _counts(reading, count):
                    yield Hit(
                        node=node,
                        message="numel() of a sharded parameter is already the global count",
                        fix="do not multiply by the number of ranks",
                    )


def _is_world(reading: LintContext, node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return reading.file.is_any(node.func, {"torch.distributed.get_world_size"})
    return bool(_WORLD.match(getattr(node, "id", getattr(node, "attr", ""))))


def _counts(reading: LintContext, node: ast.expr) -> bool:
    if any(isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "numel" for n in ast.walk(node)):
        return True
    if isinstance(node, ast.Name):
        values = [binding.value for binding in reading.file.bindings(node) if binding.value is not None]
        values += [
            one.value
            for one in reading.file.parents
            if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name) and one.target.id == node.id
        ]
        return any(not isinstance(value, ast.Name) and _counts(reading, value) for value in values)
    return False
