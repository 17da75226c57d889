"""Rules about the arguments of `fully_shard`: FSDP1's, unknown ones, meshes and root settings."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator

from shardwise.findings import Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source.syntax import FSDP1_NAMES, FULLY_SHARD
from shardwise.source.usage import Usage
from shardwise.source.values import Constant, ObjectRef, PartRef, ProgramEvent, TupleValue, Value

_KNOWN = frozenset(
    {
        "module",
        "mesh",
        "reshard_after_forward",
        "shard_placement_fn",
        "mp_policy",
        "offload_policy",
        "ignored_params",
        "dp_mesh_dims",
    }
)
_FROM_FSDP1 = {
    "process_group": "mesh=DeviceMesh.from_group(...)",
    "device_mesh": "mesh=",
    "sharding_strategy": "reshard_after_forward= for FULL_SHARD and SHARD_GRAD_OP, a 2-D mesh for HYBRID_SHARD",
    "cpu_offload": "offload_policy=CPUOffloadPolicy()",
    "auto_wrap_policy": "one fully_shard call for each block",
    "backward_prefetch": "nothing: backward always prefetches",
    "mixed_precision": "mp_policy=MixedPrecisionPolicy(...)",
    "ignored_modules": "ignored_params={p for m in modules for p in m.parameters()}",
    "ignored_states": "ignored_params=",
    "ignored_parameters": "ignored_params=",
    "param_init_fn": "to_empty() and an initialiser after sharding",
    "device_id": "torch.cuda.set_device() before",
    "sync_module_states": "a broadcast before sharding, or broadcast_from_rank0 when loading",
    "forward_prefetch": "set_modules_to_forward_prefetch()",
    "limit_all_gathers": "nothing: FSDP2 needs no limit",
    "use_orig_params": "nothing: parameters keep their names",
}
_INIT_MESH = "torch.distributed.device_mesh.init_device_mesh"
_MESH = "torch.distributed.device_mesh.DeviceMesh"
_HYBRID = re.compile(r"hybrid|hsdp", re.IGNORECASE)


@rule("SW193", "fsdp1-argument", severity=Severity.ERROR)
def fsdp1_argument(reading: LintContext) -> Iterator[Hit]:
    """FSDP1's settings given to `fully_shard`.

    Symptom: `TypeError: fully_shard() got an unexpected keyword argument`, or an attribute missing at the forward.
    """
    for _, event in reading.events_of(FULLY_SHARD):
        for name, argument in event.keywords.items():
            if name in _FROM_FSDP1:
                yield Hit(
                    node=argument.node,
                    message=f"{name} is an argument of FSDP1; fully_shard does not take it",
                    fix=f"use {_FROM_FSDP1[name]}",
                )
            elif name in _KNOWN:
                for kind in sorted({kind for value in argument.values if (kind := _fsdp1_kind(value))}):
                    yield Hit(
                        node=argument.node,
                        message=f"{name} gets FSDP1's {kind}; fully_shard needs its own type",
                        fix={"mp_policy": "use MixedPrecisionPolicy", "offload_policy": "use CPUOffloadPolicy"}.get(
                            name, "use the FSDP2 type"
                        ),
                    )


def _fsdp1_kind(value: Value) -> str:
    origins = getattr(value, "origins", frozenset())
    prefix = "torch.distributed.fsdp."
    names = {origin.removeprefix(prefix).split(".")[0] for origin in origins if origin.startswith(prefix)}
    return next(iter(sorted(names & FSDP1_NAMES)), "")


@rule("SW215", "wrong-fully-shard-argument", severity=Severity.ERROR)
def wrong_fully_shard_argument(reading: LintContext) -> Iterator[Hit]:
    """`fully_shard` takes one module and keyword arguments of its own.

    Symptom: `TypeError`, when the call is reached.
    """
    for _, event in reading.events_of(FULLY_SHARD):
        call = event.node
        if (
            isinstance(call, ast.Call)
            and len(event.args) > 1
            and not any(isinstance(a, ast.Starred) for a in call.args)
        ):
            yield Hit(
                node=call.args[1] if len(call.args) > 1 else call,
                message="fully_shard takes only the module by position",
                fix="name the argument, as in mesh=mesh",
            )
        for name, argument in event.keywords.items():
            if name not in _KNOWN and name not in _FROM_FSDP1:
                close = difflib.get_close_matches(name, _KNOWN, n=1)
                yield Hit(
                    node=argument.node,
                    message=f"fully_shard has no argument {name}",
                    fix=f"did you mean {close[0]}?" if close else f"it takes {', '.join(sorted(_KNOWN - {'module'}))}",
                )
            elif name == "mp_policy" and argument.values == {Constant(None)}:
                yield Hit(
                    node=argument.node,
                    message="mp_policy=None fails: fully_shard reads its fields",
                    fix="leave mp_policy out, or pass MixedPrecisionPolicy()",
                )


@rule("SW219", "hsdp-without-named-mesh", severity=Severity.ERROR)
def hsdp_without_named_mesh(reading: LintContext) -> Iterator[Hit]:
    """Hybrid sharding needs a 2-D mesh with named axes, replicas first.

    Why: without names `fully_shard` refuses the mesh; a flattened or missing mesh is worse, it silently shards over all
    ranks.
    """
    for usage, event in reading.events_of(FULLY_SHARD):
        mesh = event.keywords.get("mesh")
        if mesh is None:
            continue
        for value in mesh.values:
            message = _mesh_problem(usage, value, event)
            if message:
                made = value.site if isinstance(value, ObjectRef) else None
                yield Hit(
                    node=made if isinstance(made, ast.Call) else mesh.node,  # where the fix goes
                    message=f"{message} (line {event.node.lineno})",
                    fix='init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))',
                )
    yield from _hybrid_without_mesh(reading)


def _mesh_problem(usage: Usage, value: Value, event: ProgramEvent) -> str:
    made = next((one for one in usage.trace.calls_to(_INIT_MESH, _MESH) if value in one.result), None)
    if made is not None and not made.is_open and "dp_mesh_dims" not in event.keywords:
        num_axes = _num_axes(made)
        is_named = "mesh_dim_names" in made.keywords or (made.is_call_to(_INIT_MESH) and len(made.args) > 2)
        if num_axes > 2:
            return f"the mesh has {num_axes} axes; fully_shard takes one or two"
        if num_axes == 2 and not is_named:
            return "the 2-D mesh has no mesh_dim_names, so fully_shard refuses it"
    if isinstance(value, ObjectRef) and isinstance(value.site, ast.Call):
        return _flattened(value.site)
    return ""


def _num_axes(made: ProgramEvent) -> int:
    """How many axes a new mesh has; 0 where that is computed."""
    if made.is_call_to(_INIT_MESH):
        shape = next((one for one in made.argument(1, "mesh_shape") if isinstance(one, TupleValue)), None)
        return len(shape.items) if shape is not None else 0
    for value in made.argument(1, "mesh"):
        if isinstance(value, TupleValue):  # ranks as nested lists
            return 2 if any(isinstance(inner, TupleValue) for item in value.items for inner in item) else 1
        call = value.site if isinstance(value, ObjectRef) else None
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") in ("view", "reshape"):
            return len(call.args) if not isinstance(call.args[0], ast.Tuple) else len(call.args[0].elts)
    return 0


def _flattened(call: ast.Call) -> str:
    """`mesh["replicate", "shard"]._flatten()`: one axis over all ranks."""
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "_flatten"):
        return ""
    picked = call.func.value
    names = [node.value for node in ast.walk(picked) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    if len(names) >= 2 and any("repl" in name for name in names):
        return "the flattened mesh has one axis: parameters are sharded over all ranks, nothing is replicated"
    return ""


def _hybrid_without_mesh(reading: LintContext) -> Iterator[Hit]:
    """A setting called hybrid is tested, but no `fully_shard` call of the file gets a mesh."""
    calls = [event for _, event in reading.events_of(FULLY_SHARD)]
    if not calls or any(event.is_open or "mesh" in event.keywords for event in calls):
        return
    if "init_device_mesh" in reading.file.text or "DeviceMesh" in reading.file.text:
        return
    for node in reading.file.parents:
        if isinstance(node, ast.If) and (test := _asks_for_hybrid(node.test)) is not None:
            yield Hit(
                node=test,
                message="hybrid sharding is asked for, but fully_shard gets no mesh and shards over all ranks",
                fix='pass mesh=init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))',
            )


def _asks_for_hybrid(test: ast.expr) -> ast.expr | None:
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.In):
            for constant in ast.walk(node):
                if isinstance(constant, ast.Constant) and _HYBRID.search(str(constant.value)):
                    return node
    return None


@rule("SW237", "root-reshards-after-forward", severity=Severity.NOTE, preview=True)
def root_reshards_after_forward(reading: LintContext) -> Iterator[Hit]:
    """`reshard_after_forward=True` on the root frees what backward gathers again at once.

    Why: the root's parameters are the first that backward needs; by default they stay gathered.
    """
    for usage, shard in reading.shards:
        given = shard.event.keywords.get("reshard_after_forward")
        holds_others = any(usage.trace.is_part_of(other.subject, shard.subject) for other in usage.shards)
        if (
            given is not None
            and given.values == {Constant(True)}
            and holds_others
            and not _is_inner(usage, shard.subject)
        ):
            yield Hit(
                node=given.node,
                message="the root is freed after forward and gathered again at the start of backward",
                fix="leave reshard_after_forward out on the root",
            )


def _is_inner(usage: Usage, subject: ObjectRef | PartRef) -> bool:
    return any(usage.trace.is_part_of(subject, other.subject) for other in usage.shards)
