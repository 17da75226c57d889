"""Are the groups such that FSDP2 saves memory and overlaps? Local."""

import statistics
from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwise import compat
from shardwise.diagnosing.checks.subject import Subject
from shardwise.findings import Finding, Severity
from shardwise.units import format_bytes

_LARGE = 4.0
_PADDING = 0.25
_SMALL_BYTES = 1 << 20


def not_sharded(subject: Subject) -> Iterator[Finding]:
    """SW411: `fully_shard` was never applied."""
    if not subject.groups:
        yield Finding(
            code="SW411",
            message="the model is not sharded: every rank holds all of it, and no gradient is averaged",
            where="(root)",
            severity=Severity.ERROR,
            fix="model = shardwise.shard(model)",
        )


def root_only(subject: Subject) -> Iterator[Finding]:
    """SW412: a single group, so that the whole model is gathered at once."""
    num_blocks = _num_repeated(subject.model)
    if len(subject.groups) == 1 and num_blocks > 1:
        yield Finding(
            code="SW412",
            message=f"only the root is sharded: all of the model is gathered at once, with {num_blocks} blocks that "
            "could be gathered one at a time",
            where=next(iter(subject.groups)),
            fix="fully_shard each block before the root, or shardwise.shard(model)",
        )


def oversized(subject: Subject) -> Iterator[Finding]:
    """SW414: a group much larger than the others sets the peak of memory."""
    sizes = {name: _bytes(group) for name, group in subject.groups.items()}
    if len(sizes) < 3:
        return
    usual = statistics.median(sizes.values())
    for name, size in sizes.items():
        if size > _LARGE * usual and size > _SMALL_BYTES and size > sum(sizes.values()) / 2:
            yield Finding(
                code="SW414",
                message=f"it gathers {format_bytes(size)}, {size / usual:.0f} times the usual group and over half "
                "of the model",
                where=name,
                fix="shard the modules inside it as groups of their own",
            )


def padding(subject: Subject) -> Iterator[Finding]:
    """SW415: a dimension so short that most of what ranks hold is padding."""
    if subject.mesh is None:
        return
    for group in subject.groups.values():
        for fsdp_param in group.fsdp_params:
            real, held = compat.real_and_padded_numel(fsdp_param)
            item = fsdp_param.sharded_param.element_size()
            if held > real and (held - real) * item > _SMALL_BYTES and held - real > _PADDING * held:
                yield Finding(
                    code="SW415",
                    message=f"{1 - real / held:.0%} of what the ranks hold of it is padding: dimension 0 is shorter "
                    "than the number of ranks, or nearly so",
                    where=subject.name_of(fsdp_param.sharded_param),
                    fix="split another dimension (`shard_placement_fn`); shardwise.shard chooses one",
                )


def sync_left_off(subject: Subject) -> Iterator[Finding]:
    """SW416: gradient reduction is switched off, so that ranks train apart."""
    off = [name for name, group in subject.groups.items() if not compat.reduces_gradients(group)]
    if off:
        yield Finding(
            code="SW416",
            message=f"gradient reduction is switched off in {len(off)} of {len(subject.groups)} groups",
            where=off[0],
            severity=Severity.ERROR,
            fix="model.set_requires_gradient_sync(True) for the last micro-batch; `shardwise.accumulate` cannot "
            "forget it",
        )


def left_gathered(subject: Subject) -> Iterator[Finding]:
    """SW417: a group stands gathered between steps: parameters() lists copies, a step would leave them stale."""
    gathered = [name for name, group in subject.groups.items() if compat.is_gathered(group)]
    if gathered:
        yield Finding(
            code="SW417",
            message=f"{len(gathered)} groups stand gathered: parameters() lists their gathered copies, and an "
            "optimizer built now would train those",
            where=gathered[0],
            fix="model.reshard() after a forward without backward; shardwise.shard does it by itself",
        )


def _num_repeated(model: nn.Module) -> int:
    """The largest number of siblings of one class that hold parameters."""
    counts = [
        sum(1 for child in module.children() if type(child) is kind and any(True for _ in child.parameters()))
        for module in model.modules()
        for kind in {type(child) for child in module.children() if any(True for _ in child.children())}
    ]
    return max(counts, default=0)


def _bytes(group: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in compat.sharded_parameters(group))
