"""check(): look at a sharded model and its optimizers, live, on all ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import socket
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shardwise import compat
from shardwise.distributed.agreement import gather_over_mesh
from shardwise.errors import ShardError
from shardwise.findings import Finding, Severity
from shardwise.planning.plan import PlannedParameter
from shardwise.sharding.inventory import fingerprint, local_tensor
from shardwise.sharding.registry import sharded_state
from shardwise.units import format_bytes


@dataclass(frozen=True, slots=True)
class Subject:
    """A live model, and the optimizers that train it."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    parameters: dict[str, nn.Parameter]
    """As registered now."""
    groups: dict[str, Any]
    """FSDP2's groups by the module they stand for."""
    mesh: DeviceMesh | None
    """None when nothing is sharded."""
    planned: tuple[PlannedParameter, ...]
    """Empty for a model sharded by hand."""
    averaged: frozenset[str]
    """Parameters outside all groups whose gradients shardwise averages."""
    names: dict[int, str]
    """Identity of a parameter, sharded or gathered, to its name."""

    def name_of(self, parameter: nn.Parameter) -> str:
        """How the model calls it; empty when it does not know it."""
        return self.names.get(id(parameter), "")


def look_at(model: nn.Module, optimizers: tuple[Optimizer, ...]) -> Subject:
    """Find the groups and names of a model.

    Ranks:
        Local.
    """
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    modules = {module: name for name, module in model.named_modules()}
    groups = compat.named_groups(model)
    for group in groups.values():
        for fsdp_param, owner, leaf in compat.places_in_group(group):
            names.setdefault(id(compat.sharded_parameter(fsdp_param)), f"{modules[owner]}.{leaf}".lstrip("."))
    state = sharded_state(model)
    planned = tuple(state.plan.parameters) if state is not None else ()
    averaged = (
        frozenset(p.fqn for p in (*state.plan.ignored, *state.plan.replicated)) if state is not None else frozenset()
    )
    return Subject(model, optimizers, parameters, groups, _mesh(model, groups), planned, averaged, names)


def _mesh(model: nn.Module, groups: dict[str, Any]) -> DeviceMesh | None:
    state = sharded_state(model)
    if state is not None:
        return state.mesh
    for group in groups.values():
        for parameter in compat.sharded_parameters(group):
            if isinstance(parameter, DTensor):
                return parameter.device_mesh
    return None


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
        for fsdp_param in compat.parameter_records([group]):
            real, held = compat.real_and_padded_numel(fsdp_param)
            item = compat.sharded_parameter(fsdp_param).element_size()
            if held > real and (held - real) * item > _SMALL_BYTES and held - real > _PADDING * held:
                yield Finding(
                    code="SW415",
                    message=f"{1 - real / held:.0%} of what the ranks hold of it is padding: dimension 0 is shorter "
                    "than the number of ranks, or nearly so",
                    where=subject.name_of(compat.sharded_parameter(fsdp_param)),
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
    gathered = [name for name, group in subject.groups.items() if compat.is_unsharded(group)]
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


def held_parameters(subject: Subject) -> Iterator[Finding]:
    """SW421, SW422, SW423: tensors that are not the model's, parameters in no optimizer, parameters in two."""
    own = {id(parameter): name for name, parameter in subject.parameters.items()}
    for name, group in subject.groups.items():
        for parameter in compat.sharded_parameters(group):
            own.setdefault(id(parameter), subject.name_of(parameter) or name)
    held: dict[int, int] = {}
    for optimizer in subject.optimizers:
        foreign = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                held[id(parameter)] = held.get(id(parameter), 0) + 1
                foreign += id(parameter) not in own
        if foreign:
            yield Finding(
                code="SW421",
                message=f"{type(optimizer).__name__} holds {foreign} tensors that the model does not use: its steps "
                "change nothing that is trained",
                where=type(optimizer).__name__,
                severity=Severity.ERROR,
                fix="build it after sharding, or pass it: shardwise.shard(model, optimizers=[optimizer])",
            )
    if not subject.optimizers:
        return
    left_out = [
        name for name, parameter in subject.parameters.items() if parameter.requires_grad and id(parameter) not in held
    ]
    if left_out:
        yield Finding(
            code="SW422",
            message=f"{len(left_out)} trainable parameters are in no optimizer",
            where=left_out[0],
            fix="add them to a parameter group, or freeze them: `requires_grad_(False)`",
        )
    twice = [own[key] for key, count in held.items() if count > 1 and key in own]
    if twice:
        yield Finding(
            code="SW423",
            message=f"{len(twice)} parameters are in two parameter groups or optimizers: each step changes them twice",
            where=twice[0],
            severity=Severity.ERROR,
            fix="put each parameter in one group",
        )


_SHORT = (torch.bfloat16, torch.float16)


def unsharded(subject: Subject) -> Iterator[Finding]:
    """SW401: trainable parameters that no group shards and nobody averages."""
    gathered = [group for group in subject.groups.values() if compat.is_unsharded(group)]  # said elsewhere
    in_groups = {subject.name_of(compat.sharded_parameter(param)) for param in compat.parameter_records(gathered)}
    for name, parameter in subject.parameters.items():
        is_plain = parameter.requires_grad and not isinstance(parameter, DTensor)
        if is_plain and name not in subject.averaged and name not in in_groups:
            yield Finding(
                code="SW401",
                message="a trainable parameter is an ordinary tensor: its gradient is not averaged, and ranks drift "
                "apart",
                where=name,
                severity=Severity.ERROR,
                fix="shard the whole model, root last; what must stay whole: ShardConfig(ignored=(...,)), which "
                "averages it",
            )


def replaced(subject: Subject) -> Iterator[Finding]:
    """SW402: a registered parameter is not the one its group gathers and reduces."""
    for group_name, group in subject.groups.items():
        for fsdp_param in compat.parameter_records([group]):
            registered, shard = compat.registered_parameter(fsdp_param), compat.sharded_parameter(fsdp_param)
            if compat.is_unsharded(group) or registered is None:
                continue  # said elsewhere
            if registered is not shard or registered.dtype != local_tensor(shard).dtype:
                yield Finding(
                    code="SW402",
                    message="the parameter was replaced after sharding (assigned, or `p.data = ...`): its group still "
                    "gathers the old one",
                    where=subject.name_of(shard) or group_name,
                    severity=Severity.ERROR,
                    fix="change values in place: `with torch.no_grad(): parameter.copy_(...)`, or "
                    "shardwise.full_params(model, writeback=True)",
                )


def sixteen_bit(subject: Subject) -> Iterator[Finding]:
    """SW403: trainable parameters stored in 16 bits, which lose small updates."""
    short = [name for name, p in subject.parameters.items() if p.requires_grad and p.dtype in _SHORT]
    if short:
        dtype = str(subject.parameters[short[0]].dtype).removeprefix("torch.")
        yield Finding(
            code="SW403",
            message=f"{len(short)} trainable parameters are stored in {dtype}: an update smaller than 1/256 of a "
            "weight is lost",
            where=short[0],
            fix="model.float() before sharding; `PrecisionConfig(param_dtype='bfloat16')` still computes in 16 bits",
        )


def several_dtypes(subject: Subject) -> Iterator[Finding]:
    """SW404: a group with trainable parameters of several dtypes, which FSDP2 refuses at the first forward."""
    for name, group in subject.groups.items():
        dtypes = {str(p.dtype) for p in compat.sharded_parameters(group) if p.requires_grad}
        if len(dtypes) > 1:
            yield Finding(
                code="SW404",
                message=f"one group holds trainable parameters of {', '.join(sorted(dtypes))}: FSDP2 refuses that "
                "at the first forward",
                where=name,
                severity=Severity.ERROR,
                fix="shard the modules of each dtype as groups of their own, or cast; shardwise.shard does it by "
                "itself",
            )


def on_meta(subject: Subject) -> Iterator[Finding]:
    """SW405: parameters or buffers without values."""
    tensors = {**subject.parameters, **dict(subject.model.named_buffers())}
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        yield Finding(
            code="SW405",
            message=f"{len(empty)} tensors have no values yet (meta device)",
            where=empty[0],
            severity=Severity.ERROR,
            fix="shardwise.materialize(model), or shardwise.load_weights(model, path)",
        )


def ties(subject: Subject) -> Iterator[Finding]:
    """SW406: weights that are tied by the plan or by the model's own word, and no longer are one tensor."""
    pairs = [(p.fqn, alias) for p in subject.planned for alias in p.aliases]
    pairs += _tied_by_config(subject.model)
    for first, second in pairs:
        if _tensor(subject.model, first) is not _tensor(subject.model, second):
            yield Finding(
                code="SW406",
                message=f"{second} should be the same tensor as {first}, and is not: each would go its own way",
                where=second,
                severity=Severity.ERROR,
                fix="tie them before sharding (`head.weight = embedding.weight`), and do not assign to them afterwards",
            )


def _tied_by_config(model: nn.Module) -> list[tuple[str, str]]:
    """What transformers says about input and output embeddings."""
    config = getattr(model, "config", None)
    getters: list[Any] = [getattr(model, f"get_{end}_embeddings", None) for end in ("input", "output")]
    if not getattr(config, "tie_word_embeddings", False) or not all(getters):
        return []
    try:
        ends = [get() for get in getters]
    except (NotImplementedError, AttributeError):
        return []
    names = {id(module): name for name, module in model.named_modules()}
    found = [f"{names[id(end)]}.weight" for end in ends if id(end) in names and hasattr(end, "weight")]
    return [(found[0], found[1])] if len(found) == 2 else []


def _tensor(model: nn.Module, name: str) -> object:
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner)._parameters.get(leaf)


_BUFFER_DIFFERS = Finding(
    code="SW431",
    message="a buffer differs between ranks",
    fix="BatchNorm: SyncBatchNorm or frozen statistics; else shardwise.materialize(model, sync_from_rank_zero=True)",
)
_PLAIN_DIFFERS = Finding(
    code="SW432",
    message="an unsharded parameter differs between ranks: they have drifted apart",
    severity=Severity.ERROR,
    fix="average its gradient: ShardConfig(ignored=(...,)) does",
)


def across_ranks(subject: Subject) -> list[Finding]:
    """SW431 to SW437: what differs between ranks; buffers full of garbage; shared devices; offload."""
    findings = [*_garbage_buffers(subject), *_offload_backend(subject)]
    mesh = subject.mesh
    if mesh is None or mesh.size() == 1:
        return findings
    told = gather_over_mesh(mesh, _facts(subject))
    findings += _shared_devices(told)
    findings += _differing(told, "buffers", _BUFFER_DIFFERS)
    findings += _differing(told, "plain", _PLAIN_DIFFERS)
    findings += _replicas(told)
    findings += _groups(told)
    return findings


def _facts(subject: Subject) -> dict[str, Any]:
    """What this rank tells the others: fingerprints and its device."""
    mesh = subject.mesh
    assert mesh is not None
    plain = {n: p for n, p in subject.parameters.items() if not isinstance(p, DTensor) and not p.is_meta}
    return {
        "device": _device(mesh.device_type),
        "buffers": {name: _digest(b) for name, b in subject.model.named_buffers() if not b.is_meta},
        "plain": {name: _digest(p) for name, p in plain.items()},
        "replicas": _replica_digests(subject),
        "groups": _group_names(subject),
    }


def _group_names(subject: Subject) -> list[list[frozenset[str]]]:
    """Of each optimizer, the names in each group; parameters of other models have none."""
    name_of = {id(parameter): name for name, parameter in subject.parameters.items()}
    return [
        [frozenset(name_of[id(p)] for p in group["params"] if id(p) in name_of) for group in optimizer.param_groups]
        for optimizer in subject.optimizers
    ]


def _groups(told: list[dict[str, Any]]) -> list[Finding]:
    for index, first in enumerate(told[0]["groups"]):
        for rank, facts in enumerate(told[1:], start=1):
            groups = facts["groups"][index] if index < len(facts["groups"]) else []
            if groups == first:
                continue
            moved = sorted(name for one, other in zip(first, groups, strict=False) for name in one ^ other)
            swapped = sorted(map(sorted, groups)) == sorted(map(sorted, first))
            return [
                Finding(
                    code="SW437",
                    message=f"an optimizer's groups {'stand in another order' if swapped else 'are others'} on rank "
                    f"{rank} than on rank 0" + ("" if swapped else ": each rank steps its shard with its own options"),
                    where=moved[0] if moved else f"optimizer {index}",
                    severity=Severity.WARNING if swapped else Severity.ERROR,
                    fix="build the groups in one order on every rank, from a list and not from a set",
                )
            ]
    return []


def _replica_digests(subject: Subject) -> dict[str, str]:
    """Fingerprints of shards of which other ranks hold copies (HSDP), by their place along the other axes."""
    digests = {}
    for name, parameter in subject.parameters.items():
        if not isinstance(parameter, DTensor) or parameter.is_meta or parameter.device_mesh.ndim < 2:
            continue
        coordinate = parameter.device_mesh.get_coordinate()
        copies = [isinstance(placement, Replicate) for placement in parameter.placements]
        if coordinate is None or not any(copies):
            continue
        place = [str(part) for part, copied in zip(coordinate, copies, strict=True) if not copied]
        digests[f"{name} [{','.join(place)}]"] = _digest(parameter.to_local())
    return digests


def _replicas(told: list[dict[str, Any]]) -> list[Finding]:
    first: dict[str, tuple[str, int]] = {}
    found: dict[str, tuple[int, int]] = {}
    for rank, facts in enumerate(told):
        for place, digest in facts["replicas"].items():
            seen = first.setdefault(place, (digest, rank))
            if seen[0] != digest:
                found.setdefault(place.partition(" [")[0], (seen[1], rank))
    if not found:
        return []
    name, (one, other) = next(iter(found.items()))
    return [
        Finding(
            code="SW433",
            message=f"replicas differ: {len(found)} parameters are not the same on rank {one} and rank {other}",
            where=name,
            severity=Severity.ERROR,
            fix="initialise every rank alike (one seed, or shardwise.materialize), or load the same checkpoint",
        )
    ]


def _differing(told: list[dict[str, Any]], key: str, finding: Finding) -> list[Finding]:
    names = [name for name, digest in told[0][key].items() if any(rank[key].get(name) != digest for rank in told[1:])]
    if not names:
        return []
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return [dataclasses.replace(finding, message=finding.message + more, where=names[0])]


def _garbage_buffers(subject: Subject) -> Iterator[Finding]:
    """A buffer that nothing wrote after `to_empty()` holds what was in memory: often NaN or absurd numbers."""
    for name, buffer in subject.model.named_buffers():
        if buffer.is_meta or not buffer.is_floating_point() or not buffer.numel():
            continue
        value = buffer.detach().abs().max().item()
        tiny = 0.0 < value < 1e-30
        if value != value or (value > 1e30 and value != float("inf")) or tiny:
            yield Finding(
                code="SW434",
                message=f"its values (largest {value:.3g}) look like memory that nothing has written: is it rebuilt "
                "after to_empty()?",
                where=name,
                severity=Severity.ERROR,
                fix="shardwise.materialize(model) rebuilds buffers that no checkpoint holds",
            )


def _shared_devices(told: list[dict[str, Any]]) -> list[Finding]:
    users: dict[str, list[int]] = {}
    for rank, facts in enumerate(told):
        if facts["device"]:
            users.setdefault(facts["device"], []).append(rank)
    return [
        Finding(
            code="SW435",
            message=f"ranks {', '.join(map(str, ranks))} use the same GPU",
            where=device,
            severity=Severity.ERROR,
            fix="torch.cuda.set_device(local_rank) before anything else; shardwise.init_distributed does it",
        )
        for device, ranks in users.items()
        if len(ranks) > 1
    ]


def _offload_backend(subject: Subject) -> Iterator[Finding]:
    """Offloaded gradients live in CPU memory; clipping them needs a process group that can send from there."""
    mesh = subject.mesh
    if mesh is None or mesh.device_type == "cpu" or not dist.is_initialized():
        return
    offloaded = [name for name, p in subject.parameters.items() if isinstance(p, DTensor) and p.device.type == "cpu"]
    if offloaded and "gloo" not in str(dist.get_backend_config()):
        yield Finding(
            code="SW436",
            message="shards are offloaded to the CPU, but the process group knows GPUs only",
            where=offloaded[0],
            severity=Severity.ERROR,
            fix='dist.init_process_group("cpu:gloo,cuda:nccl"); shardwise.init_distributed does it',
        )


def _device(device_type: str) -> str:
    if device_type != "cuda" or not torch.cuda.is_available():
        return ""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{socket.gethostname()} {getattr(properties, 'uuid', torch.cuda.current_device())}"


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(str(fingerprint(tensor.detach()).tolist()).encode(), digest_size=8).hexdigest()


_LOCAL = (
    not_sharded, root_only, oversized, padding, sync_left_off,
    left_gathered, unsharded, replaced, sixteen_bit, several_dtypes,
    on_meta, ties, held_parameters,
)  # fmt: skip


def check(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> list[Finding]:
    """Look for everything that would make training silently wrong, before the first step or whenever in doubt.

    Between steps, not inside one: a group that is gathered for a forward is meant to be.

    Args:
        model: Sharded by shardwise or by hand.
        optimizer: The optimizer, or several, that train it.

    Returns:
        What is wrong, the worst first; empty when all is well.

    Ranks:
        Collective. One exchange of fingerprints; reads every buffer and unsharded parameter once, and shards where
        other ranks hold copies.
    """
    given = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer or ())
    subject = look_at(model, given)
    findings = [finding for look in _LOCAL for finding in look(subject)]
    findings += across_ranks(subject)
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def refuse_errors(findings: Sequence[Finding]) -> None:
    """Raise if any finding is an error; warnings pass.

    Raises:
        ShardError: With every error that was found.

    Ranks:
        Local; the findings of `check` may differ between ranks, so gather them first where that matters.
    """
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        raise ShardError(
            f"{errors[0].message}" + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""),
            where="; ".join(f"{finding.code} {finding.where}" for finding in errors[:8]),
            why="this would fail at the first step, or train wrongly without a word",
            fix=errors[0].fix,
        )
