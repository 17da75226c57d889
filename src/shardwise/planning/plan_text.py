"""Plans as text: a tree that a person reads before launching."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.planning.plan import Group, Plan
from shardwise.units import format_bytes, format_count


def render_plan(plan: Plan) -> str:
    """A readable tree: one row a group, with sizes, dtypes, policy and reason."""
    mesh = " x ".join(f"{name} {size}" for name, size in plan.axes) or "one rank"
    total = sum(parameter.numel for parameter in plan.parameters)
    lines = [
        f"{plan.model}: {format_count(total)} parameters, {format_bytes(plan.num_bytes)}; "
        f"{len(plan.groups)} groups over {mesh} ({plan.device}); "
        f"{format_bytes(plan.bytes_per_rank)} of parameters per rank"
    ]
    lines += [f"  · {reason}" for reason in plan.reasons]
    for first, last, group in _runs(plan.groups):
        count = f"{first} … {last}" if first != last else first
        lines.append(f"├─ {count}  {_sizes(group)}  {_policy(group)}")
        lines.append(f"│    {group.reason}")
        lines += [f"│    {p.fqn}: {p.reason}" for p in group.parameters if p.reason]
        lines += [f"│    entered through {', '.join(group.entry_points)}"] if group.entry_points else []
    for title, parameters in (("replicated", plan.replicated), ("ignored", plan.ignored)):
        lines += [f"├─ {title}: {p.fqn}  {list(p.shape)} {p.dtype}  {p.reason}" for p in parameters]
    lines += [f"└─ warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines)


def _sizes(group: Group) -> str:
    return f"{format_count(group.numel)} parameters, {format_bytes(group.num_bytes)}"


def _policy(group: Group) -> str:
    compute = group.param_dtype or "storage"
    parts = [f"{'/'.join(group.storage_dtypes) or '-'} → {compute}, reduce {group.reduce_dtype or compute}"]
    if group.output_dtype:
        parts.append(f"output {group.output_dtype}")
    parts.append(_after_forward(group.reshard_after_forward))
    if group.offload:
        parts.append("offload to CPU" + (", pinned" if group.pin_memory else ""))
    if group.forward_prefetch or group.backward_prefetch:
        parts.append(f"prefetch {len(group.forward_prefetch)}/{len(group.backward_prefetch)}")
    return "[" + "; ".join(parts) + "]"


def _after_forward(reshard: bool | int | None) -> str:
    if reshard is None or isinstance(reshard, bool):
        return "reshard" if reshard else "keep gathered"
    return f"reshard to {reshard}"


def _runs(groups: tuple[Group, ...]) -> Iterator[tuple[str, str, Group]]:
    """Fold neighbouring groups that differ only in their index, so that 80 layers print as one row."""
    start = 0
    for index in range(1, len(groups) + 1):
        if index == len(groups) or _shape_of(groups[index]) != _shape_of(groups[start]):
            yield groups[start].name, groups[index - 1].name, groups[start]
            start = index


def _shape_of(group: Group) -> tuple[Any, ...]:
    digits = str.maketrans("", "", "0123456789")
    parameters = tuple((p.fqn.translate(digits), p.shape, p.dtype, p.trainable) for p in group.parameters)
    names = tuple(module.translate(digits) for module in group.modules)
    return names, group.kind, parameters, group.param_dtype, group.reshard_after_forward, group.offload, group.held
