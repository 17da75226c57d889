"""FSDP1's wrapping policies, mixed precision and placement as arguments of fully_shard."""

from __future__ import annotations

import ast
import re

from shardwise.config.fsdp1_names import HYBRID, KEEPS_UNSHARDED
from shardwise.fsdp1.codemod.constructors import Wrap, read_arguments
from shardwise.fsdp1.codemod.draft import Blocked
from shardwise.fsdp1.codemod.program import (
    called_fsdp_name,
    fsdp_name,
    is_constant,
    is_none,
    single_value,
    strategy,
)
from shardwise.source.syntax import argument_of

Options = list[tuple[str, str]]
"""Arguments of `fully_shard` or of a helper, as names and texts."""


def refuse_unknown(wrap: Wrap, node: ast.expr) -> None:
    """Refuse policies that are not asked module by module.

    Raises:
        Blocked: For CustomPolicy, which may answer with settings of FSDP1 for single modules.
    """
    if called_fsdp_name(wrap.context, single_value(wrap.context, node)) == "wrap.CustomPolicy":
        raise Blocked(
            "CustomPolicy may give single modules FSDP1 settings of their own",
            "call fully_shard on the modules it picks, with FSDP2 settings, children first",
        )


def classes(wrap: Wrap, node: ast.expr | None) -> list[str]:
    """The class expressions that a policy written in the call picks, as text; none for any other policy."""
    picked: ast.expr | None = None
    match node:
        case ast.Call(args=[policy], keywords=[ast.keyword(arg="transformer_layer_cls", value=value)]):
            is_partial = wrap.context.is_any(node.func, {"functools.partial"})
            is_known = fsdp_name(wrap.context, policy) == "wrap.transformer_auto_wrap_policy"
            picked = value if is_partial and is_known else None
        case ast.Call(args=[value], keywords=[]) | ast.Call(args=[], keywords=[ast.keyword(value=value)]):
            picked = value if called_fsdp_name(wrap.context, node) == "wrap.ModuleWrapPolicy" else None
    elements = picked.elts if isinstance(picked, ast.Set | ast.List | ast.Tuple) else []
    is_open = any(isinstance(one, ast.Starred) for one in elements)
    return [] if is_open else [wrap.draft.source(one) for one in elements]


_SWITCHES = ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs")
_FIELDS = ("param_dtype", "reduce_dtype", "buffer_dtype", *_SWITCHES, "_module_classes_to_ignore")


def convert_precision(wrap: Wrap, *, has_policy: bool) -> tuple[Options, set[str]]:
    """Rewrite `mixed_precision=`.

    Returns:
        Options for a helper, and the features of the helper that they need; both empty where `fully_shard` itself
        can be told.
    """
    node = wrap.value("mixed_precision")
    if node is None or is_none(node):
        wrap.drop("mixed_precision")
        return [], set()
    literal = _own_literal(wrap, node)
    if literal is not None:
        wrap.rename("mixed_precision", "mp_policy")
        return _convert_literal(wrap, literal, has_policy)
    end = ", is_root=False)" if wrap.is_inner else ")"
    wrap.list.wrap(wrap.by_name["mixed_precision"], f"**{wrap.draft.helper('_precision')}(", end)
    return [], {"mp_policy", "buffer_dtype", "cast_unit_inputs", "in_full"}


def _own_literal(wrap: Wrap, node: ast.expr) -> ast.Call | None:
    """The `MixedPrecision(...)` that the argument is, if nobody else can see it and nothing in it is odd."""
    context = wrap.context
    value = node
    if isinstance(node, ast.Name):
        value, bindings, home = single_value(context, node), context.bindings(node), context.scope(node).find(node.id)
        uses = [context.scope(one).find(one.id) for one in context.loads(node.id)]
        num_uses = sum(one is not None and home is not None and one[0] is home[0] for one in uses)
        if len(bindings) != 1 or bindings[0].value is not value or num_uses != 1:
            return None
    if not isinstance(value, ast.Call) or called_fsdp_name(context, value) != "MixedPrecision":
        return None
    names = {keyword.arg for keyword in value.keywords}
    switches = [keyword.value for keyword in value.keywords if keyword.arg in _SWITCHES] + value.args[3:]
    is_clear = not names & {None, "_module_classes_to_ignore"} and all(
        isinstance(one, ast.Constant) for one in switches
    )
    starred = any(isinstance(one, ast.Starred) for one in value.args)
    return value if is_clear and not starred and (value.args or names) else None


def _convert_literal(wrap: Wrap, call: ast.Call, has_policy: bool) -> tuple[Options, set[str]]:
    listed = read_arguments(wrap.context, call)
    given = {one.name or _FIELDS[position]: one for position, one in enumerate(listed.arguments)}
    wrap.draft.replace(call.func, wrap.draft.name("MixedPrecisionPolicy"))
    options: Options = []
    features: set[str] = {"mp_policy"} if has_policy else set()
    switches = {name: is_constant(one.value, True) for name, one in given.items() if name in _SWITCHES}
    if switches.get("keep_low_precision_grads"):
        raise Blocked(
            "keep_low_precision_grads has no counterpart: gradients have the dtype parameters are stored in",
            "store the parameters in 16 bits, or leave it out",
        )
    param, reduce, buffers = (given.get(name) for name in _FIELDS[:3])
    if param is not None and not is_none(param.value):
        # FSDP1 reduces in `param_dtype` when told nothing; FSDP2 does not in every release.
        text = listed.text(param)
        if reduce is None:
            listed.add(f"reduce_dtype={text}")
        elif is_none(reduce.value):
            listed.replace(reduce, f"reduce_dtype={text}")
        elif not _is_torchs(wrap, reduce.value) and listed.text(reduce) != text:
            listed.replace(reduce, f"reduce_dtype={_bracketed(listed.text(reduce))} or {_bracketed(text)}")
    for name in _FIELDS[:2]:
        if name in given and not given[name].name:
            listed.rename(given[name], name)
    for name in ("buffer_dtype", *switches):
        if name in given:
            given[name].is_dropped = True
    if buffers is not None and not is_none(buffers.value):
        options.append(("buffer_dtype", listed.text(buffers)))
        features |= {"buffer_dtype", "mp_policy"}
    if switches.get("cast_forward_inputs"):
        options += [("cast_unit_inputs", "True")] if has_policy else []
    elif not switches.get("cast_root_forward_inputs", True) or wrap.is_inner:
        listed.add("cast_forward_inputs=False")
    wrap.draft.edits += listed.edits()
    return options, features


def _is_torchs(wrap: Wrap, node: ast.expr) -> bool:
    return any(origin.startswith("torch.") for origin in wrap.context.origins(node))


def _bracketed(text: str) -> str:
    return text if text.replace(".", "").replace("_", "").isalnum() else f"({text})"


def convert_offload(wrap: Wrap) -> Options:
    """Rewrite `cpu_offload=`; the options that `fully_shard` is to be told."""
    node = wrap.value("cpu_offload")
    text = "OffloadPolicy()" if node is None or is_constant(node, False) else _offload_text(wrap, node)
    if text is None:
        helper = wrap.draft.helper("_offload_policy")
        wrap.list.wrap(wrap.by_name["cpu_offload"], f"offload_policy={helper}(", ")")
        return []
    wrap.drop("cpu_offload")
    if text == "OffloadPolicy()":
        return []
    wrap.draft.names.update(re.findall(r"\b(?:CPU)?OffloadPolicy(?=\(\))", text))
    return [("offload_policy", text)]


def _offload_text(wrap: Wrap, node: ast.expr) -> str | None:
    """The FSDP2 policy for an expression; None where it is known only at run time."""
    if isinstance(node, ast.IfExp):
        yes, no = _offload_text(wrap, node.body), _offload_text(wrap, node.orelse)
        if yes is None or no is None:
            return None
        return yes if yes == no else f"{yes} if {wrap.draft.source(node.test)} else {no}"
    value = single_value(wrap.context, node)
    told = argument_of(value, 0, "offload_params") if isinstance(value, ast.Call) else None
    if not is_none(node) and called_fsdp_name(wrap.context, value) != "CPUOffload":
        return None
    if told is None or is_constant(told, False):
        return "OffloadPolicy()"
    if is_constant(told, True):
        return "CPUOffloadPolicy()"
    return f"CPUOffloadPolicy() if {wrap.draft.source(told)} else OffloadPolicy()" if value is node else None


_WHERE = ("process_group", "device_mesh", "device_id")
_AXES = 'mesh_dim_names=("replicate", "shard")'
_BUILDERS = {"torch.distributed.device_mesh.init_device_mesh", "torch.distributed.init_device_mesh"}
_LOCAL = {"rank", "local_rank", "gpu", "gpu_id", "localrank", "local_rank_id"}


def _device_kind(wrap: Wrap, node: ast.expr | None) -> str:
    """What `device_id` is: `current` (or nothing), `cpu`, `cuda` (with an index), or `unknown`."""
    if node is None or is_none(node):
        return "current"
    match resolved := single_value(wrap.context, node):
        case ast.IfExp():
            kinds = {_device_kind(wrap, resolved.body), _device_kind(wrap, resolved.orelse)}
            return kinds.pop() if len(kinds) == 1 else "unknown"
        case ast.Call(func=ast.Attribute(attr="current_device") as function):
            return "cpu" if wrap.context.is_any(function, {"torch.cpu.current_device"}) else "current"
        case ast.Call() if wrap.context.is_any(resolved.func, {"torch.device"}):
            return _torch_device(resolved)
        case ast.Constant(value=bool()):
            return "unknown"
        case ast.Constant(value=str(name)):
            return "cpu" if name == "cpu" else "cuda" if re.fullmatch(r"cuda:\d+", name) else "unknown"
        case ast.Constant(value=int()) | ast.BinOp(op=ast.Mod()):
            return "cuda"
        case ast.Call(func=ast.Name(id="int")) | ast.Call(func=ast.Attribute(attr="get_rank")):
            return "cuda"
    last = re.split(r"\W+", wrap.draft.source(node).rstrip("])\"' "))[-1].lower()
    return "cuda" if last in _LOCAL else "unknown"


def _torch_device(call: ast.Call) -> str:
    match call.args:
        case [ast.Constant(value="cpu"), *_]:
            return "cpu"
        case [ast.Constant(value="cuda")] if not call.keywords:
            return "current"
        case [ast.Constant(value=str(name)), *_] if name == "cuda" or name.startswith("cuda:"):
            return "cuda"
        case [ast.JoinedStr(values=[ast.Constant(value="cuda:"), *_]), *_]:
            return "cuda"
    return "unknown"


def convert_placement(wrap: Wrap) -> Options:
    """Drop or rewrite the four arguments.

    Returns:
        `fully_shard` options as (name, text), for those that read as constants; what is known only at run time has
        been written into the argument list already, by a helper.
    """
    wrap.drop(*(name for name in _WHERE if is_none(wrap.value(name))))
    member = strategy(wrap.context, wrap.value("sharding_strategy"))
    kind = _device_kind(wrap, wrap.value("device_id"))
    mesh, group = wrap.value("device_mesh"), wrap.value("process_group")
    is_clear = member is not None and is_none(group) and kind != "unknown" and (kind != "cuda" or wrap.is_plain)
    if mesh is not None and not is_none(mesh):
        is_clear = is_clear and member != "NO_SHARD" and _has_right_axes(wrap, mesh, member)
    elif member in (*HYBRID, "NO_SHARD"):
        is_clear = is_clear and (kind == "cpu" or "torch.cuda." in wrap.context.text)
    if member is None or not is_clear:
        return _at_run_time(wrap, member, kind)
    wrap.drop("sharding_strategy", "device_id")
    if kind == "cuda":
        _set_device(wrap)
    text = _mesh_text(wrap, member, kind)
    wrap.drop("device_mesh")
    reshard = member in KEEPS_UNSHARDED
    return [("mesh", text)] * bool(text) + [("reshard_after_forward", "False")] * reshard


def _has_right_axes(wrap: Wrap, mesh: ast.expr, member: str | None) -> bool:
    """Whether the mesh has the number of axes that the strategy takes, with names where FSDP2 needs them."""
    num_axes = 2 if member in HYBRID else 1
    built = single_value(wrap.context, mesh)
    if isinstance(built, ast.Subscript):  # mesh["dp"]
        names = built.slice.elts if isinstance(built.slice, ast.Tuple) else [built.slice]
        is_named = all(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in names)
        return is_named and len(names) == num_axes
    if not (isinstance(built, ast.Call) and wrap.context.is_any(built.func, _BUILDERS)):
        return False
    shape, named = argument_of(built, 1, "mesh_shape"), argument_of(built, 2, "mesh_dim_names")
    return isinstance(shape, ast.Tuple) and len(shape.elts) == num_axes and (num_axes == 1 or not is_none(named))


def _mesh_text(wrap: Wrap, member: str, kind: str) -> str:
    """The mesh to give; empty where `fully_shard` makes the same one itself."""
    if not is_none(wrap.value("device_mesh")):
        return wrap.text("device_mesh")
    if kind != "cpu" and member not in (*HYBRID, "NO_SHARD"):
        return ""
    device, world = "cpu" if kind == "cpu" else "cuda", "dist.get_world_size()"
    wrap.draft.names |= {"init_device_mesh", "dist"}
    if member in HYBRID:
        per_node = f"{wrap.draft.name('torch')}.{device}.device_count()"
        return f'init_device_mesh("{device}", ({world} // {per_node}, {per_node}), {_AXES})'
    if member == "NO_SHARD":
        wrap.dropped.append("NO_SHARD keeps a whole copy on every rank: a mesh with a shard axis of 1")
        return f'init_device_mesh("{device}", ({world}, 1), {_AXES})'
    return f'init_device_mesh("cpu", ({world},))'


def _set_device(wrap: Wrap) -> None:
    """`fully_shard` uses the current device: make it the one that `device_id` named, unless that is done already."""
    text = wrap.text("device_id")
    calls = wrap.context.calls_to("torch.cuda.set_device", "torch.cuda.device")
    if not any(call.args and wrap.draft.source(call.args[0]) == text for call in calls):
        wrap.draft.insert_before(wrap.statement, [f"{wrap.draft.name('torch')}.cuda.set_device({text})"])


def _at_run_time(wrap: Wrap, member: str | None, kind: str) -> Options:
    """Leave it to `_placement` or `_mesh`, in place of the first of the arguments."""
    draft, told = wrap.draft, wrap.by_name.get("sharding_strategy")
    given = [name for name in _WHERE if not is_none(wrap.value(name)) and (name, kind) != ("device_id", "current")]
    where = ", ".join(f"{name}={wrap.text(name)}" for name in given)
    draft.features.update(given)
    wrap.drop(*_WHERE)
    if member in ("FULL_SHARD", "SHARD_GRAD_OP"):
        wrap.drop("sharding_strategy")
        options = [("mesh", f"{draft.helper('_mesh')}({where})")] if given else []
        return options + [("reshard_after_forward", "False")] * (member == "SHARD_GRAD_OP")
    helper = draft.helper("_placement", "strategy")
    if told is None:
        return [("**", f"**{helper}({where})")]
    wrap.list.wrap(told, f"**{helper}(", f", {where})" if where else ")")
    return []
