"""Rules about gradients, losses and dtypes: wrong results without an error."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.findings import Edit, Safety, Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source import facts
from shardwise.source.edits import change
from shardwise.source.facts import refers_to
from shardwise.source.syntax import FSDP1, FileContext, Function, argument_of, calls_in, given_to, last_name
from shardwise.source.trace import Trace
from shardwise.source.values import ObjectRef, Param, ProgramEvent, Value, modules, nested, owners_of_params

_CLIP = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.get_total_norm")
_SWITCHES = {"set_requires_gradient_sync": "requires_gradient_sync", "set_requires_all_reduce": "requires_all_reduce"}
_NORMS = ("torch.norm", "torch.linalg.vector_norm", "torch.linalg.norm")
_WORLD = re.compile(r"^(world_size|num_ranks|n_gpus|num_gpus)$")
_LOGS = re.compile(r"^(print|log|info|debug|warning|add_scalar|log_metrics|set_postfix)$")


@rule("SW232")
def gradient_sync_left_off(context: LintContext) -> Iterator[Hit]:
    """`set_requires_gradient_sync(False)` stays in effect until it is called with True.

    Why: it is a setting, not a context manager. Without the second call gradients are never reduced: ranks diverge.
    """
    for switch, name in _SWITCHES.items():
        calls = [call for call in context.file.calls if getattr(call.func, "attr", "") == switch]
        flags = {call: flag for call in calls if (flag := argument_of(call, 0, name)) is not None}
        if all(getattr(flag, "value", None) is False for flag in flags.values()):  # never True, and never computed
            for call in flags:
                fix = f"call {switch}(is_last_micro_step) before each forward"
                yield Hit(call, f"{switch} is called with False, but never with True", fix)


@rule("SW233", Severity.WARNING, fix="call .full_tensor() on every rank before reading it")
def norm_of_shards(context: LintContext) -> Iterator[Hit]:
    """The norm of a sharded gradient is a DTensor; its local value is not the norm.

    Why: a norm computed by hand covers only this rank's shard, too small by about the square root of the number of
    ranks; on older torch the norm returned by `clip_grad_norm_` is partial as well, and cannot be formatted.
    """
    for trace in context.traces:
        norms = {value: event for event in trace.events if _is_norm(trace, event) for value in event.result}
        gathered = {value for event in trace.events if event.method == "full_tensor" for value in event.receiver}
        for event in trace.events if norms else ():
            for value in _norms_read(context.file, event, norms):
                if value in norms and value not in gathered:
                    line = norms[value].line
                    yield Hit(event.node, f"the norm of line {line} is a DTensor; this reads it without full_tensor()")


def _is_norm(trace: Trace, event: ProgramEvent) -> bool:
    """Whether a call returns a norm over gradients of sharded parameters."""
    owners = set()
    if event.is_call_to(*_CLIP, *_NORMS):
        owners = owners_of_params(event.argument(0, "parameters", "tensors", "input", "x"))
    elif event.method == "norm":
        owners = {value.owner for value in event.receiver if isinstance(value, Param)}
    return any(trace.holds_shards(owner, event) is not None for owner in owners)


def _norms_read(file: FileContext, event: ProgramEvent, norms: dict[Value, ProgramEvent]) -> Iterator[Value]:
    """Yield values that an event converts to numbers or text: by method, as an argument, or by name in an f-string."""
    if event.method in ("item", "to_local", "tolist") and not event.args:
        yield from event.receiver
    elif (event.method == "float" and not event.receiver) or _LOGS.match(event.method):
        yield from nested(frozenset().union(*event.args), depth=2)
        for value, made in norms.items() if _LOGS.match(event.method) else ():
            names = {getattr(one, "id", "") for one in file.targets(made.node)[:1]}
            if names & _formatted_names(event.node) and made.order < event.order:
                yield value


def _formatted_names(node: ast.AST) -> set[str]:
    """Return the names that f-strings format with a format spec, as in `{norm:.3f}`; DTensors do not support one."""
    parts = [one for one in ast.walk(node) if isinstance(one, ast.FormattedValue) and one.format_spec is not None]
    return {part.value.id for part in parts if isinstance(part.value, ast.Name)}


@rule("SW234", Severity.WARNING, fix="do not multiply by the number of ranks")
def numel_times_world_size(context: LintContext) -> Iterator[Hit]:
    """A DTensor's `numel()` and `shape` are those of the whole tensor.

    Why: FSDP1's flat shards had to be multiplied by the number of ranks; FSDP2's parameters have their global size.
    """
    file = context.file
    for node in file.nodes(ast.BinOp) if any(trace.shards for trace in context.traces) else ():
        sides = [(node.left, node.right), (node.right, node.left)] if isinstance(node.op, ast.Mult) else []
        for count, world in sides:
            if _is_world(file, world) and _counts(file, count):
                yield Hit(node, "numel() of a sharded parameter is already the global count")


def _is_world(file: FileContext, node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return file.is_any(node.func, {"torch.distributed.get_world_size"})
    return bool(_WORLD.match(last_name(node)))


def _counts(file: FileContext, node: ast.expr) -> bool:
    if any(getattr(call.func, "attr", "") == "numel" for call in calls_in(node)):
        return True
    if not isinstance(node, ast.Name):
        return False
    added = [one.value for one in file.nodes(ast.AugAssign) if getattr(one.target, "id", "") == node.id]
    return any(not isinstance(value, ast.Name) and _counts(file, value) for value in [*file.assigned(node), *added])


_LOSSES = re.compile(r"loss|nll|cross_entropy|xent", re.IGNORECASE)
_MASKS = re.compile(r"mask|valid|ignore|!=|\.ne\(|not_equal|-100")
_COUNTS = re.compile(r"tok|count|num|mask|valid|denom", re.IGNORECASE)
_SAME_COUNT = frozenset({"clamp", "clamp_min", "clamp_", "to", "float", "long", "item", "max", "int"})
_SUMMED_OVER_RANKS = re.compile(r"(all_)?reduce|all_gather|token_mean|gather_for_metrics")
_EVALUATES = re.compile(r"eval|valid|test")
_MEANS = frozenset(
    f"torch.nn.{name}" for name in ("functional.cross_entropy", "functional.nll_loss", "CrossEntropyLoss", "NLLLoss")
)


@rule(
    "SW239",
    Severity.WARNING,
    fix="sum the loss and call sw.token_mean(loss_sum, num_tokens), or divide by the all-reduced count",
)
def token_mean_per_rank(context: LintContext) -> Iterator[Hit]:
    """A loss divided by this rank's own number of tokens weights tokens unequally across ranks.

    Why: gradients are averaged over ranks. If ranks have different numbers of unmasked tokens, the mean of the ranks'
    means is not the mean over all tokens: tokens on ranks with fewer tokens have more weight. No error is raised.
    """
    file = context.file
    if not any(getattr(call.func, "attr", "") == "backward" for call in file.calls):
        return
    if not any(trace.shards for trace in context.traces) and not any(True for _ in file.calls_to(FSDP1)):
        return
    sums = [call for call in file.calls if _SUMMED_OVER_RANKS.fullmatch(last_name(call.func))]
    summed = {one.id for call in sums for given in (*call.args, *call.keywords) for one in _names(given)}
    is_counted_globally = any(map(_COUNTS.search, summed))
    for node in file.nodes(ast.BinOp, ast.AugAssign, ast.Call):
        if isinstance(node, ast.Call):
            is_mean = not is_counted_globally and _averages(file, node)
        else:
            is_mean = isinstance(node.op, ast.Div) and _is_mean_of_own_tokens(file, node, summed)
        if is_mean and not _is_evaluating(file, node):
            message = "the mean is over this rank's tokens; ranks with fewer of them count as much as the others"
            yield Hit(node, message)


def _is_mean_of_own_tokens(file: FileContext, node: ast.BinOp | ast.AugAssign, summed: set[str]) -> bool:
    """Whether it is `loss.sum() / mask.sum()` with a count that is not reduced over ranks."""
    over, count = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
    if not _LOSSES.search(file.source(over)) or any(one.id in summed for one in _names(count)):
        return False
    return _is_count(file, count)


def _is_count(file: FileContext, node: ast.expr, depth: int = 5) -> bool:
    """Whether it is `mask.sum()` or `(labels != -100).sum()`, possibly clamped or converted, or a name of one."""
    if isinstance(node, ast.Name):
        return depth > 0 and any(_is_count(file, one, depth - 1) for one in file.assigned(node))
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and any(_is_count(file, one, depth) for one in (node.left, node.right))
    if not isinstance(node, ast.Call):
        return False
    name = last_name(node.func)
    of = node.func.value if isinstance(node.func, ast.Attribute) and not file.origins(node.func) else None
    if name in _SAME_COUNT:
        return any(_is_count(file, given, depth) for given in (of, *node.args) if given is not None)
    given = of or (node.args[0] if node.args else None)
    # With a dimension it counts tokens per sequence, not per rank.
    if name not in ("sum", "count_nonzero") or given is None or len(node.args) > (of is None):
        return False
    return name == "count_nonzero" or _is_masked(file, given)


def _is_masked(file: FileContext, node: ast.expr) -> bool:
    return any(_MASKS.search(file.source(one)) for one in (node, *file.assigned(node)))


def _averages(file: FileContext, call: ast.Call) -> bool:
    """Whether it is `cross_entropy` with ignored targets, or `loss[mask].mean()`."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "mean" and not call.args:
        of = call.func.value
        loss = of.value if isinstance(of, ast.Subscript) else of
        is_masked = isinstance(of, ast.Subscript) and _is_masked(file, of.slice)
        is_selected = last_name(getattr(of, "func", of)) == "masked_select"
        return (is_masked or is_selected) and _LOSSES.search(file.source(loss)) is not None
    if file.callee(call).origins.isdisjoint(_MEANS):
        return False
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in given or getattr(given.get("reduction"), "value", "mean") != "mean":
        return False
    return "ignore_index" in given or _writes_ignored_targets(file)


def _writes_ignored_targets(file: FileContext) -> bool:
    """Whether there is `labels[~mask] = -100`, `masked_fill(mask, -100)` or `torch.where(mask, labels, -100)`."""
    given = [node.value for node in file.nodes(ast.Assign) if isinstance(node.targets[0], ast.Subscript)]
    fills = ("masked_fill", "masked_fill_", "where", "full_like")
    given += [argument for call in file.calls if last_name(call.func) in fills for argument in call.args]
    return any(ast.unparse(one) == "-100" for one in given)


def _is_evaluating(file: FileContext, node: ast.AST) -> bool:
    for around in file.ancestors(node):
        given = [item.context_expr for item in around.items] if isinstance(around, ast.With) else []
        if isinstance(around, Function):
            given += around.decorator_list
            if _EVALUATES.search(around.name):
                return True
        if any(file.is_any(getattr(one, "func", one), facts.NO_GRAD) for one in given):
            return True
    return False


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Name))


_POLICY = "torch.distributed.fsdp.MixedPrecisionPolicy"
_HALF = ("torch.float16", "torch.half")
_16_BITS = (*_HALF, "torch.bfloat16")


@rule("SW227", fix="copy before sharding and shard both, or keep a sharded average with sw.EMA")
def deepcopy_of_sharded_model(context: LintContext) -> Iterator[Hit]:
    """A sharded model cannot be copied with `deepcopy`.

    Symptom: `AssertionError: FSDP does not support deepcopy.`
    """
    for trace, event in context.events_of("copy.deepcopy"):
        for module in modules(event.argument(0, "x")):
            for shard in trace.shards:
                is_inside = shard.subject == module or trace.is_part_of(shard.subject, module)
                if is_inside and trace.follows(event, shard.event):
                    line = shard.event.line
                    yield Hit(event.node, f"the model is sharded (line {line}); FSDP2 refuses deepcopy")


@rule("SW228", fix="write in place under torch.no_grad(): p.copy_(...), or change the model before sharding")
def data_assigned_after_shard(context: LintContext) -> Iterator[Hit]:
    """Assigning `.data` of a sharded parameter is ignored.

    Why: FSDP all-gathers from its own shard; the new tensor is never used.
    """
    for trace, event in context.events:
        for value in event.receiver if event.is_store and event.method == "data" else ():
            owner = value.owner if isinstance(value, Param) else None
            if isinstance(value, ObjectRef) and value.path and value.path[-1] in ("weight", "bias"):
                owner = value.parent
            shard = trace.holds_shards(owner, event) if owner is not None else None
            if shard is not None and not shard.is_automatic:  # shardwise handles assignments to `.data`
                yield Hit(event.node, "FSDP2 continues with its own shard; this assignment changes nothing")


@rule("SW211", Severity.WARNING, fix="add reduce_dtype=torch.float32", safety=Safety.UNSAFE)
def no_reduce_dtype(context: LintContext) -> Iterator[Hit]:
    """Without `reduce_dtype`, gradients are summed over ranks in the 16-bit compute dtype.

    Why: bfloat16 sums have 8 significant bits; the error grows with the number of ranks. The default dtype has also
    changed between torch versions.
    """
    for _, event in context.events_of(_POLICY):
        is_given = event.is_open or "reduce_dtype" in event.keywords or len(event.args) > 1
        if not is_given and refers_to(event.argument(0, "param_dtype"), *_16_BITS):
            yield Hit(event.node, "gradients are reduced over ranks in 16 bits", edits=_reduce_dtype(context, event))


def _reduce_dtype(context: LintContext, event: ProgramEvent) -> tuple[Edit, ...]:
    """Insert the argument after the last one; torch is spelled as in the dtype argument."""
    assert isinstance(event.node, ast.Call), "a call of the policy"
    dtype = argument_of(event.node, 0, "param_dtype")
    if not (isinstance(dtype, ast.Attribute) and isinstance(dtype.value, ast.Name)):
        return ()
    end = max(context.file.positions.span(given)[1] for given in given_to(event.node))
    return (change(end, end, f", reduce_dtype={dtype.value.id}.float32"),)


@rule("SW212", fix='use torch.bfloat16, or scale the loss with torch.amp.GradScaler("cuda")')
def fp16_without_scaler(context: LintContext) -> Iterator[Hit]:
    """Training in float16 without a gradient scaler loses small gradients.

    Why: gradients below 6e-8 become zero in float16. bfloat16 has float32's range and needs no scaler.
    """
    if "GradScaler" not in context.file.text and ".backward(" in context.file.text:
        for _, event in context.events_of(_POLICY, _POLICY.removesuffix("Policy")):  # FSDP1's too
            dtypes = event.argument(0, "param_dtype")
            if dtypes and all(refers_to(frozenset({one}), *_HALF) for one in dtypes):  # not one of several choices
                yield Hit(event.node, "float16 without a gradient scaler: small gradients become zero")


@rule(
    "SW238",
    Severity.WARNING,
    fix="keep float32 weights and set MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
    preview=True,
)
def low_precision_weights(context: LintContext) -> Iterator[Hit]:
    """A model stored in 16 bits also keeps its optimizer state and its updates in 16 bits.

    Why: an update smaller than 1/256 of a bfloat16 weight is lost. Store float32 and compute in bfloat16 with
    `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`.
    """
    for trace, event in context.events:
        targets = [*modules(event.receiver), *modules(event.result)] if _casts_to_16_bits(event) else []
        for shard in trace.shards:
            is_trained = any(shard.subject in optimizer.owners for optimizer in trace.optimizers)
            if shard.subject in targets and is_trained and trace.precedes(event, shard.event):
                yield Hit(event.node, "the trained weights are stored in 16 bits: small updates are lost")


def _casts_to_16_bits(event: ProgramEvent) -> bool:
    if event.method in ("bfloat16", "half") and not event.args:
        return True
    dtypes = [event.argument(None, "dtype"), event.argument(None, "torch_dtype")]
    dtypes += event.args if event.method == "to" else ()
    loads = event.method in ("to", "from_pretrained", "from_config")
    return loads and any(refers_to(values, *_16_BITS) for values in dtypes)
