"""Rules about devices: the one this process uses, and offload to the CPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.findings import Edit, Safety, Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source.syntax import FULLY_SHARD
from shardwise.source.values import Constant, ObjectRef, ProgramEvent, Value

_INIT = "torch.distributed.init_process_group"
_OFFLOAD = "torch.distributed.fsdp.CPUOffloadPolicy"
_INIT_MESH = "torch.distributed.device_mesh.init_device_mesh"
_RANK = re.compile(r"^(local_|global_)?rank$")
_SETS_DEVICE = frozenset({"set_device", "set_device_index", "init_distributed"})


@rule("SW220", "offload-with-nccl-only", severity=Severity.ERROR, safety=Safety.UNSAFE)
def offload_with_nccl_only(reading: LintContext) -> Iterator[Hit]:
    """CPU offload needs a process group that can reduce CPU tensors.

    Why: offloaded gradients are on the CPU, and clipping or any other collective on them has no NCCL.
    Symptom: `No backend type associated with device type cpu`.
    """
    if not any(True for _ in reading.events_of(_OFFLOAD)):
        return
    for _, event in reading.events_of(_INIT):
        if event.argument(0, "backend") not in ({Constant("nccl")}, {Constant("cuda:nccl")}):
            continue
        literal = _backend_literal(event.node)
        edits = ()
        if literal is not None:
            start, end = reading.file.positions.span(literal)
            edits = (Edit(start=start, end=end, text='"cpu:gloo,cuda:nccl"'),)
        yield Hit(
            node=event.node,
            message="parameters are offloaded to the CPU, but this process group has only NCCL",
            fix='init_process_group("cpu:gloo,cuda:nccl")',
            edits=edits,
        )


def _backend_literal(node: ast.AST) -> ast.Constant | None:
    if not isinstance(node, ast.Call):
        return None
    given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "backend")]
    return next((one for one in given if isinstance(one, ast.Constant)), None)


@rule("SW235", "no-device-set", severity=Severity.WARNING)
def no_device_set(reading: LintContext) -> Iterator[Hit]:
    """Without `torch.cuda.set_device`, FSDP puts the parameters of every local rank on GPU 0.

    Why: `fully_shard` uses the current device. FSDP1 took a `device_id` instead, and `set_device` was often lost with
    it. A mesh sets the device of a rank only while that rank has not used a GPU.
    """
    names = {getattr(call.func, "attr", getattr(call.func, "id", "")) for call in reading.file.calls}
    if names & _SETS_DEVICE or "CUDA_VISIBLE_DEVICES" in reading.file.text:
        return
    for usage in reading.usages:
        inits = usage.trace.calls_to(_INIT)
        meshes = usage.trace.calls_to(_INIT_MESH, FULLY_SHARD)  # either sets the device of a rank that used none yet
        if not inits or not any(event.is_call_to(FULLY_SHARD) for event in meshes) or "device_id" in inits[0].keywords:
            continue
        for event in usage.events:
            if event.order < meshes[0].order and _moves_to_gpu(event):
                yield Hit(
                    node=event.node,
                    message="no device is set for this rank, so FSDP puts every local rank's parameters on GPU 0",
                    fix='torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) right after init_process_group',
                )
                break
        else:
            yield from _left_to_the_mesh(reading, inits[0], names)


def _left_to_the_mesh(reading: LintContext, init: ProgramEvent, names: set[str]) -> Iterator[Hit]:
    """Nothing of the file says which GPU is whose: only a launcher that sets LOCAL_RANK makes it work."""
    uses_nccl = Constant("nccl") in init.argument(0, "backend")
    if uses_nccl and "init_device_mesh" not in names and "local_rank" not in reading.file.text.lower():
        yield Hit(
            node=init.node,
            message="no device is set for this rank; it depends on the launcher which GPU it gets",
            fix='torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) right after init_process_group',
        )


def _moves_to_gpu(event: ProgramEvent) -> bool:
    """`.cuda()`, `.to("cuda")`, `.to(f"cuda:{rank}")`, `.to(rank)`: the GPU is in use before a mesh could choose it."""
    if not isinstance(event.node, ast.Call) or event.is_store or event.origins:
        return False
    if event.method == "cuda":
        return True
    if event.method != "to" or not event.args:
        return False
    given = event.node.args[0] if event.node.args else None
    return (
        any(map(_is_cuda, event.args[0])) or _is_cuda_text(given) or _RANK.match(getattr(given, "id", "")) is not None
    )


def _is_cuda(value: Value) -> bool:
    if isinstance(value, Constant):
        return str(value.value).startswith("cuda")
    if isinstance(value, ObjectRef) and "torch.device" in value.origins and isinstance(value.site, ast.Call):
        return bool(value.site.args) and _is_cuda_text(value.site.args[0])
    return False


def _is_cuda_text(node: ast.AST | None) -> bool:
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return isinstance(node, ast.Constant) and str(node.value).startswith("cuda")


@rule("SW236", "offload-materialized-on-gpu", severity=Severity.ERROR)
def offload_materialized_on_gpu(reading: LintContext) -> Iterator[Hit]:
    """With CPU offload, parameters are materialised on the CPU.

    Symptom: `FSDP parameters should be materialized on CPU when enabling CPU offloading`.
    """
    for usage in reading.usages:
        offloaded = [
            shard
            for shard in usage.shards
            if (given := shard.event.keywords.get("offload_policy")) is not None
            and given.values
            and all(_OFFLOAD in getattr(value, "origins", ()) for value in given.values)
        ]
        for event in usage.events:
            if event.method != "to_empty":
                continue
            device = event.argument(0, "device")
            on_gpu = bool(device) and all(map(_is_cuda, device))
            if on_gpu and any(shard.subject in event.receiver for shard in offloaded):
                yield Hit(
                    node=event.node,
                    message="parameters are offloaded, but materialised on the GPU",
                    fix='model.to_empty(device="cpu")',
                )
