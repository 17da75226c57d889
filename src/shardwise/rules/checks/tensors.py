"""Rules about reaching behind a sharded model's parameters: copying the module, assigning `.data`."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.findings import Severity
from shardwise.rules.program.events import Event
from shardwise.rules.program.usage import Usage, modules
from shardwise.rules.program.values import Param, Part, Value
from shardwise.rules.registry import Hit, Reading, rule


@rule("SW227", "deepcopy-of-sharded-model", severity=Severity.ERROR)
def deepcopy_of_sharded_model(reading: Reading) -> Iterator[Hit]:
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
def data_assigned_after_shard(reading: Reading) -> Iterator[Hit]:
    """Assigning `.data` of a sharded parameter is ignored.

    Why: FSDP keeps the shard it made and gathers from that; the new tensor is never used.
    """
    for usage in reading.usages:
        for event in usage.events:
            if not (event.is_store and event.method == "data"):
                continue
            for value in event.receiver:
                if _is_of_shards(usage, value, event):
                    yield Hit(
                        node=event.node,
                        message="FSDP2 goes on using the shard it has; this assignment changes nothing",
                        fix="write in place under torch.no_grad(): p.copy_(...), or change the model before sharding",
                    )


def _is_of_shards(usage: Usage, value: Value, event: Event) -> bool:
    """Whether a value is a parameter that `fully_shard` has replaced; shardwise lets `.data` arrive."""
    owner: Value | None = None
    if isinstance(value, Param):
        owner = value.owner
    elif isinstance(value, Part) and value.path[-1] in ("weight", "bias"):
        owner = Part(value.owner, value.path[:-1]) if len(value.path) > 1 else value.owner
    shard = usage.holds_shards(owner, event) if owner is not None else None
    return shard is not None and not shard.is_automatic
