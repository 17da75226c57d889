"""Rules about the arguments of `fully_shard`: FSDP1's, unknown ones, meshes and root settings."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator

from shardwise.findings import Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source.syntax import FSDP1_NAMES, FULLY_SHARD, last_name
from shardwise.source.trace import Trace
from shardwise.source.values import Constant, ObjectRef, ProgramEvent, TupleValue, Value

_NAMES = "module mesh reshard_after_forward shard_placement_fn mp_policy offload_policy ignored_params dp_mesh_dims"
_KNOWN = frozenset(_NAMES.split())
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
_FSDP2_TYPES = {"mp_policy": "MixedPrecisionPolicy", "offload_policy": "CPUOffloadPolicy"}
_INIT_MESH = "torch.distributed.device_mesh.init_device_mesh"
_MESH = "torch.distributed.device_mesh.DeviceMesh"
_HYBRID = re.compile(r"hybrid|hsdp", re.IGNORECASE)
_NAMED_MESH = 'init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))'


@rule("SW193")
def fsdp1_argument(context: LintContext) -> Iterator[Hit]:
    """FSDP1's settings given to `fully_shard`.

    Symptom: `TypeError: fully_shard() got an unexpected keyword argument`, or an attribute missing at the forward.
    """
    for _, event in context.events_of(FULLY_SHARD):
        for name, entry in event.keywords.items():
            if name in _FROM_FSDP1:
                message = f"{name} is an argument of FSDP1; fully_shard does not take it"
                yield Hit(entry.node, message, f"use {_FROM_FSDP1[name]}")
            for kind in sorted(set().union(*map(_fsdp1_types, entry.values))) if name in _KNOWN else ():
                message = f"{name} gets FSDP1's {kind}; fully_shard needs its own type"
                yield Hit(entry.node, message, f"use {_FSDP2_TYPES.get(name, 'the FSDP2 type')}")


def _fsdp1_types(value: Value) -> set[str]:
    names = [origin.split(".") for origin in getattr(value, "origins", ())]
    found = {parts[3] for parts in names if parts[:3] == ["torch", "distributed", "fsdp"] and len(parts) > 3}
    return set(sorted(found & FSDP1_NAMES)[:1])


@rule("SW215")
def wrong_fully_shard_argument(context: LintContext) -> Iterator[Hit]:
    """`fully_shard` takes one module and keyword arguments of its own.

    Symptom: `TypeError`, when the call is reached.
    """
    for _, event in context.events_of(FULLY_SHARD):
        given = getattr(event.node, "args", [])
        if len(event.args) > 1 and not any(isinstance(one, ast.Starred) for one in given):
            node = given[1] if len(given) > 1 else event.node
            yield Hit(node, "fully_shard takes only the module by position", "name the argument, as in mesh=mesh")
        for name, entry in event.keywords.items():
            if name not in _KNOWN and name not in _FROM_FSDP1:
                close = difflib.get_close_matches(name, _KNOWN, n=1)
                fix = f"did you mean {close[0]}?" if close else f"it takes {', '.join(sorted(_KNOWN - {'module'}))}"
                yield Hit(entry.node, f"fully_shard has no argument {name}", fix)
            elif name == "mp_policy" and entry.values == {Constant(None)}:
                fix = "leave mp_policy out, or pass MixedPrecisionPolicy()"
                yield Hit(entry.node, "mp_policy=None fails: fully_shard reads its fields", fix)


@rule("SW219", fix=_NAMED_MESH)
def hsdp_without_named_mesh(context: LintContext) -> Iterator[Hit]:
    """Hybrid sharding needs a 2-D mesh with named axes, replicas first.

    Why: without names `fully_shard` refuses the mesh; a flattened or missing mesh is worse, it silently shards over all
    ranks.
    """
    for trace, event in context.events_of(FULLY_SHARD):
        mesh = event.keywords.get("mesh")
        for value in mesh.values if mesh is not None else ():
            message = _mesh_problem(trace, value, event)
            if mesh is not None and message:
                made = value.site if isinstance(value, ObjectRef) and not value.path else None
                node = made if isinstance(made, ast.Call) else mesh.node  # where the fix goes
                yield Hit(node, f"{message} (line {event.line})")
    yield from _hybrid_without_mesh(context)


def _mesh_problem(trace: Trace, value: Value, event: ProgramEvent) -> str:
    made = next((one for one in trace.calls_to(_INIT_MESH, _MESH) if value in one.result), None)
    if made is not None and not made.is_open and "dp_mesh_dims" not in event.keywords:
        num_axes = _num_axes(made)
        is_named = "mesh_dim_names" in made.keywords or (made.is_call_to(_INIT_MESH) and len(made.args) > 2)
        if num_axes > 2:
            return f"the mesh has {num_axes} axes; fully_shard takes one or two"
        if num_axes == 2 and not is_named:
            return "the 2-D mesh has no mesh_dim_names, so fully_shard refuses it"
    call = value.site if isinstance(value, ObjectRef) and not value.path else None
    if isinstance(call, ast.Call) and last_name(call.func) == "_flatten":  # `mesh["replicate", "shard"]._flatten()`
        names = [node.value for node in ast.walk(call.func) if isinstance(node, ast.Constant)]
        if len(names) >= 2 and any("repl" in str(name) for name in names):
            return "the flattened mesh has one axis: parameters are sharded over all ranks, nothing is replicated"
    return ""


def _num_axes(made: ProgramEvent) -> int:
    """How many axes a new mesh has; 0 where that is computed."""
    if made.is_call_to(_INIT_MESH):
        return next((len(one.items) for one in made.argument(1, "mesh_shape") if isinstance(one, TupleValue)), 0)
    for value in made.argument(1, "mesh"):
        if isinstance(value, TupleValue):  # ranks as nested lists
            return 2 if any(isinstance(inner, TupleValue) for item in value.items for inner in item) else 1
        call = getattr(value, "site", None)
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") in ("view", "reshape"):
            return len(call.args[0].elts if isinstance(call.args[0], ast.Tuple) else call.args)
    return 0


def _hybrid_without_mesh(context: LintContext) -> Iterator[Hit]:
    """A setting called hybrid is tested, but no `fully_shard` call of the file gets a mesh."""
    calls = [event for _, event in context.events_of(FULLY_SHARD)]
    if not calls or any(event.is_open or "mesh" in event.keywords for event in calls):
        return
    if "init_device_mesh" in context.file.text or "DeviceMesh" in context.file.text:
        return
    for node in context.file.nodes(ast.If):
        for test in ast.walk(node.test):
            if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq | ast.In) and _names_hybrid(test):
                message = "hybrid sharding is asked for, but fully_shard gets no mesh and shards over all ranks"
                yield Hit(test, message, f"pass mesh={_NAMED_MESH}")
                break


def _names_hybrid(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Constant) and _HYBRID.search(str(node.value)) for node in ast.walk(test))


@rule("SW237", Severity.NOTE, fix="leave reshard_after_forward out on the root", preview=True)
def root_reshards_after_forward(context: LintContext) -> Iterator[Hit]:
    """`reshard_after_forward=True` on the root frees what backward gathers again at once.

    Why: the root's parameters are the first that backward needs; by default they stay gathered.
    """
    for trace, shard in context.shards:
        given = shard.event.keywords.get("reshard_after_forward")
        if given is not None and given.values == {Constant(True)}:
            holds_others = any(trace.is_part_of(other.subject, shard.subject) for other in trace.shards)
            is_inner = any(trace.is_part_of(shard.subject, other.subject) for other in trace.shards)
            if holds_others and not is_inner:
                yield Hit(given.node, "the root is freed after forward and gathered again at the start of backward")
