"""Rules about `fully_shard`: its arguments, its modules, and the order of calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.errors import fix_name
from shardwise.findings import Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.linting.rules.devices import built_classes
from shardwise.source import values as v
from shardwise.source.facts import LISTS
from shardwise.source.interpreter import DESCENDANT, ITEM
from shardwise.source.syntax import FSDP1_NAMES, FULLY_SHARD, FileContext, calls_in, last_name, tested_classes
from shardwise.source.trace import Shard, Trace
from shardwise.source.values import BranchTest, Constant, DictValue, ObjectRef, ProgramEvent, TupleValue, Value, modules

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
    "param_init_fn": "to_empty() and an initializer after sharding",
    "device_id": "torch.cuda.set_device() before",
    "sync_module_states": "a broadcast before sharding, or broadcast_from_rank0 when loading",
    "forward_prefetch": "set_modules_to_forward_prefetch()",
    "limit_all_gathers": "nothing: FSDP2 needs no limit",
    "use_orig_params": "nothing: parameters keep their names",
}
_TYPES = {
    "mesh": "a DeviceMesh",
    "reshard_after_forward": "True, False, None or a number of ranks",
    "mp_policy": "a MixedPrecisionPolicy",
    "offload_policy": "an OffloadPolicy",
    "shard_placement_fn": "a function from a parameter to a Shard",
}
_FSDP2_TYPES = {"mp_policy": "MixedPrecisionPolicy", "offload_policy": "CPUOffloadPolicy"}
_INIT_MESH = "torch.distributed.device_mesh.init_device_mesh"
_MESH = "torch.distributed.device_mesh.DeviceMesh"
_HYBRID = re.compile(r"hybrid|hsdp", re.IGNORECASE)
_NAMED_MESH = 'init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))'


@rule("SW193")
def fsdp1_argument(context: LintContext) -> Iterator[Hit]:
    """`fully_shard` is called with settings of FSDP1.

    Symptom: `TypeError: fully_shard() got an unexpected keyword argument`, or a missing attribute in the forward.
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
    """`fully_shard` takes one positional argument, the module, and only its own keyword arguments.

    Symptom: `TypeError` when the call is executed.
    """
    for _, event in context.events_of(FULLY_SHARD):
        given = getattr(event.node, "args", [])
        if len(event.args) > 1 and not any(isinstance(one, ast.Starred) for one in given):
            node = given[1] if len(given) > 1 else event.node
            yield Hit(node, "fully_shard takes only the module by position", "name the argument, as in mesh=mesh")
        for name, entry in event.keywords.items():
            if name not in _KNOWN and name not in _FROM_FSDP1:
                fix = fix_name(name, _KNOWN, f"it takes {', '.join(sorted(_KNOWN - {'module'}))}")
                yield Hit(entry.node, f"fully_shard has no argument {name}", fix)
            elif name == "mp_policy" and entry.values == {Constant(None)}:
                fix = "omit mp_policy, or pass MixedPrecisionPolicy()"
                yield Hit(entry.node, "mp_policy=None fails: fully_shard reads its fields", fix)
            elif name in _KNOWN and entry.values and all(_is_wrong_literal(name, value) for value in entry.values):
                message = f"{context.file.source(entry.node)} is not a value of {name}"
                yield Hit(entry.node, message, f"give it {_TYPES.get(name, 'what fully_shard documents')}")


def _is_wrong_literal(name: str, value: Value) -> bool:
    """Whether the value is a literal of a type that `fully_shard` does not accept for this argument."""
    if isinstance(value, TupleValue | DictValue):
        return name in _TYPES
    kinds = (bool, int) if name == "reshard_after_forward" else ()
    return isinstance(value, Constant) and value.value is not None and not isinstance(value.value, kinds)


@rule("SW219", fix=_NAMED_MESH)
def hsdp_without_named_mesh(context: LintContext) -> Iterator[Hit]:
    """Hybrid sharding needs a 2-D mesh with named axes, replicas first.

    Why: without names `fully_shard` raises; with a flattened mesh or none it silently shards over all ranks, which is
    worse.
    """
    for trace, event in context.events_of(FULLY_SHARD):
        mesh = event.keywords.get("mesh")
        for value in mesh.values if mesh is not None else ():
            message = _mesh_problem(trace, value, event)
            if mesh is not None and message:
                made = value.site if isinstance(value, ObjectRef) and not value.path else None
                node = made if isinstance(made, ast.Call) else mesh.node  # where the fix applies
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
    """Return the number of axes of a new mesh; 0 if it is computed."""
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
    """Find tests of a setting called hybrid in a file in which no `fully_shard` call has a mesh."""
    calls = [event for _, event in context.events_of(FULLY_SHARD)]
    if not calls or any(event.is_open or "mesh" in event.keywords for event in calls):
        return
    if "init_device_mesh" in context.file.text or "DeviceMesh" in context.file.text:
        return
    for node in context.file.nodes(ast.If):
        for test in ast.walk(node.test):
            if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq | ast.In) and _names_hybrid(test):
                message = "hybrid sharding is requested, but fully_shard gets no mesh and shards over all ranks"
                yield Hit(test, message, f"pass mesh={_NAMED_MESH}")
                break


def _names_hybrid(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Constant) and _HYBRID.search(str(node.value)) for node in ast.walk(test))


@rule("SW237", Severity.NOTE, fix="omit reshard_after_forward on the root", preview=True)
def root_reshards_after_forward(context: LintContext) -> Iterator[Hit]:
    """`reshard_after_forward=True` on the root frees parameters that backward unshards again immediately.

    Why: backward needs the root's parameters first; by default they stay unsharded.
    """
    for trace, shard in context.shards:
        given = shard.event.keywords.get("reshard_after_forward")
        if given is not None and given.values == {Constant(True)}:
            holds_others = any(trace.is_part_of(other.subject, shard.subject) for other in trace.shards)
            is_inner = any(trace.is_part_of(shard.subject, other.subject) for other in trace.shards)
            if holds_others and not is_inner:
                yield Hit(given.node, "the root is resharded after forward, and unsharded again for backward")


_SHARDS_INSIDE = re.compile(r"shard|fsdp|wrap|paralle|prepare", re.IGNORECASE)
_LAYER = re.compile(r"(Linear|Layer|Norm|Embedding|Block|Conv\dd|MLP|Attention|Experts?|Router|Head)$")
_SCALARS = {"torch.tensor", "torch.as_tensor"}
_SIZED = {"torch.ones", "torch.zeros", "torch.empty", "torch.randn", "torch.rand", "torch.full"}


@rule("SW202", Severity.WARNING, fix="call fully_shard on each block first, then on the model")
def root_only_sharding(context: LintContext) -> Iterator[Hit]:
    """One `fully_shard` call on the whole model makes one group, which is unsharded as a whole.

    Why: a group is unsharded and resharded as one; with a single group peak memory is that of the unsharded model, and
    communication cannot overlap with computation.
    """
    file = context.file
    read = {shard.event.node for _, shard in context.shards}
    loads = [node for node in file.nodes(ast.Name, ast.Attribute) if isinstance(node.ctx, ast.Load)]
    loads = [node for node in loads if not isinstance(file.parents[node], ast.Attribute)]
    if sum(file.is_any(node, {FULLY_SHARD}) for node in loads) != len(read):
        return  # a `fully_shard` call with an unknown module: it may shard blocks
    for trace, shard in context.shards:
        if _is_whole_model(file, trace, shard) and not _has_groups_inside(trace, shard):
            message = "the whole model is one group: it is unsharded as a whole, and nothing overlaps"
            yield Hit(shard.event.node, message)


def _is_whole_model(file: FileContext, trace: Trace, shard: Shard) -> bool:
    subject = shard.subject
    if shard.is_automatic or ITEM in subject.path or shard.event.loop is not None:
        return False
    is_called = any(module == subject for _, module in trace.entered)
    is_trained = is_called and any(event.method == "backward" for event in trace.events)
    if not is_trained and not any(subject in optimizer.owners for optimizer in trace.optimizers):
        return False
    if subject.definition is not None:
        return any(
            _holds_blocks(file, call) for one in built_classes(file, subject.definition) for call in calls_in(one)
        )
    return not any(origin.startswith("torch.nn.") or _LAYER.search(origin) for origin in subject.origins)


def _holds_blocks(file: FileContext, call: ast.Call) -> bool:
    """Whether a call creates a list of modules, or a module that contains one."""
    origins = file.origins(call.func)
    if origins & LISTS or any(origin.startswith("torch.nn.Transformer") for origin in origins):
        return True
    return "torch.nn.Sequential" in origins and any(isinstance(argument, ast.Starred) for argument in call.args)


def _has_groups_inside(trace: Trace, shard: Shard) -> bool:
    if any(trace.are_related(other.subject, shard.subject) and other is not shard for other in trace.shards):
        return True
    return any(
        shard.subject in values and _SHARDS_INSIDE.search(event.method)
        for event in trace.events
        if event is not shard.event and not event.is_inlined  # calls inside an inlined function are events themselves
        for values in event.args
    )


@rule("SW205", fix="shard each module in it: for block in blocks: fully_shard(block)")
def container_sharded(context: LintContext) -> Iterator[Hit]:
    """`nn.ModuleList` and `nn.ModuleDict` have no forward to hook.

    Symptom: `fully_shard does not support containers that do not implement forward`.
    """
    for _, shard in context.shards:
        subject = shard.subject
        kinds = sorted(origin.rpartition(".")[2] for origin in subject.origins & LISTS)
        if subject.path and subject.path[-1] in ("layers", "h", "blocks"):
            # transformers stores blocks in a ModuleList with one of these names.
            kinds = ["ModuleList" for one in subject.whole.origins if one.startswith("transformers.")]
        if kinds and not shard.is_automatic:
            yield Hit(shard.event.node, f"{kinds[0]} has no forward, so fully_shard refuses it")


@rule("SW213", fix="shard both in one call, fully_shard([a, b]), or leave both to the root")
def tied_weights_split(context: LintContext) -> Iterator[Hit]:
    """Tied weights that are sharded in separate groups are no longer tied.

    Why: each group creates its own parameter. Up to torch 2.12, and sometimes later, no error is raised and the two
    weights train separately; newer versions raise.
    """
    for trace, tie in context.events:
        given = modules(tie.args[0]) if tie.is_store and tie.method == "weight" else []
        for source in [one.parent for one in given if one.path and one.path[-1] == "weight"]:
            for target in tie.receiver:
                alone = {shard.subject: shard for shard in reversed(trace.shards) if len(shard.together) == 1}
                if source in alone and target in alone:
                    last = max(alone[source], alone[target], key=lambda shard: shard.event.order)
                    message = f"its weight is tied to another module's (line {tie.line}) in a separate group"
                    yield Hit(last.event.node, message)


@rule("SW214", fix="give it one element: nn.Parameter(torch.ones(1)), or pass it in ignored_params")
def scalar_parameter(context: LintContext) -> Iterator[Hit]:
    """A parameter without dimensions cannot be sharded.

    Symptom: `fully_shard doesn't support scalar parameters. Change ... to a 1D tensor with numel equal to 1.`
    """
    for trace, event in context.events:
        if event.is_store and _is_scalar_parameter(context.file, event):
            for shard in trace.shards:
                is_left_out = shard.is_automatic or "ignored_params" in shard.event.keywords or shard.event.is_open
                subject = shard.subject
                owners = [one for one in event.receiver if one == subject or trace.is_part_of(one, subject)]
                if owners and not is_left_out:
                    yield Hit(event.node, f"{event.method} is a scalar, and fully_shard refuses scalar parameters")


def _is_scalar_parameter(file: FileContext, event: ProgramEvent) -> bool:
    value = getattr(file.statement(event.node), "value", None)
    is_parameter = isinstance(value, ast.Call) and value.args and file.is_any(value.func, {"torch.nn.Parameter"})
    return isinstance(value, ast.Call) and bool(is_parameter) and _is_scalar(file, value.args[0])


def _is_scalar(file: FileContext, node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):  # with a number, or with another scalar
        sides = (node.left, node.right)
        return any(_is_scalar(file, side) for side in sides) and (
            any(not calls_in(side) for side in sides) or all(_is_scalar(file, side) for side in sides)
        )
    if not (isinstance(node, ast.Call) and node.args):
        return False
    first = node.args[0]
    if file.is_any(node.func, _SCALARS):
        first = first.operand if isinstance(first, ast.UnaryOp) else first
        return isinstance(first, ast.Constant) and isinstance(first.value, int | float)
    return file.is_any(node.func, _SIZED) and isinstance(first, ast.List | ast.Tuple) and not first.elts


@rule("SW218", Severity.WARNING, fix="pass the same ignored_params to every fully_shard call")
def ignored_params_on_some_calls(context: LintContext) -> Iterator[Hit]:
    """`ignored_params` holds for one `fully_shard` call only.

    Why: a block that is sharded without it also shards the parameters that the root's call ignores.
    """
    for trace, root in context.shards:
        owners = v.owners_of_params(root.event.argument(None, "ignored_params"))
        for shard in trace.shards if owners else ():
            if (
                trace.is_part_of(shard.subject, root.subject)
                and "ignored_params" not in shard.event.keywords
                and not shard.event.is_open
                and any(trace.are_related(owner, shard.subject) for owner in owners)
            ):
                yield Hit(shard.event.node, f"this call shards what the call on line {root.event.line} ignores")


_APPLY_CHECKPOINTING = (
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing",
    "torch.distributed.fsdp.wrap.apply_activation_checkpointing",
)
_WRAP_CHECKPOINTING = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper"
_NESTED = {
    "TransformerEncoder": {"TransformerEncoderLayer"},
    "TransformerDecoder": {"TransformerDecoderLayer"},
    "Transformer": {
        "TransformerEncoder",
        "TransformerDecoder",
        "TransformerEncoderLayer",
        "TransformerDecoderLayer",
    },
}
"""Torch's modules that contain other modules of torch."""


@rule("SW206", fix="apply activation checkpointing first, then shard the wrapped blocks")
def checkpointing_after_shard(context: LintContext) -> Iterator[Hit]:
    """Activation checkpointing applied after `fully_shard` wraps the sharded block.

    Why: FSDP's hooks then run inside the recomputation. On torch 2.11 they do not cast the block's inputs again, which
    fails in backward if the block casts them; from 2.13 on, gradients and all-gathers equal those of the right order.
    """
    for trace, event in context.events_of(*_APPLY_CHECKPOINTING, _WRAP_CHECKPOINTING):
        is_whole = event.is_call_to(*_APPLY_CHECKPOINTING)
        for module in modules(event.argument(0, "model", "module")):
            for shard in trace.shards:
                is_wrapped = shard.subject == module and (shard.is_automatic or not is_whole)
                is_wrapped |= is_whole and trace.is_part_of(shard.subject, module)
                if is_wrapped and trace.precedes(shard.event, event):
                    message = f"checkpointing wraps blocks that are already sharded (line {shard.event.line})"
                    yield Hit(event.node, message)


@rule("SW207", fix="test isinstance(module, CheckpointWrapper), or loop over the list that holds the blocks")
def block_sharded_inside_checkpoint(context: LintContext) -> Iterator[Hit]:
    """Selecting blocks by class after checkpointing selects the block inside its wrapper.

    Why: `apply_activation_checkpointing` wraps each block in a `CheckpointWrapper`; the class matches the inner block,
    so the wrapper is outside the FSDP group.
    """
    for trace, event in context.events_of(*_APPLY_CHECKPOINTING):
        wrapped = _checkpointed_classes(context.file, event)
        for shard in trace.shards:
            picked = _picked_classes(context.file, shard.event.guards)
            inside = ", ".join(sorted(picked & wrapped))
            is_found = shard.subject.path[-1:] == (DESCENDANT,) and trace.precedes(event, shard.event)
            if inside and is_found and "CheckpointWrapper" not in picked:
                message = f"{inside} is inside a checkpoint wrapper since line {event.line}; "
                yield Hit(shard.event.node, message + "the wrapper is what should be sharded")


def _picked_classes(file: FileContext, guards: tuple[BranchTest, ...] | list[BranchTest]) -> set[str]:
    return {name for guard in guards if guard.taken for name in tested_classes(file, guard.test)}


def _checkpointed_classes(file: FileContext, event: ProgramEvent) -> set[str]:
    """Return the classes that a `check_fn` selects, if it is a lambda or a function of this file."""
    check = event.keywords.get("check_fn") or event.keywords.get("auto_wrap_policy")
    nodes = [file.definition(check.node), *file.assigned(check.node)] if check is not None else []
    calls = [call for node in nodes[:2] if node is not None for call in calls_in(node)]
    return {name for call in calls for name in tested_classes(file, call)}


@rule("SW208", Severity.WARNING, fix="compile each block before sharding it, or call model.compile() after sharding")
def compiled_model_sharded(context: LintContext) -> Iterator[Hit]:
    """`torch.compile` is applied to the whole model before `fully_shard` splits it into groups.

    Why: the graph breaks at every hook, and state-dict keys get an `_orig_mod.` prefix. Compile each block, or call
    `model.compile()` after sharding.
    """
    for trace, event in context.events_of("torch.compile"):
        for shard in trace.shards:
            has_groups = any(trace.is_part_of(other.subject, shard.subject) for other in trace.shards)
            if shard.subject in event.argument(0, "model") and has_groups and trace.precedes(event, shard.event):
                yield Hit(event.node, f"the whole model is compiled before it is sharded (line {shard.event.line})")


@rule("SW203", fix="shard children first, then the modules around them, the root last")
def parent_before_child(context: LintContext) -> Iterator[Hit]:
    """`fully_shard` on a parent before its child leaves the child no parameters to shard.

    Why: each call shards the parameters that no earlier call sharded; children come first, the root last.
    Symptom: `TypeError: Invariant encountered: value was None when it should not be`.
    """
    for trace, child in context.shards:
        for parent in trace.shards:
            # shardwise orders the calls itself; a ModuleList raises in any order (SW205)
            is_excused = parent.is_automatic or parent.subject.origins & LISTS
            is_around = trace.is_part_of(child.subject, parent.subject)
            if is_around and not is_excused and trace.precedes(parent.event, child.event):
                line = parent.event.line
                yield Hit(child.event.node, f"the module around this one is already sharded (line {line})")
                break
    for _, shard in context.shards:
        reason = _parents_come_first(context.file, shard)
        if reason:
            fix = "loop over reversed(list(model.modules())), or over the blocks themselves"
            yield Hit(shard.event.node, f"modules() gives parents before their children, {reason}", fix)


def _parents_come_first(file: FileContext, shard: Shard) -> str:
    """Return why a loop over `modules()` shards a module before one inside it; empty if it does not."""
    loop = shard.event.loop
    if shard.subject.path[-1:] != (DESCENDANT,) or not isinstance(loop, ast.For):
        return ""
    called = {last_name(call.func) for call in calls_in(loop.iter)}
    if "reversed" in called or not called & {"modules", "named_modules"}:
        return ""  # modules were filtered before; the condition is unknown
    inside = [guard for guard in shard.event.guards if loop.lineno <= guard.test.lineno <= (loop.end_lineno or 0)]
    if not inside:
        return "and every one of them is sharded"
    names = _picked_classes(file, inside) if len(inside) == 1 else set()
    for outer in names:
        own = {last_name(call.func) for call in calls_in(file.classes[outer])} if outer in file.classes else set()
        for inner in (names - {outer}) & (own | _NESTED.get(outer, set())):
            return f"and {outer} contains {inner}"
    return ""


@rule("SW204")
def sharded_twice(context: LintContext) -> Iterator[Hit]:
    """A module can be given to `fully_shard` only once.

    Why: the first call has already replaced its parameters and registered its hooks.
    Symptom: `fully_shard has already been applied to the module`.
    """
    for trace, second in context.shards:
        for first in trace.shards:
            is_again = first.subject == second.subject and trace.precedes(first.event, second.event)
            if is_again and _is_one_module(context.file, first, second):
                message = f"this module is already sharded (line {first.event.line})"
                yield Hit(second.event.node, message, "remove one of the two calls")
                break
        if _is_repeated(second):
            message = "every iteration of the loop shards the same module"
            yield Hit(second.event.node, message, "shard it once, before the loop")


def _is_repeated(shard: Shard) -> bool:
    """Whether a loop in the same function repeats the call for a module created before the loop."""
    loop, argument = shard.event.loop, _first_argument(shard)
    if not (isinstance(loop, ast.For) and not shard.subject.path and isinstance(argument, ast.Name)):
        return False
    inside = list(ast.walk(loop))
    stored = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    ends = any(isinstance(node, ast.Break | ast.Return) for node in inside)
    is_made_before = shard.subject.site not in inside and argument.id not in stored
    return shard.event.node in inside and is_made_before and not ends


def _is_one_module(file: FileContext, first: Shard, second: Shard) -> bool:
    """Whether two shards are the same module; elements of a list are, if both loops iterate over the same list."""
    one, other = first.event.loop, second.event.loop
    if one is None and other is None:
        return ITEM not in first.subject.path and len(first.together) == len(second.together) == 1
    if not (isinstance(one, ast.For) and isinstance(other, ast.For)):
        return False
    by_name = all(isinstance(_first_argument(shard), ast.Name | None) for shard in (first, second))
    is_tested = any(
        guard.test.lineno >= shard.event.loop.lineno
        for shard in (first, second)
        for guard in shard.event.guards
        if shard.event.loop is not None
    )
    return by_name and (one is other or (file.source(one.iter) == file.source(other.iter) and not is_tested))


def _first_argument(shard: Shard) -> ast.expr | None:
    return next(iter(getattr(shard.event.node, "args", [])), None)
