"""`model.clip_grad_norm_(...)`: torch's own function clips sharded gradients right under FSDP2."""

from __future__ import annotations

import ast
import re

from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.sharded import Holds

CODE = "SW120"
_ARGUMENTS = {"max_norm", "norm_type", "error_if_nonfinite"}
"""Those that shardwise's function has as well."""
_OTHERS = re.compile(r"self$|super|utils|accelerator|fabric|engine|trainer|strategy|plugin|optim|scaler|clip")
_FUNCTIONS = {"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_norm"}


def rewrite_clipping(draft: Draft, program: Program) -> None:
    """Rewrite the method, and the use of torch's result where it is a sharded number now."""
    context, sharded = draft.context, program.sharded(draft.context)
    for call in draft.calls():
        if call in draft.taken or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr == "clip_grad_norm_" and _is_model(draft, call, sharded.holds(call.func.value)):
            _method(draft, call, call.func)
        elif context.is_any(call.func, _FUNCTIONS):
            _function(draft, call, sharded)


def _is_model(draft: Draft, call: ast.Call, holds: Holds) -> bool:
    """Plain modules have no such method; accelerators and engines of other libraries do, and take the parameters."""
    if holds is not Holds.NEVER:
        return True
    context = draft.context
    last = context.source(call.func.value).rpartition(".")[2].lower()  # pyrefly: ignore[missing-attribute]
    if last.endswith(("model", "module", "net")) or last == "fsdp":
        return True
    first = context.source(call.args[0]) if call.args else ""
    given = first + "".join(keyword.arg or "" for keyword in call.keywords)
    is_other = _OTHERS.search(last) is not None or bool(context.origins(call.func))
    return "fsdp" in context.text.lower() and "param" not in given and not is_other


def _method(draft: Draft, call: ast.Call, func: ast.Attribute) -> None:
    context = draft.context
    model = context.source(func.value)
    start, end = context.positions.span(func)
    if draft.target == "shardwise":
        draft.name("sw")
        draft.edit(start, end, "sw.clip_grad_norm_")
        draft.edit_after_open(call, f"{model}, ")
    else:
        draft.name("torch")
        is_used = not isinstance(context.parents[call], ast.Expr)
        name = draft.helper("_clip_grad_norm") if is_used else "torch.nn.utils.clip_grad_norm_"
        draft.edit(start, end, name)
        draft.edit_after_open(call, f"{model}.parameters(), ")
    draft.taken.update((call, func, func.value))
    draft.rewritten(CODE, call, "the method became a function of the parameters; its norm is over all ranks, as before")


def _function(draft: Draft, call: ast.Call, sharded: object) -> None:
    """FSDP1 clipped by the norm of each rank's own part; FSDP2's is over all ranks, and its result is sharded."""
    context = draft.context
    first = call.args[0] if call.args else None
    if not (isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute) and first.func.attr == "parameters"):
        return
    holds = sharded.holds(first.func.value)  # pyrefly: ignore[missing-attribute]
    if holds is Holds.NEVER:
        return
    draft.reported(
        CODE,
        call,
        "FSDP1 clipped each rank by the norm of its own part here; FSDP2 clips by the norm over all ranks",
        "nothing, unless the old behaviour was meant",
    )
    if isinstance(context.parents[call], ast.Expr):
        return
    known = len(call.args) <= 3 and {one.arg for one in call.keywords} <= {
        "max_norm",
        "norm_type",
        "error_if_nonfinite",
    }
    if draft.target == "shardwise" and known:
        draft.name("sw")
        draft.replace(call.func, "sw.clip_grad_norm_")
    else:
        draft.replace(call.func, draft.helper("_clip_grad_norm"))
    draft.taken.add(call)
