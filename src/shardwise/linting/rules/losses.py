"""Rules about the loss of a sharded model: means over the tokens of one rank."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.findings import Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source import facts
from shardwise.source.syntax import FSDP1, FileContext, Function

_LOSSES = re.compile(r"loss|nll|cross_entropy|xent", re.IGNORECASE)
_MASKS = re.compile(r"mask|valid|ignore|!=|\.ne\(|not_equal|-100")
_COUNTS = re.compile(r"tok|count|num|mask|valid|denom", re.IGNORECASE)
_SAME_COUNT = frozenset({"clamp", "clamp_min", "clamp_", "to", "float", "long", "item", "max", "int"})
_SUMMED_OVER_RANKS = re.compile(r"(all_)?reduce|all_gather|token_mean|gather_for_metrics")
_EVALUATES = re.compile(r"eval|valid|test")
_MEANS = frozenset(
    f"torch.nn.{name}" for name in ("functional.cross_entropy", "functional.nll_loss", "CrossEntropyLoss", "NLLLoss")
)


@rule("SW239", "token-mean-per-rank", severity=Severity.WARNING)
def token_mean_per_rank(reading: LintContext) -> Iterator[Hit]:
    """A loss divided by this rank's own number of tokens weights the tokens of ranks unequally.

    Why: gradients are averaged over ranks. Where ranks hold different numbers of unmasked tokens, a mean of each rank's
    means is not the mean over all tokens: tokens count more on ranks that have fewer. No error is raised.
    """
    file = reading.file
    if not any(getattr(call.func, "attr", "") == "backward" for call in file.calls):
        return
    if not any(usage.shards for usage in reading.usages) and not any(True for _ in file.calls_to(FSDP1)):
        return
    summed = _summed_over_ranks(file)
    is_counted_globally = any(map(_COUNTS.search, summed))
    for node in file.parents:
        if isinstance(node, ast.BinOp | ast.AugAssign):
            is_mean = isinstance(node.op, ast.Div) and _is_mean_of_own_tokens(file, node, summed)
        elif isinstance(node, ast.Call):
            is_mean = not is_counted_globally and _averages(file, node)
        else:
            continue
        if is_mean and not _is_evaluating(file, node):
            yield Hit(
                node=node,
                message="the mean is over this rank's tokens; ranks with fewer of them count as much as the others",
                fix="sum the loss and call sw.token_mean(loss_sum, num_tokens), or divide by the all-reduced count",
            )


def _summed_over_ranks(file: FileContext) -> set[str]:
    """The names that are given to a sum over ranks."""
    calls = [call for call in file.calls if _SUMMED_OVER_RANKS.fullmatch(_name(call.func))]
    return {one.id for call in calls for given in (*call.args, *call.keywords) for one in _names(given)}


def _is_mean_of_own_tokens(file: FileContext, node: ast.BinOp | ast.AugAssign, summed: set[str]) -> bool:
    """`loss.sum() / mask.sum()`, where no other rank adds to the count."""
    over, count = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
    if not _LOSSES.search(file.source(over)) or any(one.id in summed for one in _names(count)):
        return False
    return _is_count(file, count)


def _is_count(file: FileContext, node: ast.expr, depth: int = 5) -> bool:
    """`mask.sum()`, `(labels != -100).sum()`, also held away from zero or converted, or a name for it."""
    if isinstance(node, ast.Name):
        return depth > 0 and any(_is_count(file, one, depth - 1) for one in _values(file, node))
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and any(_is_count(file, one, depth) for one in (node.left, node.right))
    if not isinstance(node, ast.Call):
        return False
    name = _name(node.func)
    of = node.func.value if isinstance(node.func, ast.Attribute) and not file.origins(node.func) else None
    if name in _SAME_COUNT:
        return any(_is_count(file, given, depth) for given in (of, *node.args) if given is not None)
    given = of or (node.args[0] if node.args else None)
    # With a dimension it counts by sequence, not by rank.
    if name not in ("sum", "count_nonzero") or given is None or len(node.args) > (of is None):
        return False
    return name == "count_nonzero" or any(_MASKS.search(file.source(one)) for one in (given, *_values(file, given)))


def _averages(file: FileContext, call: ast.Call) -> bool:
    """`cross_entropy` over targets some of which are ignored, or `loss[mask].mean()`."""
    if _name(call.func) == "mean" and isinstance(call.func, ast.Attribute) and not call.args:
        of = call.func.value
        if isinstance(of, ast.Subscript):
            chosen = any(_MASKS.search(file.source(one)) for one in (of.slice, *_values(file, of.slice)))
            return chosen and _LOSSES.search(file.source(of.value)) is not None
        return _name(getattr(of, "func", of)) == "masked_select" and _LOSSES.search(file.source(of)) is not None
    if file.callee(call).origins.isdisjoint(_MEANS):
        return False
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in given or getattr(given.get("reduction"), "value", "mean") != "mean":
        return False
    return "ignore_index" in given or _writes_ignored_targets(file)


def _writes_ignored_targets(file: FileContext) -> bool:
    """`labels[~mask] = -100`, `masked_fill(mask, -100)`, `torch.where(mask, labels, -100)`."""
    for node in file.parents:
        given: list[ast.expr] = []
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            given = [node.value]
        elif isinstance(node, ast.Call) and _name(node.func) in ("masked_fill", "masked_fill_", "where", "full_like"):
            given = node.args
        if any(ast.unparse(one) == "-100" for one in given):
            return True
    return False


def _is_evaluating(file: FileContext, node: ast.AST) -> bool:
    for around in file.ancestors(node):
        if isinstance(around, Function) and _EVALUATES.search(around.name):
            return True
        given = [item.context_expr for item in around.items] if isinstance(around, ast.With) else []
        given += around.decorator_list if isinstance(around, Function) else []
        if any(file.is_any(getattr(one, "func", one), facts.NO_GRAD) for one in given):
            return True
    return False


def _values(file: FileContext, node: ast.expr) -> list[ast.expr]:
    """An expression, or what is assigned to the name that it is."""
    if not isinstance(node, ast.Name):
        return [node]
    return [binding.value for binding in file.bindings(node) if binding.value is not None]


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Name))


def _name(function: ast.AST) -> str:
    return getattr(function, "attr", "") or getattr(function, "id", "")
