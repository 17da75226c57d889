"""`auto_wrap_policy`: which classes it picks, where that can be read."""

from __future__ import annotations

import ast

from shardwise.rules.moving.constructors import Blocked, Wrap
from shardwise.rules.moving.values import called_fsdp_name, fsdp_name, single_value

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
