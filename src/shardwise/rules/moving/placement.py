"""`sharding_strategy`, `process_group`, `device_mesh` and `device_id`: where the shards are."""

from __future__ import annotations

import ast
import re

from shardwise.rules.moving.constructors import Wrap
from shardwise.rules.moving.values import HYBRID, is_none, single_value, strategy

_WHERE = ("process_group", "device_mesh", "device_id")
_FEATURE = {"process_group": "group", "device_mesh": "mesh", "device_id": "device"}
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


def convert(wrap: Wrap) -> list[tuple[str, str]]:
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
    shape = built.args[1] if len(built.args) > 1 else _keyword(built, "mesh_shape")
    named = _keyword(built, "mesh_dim_names")
    if not isinstance(shape, ast.Tuple):
        return False
    return len(shape.elts) == (2 if member in HYBRID else 1) and (len(shape.elts) == 1 or not is_none(named))


_BUILDERS = {"torch.distributed.device_mesh.init_device_mesh", "torch.distributed.init_device_mesh"}


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


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
    wrap.draft.features.update(_FEATURE[name] for name in given)
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
