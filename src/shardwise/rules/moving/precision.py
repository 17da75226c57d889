"""`mixed_precision` and `cpu_offload`: FSDP1's objects as FSDP2's policies."""

from __future__ import annotations

import ast

from shardwise.rules.moving.arguments import ArgumentList, read_arguments
from shardwise.rules.moving.constructors import Blocked, Wrap
from shardwise.rules.moving.values import called_fsdp_name, is_constant, is_none, single_value

_FIELDS = (
    "param_dtype",
    "reduce_dtype",
    "buffer_dtype",
    "keep_low_precision_grads",
    "cast_forward_inputs",
    "cast_root_forward_inputs",
    "_module_classes_to_ignore",
)


def convert(wrap: Wrap, *, has_policy: bool) -> tuple[list[tuple[str, str]], set[str]]:
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
        return [], {"precision", "buffers"}
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
    uses = 0
    for node in context.parents:
        if isinstance(node, ast.Name) and node.id == name.id and isinstance(node.ctx, ast.Load):
            other = context.scope(node).find(node.id)
            uses += other is not None and other[0] is home
    return uses


def _literal(
    wrap: Wrap, call: ast.Call, listed: ArgumentList, has_policy: bool
) -> tuple[list[tuple[str, str]], set[str]]:
    given = {}
    for position, argument in enumerate(listed.arguments):
        given[argument.name or _FIELDS[position]] = argument
    wrap.draft.replace(call.func, wrap.draft.name("MixedPrecisionPolicy"))
    options: list[tuple[str, str]] = []
    features: set[str] = {"precision"} if has_policy else set()
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
            features |= {"buffers", "precision"}
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
    told = value.args[0] if value.args else next((k.value for k in value.keywords if k.arg == "offload_params"), None)
    if told is None or is_constant(told, False):
        return "OffloadPolicy()"
    if is_constant(told, True):
        return "CPUOffloadPolicy()"
    return f"CPUOffloadPolicy() if {wrap.context.source(told)} else OffloadPolicy()" if value is node else None
