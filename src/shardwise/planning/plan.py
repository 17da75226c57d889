"""Plan: every sharding decision for a model, with reasons; as text and JSON."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Literal

from pydantic import TypeAdapter

from shardwise.config.schema import ROOT_PATTERN, SHARD_AXES
from shardwise.errors import PlanError, listed
from shardwise.units import format_bytes, format_count

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "complex64": 8, "complex128": 16, "int64": 8,
    "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
PLAN_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedParameter:
    """One parameter: its place in the model and the sharding of its storage."""

    fqn: str
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor (ties)."""
    shape: tuple[int, ...]
    dtype: str
    """Storage dtype."""
    trainable: bool = True
    placement: Literal["shard", "replicate", "ignore"] = "shard"
    shard_dim: int = 0
    splits: tuple[tuple[str, int, int], ...] = ()
    """Splits over mesh axes before sharding: axis, dimension and number of ranks, as in `("tensor", 0, 2)`."""
    make_contiguous: bool = False
    """Make the storage row-major first, as FSDP2 requires."""
    upcast_from: str | None = None
    """Original dtype, if the plan changes the storage dtype."""
    packed_bytes: int | None = None
    """Storage over all ranks, if a tensor subclass packs elements into fewer bits than `dtype`."""
    reason: str = ""
    """Reason for anything but the default."""

    @property
    def numel(self) -> int:
        """Number of elements, over all ranks."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Storage, over all ranks."""
        return self.numel * DTYPE_BYTES.get(self.dtype, 4) if self.packed_bytes is None else self.packed_bytes

    def bytes_per_rank(self, num_shards: int) -> int:
        """Storage on the fullest rank; dim 0 is padded up to a multiple of the ranks."""
        shape = self.local_shape
        num_bytes = self.num_bytes * math.prod(shape) // max(self.numel, 1)
        if self.placement != "shard" or not shape:
            return num_bytes
        rows = shape[self.shard_dim]
        return -(-rows // num_shards) * (num_bytes // rows if rows else 0)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape passed to `fully_shard` on the fullest rank, after `splits`."""
        shape = list(self.shape)
        for _, dim, num_ranks in self.splits:
            shape[dim] = -(-shape[dim] // num_ranks)
        return tuple(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelModule:
    """Conversion of a module for one form of parallelism or float8, with its reason."""

    fqn: str
    how: str
    """Style, method or recipe; empty for a module that is not converted."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters of one group: the modules of one `fully_shard` call and its settings."""

    modules: tuple[str, ...]
    """FQNs; the root is the empty name."""
    kind: Literal["block", "leaf", "tie", "island", "storage", "part", "experts", "root"]
    """Why these modules form a group; see `reason`."""
    parameters: tuple[PlannedParameter, ...]
    shard_axes: tuple[str, ...] = ("shard",)
    """Mesh axes that its parameters are sharded over, flattened into one."""
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_inputs: bool = True
    reshard_after_forward: bool | int | None = None
    offload: bool = False
    pin_memory: bool = False
    forward_prefetch: tuple[str, ...] = ()
    """First module of each group prefetched in forward."""
    backward_prefetch: tuple[str, ...] = ()
    entry_points: tuple[str, ...] = ()
    """`module:method` names besides `forward` that enter the group (`:method` for the root)."""
    held: bool = False
    """Kept unsharded from the root's forward to the end of backward, because code outside reads its parameters."""
    reduce_unused: bool = False
    """Send zeros for parameters that got no gradient on this rank."""
    reason: str = ""

    @property
    def name(self) -> str:
        """Name of the group in messages."""
        return "+".join(module or ROOT_PATTERN for module in self.modules)

    @property
    def numel(self) -> int:
        """Number of elements, over all ranks."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def num_bytes(self) -> int:
        """Storage, over all ranks."""
        return sum(parameter.num_bytes for parameter in self.parameters)

    @property
    def storage_dtypes(self) -> tuple[str, ...]:
        """Storage dtypes of its parameters."""
        return tuple(sorted({parameter.dtype for parameter in self.parameters}))

    def bytes_per_rank(self, num_shards: int) -> int:
        """Storage on the fullest rank."""
        return sum(parameter.bytes_per_rank(num_shards) for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Sharding plan of a model. Equal on every rank; `print(plan)` shows a tree with reasons."""

    model: str
    """Class of the root module."""
    device: str
    """Device type of the groups."""
    axes: tuple[tuple[str, int], ...]
    """Mesh axes, outermost first: `(("replicate", 2), ("shard", 4))`. For a pipeline, the axes of one stage."""
    groups: tuple[Group, ...]
    """Children first, root last."""
    replicated: tuple[PlannedParameter, ...] = ()
    """Replicated on every rank: FSDP2 cannot shard them."""
    ignored: tuple[PlannedParameter, ...] = ()
    """Not sharded, as requested; gradients are averaged."""
    grad_scaler: bool = False
    """float16 compute: the loop needs `torch.amp.GradScaler`."""
    early_root: bool = False
    """Unshard the root right after `optimizer.step()`."""
    outer_modules: tuple[str, ...] = ()
    """Modules in the root's group only that a script may call on their own; such a call enters the root."""
    track_unused: bool = False
    """The model may skip parameters: after each backward, ranks agree on those without a gradient on any rank."""
    float8: tuple[ParallelModule, ...] = ()
    """Modules with float8 matrix products, and unconverted modules."""
    tensor_parallel: tuple[ParallelModule, ...] = ()
    """Styles of the modules split over the tensor axis, and unsplit modules."""
    expert_parallel: tuple[ParallelModule, ...] = ()
    """Modules whose experts are split over the expert axis."""
    context_parallel: tuple[ParallelModule, ...] = ()
    """Attention on sequences split over the context axis."""
    pipeline: tuple[ParallelModule, ...] = ()
    """Stages of the pipeline."""
    activations: Literal["auto", "keep", "full", "selective", "offload", "every_n", "regions"] | float = "auto"
    """Activation checkpointing of the blocks, as in `ShardConfig`."""
    compile: str | bool = "auto"
    """Whether blocks are compiled, as in `ShardConfig`."""
    reasons: tuple[str, ...] = ()
    """Decisions about the model as a whole."""
    warnings: tuple[str, ...] = ()

    @property
    def num_shards(self) -> int:
        """Number of ranks that dense parameters are sharded over."""
        return self.num_ranks(SHARD_AXES)

    def num_ranks(self, axes: Iterable[str]) -> int:
        """Number of ranks of these axes combined.

        Ranks:
            Local.
        """
        sizes = dict(self.axes)
        return math.prod(sizes.get(axis, 1) for axis in axes)

    @property
    def root(self) -> Group:
        """The group of the model itself, or of the last network in a container."""
        return self.groups[-1]

    @property
    def parameters(self) -> Iterator[PlannedParameter]:
        """All distinct parameters: sharded, replicated and ignored."""
        for group in self.groups:
            yield from group.parameters
        yield from self.replicated
        yield from self.ignored

    @property
    def num_bytes(self) -> int:
        """Storage, over all ranks."""
        return sum(parameter.num_bytes for parameter in self.parameters)

    @property
    def bytes_per_rank(self) -> int:
        """Parameter storage on the fullest rank."""
        groups = sum(group.bytes_per_rank(self.num_ranks(group.shard_axes)) for group in self.groups)
        return groups + sum(p.bytes_per_rank(1) for p in (*self.replicated, *self.ignored))

    def group_of(self, parameter_fqn: str) -> Group | None:
        """Return the group of a parameter, by any of its names.

        Ranks:
            Local.
        """
        for group in self.groups:
            for parameter in group.parameters:
                if parameter_fqn == parameter.fqn or parameter_fqn in parameter.aliases:
                    return group
        return None

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON with sorted keys, so that equal plans give equal text; `Plan.from_json` reads it back.

        Ranks:
            Local.
        """
        return json.dumps({"format": PLAN_FORMAT, **asdict(self)}, indent=indent, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from the output of `to_json`.

        Raises:
            PlanError: The text was written by a version with another layout.

        Ranks:
            Local.
        """
        data = json.loads(text)
        if (found := data.pop("format", None)) != PLAN_FORMAT:
            raise PlanError(
                f"plan has format {found!r}, this version reads {PLAN_FORMAT}",
                why="the layout of a plan may change between releases",
                fix="compute a new plan with shardwise.plan(...)",
            )
        return TypeAdapter(Plan).validate_python(data)  # unknown keys are ignored

    def digest(self) -> str:
        """Return a short hash; ranks compare it before sharding.

        Ranks:
            Local.
        """
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return render_plan(self)


_MAX_NAMES = 4


def render_plan(plan: Plan) -> str:
    """Render a tree with one row for groups that differ only in their index."""
    total = sum(parameter.numel for parameter in plan.parameters)
    lines = [
        f"{plan.model}: {format_count(total)} parameters, {format_bytes(plan.num_bytes)}; "
        f"{len(plan.groups)} groups over {_mesh(plan)}; {format_bytes(plan.bytes_per_rank)} of parameters per rank"
    ]
    lines += [f"  · {reason}" for reason in dict.fromkeys(plan.reasons)]
    if len(steps := [title for title, modules in parallel_parts(plan) if modules]):
        lines.append(f"  · order: {', '.join(steps)}, then fully_shard, children first")
    rows = _group_rows(plan.groups)
    noted = [p for group in plan.groups for p in group.parameters if p.reason]
    for title, parameters in (("sharded", noted), ("replicated", plan.replicated), ("ignored", plan.ignored)):
        rows += _parameter_rows(title, parameters)
    for title, modules in parallel_parts(plan):
        rows += _parallel_rows(title, modules)
    rows += [[f"warning: {warning}"] for warning in dict.fromkeys(plan.warnings)]
    for row, (first, *rest) in enumerate(rows, start=1):
        lines += [f"{'└─' if row == len(rows) else '├─'} {first}"]
        lines += [f"{' ' if row == len(rows) else '│'}    {line}" for line in rest]
    return "\n".join(lines)


def parallel_parts(plan: Plan) -> list[tuple[str, tuple[ParallelModule, ...]]]:
    """Return the conversions of modules before sharding, in their order."""
    return [
        ("float8", plan.float8),
        ("tensor parallel", plan.tensor_parallel),
        ("expert parallel", plan.expert_parallel),
        ("context parallel", plan.context_parallel),
        ("pipeline", plan.pipeline),
    ]


def _parallel_rows(title: str, modules: Iterable[ParallelModule]) -> list[list[str]]:
    """Return one row for all modules with the same conversion and reason."""
    alike: dict[tuple[str, str], list[ParallelModule]] = defaultdict(list)
    for module in modules:
        alike[module.how, _unnumbered(module.reason)].append(module)
    return [
        _row(title, members, how or "left as it is", _pattern([module.reason for module in members]))
        for (how, _), members in alike.items()
    ]


def _row(title: str, members: Sequence[ParallelModule | PlannedParameter], what: str, reason: str) -> list[str]:
    """Return the members' names, their common property, and its reason."""
    names = [_pattern(fqns) for fqns in numbered_alike(member.fqn or ROOT_PATTERN for member in members)]
    return [f"{title}: {', '.join(listed(names, _MAX_NAMES))}  {what}", *([reason] if reason else [])]


def render_group(plan: Plan, group: Group) -> str:
    """Render the details of one group."""
    shards = plan.num_ranks(group.shard_axes)
    compute, reduce = group.param_dtype or "the stored dtype", group.reduce_dtype or "the dtype of the gradients"
    inputs = f"cast to {compute}" if group.cast_inputs and group.param_dtype else "as they are"
    facts = [("reason", group.reason), *(("", reason) for reason in plan.reasons)]
    facts += [("modules", ", ".join(module or "(root)" for module in group.modules)), ("mesh", _mesh(plan))]
    facts += [("storage", "/".join(group.storage_dtypes) or "-"), ("compute", compute), ("reduce", reduce)]
    facts += [("inputs", inputs), ("outputs", f"cast to {group.output_dtype}" if group.output_dtype else "as they are")]
    facts += [("after forward", _after_forward(group.reshard_after_forward))]
    facts += [("held", "unsharded when the root is entered, until the end of backward")] if group.held else []
    facts += [("unused", "zeros are reduced for parameters without a gradient")] if group.reduce_unused else []
    facts += [("offload", ("to pinned CPU memory" if group.pin_memory else "to CPU memory") if group.offload else "no")]
    for name, ahead in (("forward", group.forward_prefetch), ("backward", group.backward_prefetch)):
        groups = ", ".join(module or "(root)" for module in ahead)
        facts.append((f"prefetch in {name}", groups or "none named; FSDP2's own"))
    facts.append(("entry points", ", ".join(group.entry_points) or "calling its modules"))
    lines = [f"{group.name}: {group.kind}, {_sizes(group)}; {format_bytes(group.bytes_per_rank(shards))} per rank"]
    lines += [f"  {name:<20}  {text}" for name, text in facts]
    lines.append(f"  {'parameters':<20}  {len(group.parameters)}")
    for p in group.parameters:
        per_rank = format_bytes(p.bytes_per_rank(shards))
        notes = [f"divided over {axis} on dim {dim}" for axis, dim, _ in p.splits]
        notes += [f"shard on dim {p.shard_dim}", *([] if p.trainable else ["frozen"])]
        notes += [f"also {', '.join(p.aliases)}"] if p.aliases else []
        notes += [p.reason] if p.reason else []
        size = f"{p.dtype} {list(p.shape)}, {format_bytes(p.num_bytes)}, {per_rank} per rank"
        lines.append(f"    {p.fqn}  {size}; {'; '.join(notes)}")
    return "\n".join(lines)


def _mesh(plan: Plan) -> str:
    return (" x ".join(f"{name} {size}" for name, size in plan.axes) or "one rank") + f" ({plan.device})"


def _group_rows(groups: Sequence[Group]) -> list[list[str]]:
    alike: dict[object, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        alike[_shape_of(group)].append(index)
    rows, printed = [], set()
    for indices in alike.values():
        members = [groups[index] for index in indices]
        each = f"{len(members)} groups, each " if len(members) > 1 else ""
        rows.append([f"{_names(groups, indices)}  {each}{_sizes(members[0])}  {_policy(members)}"])
        reason = _pattern([group.reason for group in members])
        if reason not in printed:
            printed.add(reason)
            rows[-1].append(reason)
        entry_points = [_pattern(names) for names in zip(*(group.entry_points for group in members), strict=True)]
        rows[-1] += [f"entered through {', '.join(entry_points)}"] if entry_points else []
    return rows


def _names(groups: Sequence[Group], indices: Sequence[int]) -> str:
    """`layers.0 … layers.31` for neighbors, `layers.0, layers.2, … layers.30` for others."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and _are_neighbors(groups, runs[-1][-1], index):
            runs[-1].append(index)
        else:
            runs.append([index])
    names = [" … ".join(_short_name(groups[i]) for i in dict.fromkeys((run[0], run[-1]))) for run in runs]
    return ", ".join(names) if len(names) <= _MAX_NAMES else f"{names[0]}, {names[1]}, … {names[-1]}"


def _are_neighbors(groups: Sequence[Group], one: int, other: int) -> bool:
    numbers = zip(*(map(int, re.findall(r"\d+", groups[i].modules[0])) for i in (one, other)), strict=True)
    return other == one + 1 or sum(abs(a - b) for a, b in numbers) == 1


def _short_name(group: Group) -> str:
    first, *others = group.modules
    return group.name if len(others) <= 1 else f"{first}+{len(others)} more"


def _parameter_rows(title: str, parameters: Iterable[PlannedParameter]) -> list[list[str]]:
    """Return one row for all parameters with the same dtype and reason."""
    alike: dict[tuple[str, str], list[PlannedParameter]] = defaultdict(list)
    for parameter in parameters:
        alike[parameter.dtype, parameter.reason].append(parameter)
    rows = []
    for (dtype, reason), members in alike.items():
        shapes = {p.shape for p in members}
        sizes = [f"{dtype} {list(shapes.pop())}" if len(shapes) == 1 else dtype]
        sizes += [f"{len(members)} parameters"] if len(members) > 1 else []
        sizes.append(format_bytes(sum(p.num_bytes for p in members)))
        rows.append(_row(title, members, ", ".join(sizes), reason))
    return rows


def _sizes(group: Group) -> str:
    return f"{format_count(group.numel)} parameters, {format_bytes(group.num_bytes)}"


def _policy(members: Sequence[Group]) -> str:
    group = members[0]
    compute = group.param_dtype or "storage"
    parts = [f"{'/'.join(group.storage_dtypes) or '-'} → {compute}, reduce {group.reduce_dtype or compute}"]
    if group.output_dtype:
        parts.append(f"output {group.output_dtype}")
    parts.append(_after_forward(group.reshard_after_forward))
    if group.offload:
        parts.append("offload to CPU" + (", pinned" if group.pin_memory else ""))
    # The last groups of a pass prefetch fewer groups.
    forward = max(len(group.forward_prefetch) for group in members)
    backward = max(len(group.backward_prefetch) for group in members)
    parts += [f"prefetch {forward}/{backward}"] if forward or backward else []
    return "[" + "; ".join(parts) + "]"


def _after_forward(reshard: bool | int | None) -> str:
    if reshard is None or isinstance(reshard, bool):
        return "reshard" if reshard else "keep unsharded"
    return f"reshard to {reshard}"


def _shape_of(group: Group) -> object:
    """Return a key that is equal for groups of the same row: all printed facts, except numbers in names."""
    parameters = tuple((_unnumbered(p.fqn), p.shape, p.dtype, p.trainable) for p in group.parameters)
    texts = tuple(_unnumbered(text) for text in chain(group.modules, group.entry_points, [group.reason]))
    settings = (group.param_dtype, group.reduce_dtype, group.output_dtype, group.reshard_after_forward)
    return group.kind, texts, parameters, settings, group.offload, group.pin_memory, group.held


def numbered_alike(names: Iterable[str]) -> list[list[str]]:
    """Group names that differ only in numbers, such as the same parameter of every layer."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[_unnumbered(name)].append(name)
    return list(alike.values())


def _unnumbered(text: str) -> str:
    return re.sub(r"\d+", "*", text)


def _pattern(texts: Sequence[str]) -> str:
    """Merge texts that differ only in numbers, with `*` for the differing numbers."""
    columns = zip(*(re.split(r"(\d+)", text) for text in texts), strict=True)
    return "".join(column[0] if len(set(column)) == 1 else "*" for column in columns)
