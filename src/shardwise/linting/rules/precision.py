"""Dtypes, and tensors that are no longer plain."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.findings import Edit, Safety, Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source.facts import refers_to
from shardwise.source.usage import Usage, modules
from shardwise.source.values import Param, PartRef, ProgramEvent, Value, Values


@rule("SW227", "deepcopy-of-sharded-model", severity=Severity.ERROR)
def deepcopy_of_sharded_model(reading: LintContext) -> Iterator[Hit]:
    """A sharded model cannot be copied with `deepcopy`.

    Symptom: `AssertionError: FSDP does not support deepcopy.`
    """
    for usage, event in reading.events_of("copy.deepcopy"):
        for module in modules(event.argument(0, "x")):
            inside = [
                shard
                for shard in usage.shards
                if usage.follows(event, shard.event)
                and (shard.subject == module or usage.trace.is_part_of(shard.subject, module))
            ]
            if inside:
                yield Hit(
                    node=event.node,
                    message=f"the model is sharded (line {inside[0].event.node.lineno}); FSDP2 refuses deepcopy",
                    fix="copy before sharding and shard both, or keep a sharded average with sw.EMA",
                )


@rule("SW228", "data-assigned-after-shard", severity=Severity.ERROR)
def data_assigned_after_shard(reading: LintContext) -> Iterator[Hit]:
    """Assigning `.data` of a sharded parameter is ignored.

    Why: FSDP keeps the shard it made and gathers from that; the new tensor is never used.
    """
    for usage, event in reading.events:
        if not (event.is_store and event.method == "data"):
            continue
        for value in event.receiver:
            if _is_of_shards(usage, value, event):
                yield Hit(
                    node=event.node,
                    message="FSDP2 goes on using the shard it has; this assignment changes nothing",
                    fix="write in place under torch.no_grad(): p.copy_(...), or change the model before sharding",
                )


def _is_of_shards(usage: Usage, value: Value, event: ProgramEvent) -> bool:
    """Whether a value is a parameter that `fully_shard` has replaced; shardwise lets `.data` arrive."""
    owner: Value | None = None
    if isinstance(value, Param):
        owner = value.owner
    elif isinstance(value, PartRef) and value.path[-1] in ("weight", "bias"):
        owner = PartRef(value.owner, value.path[:-1]) if len(value.path) > 1 else value.owner
    shard = usage.holds_shards(owner, event) if owner is not None else None
    return shard is not None and not shard.is_automatic


_POLICY = "torch.distributed.fsdp.MixedPrecisionPolicy"
_HALF = ("torch.float16", "torch.half")
_BFLOAT = ("torch.bfloat16",)


@rule("SW211", "no-reduce-dtype", severity=Severity.WARNING, safety=Safety.UNSAFE)
def no_reduce_dtype(reading: LintContext) -> Iterator[Hit]:
    """Without `reduce_dtype`, gradients are summed over ranks in the 16-bit compute dtype.

    Why: bfloat16 keeps 8 bits of a sum; the error grows with the number of ranks. Which dtype is used when it is left
    out has also changed between torch versions.
    """
    for _, event in reading.events_of(_POLICY):
        given = event.argument(0, "param_dtype")
        if event.is_open or "reduce_dtype" in event.keywords or len(event.args) > 1:
            continue
        if refers_to(given, *_HALF, *_BFLOAT):
            yield Hit(
                node=event.node,
                message="gradients are reduced over ranks in 16 bits",
                fix="add reduce_dtype=torch.float32",
                edits=_with_reduce_dtype(reading, event),
            )


def _with_reduce_dtype(reading: LintContext, event: ProgramEvent) -> tuple[Edit, ...]:
    """Insert the argument after the last one, spelling torch as the dtype next to it does."""
    call = event.node
    if not isinstance(call, ast.Call) or not (call.args or call.keywords):
        return ()
    dtype = call.args[0] if call.args else next(k.value for k in call.keywords if k.arg == "param_dtype")
    if not (isinstance(dtype, ast.Attribute) and isinstance(dtype.value, ast.Name)):
        return ()
    last = max([*call.args, *call.keywords], key=lambda node: (node.end_lineno, node.end_col_offset))
    end = reading.file.positions.span(last)[1]
    return (Edit(start=end, end=end, text=f", reduce_dtype={dtype.value.id}.float32"),)


@rule("SW212", "fp16-without-scaler", severity=Severity.ERROR)
def fp16_without_scaler(reading: LintContext) -> Iterator[Hit]:
    """Training in float16 without a gradient scaler loses small gradients.

    Why: gradients below 6e-8 become zero in float16. bfloat16 has float32's range and needs no scaler.
    """
    if "GradScaler" in reading.file.text or ".backward(" not in reading.file.text:
        return
    for _, event in reading.events_of(_POLICY):
        if refers_to(event.argument(0, "param_dtype"), *_HALF):
            yield Hit(
                node=event.node,
                message="float16 without a gradient scaler: small gradients become zero",
                fix='use torch.bfloat16, or scale the loss with torch.amp.GradScaler("cuda")',
            )


@rule("SW238", "low-precision-weights", severity=Severity.WARNING, preview=True)
def low_precision_weights(reading: LintContext) -> Iterator[Hit]:
    """A model stored in 16 bits also keeps its optimizer state and its updates in 16 bits.

    Why: an update smaller than 1/256 of a bfloat16 weight changes nothing. Store float32 and compute in bfloat16 with
    `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`.
    """
    for usage in reading.usages:
        casts = [event for event in usage.events if _casts_to_16_bits(event)]
        for event in casts:
            targets = [*modules(event.receiver), *modules(event.result)]
            for shard in usage.shards:
                trained = any(shard.subject in optimizer.owners for optimizer in usage.optimizers)
                if shard.subject in targets and trained and usage.trace.precedes(event, shard.event):
                    yield Hit(
                        node=event.node,
                        message="the trained weights are stored in 16 bits: small updates are lost",
                        fix="keep float32 weights and set MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
                    )
                    break


def _casts_to_16_bits(event: ProgramEvent) -> bool:
    if event.method in ("bfloat16", "half") and not event.args:
        return True
    dtypes: list[Values] = [event.keywords[key].values for key in ("dtype", "torch_dtype") if key in event.keywords]
    if event.method == "to":
        dtypes += event.args
    loads = event.method in ("to", "from_pretrained", "from_config")
    return loads and any(refers_to(values, *_HALF, *_BFLOAT) for values in dtypes)
