"""FSDP1's wrapping policies, mixed precision and placement as arguments of fully_shard."""

from __future__ import annotations

import ast
import re

from shardwise.fsdp1.codemod.constructors import ArgumentList, Blocked, Wrap, read_arguments
from shardwise.fsdp1.codemod.program import (
    HYBRID,
    called_fsdp_name,
    fsdp_name,
    is_constant,
    is_none,
    single_value,
    strategy,
)
from shardwise.source.syntax import argument_of

_CLASS_POLICIES = {"wrap.transformer_auto_wrap_policy": "transformer_layer_cls"}


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


def classes(wrap: Wrap, node: ast.expr) -> list[str] | None:
    """The class expressions that a policy written in the call picks, as text; None for any other policy."""
    context = wrap.context
    if not isinstance(node, ast.Call):
        return None
    picked: ast.expr | None = None
    if context.is_any(node.func, {"functools.partial"}) and len(node.args) == 1 and len(node.keywords) == 1:
        keyword = _CLASS_POLICIES.get(fsdp_name(context, node.args[0]) or "")
        picked = node.keywords[0].value if keyword is not None and node.keywords[0].arg == keyword else None
    elif called_fsdp_name(context, node) == "wrap.ModuleWrapPolicy" and len(node.args) + len(node.keywords) == 1:
        picked = node.args[0] if node.args else node.keywords[0].value
    if not isinstance(picked, ast.Set | ast.List | ast.Tuple) or not picked.elts:
        return None
    if any(isinstance(one, ast.Starred) for one in picked.elts):
        return None
    return [context.source(one) for one in picked.elts]


_FIELDS = (
    "param_dtype",
    "reduce_dtype",
    "buffer_dtype",
    "keep_low_precision_grads",
    "cast_forward_inputs",
    "cast_root_forward_inputs",
    "_module_classes_to_ignore",
)


def convert_precision(wrap: Wrap, *, has_policy: bool) -> tuple[list[tuple[str, str]], set[str]]:
    """Rewrite `mixed_precision=`.

    Returns:
        Options for a helper, and the features of the helper that they need; both empty where `fully_shard` itself
        can be told.
    """
    node = wrap.value("mixed_precision")
    if is_none(node):
        wrap.drop("mixed_precision")
        return [], set()
    assert node is not None
    literal = _own_literal(wrap, node)
    if literal is None:
        argument = wrap.by_name["mixed_precision"]
        end = ", is_root=False)" if wrap.is_inner else ")"
        wrap.list.wrap(argument, f"**{wrap.draft.helper('_precision')}(", end)
        return [], {"mp_policy", "buffer_dtype", "cast_unit_inputs", "in_full"}
    listed = read_arguments(wrap.context, literal)
    options, features = _literal(wrap, literal, listed, has_policy)
    wrap.draft.edits += listed.edits()
    wrap.list.rename(wrap.by_name["mixed_precision"], "mp_policy")
    return options, features


def _own_literal(wrap: Wrap, node: ast.expr) -> ast.Call | None:
    """The `MixedPrecision(...)` that the argument is, if nobody else can see it."""
    context = wrap.context
    value = node
    if isinstance(node, ast.Name):
        value = single_value(context, node)
        bindings = context.bindings(node)
        if len(bindings) != 1 or bindings[0].value is not value or _num_uses(wrap, node) != 1:
            return None
    if called_fsdp_name(context, value) != "MixedPrecision":
        return None
    assert isinstance(value, ast.Call)
    starred = any(isinstance(one, ast.Starred) for one in value.args) or any(k.arg is None for k in value.keywords)
    names = [k.arg for k in value.keywords]
    flags = [k.value for k in value.keywords if k.arg in _FIELDS[3:6]]
    flags += value.args[3:]
    odd = "_module_classes_to_ignore" in names or any(not isinstance(one, ast.Constant) for one in flags)
    return None if starred or odd or (not value.keywords and not value.args) else value


def _num_uses(wrap: Wrap, name: ast.Name) -> int:
    context = wrap.context
    found = context.scope(name).find(name.id)
    home = found[0] if found else None
    others = [context.scope(node).find(node.id) for node in context.loads(name.id)]
    return sum(other is not None and other[0] is home for other in others)


def _literal(
    wrap: Wrap, call: ast.Call, listed: ArgumentList, has_policy: bool
) -> tuple[list[tuple[str, str]], set[str]]:
    given = {}
    for position, argument in enumerate(listed.arguments):
        given[argument.name or _FIELDS[position]] = argument
    wrap.draft.replace(call.func, wrap.draft.name("MixedPrecisionPolicy"))
    options: list[tuple[str, str]] = []
    features: set[str] = {"mp_policy"} if has_policy else set()
    values = {name: argument.value for name, argument in given.items()}
    if is_constant(values.get("keep_low_precision_grads"), True):
        raise Blocked(
            "keep_low_precision_grads has no counterpart: gradients have the dtype parameters are stored in",
            "store the parameters in 16 bits, or leave it out",
        )
    _reduce(listed, given)
    for name in ("param_dtype", "reduce_dtype"):
        if name in given and not given[name].name:
            listed.rename(given[name], name)
    buffers = given.get("buffer_dtype")
    if buffers is not None:
        listed.drop(buffers)
        if not is_none(buffers.value):
            options.append(("buffer_dtype", listed.text(buffers)))
            features |= {"buffer_dtype", "mp_policy"}
    units, root = values.get("cast_forward_inputs"), values.get("cast_root_forward_inputs")
    for name in _FIELDS[3:6]:
        if name in given:
            listed.drop(given[name])
    if is_constant(units, True):
        if has_policy:
            options.append(("cast_unit_inputs", "True"))
    elif is_constant(root, False) or wrap.is_inner:
        listed.add("cast_forward_inputs=False")
    return options, features


def _reduce(listed: ArgumentList, given: dict) -> None:
    """FSDP1 reduces in `param_dtype` when told nothing; FSDP2 does not in every release."""
    param, reduce = given.get("param_dtype"), given.get("reduce_dtype")
    if param is None or is_none(param.value):
        return
    if reduce is None:
        listed.add(f"reduce_dtype={listed.text(param)}")
    elif is_none(reduce.value):
        listed.replace(reduce, f"reduce_dtype={listed.text(param)}")
    elif not _is_dtype(listed, reduce.value) and listed.text(reduce) != listed.text(param):
        listed.replace(reduce, f"reduce_dtype={_bracketed(listed.text(reduce))} or {_bracketed(listed.text(param))}")


def _is_dtype(listed: ArgumentList, node: ast.expr) -> bool:
    return any(origin.startswith("torch.") for origin in listed.context.origins(node))


def _bracketed(text: str) -> str:
    return text if text.replace(".", "").replace("_", "").isalnum() else f"({text})"


def convert_offload(wrap: Wrap) -> list[tuple[str, str]]:
    """Rewrite `cpu_offload=`; the options that `fully_shard` is to be told."""
    node = wrap.value("cpu_offload")
    if is_none(node) or is_constant(node, False):
        wrap.drop("cpu_offload")
        return []
    assert node is not None
    text = _offload_text(wrap, node)
    argument = wrap.by_name["cpu_offload"]
    if text is None:
        wrap.list.wrap(argument, f"offload_policy={wrap.draft.helper('_offload_policy')}(", ")")
    elif text == "OffloadPolicy()":
        wrap.drop("cpu_offload")
    else:
        wrap.drop("cpu_offload")
        wrap.draft.name("CPUOffloadPolicy")
        if "else OffloadPolicy()" in text or "OffloadPolicy() if" in text.replace("CPUOffloadPolicy", ""):
            wrap.draft.name("OffloadPolicy")
        return [("offload_policy", text)]
    return []


def _offload_text(wrap: Wrap, node: ast.expr) -> str | None:
    """The FSDP2 policy for an expression; None where it is known only at run time."""
    if is_none(node):
        return "OffloadPolicy()"
    if isinstance(node, ast.IfExp):
        yes, no = _offload_text(wrap, node.body), _offload_text(wrap, node.orelse)
        if yes is None or no is None:
            return None
        return yes if yes == no else f"{yes} if {wrap.context.source(node.test)} else {no}"
    value = single_value(wrap.context, node)
    if called_fsdp_name(wrap.context, value) != "CPUOffload":
        return None
    assert isinstance(value, ast.Call)
    told = argument_of(value, 0, "offload_params")
    if told is None or is_constant(told, False):
        return "OffloadPolicy()"
    if is_constant(told, True):
        return "CPUOffloadPolicy()"
    return f"CPUOffloadPolicy() if {wrap.context.source(told)} else OffloadPolicy()" if value is node else None


_WHERE = ("process_group", "device_mesh", "device_id")
_AXES = 'mesh_dim_names=("replicate", "shard")'


def device_kind(wrap: Wrap) -> str:
    """What `device_id` is: `current` (or nothing), `cpu`, `cuda` (with an index), or `unknown`."""
    return _kind(wrap, wrap.value("device_id"))


def _kind(wrap: Wrap, node: ast.expr | None) -> str:
    if is_none(node):
        return "current"
    assert node is not None
    text = wrap.context.source(node)
    resolved = single_value(wrap.context, node)
    match resolved:
        case ast.IfExp():
            kinds = {_kind(wrap, resolved.body), _kind(wrap, resolved.orelse)}
            return kinds.pop() if len(kinds) == 1 else "unknown"
        case ast.Call(func=ast.Attribute(attr="current_device") as function):
            return "cpu" if wrap.context.is_any(function, {"torch.cpu.current_device"}) else "current"
        case ast.Call() if wrap.context.is_any(resolved.func, {"torch.device"}):
            return _torch_device(resolved)
        case ast.Call(func=ast.Name(id="int")) | ast.Call(func=ast.Attribute(attr="get_rank")):
            return "cuda"
        case ast.Constant(value=bool()):
            return "unknown"
        case ast.Constant(value=int()):
            return "cuda"
        case ast.BinOp(op=ast.Mod()):
            return "cuda"
        case ast.Constant(value=str(name)):
            return "cpu" if name == "cpu" else "cuda" if re.fullmatch(r"cuda:\d+", name) else "unknown"
    last = re.split(r"\W+", text.rstrip("])\"' "))[-1].lower()
    return "cuda" if last in ("rank", "local_rank", "gpu", "gpu_id", "localrank", "local_rank_id") else "unknown"


def _torch_device(call: ast.Call) -> str:
    first = call.args[0] if call.args else None
    match first:
        case ast.Constant(value="cpu"):
            return "cpu"
        case ast.Constant(value="cuda"):
            return "cuda" if len(call.args) > 1 or call.keywords else "current"
        case ast.Constant(value=str(name)) if name.startswith("cuda:"):
            return "cuda"
        case ast.JoinedStr(values=[ast.Constant(value="cuda:"), *_]):
            return "cuda"
    return "unknown"


def convert_placement(wrap: Wrap) -> list[tuple[str, str]]:
    """Drop or rewrite the four arguments.

    Returns:
        `fully_shard` options as (name, text), for those that read as constants; what is known only at run time has
        been written into the argument list already, by a helper.
    """
    for name in _WHERE:
        if is_none(wrap.value(name)):
            wrap.drop(name)
    member = strategy(wrap.context, wrap.value("sharding_strategy"))
    kind = device_kind(wrap)
    mesh, group = wrap.value("device_mesh"), wrap.value("process_group")
    if (
        member is None
        or not is_none(group)
        or kind == "unknown"
        or (kind == "cuda" and not wrap.is_plain)
        or (not is_none(mesh) and (member == "NO_SHARD" or not _is_clear(wrap, mesh, member)))
        or (member in (*HYBRID, "NO_SHARD") and is_none(mesh) and kind != "cpu" and not _speaks_of_cuda(wrap))
    ):
        return _at_run_time(wrap, member, kind)
    wrap.drop("sharding_strategy")
    wrap.drop("device_id")
    if kind == "cuda":
        _set_device(wrap)
    options = []
    if (text := _mesh_text(wrap, member, kind)) is not None:
        wrap.drop("device_mesh")
        options.append(("mesh", text))
    if member in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "NO_SHARD"):
        options.append(("reshard_after_forward", "False"))
    return options


def _speaks_of_cuda(wrap: Wrap) -> bool:
    return "torch.cuda." in wrap.context.text


def _is_clear(wrap: Wrap, mesh: ast.expr | None, member: str) -> bool:
    """Whether the mesh has the number of axes that the strategy takes, with names where FSDP2 needs them."""
    if mesh is None:
        return True
    built = single_value(wrap.context, mesh)
    if isinstance(built, ast.Subscript):  # mesh["dp"]
        names = built.slice.elts if isinstance(built.slice, ast.Tuple) else [built.slice]
        return all(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in names) and (
            len(names) == (2 if member in HYBRID else 1)
        )
    if not (isinstance(built, ast.Call) and wrap.context.is_any(built.func, _BUILDERS)):
        return False
    shape, named = argument_of(built, 1, "mesh_shape"), argument_of(built, 2, "mesh_dim_names")
    if not isinstance(shape, ast.Tuple):
        return False
    return len(shape.elts) == (2 if member in HYBRID else 1) and (len(shape.elts) == 1 or not is_none(named))


_BUILDERS = {"torch.distributed.device_mesh.init_device_mesh", "torch.distributed.init_device_mesh"}


def _mesh_text(wrap: Wrap, member: str, kind: str) -> str | None:
    if not is_none(wrap.value("device_mesh")):
        return wrap.text("device_mesh")
    device = "cpu" if kind == "cpu" else "cuda"
    if member in (*HYBRID, "NO_SHARD") or kind == "cpu":
        wrap.draft.name("init_device_mesh")
        wrap.draft.name("dist")
    world = "dist.get_world_size()"
    if member in HYBRID:
        per_node = f"torch.{device}.device_count()"
        wrap.draft.name("torch")
        return f'init_device_mesh("{device}", ({world} // {per_node}, {per_node}), {_AXES})'
    if member == "NO_SHARD":
        wrap.dropped.append("NO_SHARD keeps a whole copy on every rank: a mesh with a shard axis of 1")
        return f'init_device_mesh("{device}", ({world}, 1), {_AXES})'
    return f'init_device_mesh("cpu", ({world},))' if kind == "cpu" else None


def _set_device(wrap: Wrap) -> None:
    """`fully_shard` uses the current device: make it the one that `device_id` named, unless that is done already."""
    text = wrap.text("device_id")
    for call in wrap.context.calls_to("torch.cuda.set_device", "torch.cuda.device"):
        if call.args and wrap.context.source(call.args[0]) == text:
            return
    wrap.draft.name("torch")
    wrap.draft.insert_before(wrap.statement, [f"torch.cuda.set_device({text})"])


def _at_run_time(wrap: Wrap, member: str | None, kind: str) -> list[tuple[str, str]]:
    """Leave it to `_placement` or `_mesh`, in place of the first of the arguments."""
    given = [name for name in _WHERE if not is_none(wrap.value(name))]
    if kind == "current" and "device_id" in given:
        given.remove("device_id")
        wrap.drop("device_id")
    more = "".join(f", {name}={wrap.text(name)}" for name in given)
    wrap.draft.features.update(given)
    if member not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        wrap.draft.features.add("strategy")
    told = wrap.by_name.get("sharding_strategy")
    draft = wrap.draft
    if member in ("FULL_SHARD", "SHARD_GRAD_OP"):
        where = more.removeprefix(", ")
        if told is not None:
            wrap.drop("sharding_strategy")
        options = [("mesh", f"{draft.helper('_mesh')}({where})")] if given else []
        options += [("reshard_after_forward", "False")] if member == "SHARD_GRAD_OP" else []
    elif told is not None:
        wrap.list.wrap(told, f"**{draft.helper('_placement')}(", f"{more})")
        options = []
    else:
        options = [("**", f"**{draft.helper('_placement')}({more.removeprefix(', ')})")]
    for name in given:
        wrap.drop(name)
    return options
