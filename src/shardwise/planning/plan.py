"""The Plan: one immutable, printable value that says everything sharding will do, and why. No torch calls."""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from shardwise.units import format_bytes, format_count

PLAN_FORMAT = 1

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "complex64": 8, "complex128": 16, "int64": 8,
    "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedParameter:
    """One parameter: where it lives in the model and how its storage is spread over ranks."""

    fqn: str
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor (ties)."""
    shape: tuple[int, ...]
    dtype: str
    """Storage dtype."""
    trainable: bool = True
    placement: Literal["shard", "replicate", "ignore"] = "shard"
    shard_dim: int = 0
    make_contiguous: bool = False
    """Storage is rewritten row-major first: FSDP2 shards nothing else."""
    upcast_from: str | None = None
    """The dtype before sharding, where the plan changes storage."""
    reason: str = ""
    """Why, where it is not the default."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * DTYPE_BYTES.get(self.dtype, 4)

    def bytes_per_rank(self, num_shards: int) -> int:
        """Storage on the fullest rank; dim 0 is padded up to a multiple of the ranks."""
        if self.placement != "shard" or not self.shape:
            return self.num_bytes
        rows = self.shape[self.shard_dim]
        return -(-rows // num_shards) * (self.num_bytes // rows if rows else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters gathered together: the modules of one `fully_shard` call and its settings."""

    modules: tuple[str, ...]
    """FQNs; the root is the empty name."""
    kind: Literal["block", "leaf", "tie", "island", "storage", "part", "root"]
    """What made it a group; see `reason`."""
    parameters: tuple[PlannedParameter, ...]
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_inputs: bool = True
    reshard_after_forward: bool | int | None = None
    offload: bool = False
    pin_memory: bool = False
    forward_prefetch: tuple[str, ...] = ()
    """First module of each group gathered ahead in forward."""
    backward_prefetch: tuple[str, ...] = ()
    entry_points: tuple[str, ...] = ()
    """`module:method` names besides `forward` that enter the group (`:method` for the root)."""
    held: bool = False
    """Gathered when the root is entered and kept to the end of backward: code outside reads its parameters."""
    reduce_unused: bool = False
    """Send zeros for parameters that got no gradient on this rank."""
    reason: str = ""

    @property
    def name(self) -> str:
        """How the group is called in messages."""
        return "+".join(module or "(root)" for module in self.modules)

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def num_bytes(self) -> int:
        return sum(parameter.num_bytes for parameter in self.parameters)

    @property
    def storage_dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({parameter.dtype for parameter in self.parameters}))

    def bytes_per_rank(self, num_shards: int) -> int:
        return sum(parameter.bytes_per_rank(num_shards) for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What `shard()` will do to a model. Equal on every rank; `print(plan)` is a tree with reasons."""

    model: str
    """Class of the root module."""
    device: str
    """Device type the groups live on."""
    axes: tuple[tuple[str, int], ...]
    """Data-parallel mesh axes, outermost first: `(("replicate", 2), ("shard", 4))`."""
    groups: tuple[Group, ...]
    """Children first, root last."""
    replicated: tuple[PlannedParameter, ...] = ()
    """Held whole on every rank: too small or odd for FSDP2."""
    ignored: tuple[PlannedParameter, ...] = ()
    """Left as they are, by request; gradients are averaged."""
    grad_scaler: bool = False
    """float16 compute: the loop needs `torch.amp.GradScaler`."""
    early_root: bool = False
    """Gather the root right after `optimizer.step()`."""
    outer_modules: tuple[str, ...] = ()
    """Modules outside all groups but the root that a script may call by themselves; they enter through the root."""
    track_unused: bool = False
    """The model's code can leave parameters out: agree after each backward on which got no gradient anywhere."""
    reasons: tuple[str, ...] = ()
    """Decisions about the model as a whole."""
    warnings: tuple[str, ...] = ()

    @property
    def num_shards(self) -> int:
        return dict(self.axes).get("shard", 1)

    @property
    def root(self) -> Group:
        return self.groups[-1]

    @property
    def parameters(self) -> Iterator[PlannedParameter]:
        """Every parameter once, whatever becomes of it."""
        for group in self.groups:
            yield from group.parameters
        yield from self.replicated
        yield from self.ignored

    @property
    def num_bytes(self) -> int:
        return sum(parameter.num_bytes for parameter in self.parameters)

    @property
    def bytes_per_rank(self) -> int:
        """Parameter storage on the fullest rank."""
        return sum(parameter.bytes_per_rank(self.num_shards) for parameter in self.parameters)

    def group_of(self, parameter_fqn: str) -> Group | None:
        """The group that gathers a parameter, by any of its names."""
        for group in self.groups:
            for parameter in group.parameters:
                if parameter_fqn == parameter.fqn or parameter_fqn in parameter.aliases:
                    return group
        return None

    def to_dict(self) -> dict[str, Any]:
        return {"format": PLAN_FORMAT, **asdict(self)}

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON; `Plan.from_json` reads it back to an equal plan."""
        return json.dumps(self.to_dict(), indent=indent, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        return plan_from_dict(json.loads(text))

    def digest(self) -> str:
        """Short fingerprint; ranks compare it before they change anything."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return render_plan(self)


def plan_from_dict(data: dict[str, Any]) -> Plan:
    """Rebuild a plan from `Plan.to_dict()`; unknown formats are refused."""
    from shardwise.errors import PlanError

    data = dict(data)
    if (found := data.pop("format", None)) != PLAN_FORMAT:
        raise PlanError(
            f"plan has format {found!r}, this version reads {PLAN_FORMAT}",
            why="the layout of a plan may change between releases",
            fix="make the plan again with shardwise.plan(...)",
        )
    groups = tuple(
        Group(**{**_tuples(Group, group), "parameters": _parameters(group["parameters"])}) for group in data["groups"]
    )
    rebuilt = {"groups": groups, "replicated": _parameters(data["replicated"]), "ignored": _parameters(data["ignored"])}
    return Plan(**{**_tuples(Plan, data), **rebuilt, "axes": tuple((name, size) for name, size in data["axes"])})


def _parameters(rows: list[dict[str, Any]]) -> tuple[PlannedParameter, ...]:
    return tuple(PlannedParameter(**_tuples(PlannedParameter, row)) for row in rows)


def _tuples(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    """JSON lists back to the tuples the dataclass holds."""
    known = {f.name for f in fields(kind)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if name in known}


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
    parts.append(
        {True: "reshard", False: "keep gathered", None: "keep gathered"}[group.reshard_after_forward]
        if isinstance(group.reshard_after_forward, bool | None)
        else f"reshard to {group.reshard_after_forward}"
    )
    if group.offload:
        parts.append("offload to CPU" + (", pinned" if group.pin_memory else ""))
    if group.forward_prefetch or group.backward_prefetch:
        parts.append(f"prefetch {len(group.forward_prefetch)}/{len(group.backward_prefetch)}")
    return "[" + "; ".join(parts) + "]"


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
    prefetch = (len(group.forward_prefetch), len(group.backward_prefetch))
    return names, group.kind, parameters, group.param_dtype, group.reshard_after_forward, group.offload, prefetch
