"""Dtypes, and tensors that are no longer plain."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.findings import Edit, Safety, Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source.edits import change
from shardwise.source.facts import refers_to
from shardwise.source.syntax import argument_of, given_to
from shardwise.source.values import ObjectRef, Param, ProgramEvent, modules

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

    Why: FSDP keeps the shard it made and gathers from that; the new tensor is never used.
    """
    for trace, event in context.events:
        for value in event.receiver if event.is_store and event.method == "data" else ():
            owner = value.owner if isinstance(value, Param) else None
            if isinstance(value, ObjectRef) and value.path and value.path[-1] in ("weight", "bias"):
                owner = value.parent
            shard = trace.holds_shards(owner, event) if owner is not None else None
            if shard is not None and not shard.is_automatic:  # shardwise lets `.data` arrive
                yield Hit(event.node, "FSDP2 goes on using the shard it has; this assignment changes nothing")


@rule("SW211", Severity.WARNING, fix="add reduce_dtype=torch.float32", safety=Safety.UNSAFE)
def no_reduce_dtype(context: LintContext) -> Iterator[Hit]:
    """Without `reduce_dtype`, gradients are summed over ranks in the 16-bit compute dtype.

    Why: bfloat16 keeps 8 bits of a sum; the error grows with the number of ranks. Which dtype is used when it is left
    out has also changed between torch versions.
    """
    for _, event in context.events_of(_POLICY):
        is_given = event.is_open or "reduce_dtype" in event.keywords or len(event.args) > 1
        if not is_given and refers_to(event.argument(0, "param_dtype"), *_16_BITS):
            yield Hit(event.node, "gradients are reduced over ranks in 16 bits", edits=_reduce_dtype(context, event))


def _reduce_dtype(context: LintContext, event: ProgramEvent) -> tuple[Edit, ...]:
    """Insert the argument after the last one, spelling torch as the dtype next to it does."""
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
        for _, event in context.events_of(_POLICY):
            if refers_to(event.argument(0, "param_dtype"), *_HALF):
                yield Hit(event.node, "float16 without a gradient scaler: small gradients become zero")


@rule(
    "SW238",
    Severity.WARNING,
    fix="keep float32 weights and set MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
    preview=True,
)
def low_precision_weights(context: LintContext) -> Iterator[Hit]:
    """A model stored in 16 bits also keeps its optimizer state and its updates in 16 bits.

    Why: an update smaller than 1/256 of a bfloat16 weight changes nothing. Store float32 and compute in bfloat16 with
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
