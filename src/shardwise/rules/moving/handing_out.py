"""Functions that are handed the sharded model, and that may know FSDP1's models only."""

from __future__ import annotations

import ast
import re

from shardwise.rules.moving.draft import ROAD1, Draft
from shardwise.rules.moving.leftovers import FLAT
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.sharded import Holds
from shardwise.rules.scopes import Function
from shardwise.rules.source import FileContext

CODE = "SW132"
_SAYS = re.compile(r"fsdp", re.IGNORECASE)
_PRIVATE = "torch.distributed.fsdp._"


def report_handed_out(draft: Draft, program: Program) -> None:
    """Note each call that hands a wrapped model to a function made for FSDP1, by what it does or is called."""
    context, sharded = draft.context, program.sharded(draft.context)
    for call in draft.calls():
        name = context.source(call.func).rpartition(".")[2]
        if call in draft.taken or not _SAYS.search(name) or sharded.holds(call.func) is not Holds.NEVER:
            continue
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        models = [one for one in given if isinstance(one, ast.Name | ast.Attribute)]
        if not any(sharded.holds(one) is Holds.ALWAYS for one in models) or _is_torchs(context, call):
            continue
        found = program.function(context, call.func)
        if (found is None and not _is_foreign(context, program, call)) or (found and not _knows_internals(*found)):
            continue  # rewritten where it is
        why = "works on FSDP1's internals" if found is not None else "is of a file not given, and named after FSDP"
        draft.undecided(
            CODE,
            call,
            f"{name} is handed the sharded model; it {why}",
            f"see whether it takes FSDP2's models, or leave the call out; or {ROAD1}",
        )


def _is_foreign(context: FileContext, program: Program, call: ast.Call) -> bool:
    """Whether a function is imported from a module that is not among the files given."""
    for origin in context.origins(call.func, raw=True):
        parts = origin.split(".")
        modules = [".".join(parts[:end]) for end in range(1, len(parts))]
        if not origin.startswith(".") and not any(program.find_module(context, one) for one in modules):
            return True
    return False


def _is_torchs(context: FileContext, call: ast.Call) -> bool:
    return any(origin.startswith(("torch.", "shardwise.")) for origin in context.origins(call.func, raw=True))


def _knows_internals(context: FileContext, function: Function) -> bool:
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name | ast.Attribute)]
    if any(isinstance(node, ast.Attribute) and node.attr in FLAT for node in names):
        return True
    return any(origin.startswith(_PRIVATE) for node in names for origin in context.origins(node, raw=True))
