"""Do the ranks hold the same where they must, and a device each? Collective: one small exchange."""

import dataclasses
import hashlib
import socket
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from shardwise.diagnosing.checks.subject import Subject
from shardwise.findings import Finding, Severity
from shardwise.sharding.poison import fingerprint
from shardwise.sharding.replicas import values_of_ranks

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
    told = values_of_ranks(_facts(subject), mesh)
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
