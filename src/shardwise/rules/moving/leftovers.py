"""What no other rule has taken: FSDP1's class as a value, its internals, hooks. Each gets a finding."""

from __future__ import annotations

import ast
import re

from shardwise.errors import SourceError
from shardwise.rules.moving.draft import ROAD1, Draft
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.sharded import Holds
from shardwise.rules.names import FSDP1
from shardwise.rules.source import FileContext

INTERNAL = {"_handle", "_handles", "_all_handles", "flat_param", "_flat_param", "_gradient_postdivide_factor"}
INTERNAL |= {"_is_flat_param", "_shard_param_infos"}
INTERNAL |= {"_gradient_predivide_factor", "_fsdp_wrapped_module", "_is_root", "_has_params", "_unshard_params"}
_ATTRIBUTES = {"process_group", "sharding_strategy", "compute_device", "training_state", "check_is_root", "_lazy_init"}
_ATTRIBUTES |= {"mixed_precision", "cpu_offload", "backward_prefetch", "limit_all_gathers"}
FLAT = {"flat_param", "_flat_param", "_all_handles", "_is_flat_param", "_shard_param_infos"}
"""What nothing but FSDP1's flat parameters has."""
_SURE = {*FLAT, "_gradient_postdivide_factor", "_gradient_predivide_factor"}
_WRAP = {"torch.distributed.fsdp.wrap.wrap", "torch.distributed.fsdp.wrap.enable_wrap"}
_WRAP |= {"torch.distributed.fsdp.wrap.auto_wrap"}
_PRIVATE = re.compile(r"torch\.distributed\.fsdp\._(?!fully_shard)")
_INHERITS = re.compile(r"^[ \t]*class \w+\([^)]*(?:FSDP|FullyShardedDataParallel)", re.MULTILINE)
_HOOKS = ("register_comm_hook", "register_params_comm_hook", "set_comm_hook")


def subclasses(context: FileContext, program: Program) -> dict[str, ast.ClassDef]:
    """The classes of a file that inherit from FSDP."""
    return {
        name: node
        for name, node in context.classes.items()
        if any(program.is_any(context, base, {FSDP1}) for base in node.bases)
    }


def built_subclasses(context: FileContext, program: Program) -> list[str]:
    """Those of them that the file also makes objects of."""
    called = {call.func.id for call in context.calls if isinstance(call.func, ast.Name)}
    return sorted(name for name in subclasses(context, program) if name in called)


def built_anywhere(program: Program) -> str:
    """A subclass of FSDP that some file of the program makes objects of; empty if there is none."""
    return program.remember("built_anywhere", _built_anywhere)


def _built_anywhere(program: Program) -> str:
    for path, text in program.texts.items():
        if _INHERITS.search(text):
            try:
                found = built_subclasses(program.file(path), program)
            except SourceError:
                continue
            if found:
                return found[0]
    return ""


def report_leftovers(draft: Draft, program: Program) -> None:
    """Note every use of FSDP1 that is still there."""
    _classes(draft, program)
    _wraps(draft)
    _internals(draft, program)


def _classes(draft: Draft, program: Program) -> None:
    context = draft.context
    inherited = subclasses(context, program)
    for node in draft.nodes():
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load) or node in draft.taken:
            continue
        parent = context.parents[node]
        if not program.is_any(context, node, {FSDP1}):
            continue
        if isinstance(parent, ast.ClassDef) and node in parent.bases:
            draft.undecided(
                "SW102",
                node,
                f"{parent.name} is a subclass of FSDP: FSDP2 has no wrapper class to inherit from",
                f"keep its methods as functions of the sharded model; or {ROAD1}",
            )
        elif isinstance(parent, ast.Attribute):
            if parent not in draft.taken and not any(_has_note(draft, one) for one in context.ancestors(node)):
                _static(draft, node, parent)
        elif not isinstance(parent, ast.Call) or (
            node in parent.args and parent not in draft.taken and not _has_note(draft, parent)
        ):
            _value(draft, node)
    for call in draft.calls():
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name in inherited and call not in draft.taken:
            draft.undecided(
                "SW101",
                call,
                f"{name}(...) is left alone: it is a subclass of FSDP",
                f"shard with fully_shard and keep {name}'s methods as functions; or {ROAD1}",
            )


def _has_note(draft: Draft, node: ast.AST) -> bool:
    line = getattr(node, "lineno", None)
    return isinstance(node, ast.stmt | ast.expr) and any(
        note.line == line and note.status.value != "reported" for note in draft.notes
    )


def _static(draft: Draft, node: ast.expr, parent: ast.Attribute) -> None:
    draft.undecided(
        "SW131",
        node,
        f"FSDP.{parent.attr} works on FSDP1's models only",
        f"replace it by what it is used for; or {ROAD1}",
    )


def _value(draft: Draft, node: ast.expr) -> None:
    draft.undecided(
        "SW102",
        node,
        "FSDP's class is used as a value here: passed on, stored or chosen at run time",
        f"pass a function that calls fully_shard and returns the module; or {ROAD1}",
    )


def _wraps(draft: Draft) -> None:
    for call in draft.calls():
        if call not in draft.taken and draft.context.is_any(call.func, _WRAP):
            draft.undecided(
                "SW103",
                call,
                "enable_wrap and wrap make FSDP1 units while the model is built",
                f"build the model first, then call fully_shard on the same modules, children first; or {ROAD1}",
            )


def _internals(draft: Draft, program: Program) -> None:
    sharded = program.sharded(draft.context)
    for node in draft.nodes():
        if isinstance(node, ast.ImportFrom) and _PRIVATE.match(node.module or ""):
            _private(draft, node, node.module or "")
        if not isinstance(node, ast.Attribute) or node in draft.taken:
            continue
        if _is_private_module(draft.context, node):
            _private(draft, node, draft.context.source(node))
        if node.attr in INTERNAL and (node.attr in _SURE or sharded.holds(node.value) is not Holds.NEVER):
            draft.undecided(
                "SW127",
                node,
                f".{node.attr} is a part of FSDP1's flat parameters, which FSDP2 does not have",
                f"work on the DTensors that model.parameters() gives; or {ROAD1}",
            )
        if node.attr in _ATTRIBUTES and sharded.holds(node.value) is not Holds.NEVER:
            draft.undecided(
                "SW127",
                node,
                f".{node.attr} is an attribute of FSDP1's wrapper, which FSDP2 does not have",
                f"take it from the mesh or the settings that the model is sharded with; or {ROAD1}",
            )
        if node.attr in _HOOKS and sharded.holds(node.value) is not Holds.NEVER:
            draft.undecided(
                "SW130",
                node,
                f"{node.attr} has no direct counterpart in FSDP2",
                f"set_all_reduce_hook, or a custom communication class; or {ROAD1}",
            )


def _private(draft: Draft, node: ast.AST, name: str) -> None:
    draft.undecided(
        "SW127",
        node,
        f"{name} is private to FSDP1",
        f"remove what uses it, or write it anew on DTensor; or {ROAD1}",
    )


def _is_private_module(context: FileContext, node: ast.Attribute) -> bool:
    """`torch.distributed.fsdp._runtime_utils`, written out: the module itself, not what is taken from it."""
    if not node.attr.startswith("_") or node.attr == "_fully_shard":
        return False
    return f"torch.distributed.fsdp.{node.attr}" in context.origins(node, raw=True)
