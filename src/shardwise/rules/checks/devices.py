"""Rules about devices: the one this process uses, and offload to the CPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.findings import Edit, Safety, Severity
from shardwise.rules.names import FULLY_SHARD
from shardwise.rules.program.usage import Usage
from shardwise.rules.program.values import Constant, Thing, Value
from shardwise.rules.registry import Hit, Reading, rule

_INIT = "torch.distributed.init_process_group"
_OFFLOAD = "torch.distributed.fsdp.CPUOffloadPolicy"
_SETS_DEVICE = frozenset({"set_device", "set_device_index"})


@rule("SW220", "offload-with-nccl-only", severity=Severity.ERROR, safety=Safety.UNSAFE)
def offload_with_nccl_only(reading: Reading) -> Iterator[Hit]:
    """CPU offload needs a process group that can reduce CPU tensors.

    Why: offloaded gradients are on the CPU, and clipping or any other collective on them has no NCCL.
    Symptom: `No backend type associated with device type cpu`.
    """
    if not any(True for _ in reading.events_of(_OFFLOAD)):
        return
    for _, event in reading.events_of(_INIT):
        if event.argument(0, "backend") != {Constant("nccl")}:
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
def no_device_set(reading: Reading) -> Iterator[Hit]:
    """Without `torch.cuda.set_device`, tensors of every local rank go to GPU 0.

    Why: `fully_shard` uses the current device, and so do `.cuda()` and `device="cuda"`. FSDP1 took a `device_id`
    instead, and the call was often lost with it.
    """
    calls = {getattr(call.func, "attr", getattr(call.func, "id", "")) for call in reading.file.calls}
    sets_visible = "CUDA_VISIBLE_DEVICES" in reading.file.text
    if calls & _SETS_DEVICE or calls & {"init_device_mesh", "init_distributed", "device_count"} or sets_visible:
        return  # a device mesh on cuda sets the device of a rank that has none
    for usage in reading.usages:
        inits = usage.trace.calls_to(_INIT)
        sharded = [shard for shard in usage.shards if shard.event.is_call_to(FULLY_SHARD)]
        if not inits or not sharded or any("mesh" in s.event.keywords or s.event.is_open for s in sharded):
            continue
        for event in usage.events:
            if usage.trace.precedes(event, sharded[0].event) and _moves_to_any_gpu(event) and _is_model(usage, event):
                yield Hit(
                    node=event.node,
                    message="no device is set for this rank: every local rank puts this on GPU 0",
                    fix='torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) right after init_process_group',
                )
                break


def _moves_to_any_gpu(event: object) -> bool:
    """`.cuda()` or `.to("cuda")` without a number."""
    method, args, keywords = event.method, event.args, event.keywords  # pyrefly: ignore
    if method == "cuda":
        return not args and not keywords
    return method == "to" and bool(args) and any(_is_bare_cuda(value) for value in args[0])


def _is_bare_cuda(value: Value) -> bool:
    if isinstance(value, Constant):
        return value.value == "cuda"
    if isinstance(value, Thing) and "torch.device" in value.origins and isinstance(value.site, ast.Call):
        args = value.site.args
        return len(args) == 1 and getattr(args[0], "value", None) == "cuda"
    return False


def _is_model(usage: Usage, event: object) -> bool:
    return any(
        usage.trace.are_related(value, shard.subject)
        for value in event.receiver  # pyrefly: ignore
        for shard in usage.shards
    )


@rule("SW236", "offload-materialized-on-gpu", severity=Severity.ERROR)
def offload_materialized_on_gpu(reading: Reading) -> Iterator[Hit]:
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
            on_gpu = bool(device) and all(isinstance(v, Constant) and str(v.value).startswith("cuda") for v in device)
            if on_gpu and any(shard.subject in event.receiver for shard in offloaded):
                yield Hit(
                    node=event.node,
                    message="parameters are offloaded, but materialised on the GPU",
                    fix='model.to_empty(device="cpu")',
                )
