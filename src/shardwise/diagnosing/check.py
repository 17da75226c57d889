"""check(): inspect a live sharded model and its optimizers on all ranks."""

from __future__ import annotations

import math
import socket
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shardwise import compat
from shardwise.distributed.agreement import gather_over_mesh
from shardwise.distributed.mesh import widest_mesh
from shardwise.errors import ShardError
from shardwise.findings import Finding, Severity
from shardwise.models.configs import tied_by_config
from shardwise.planning.plan import Plan
from shardwise.sharding.inventory import fingerprint, local_tensor
from shardwise.sharding.parallel.tensor_parallel import tensor_of
from shardwise.sharding.registry import sharded_state
from shardwise.sharding.repointing import why_unsupported
from shardwise.units import format_bytes

_LARGE = 4.0
_PADDING = 0.25
_SMALL_BYTES = 1 << 20
_SHORT = (torch.bfloat16, torch.float16)

_FINDINGS: dict[str, tuple[Severity, str, str]] = {
    "SW401": (
        Severity.ERROR,
        "a trainable parameter is an ordinary tensor: its gradient is not averaged, and ranks drift apart",
        "shard the whole model, root last; what must stay whole: ShardConfig(ignored=(...,)), which averages it",
    ),
    "SW402": (
        Severity.ERROR,
        "the parameter was replaced after sharding (assigned, or `p.data = ...`): its group still gathers the old one",
        "change values in place: `with torch.no_grad(): parameter.copy_(...)`, or "
        "shardwise.full_params(model, writeback=True)",
    ),
    "SW403": (
        Severity.WARNING,
        "{num} trainable parameters are stored in {dtype}: an update smaller than 1/256 of a weight is lost",
        "model.float() before sharding; `PrecisionConfig(param_dtype='bfloat16')` still computes in 16 bits",
    ),
    "SW404": (
        Severity.ERROR,
        "one group holds trainable parameters of {dtypes}: FSDP2 refuses that at the first forward",
        "shard the modules of each dtype as groups of their own, or cast; shardwise.shard does it by itself",
    ),
    "SW405": (
        Severity.ERROR,
        "{num} tensors have no values yet (meta device)",
        "shardwise.materialize(model), or shardwise.load_weights(model, path)",
    ),
    "SW406": (
        Severity.ERROR,
        "{second} should be the same tensor as {first}, and is not: they are updated separately",
        "tie them before sharding (`head.weight = embedding.weight`), and do not assign to them afterwards",
    ),
    "SW411": (
        Severity.ERROR,
        "the model is not sharded: every rank holds all of it, and no gradient is averaged",
        "model = shardwise.shard(model)",
    ),
    "SW412": (
        Severity.WARNING,
        "only the root is sharded: all of the model is gathered at once, with {num} blocks that could be gathered one "
        "at a time",
        "fully_shard each block before the root, or shardwise.shard(model)",
    ),
    "SW414": (
        Severity.WARNING,
        "it gathers {size}, {times:.0f} times the usual group and over half of the model",
        "shard the modules inside it as groups of their own",
    ),
    "SW415": (
        Severity.WARNING,
        "{part:.0%} of what the ranks hold of it is padding: dimension 0 is shorter than the number of ranks, or "
        "nearly so",
        "split another dimension (`shard_placement_fn`); shardwise.shard chooses one",
    ),
    "SW416": (
        Severity.ERROR,
        "gradient reduction is switched off in {num} of {total} groups",
        "model.set_requires_gradient_sync(True) for the last micro-batch; `shardwise.accumulate` cannot forget it",
    ),
    "SW417": (
        Severity.WARNING,
        "{num} groups are unsharded: parameters() lists their unsharded copies, and an optimizer built now would train "
        "those",
        "model.reshard() after a forward without backward; shardwise.shard does it by itself",
    ),
    "SW421": (
        Severity.ERROR,
        "{optimizer} holds {num} tensors that the model does not use: its steps change nothing that is trained",
        "build it after sharding, or pass it: shardwise.shard(model, optimizers=[optimizer])",
    ),
    "SW422": (
        Severity.WARNING,
        "{num} trainable parameters are in no optimizer",
        "add them to a parameter group, or freeze them: `requires_grad_(False)`",
    ),
    "SW423": (
        Severity.ERROR,
        "{num} parameters are in two parameter groups or optimizers: each step changes them twice",
        "put each parameter in one group",
    ),
    "SW424": (
        Severity.ERROR,
        "{optimizer} cannot step sharded parameters: {why}",
        "use AdamW, Adam, SGD, Muon or another of the list in docs/composition.md, optimizers",
    ),
    "SW431": (
        Severity.WARNING,
        "a buffer differs between ranks{more}",
        "BatchNorm: SyncBatchNorm or frozen statistics; else shardwise.materialize(model, sync_from_rank_zero=True)",
    ),
    "SW432": (
        Severity.ERROR,
        "an unsharded parameter differs between ranks: they have drifted apart{more}",
        "average its gradient: ShardConfig(ignored=(...,)) does",
    ),
    "SW433": (
        Severity.ERROR,
        "replicas differ: {num} parameters are not the same on rank {one} and rank {other}",
        "initialize all ranks identically (one seed, or shardwise.materialize), or load the same checkpoint",
    ),
    "SW434": (
        Severity.ERROR,
        "its values (largest {value:.3g}) look like memory that nothing has written: is it rebuilt after to_empty()?",
        "shardwise.materialize(model) rebuilds buffers that no checkpoint holds",
    ),
    "SW435": (
        Severity.ERROR,
        "ranks {ranks} use the same GPU",
        "torch.cuda.set_device(local_rank) before anything else; shardwise.init_distributed does it",
    ),
    "SW436": (
        Severity.ERROR,
        "shards are offloaded to the CPU, but the process group knows GPUs only",
        'dist.init_process_group("cpu:gloo,cuda:nccl"); shardwise.init_distributed does it',
    ),
    "SW437": (
        Severity.ERROR,
        "an optimizer's parameter groups differ between rank {rank} and rank 0: each rank steps its shard with its own "
        "options",
        "build the groups in one order on every rank, from a list and not from a set",
    ),
    "SW438": (
        Severity.ERROR,
        "ranks {one} and {other} share the matrix products of a batch, and were given different ones",
        "give each rank the batch of its data-parallel rank: ranks along the tensor axis have the same",
    ),
}


def _finding(code: str, where: str, **values: Any) -> Finding:
    severity, message, fix = _FINDINGS[code]
    return Finding(code=code, message=message.format(**values), where=where, severity=severity, fix=fix)


def _about(code: str, names: Sequence[str], **values: Any) -> Iterator[Finding]:
    """Yield one finding about all `names`, located at the first; none if there are no names."""
    if names:
        yield _finding(code, names[0], num=len(names), **values)


@dataclass(frozen=True, slots=True)
class Subject:
    """A live model and its optimizers."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    parameters: dict[str, nn.Parameter]
    """Parameters as currently registered."""
    groups: dict[str, Any]
    """FSDP2's groups by module name."""
    mesh: DeviceMesh | None
    """None if nothing is sharded."""
    plan: Plan | None
    """None for a model sharded by hand."""
    names: dict[int, str]
    """Parameter name by `id` of the sharded or unsharded parameter."""


def snapshot(model: nn.Module, optimizers: tuple[Optimizer, ...]) -> Subject:
    """Find the groups and names of a model."""
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    modules = {module: name for name, module in model.named_modules()}
    groups = compat.named_groups(model)
    for group in groups.values():
        for fsdp_param in compat.parameter_records([group]):
            owner, leaf = compat.places_of(fsdp_param)[0]
            names.setdefault(id(compat.sharded_parameter(fsdp_param)), f"{modules[owner]}.{leaf}".lstrip("."))
    plan = None if (state := sharded_state(model)) is None else state.plan
    return Subject(model, optimizers, parameters, groups, mesh_of(model, groups), plan, names)


def mesh_of(model: nn.Module, groups: dict[str, Any]) -> DeviceMesh | None:
    """The mesh that a model is sharded over, by shardwise or by hand; None if it is not sharded."""
    if (state := sharded_state(model)) is not None:
        return state.mesh
    return widest_mesh(parameter for group in groups.values() for parameter in compat.sharded_parameters(group))


def groups(subject: Subject) -> Iterator[Finding]:
    """SW411, SW412, SW414: no group, only the root, or a group much larger than the others, which sets peak memory."""
    if not subject.groups:
        yield _finding("SW411", "(root)")
    num_blocks = _num_repeated(subject.model)
    if len(subject.groups) == 1 and num_blocks > 1:
        yield _finding("SW412", next(iter(subject.groups)), num=num_blocks)
    sizes = {
        name: sum(parameter.numel() * parameter.element_size() for parameter in compat.sharded_parameters(group))
        for name, group in subject.groups.items()
    }
    usual = statistics.median(sizes.values()) if len(sizes) >= 3 else math.inf
    for name, size in sizes.items():
        if size > _LARGE * usual and size > _SMALL_BYTES and size > sum(sizes.values()) / 2:
            yield _finding("SW414", name, size=format_bytes(size), times=size / usual)


def _num_repeated(model: nn.Module) -> int:
    """The largest number of siblings of one class that have parameters."""
    counts = [
        sum(1 for child in module.children() if type(child) is kind and any(True for _ in child.parameters()))
        for module in model.modules()
        for kind in {type(child) for child in module.children() if any(True for _ in child.children())}
    ]
    return max(counts, default=0)


def padding(subject: Subject) -> Iterator[Finding]:
    """SW415: a dimension too short for the number of ranks, so that shards contain much padding."""
    for fsdp_param in compat.parameter_records(list(subject.groups.values())) if subject.mesh is not None else ():
        real, held = compat.real_and_padded_numel(fsdp_param)
        parameter = compat.sharded_parameter(fsdp_param)
        if (held - real) * parameter.element_size() > _SMALL_BYTES and held - real > _PADDING * held:
            yield _finding("SW415", subject.names.get(id(parameter), ""), part=1 - real / held)


def between_steps(subject: Subject) -> Iterator[Finding]:
    """SW416, SW417: groups without gradient reduction, and unsharded groups, whose copies become stale."""
    off = [name for name, group in subject.groups.items() if not compat.reduces_gradients(group)]
    yield from _about("SW416", off, total=len(subject.groups))
    yield from _about("SW417", [name for name, group in subject.groups.items() if compat.is_unsharded(group)])


def parameters_in_groups(subject: Subject) -> Iterator[Finding]:
    """SW401, SW402: trainable parameters that are neither sharded nor averaged; parameters replaced after sharding."""
    plan = subject.plan
    averaged = set() if plan is None else {parameter.fqn for parameter in (*plan.ignored, *plan.replicated)}
    for name, group in subject.groups.items():
        for fsdp_param in compat.parameter_records([group]):
            (module, leaf), shard = compat.places_of(fsdp_param)[0], compat.sharded_parameter(fsdp_param)
            registered = module._parameters.get(leaf)
            own_name = subject.names.get(id(shard), "")
            if compat.is_unsharded(group):
                averaged.add(own_name)  # reported as SW417
            elif registered is not None and (registered is not shard or registered.dtype != local_tensor(shard).dtype):
                yield _finding("SW402", own_name or name)
    for name, parameter in subject.parameters.items():
        if parameter.requires_grad and not isinstance(parameter, DTensor) and name not in averaged:
            yield _finding("SW401", name)


def dtypes(subject: Subject) -> Iterator[Finding]:
    """SW403, SW404: trainable parameters in 16 bits, which lose small updates; groups of several dtypes."""
    trained = {name: parameter for name, parameter in subject.parameters.items() if parameter.requires_grad}
    if short := [name for name, parameter in trained.items() if parameter.dtype in _SHORT]:
        yield from _about("SW403", short, dtype=str(trained[short[0]].dtype).removeprefix("torch."))
    for name, group in subject.groups.items():
        found = {str(p.dtype) for p in compat.sharded_parameters(group) if p.requires_grad}
        if len(found) > 1:
            yield _finding("SW404", name, dtypes=", ".join(sorted(found)))


def ties(subject: Subject) -> Iterator[Finding]:
    """SW406: weights that the plan or the model's config ties, but that are separate tensors."""
    planned = () if subject.plan is None else subject.plan.parameters
    pairs = [(parameter.fqn, alias) for parameter in planned for alias in parameter.aliases]
    pairs += tied_by_config(subject.model)
    for pair in pairs:
        owners = [(subject.model.get_submodule(owner), leaf) for owner, _, leaf in (n.rpartition(".") for n in pair)]
        first, second = (owner._parameters.get(leaf) for owner, leaf in owners)
        if first is not second:
            yield _finding("SW406", pair[1], first=pair[0], second=pair[1])


def held_parameters(subject: Subject) -> Iterator[Finding]:
    """SW421 to SW424: tensors of other models, parameters in no optimizer or in two, unsupported optimizers."""
    held: Counter[int] = Counter()
    for optimizer in subject.optimizers:
        keys = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        held.update(keys)
        if foreign := sum(key not in subject.names for key in keys):
            name = type(optimizer).__name__
            yield _finding("SW421", name, optimizer=name, num=foreign)
        if why := why_unsupported(optimizer):
            yield _finding("SW424", type(optimizer).__name__, optimizer=type(optimizer).__name__, why=why)
    if subject.optimizers:
        trained = {name: parameter for name, parameter in subject.parameters.items() if parameter.requires_grad}
        yield from _about("SW422", [name for name, parameter in trained.items() if id(parameter) not in held])
        yield from _about("SW423", [subject.names[key] for key, n in held.items() if n > 1 and key in subject.names])


_LARGEST = {torch.finfo(dtype).max for dtype in (torch.float32, torch.bfloat16, torch.float64)}
"""Fill values of attention masks."""


def values(subject: Subject) -> Iterator[Finding]:
    """SW405, SW434: tensors without values; buffers not initialized after `to_empty()`, with NaN or extreme values."""
    buffers = dict(subject.model.named_buffers())
    yield from _about("SW405", [name for name, t in {**subject.parameters, **buffers}.items() if t.is_meta])
    for name, buffer in buffers.items():
        if not buffer.is_meta and buffer.is_floating_point() and buffer.numel():
            value = buffer.detach().abs().max().item()
            if value in _LARGEST:
                continue
            if value != value or 1e30 < value < math.inf or 0.0 < value < 1e-30:
                yield _finding("SW434", name, value=value)


def offload_backend(subject: Subject) -> Iterator[Finding]:
    """SW436: offloaded gradients are in CPU memory; clipping them needs a process group with a CPU backend."""
    mesh = subject.mesh
    if mesh is not None and mesh.device_type != "cpu" and "gloo" not in str(dist.get_backend_config()):
        sharded = [(name, p) for name, p in subject.parameters.items() if isinstance(p, DTensor)]
        yield from _about("SW436", [name for name, parameter in sharded if parameter.device.type == "cpu"])


def across_ranks(subject: Subject) -> Iterator[Finding]:
    """SW431, SW432, SW433, SW435, SW437, SW438: differences between ranks, and devices that ranks share.

    Ranks:
        Collective.
    """
    mesh = subject.mesh
    if mesh is None or mesh.size() == 1:
        return
    plain = {n: p for n, p in subject.parameters.items() if not isinstance(p, DTensor) and not p.is_meta}
    name_of = {id(parameter): name for name, parameter in subject.parameters.items()}
    facts: dict[str, Any] = {
        "device": _device(mesh.device_type),
        "buffers": {name: int(fingerprint(b)) for name, b in subject.model.named_buffers() if not b.is_meta},
        "plain": {name: int(fingerprint(p)) for name, p in plain.items()},
        "replicas": _replica_digests(subject),
        "groups": [  # without parameters of other models
            [frozenset(name_of[id(p)] for p in group["params"] if id(p) in name_of) for group in optimizer.param_groups]
            for optimizer in subject.optimizers
        ],
    }
    tensors = tensor_of(subject.model)
    if tensors is not None and tensors.digest is not None:
        facts["inputs"] = (dist.get_process_group_ranks(tensors.axis.get_group()), int(tensors.digest))
    gathered = gather_over_mesh(mesh, facts)
    yield from _inputs([(rank, *each["inputs"]) for rank, each in enumerate(gathered) if "inputs" in each])
    devices = [each["device"] for each in gathered]
    for device, count in Counter(devices).items():
        if device and count > 1:
            ranks = ", ".join(str(rank) for rank, other in enumerate(devices) if other == device)
            yield _finding("SW435", device, ranks=ranks)
    for key, code in (("buffers", "SW431"), ("plain", "SW432")):
        first, *others = (each[key] for each in gathered)
        names = [name for name, digest in first.items() if any(other.get(name) != digest for other in others)]
        yield from _about(code, names, more=f" (and {len(names) - 1} more)" if len(names) > 1 else "")
    yield from _replicas([each["replicas"] for each in gathered])
    yield from _optimizer_groups([each["groups"] for each in gathered])


def _inputs(digests: list[tuple[int, list[int], int]]) -> Iterator[Finding]:
    first: dict[int, tuple[int, int]] = {}
    for rank, group, digest in digests:
        seen = first.setdefault(group[0], (digest, rank))
        if seen[0] != digest:
            yield _finding("SW438", f"rank {rank}", one=seen[1], other=rank)
            return


def _device(device_type: str) -> str:
    if device_type != "cuda" or not torch.cuda.is_available():
        return ""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{socket.gethostname()} {getattr(properties, 'uuid', torch.cuda.current_device())}"


def _replica_digests(subject: Subject) -> dict[str, int]:
    """Fingerprints of shards that other ranks replicate (HSDP, tensor axis), by name and coordinates on other axes."""
    digests = {}
    for name, parameter in subject.parameters.items():
        if not isinstance(parameter, DTensor) or parameter.is_meta:
            continue
        coordinate = parameter.device_mesh.get_coordinate()
        copies = [isinstance(placement, Replicate) for placement in parameter.placements]
        is_elsewhere = subject.mesh is not None and subject.mesh.size() > parameter.device_mesh.size()
        if coordinate is not None and (any(copies) or is_elsewhere):
            place = [str(part) for part, copied in zip(coordinate, copies, strict=True) if not copied]
            digests[f"{name} [{','.join(place)}]"] = int(fingerprint(parameter.to_local()))
    return digests


def _replicas(gathered: list[dict[str, int]]) -> Iterator[Finding]:
    first: dict[str, tuple[int, int]] = {}
    found: dict[str, tuple[int, int]] = {}
    for rank, digests in enumerate(gathered):
        for place, digest in digests.items():
            seen = first.setdefault(place, (digest, rank))
            if seen[0] != digest:
                found.setdefault(place.partition(" [")[0], (seen[1], rank))
    for one, other in list(found.values())[:1]:
        yield from _about("SW433", list(found), one=one, other=other)


def _optimizer_groups(gathered: list[list[list[frozenset[str]]]]) -> Iterator[Finding]:
    for index, first in enumerate(gathered[0]):
        for rank, optimizers in enumerate(gathered):
            groups = optimizers[index] if index < len(optimizers) else []
            if groups == first:
                continue
            moved = sorted(name for one, other in zip(first, groups, strict=False) for name in one ^ other)
            finding = _finding("SW437", moved[0] if moved else f"optimizer {index}", rank=rank)
            if sorted(map(sorted, groups)) == sorted(map(sorted, first)):
                message = f"an optimizer's groups are in another order on rank {rank} than on rank 0"
                finding = replace(finding, message=message, severity=Severity.WARNING)
            yield finding
            return


_CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    groups, padding, between_steps, parameters_in_groups, dtypes, values, ties, held_parameters, offload_backend,
    across_ranks,
)  # fmt: skip


def check(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> list[Finding]:
    """Find silent training errors in a live model.

    Call it before the first step, or between steps: within a step, groups are unsharded on purpose.

    Args:
        model: Sharded by shardwise or by hand.
        optimizer: The optimizer or optimizers of the model.

    Returns:
        The findings, errors first; empty if there are none.

    Ranks:
        Collective. One exchange of fingerprints; reads every buffer, unsharded parameter and replicated shard once.
    """
    given = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer or ())
    subject = snapshot(model, given)
    findings = [finding for look in _CHECKS for finding in look(subject)]
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def refuse_errors(findings: Sequence[Finding]) -> None:
    """Raise a ShardError if any finding is an error. Findings of `check` may differ between ranks."""
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        raise ShardError(
            f"{errors[0].message}" + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""),
            where="; ".join(f"{finding.code} {finding.where}" for finding in errors[:8]),
            why="this would fail at the first step, or silently train wrongly",
            fix=errors[0].fix,
        )
