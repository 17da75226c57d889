"""Rules about what is given to `fully_shard`: only the root, lists, tied weights, scalars, ignored parameters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.findings import Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source.facts import LISTS
from shardwise.source.syntax import FULLY_SHARD
from shardwise.source.usage import Shard, Usage
from shardwise.source.values import ObjectRef, PartRef, ProgramEvent, Value, owners_of_params

_SHARDS_INSIDE = re.compile(r"shard|fsdp|wrap|paralle|prepare", re.IGNORECASE)
_LAYER = re.compile(r"(Linear|Layer|Norm|Embedding|Block|Conv\dd|MLP|Attention|Experts?|Router|Head)$")
_SCALARS = {"torch.tensor", "torch.as_tensor"}
_SIZED = {"torch.ones", "torch.zeros", "torch.empty", "torch.randn", "torch.rand", "torch.full"}


@rule("SW202", "root-only-sharding", severity=Severity.WARNING)
def root_only_sharding(reading: LintContext) -> Iterator[Hit]:
    """One `fully_shard` call on the whole model makes one group: all of it is gathered at once.

    Why: a group is gathered and freed as one; with a single group the peak is the unsharded model, and no communication
    can hide behind computation.
    """
    if not _every_call_is_read(reading):
        return
    for usage, shard in reading.shards:
        if _is_whole_model(reading, usage, shard) and not _has_groups_inside(usage, shard):
            yield Hit(
                node=shard.event.node,
                message="the whole model is one group: every parameter is gathered at once, nothing overlaps",
                fix="call fully_shard on each block first, then on the model",
            )


def _every_call_is_read(reading: LintContext) -> bool:
    """Whether the subject of every `fully_shard` in the file is known; an unknown one may be a block."""
    read = {shard.event.node for usage in reading.usages for shard in usage.shards}
    mentions = sum(reading.file.is_any(node, {FULLY_SHARD}) for node in _loads(reading))
    return mentions == len(read)


def _loads(reading: LintContext) -> Iterator[ast.expr]:
    for node in reading.file.parents:
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            parent = reading.file.parents[node]
            if not isinstance(parent, ast.Attribute):
                yield node


def _is_whole_model(reading: LintContext, usage: Usage, shard: Shard) -> bool:
    subject = shard.subject
    if shard.is_automatic or (isinstance(subject, PartRef) and "[]" in subject.path) or shard.event.loop is not None:
        return False
    if not _is_trained(usage, subject):
        return False
    definition = subject.definition if isinstance(subject, ObjectRef) else None
    if definition is not None:
        return _has_blocks(reading, definition)
    made_by = getattr(subject, "origins", frozenset())
    return not any(origin.startswith("torch.nn.") or _LAYER.search(origin) for origin in made_by)


def _is_trained(usage: Usage, subject: Value) -> bool:
    if any(subject in optimizer.owners for optimizer in usage.optimizers):
        return True
    is_called = any(module == subject for _, module in usage.entered)
    return is_called and any(event.method == "backward" for event in usage.events)


def _has_blocks(reading: LintContext, definition: ast.ClassDef, seen: frozenset[str] = frozenset()) -> bool:
    """Whether a class of this file holds a list of modules, or one that does."""
    for node in ast.walk(definition):
        if not isinstance(node, ast.Call):
            continue
        origins = reading.file.origins(node.func)
        if origins & LISTS or any(origin.startswith("torch.nn.Transformer") for origin in origins):
            return True
        if "torch.nn.Sequential" in origins and any(isinstance(arg, ast.Starred) for arg in node.args):
            return True
        inner = reading.file.definition(node.func)
        if isinstance(inner, ast.ClassDef) and inner.name not in seen | {definition.name}:
            seen |= {definition.name}
            if _has_blocks(reading, inner, seen):
                return True
    return False


def _has_groups_inside(usage: Usage, shard: Shard) -> bool:
    if any(usage.trace.are_related(other.subject, shard.subject) and other is not shard for other in usage.shards):
        return True
    return any(
        shard.subject in values and _SHARDS_INSIDE.search(event.method)
        for event in usage.events
        if event is not shard.event and not event.is_inlined  # an inlined function's own calls have been read
        for values in event.args
    )


@rule("SW205", "container-sharded", severity=Severity.ERROR)
def container_sharded(reading: LintContext) -> Iterator[Hit]:
    """`nn.ModuleList` and `nn.ModuleDict` have no forward to hook.

    Symptom: `fully_shard does not support containers that do not implement forward`.
    """
    for _, shard in reading.shards:
        kind = _kind_of_list(shard.subject)
        if kind and not shard.is_automatic:
            yield Hit(
                node=shard.event.node,
                message=f"{kind} has no forward, so fully_shard refuses it",
                fix="shard each module in it: for block in blocks: fully_shard(block)",
            )


def _kind_of_list(subject: Value) -> str:
    """`ModuleList` or `ModuleDict`, where the subject is known to be one."""
    if isinstance(subject, ObjectRef):
        return next((origin.rpartition(".")[2] for origin in sorted(subject.origins & LISTS)), "")
    if isinstance(subject, PartRef) and subject.path[-1] in ("layers", "h", "blocks"):
        # The transformers library keeps its blocks in a ModuleList, under one of these names.
        return "ModuleList" if any(one.startswith("transformers.") for one in subject.owner.origins) else ""
    return ""


@rule("SW213", "tied-weights-split", severity=Severity.ERROR)
def tied_weights_split(reading: LintContext) -> Iterator[Hit]:
    """Tied weights sharded in separate groups come apart.

    Why: each group makes a parameter of its own. Up to torch 2.12 and sometimes later this is silent: the two weights
    train separately; newer versions raise.
    """
    for usage in reading.usages:
        for one, other, tie in _ties(usage):
            apart = [shard for shard in usage.shards if (shard.subject in (one, other)) and len(shard.together) == 1]
            first = next((shard for shard in apart if shard.subject == one), None)
            second = next((shard for shard in apart if shard.subject == other), None)
            if first is None or second is None:
                continue
            last = max(first, second, key=lambda shard: shard.event.order)
            yield Hit(
                node=last.event.node,
                message=f"its weight is tied to another module's (line {tie.node.lineno}) that has a group of its own",
                fix="shard both in one call, fully_shard([a, b]), or leave both to the root",
            )


def _ties(usage: Usage) -> Iterator[tuple[Value, Value, ProgramEvent]]:
    """Pairs of modules of which one was given the other's weight."""
    for event in usage.events:
        if event.is_store and event.method == "weight":
            for given in event.args[0]:
                if isinstance(given, PartRef) and given.path[-1] == "weight":
                    source = PartRef(given.owner, given.path[:-1]) if len(given.path) > 1 else given.owner
                    for target in event.receiver:
                        yield target, source, event


@rule("SW214", "scalar-parameter", severity=Severity.ERROR)
def scalar_parameter(reading: LintContext) -> Iterator[Hit]:
    """A parameter without dimensions cannot be sharded.

    Symptom: `fully_shard doesn't support scalar parameters. Change ... to a 1D tensor with numel equal to 1.`
    """
    for usage in reading.usages:
        if not any(not shard.is_automatic for shard in usage.shards):
            continue
        for event in usage.events:
            if not (event.is_store and _is_scalar_parameter(reading, event)):
                continue
            owners = set(event.receiver)
            if any(_takes(usage, shard, owner) for shard in usage.shards for owner in owners):
                yield Hit(
                    node=event.node,
                    message=f"{event.method} is a scalar, and fully_shard refuses scalar parameters",
                    fix="give it one element: nn.Parameter(torch.ones(1)), or pass it in ignored_params",
                )


def _takes(usage: Usage, shard: Shard, owner: Value) -> bool:
    if shard.is_automatic or "ignored_params" in shard.event.keywords or shard.event.is_open:
        return False
    return owner == shard.subject or usage.trace.is_part_of(owner, shard.subject)


def _is_scalar_parameter(reading: LintContext, event: ProgramEvent) -> bool:
    statement = reading.file.statement(event.node)
    value = getattr(statement, "value", None)
    if not (isinstance(value, ast.Call) and value.args and reading.file.is_any(value.func, {"torch.nn.Parameter"})):
        return False
    return _is_scalar(reading, value.args[0])


def _is_scalar(reading: LintContext, node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        sides = (node.left, node.right)
        numbers = [side for side in sides if not any(isinstance(n, ast.Call) for n in ast.walk(side))]
        return any(_is_scalar(reading, side) for side in sides) and (
            bool(numbers) or all(_is_scalar(reading, side) or _is_number(side) for side in sides)
        )
    if not (isinstance(node, ast.Call) and node.args):
        return False
    first = node.args[0]
    if reading.file.is_any(node.func, _SCALARS):
        return _is_number(first)
    if reading.file.is_any(node.func, _SIZED):
        return isinstance(first, ast.List | ast.Tuple) and not first.elts
    return False


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


@rule("SW218", "ignored-params-on-some-calls", severity=Severity.WARNING)
def ignored_params_on_some_calls(reading: LintContext) -> Iterator[Hit]:
    """`ignored_params` holds for one `fully_shard` call only.

    Why: a block that is sharded without it takes the parameters that the root's call was told to leave alone.
    """
    for usage, root in reading.shards:
        ignored = root.event.keywords.get("ignored_params")
        if ignored is None:
            continue
        owners = owners_of_params(ignored.values)
        for shard in usage.shards:
            if (
                usage.trace.is_part_of(shard.subject, root.subject)
                and "ignored_params" not in shard.event.keywords
                and not shard.event.is_open
                and any(usage.trace.are_related(owner, shard.subject) for owner in owners)
            ):
                yield Hit(
                    node=shard.event.node,
                    message=f"this call shards what the call on line {root.event.node.lineno} ignores",
                    fix="pass the same ignored_params to every fully_shard call",
                )
