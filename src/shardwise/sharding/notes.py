"""Errors of sharded models leave with a note: which module and group, from which line, why, and what to do."""

import traceback
from types import TracebackType

import torch
from torch import nn

from shardwise import compat
from shardwise.explaining import explain
from shardwise.sharding.holdings import describe_holdings, holdings
from shardwise.sharding.registry import sharded_state

_MARK = "shardwise:"


def annotate(error: BaseException, model: nn.Module) -> None:
    """Add the note to an exception that is on its way, once.

    Args:
        error: Raised in a forward, backward or step of `model`; keeps its type and traceback.
        model: Sharded by shardwise or by hand.

    Ranks:
        Local.
    """
    if any(note.startswith(_MARK) for note in getattr(error, "__notes__", ())):
        return
    rows = []
    module = _innermost_module(error.__traceback__, model)
    if module is not None:
        rows.append(f"in {module or 'the root module'}{_group_of(model, module)}")
    if caller := _users_line(error.__traceback__):
        rows.append(f"from {caller}")
    failure = explain(error).failure
    if failure is not None:
        rows.append(f"{failure.code} {failure.name}: {_flat(failure.what)}")
        rows.append(f"why: {_flat(failure.why)}")
        rows.append(f"fix: {_flat(failure.fix)}")
        if failure.with_shardwise:
            rows.append(f"with shardwise: {_flat(failure.with_shardwise)}")
    if isinstance(error, torch.OutOfMemoryError):
        phase = "backward" if compat.in_backward() else "forward or step"
        rows.append(f"in {phase}, this rank holds:\n{describe_holdings(holdings(model))}")
    if rows:
        error.add_note("\n  ".join([_MARK, *rows]))


def _innermost_module(trace: TracebackType | None, model: nn.Module) -> str | None:
    """The name of the deepest module of the model whose method was running; None in backward."""
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            found = names[id(owner)]
        trace = trace.tb_next
    return found


def _group_of(model: nn.Module, module: str) -> str:
    state = sharded_state(model)
    if state is None:
        return ""
    inside = [name for group in state.plan.groups for name in group.modules if _contains(name, module)]
    group = max(inside, key=len, default="")
    return f", of group {group or '(root)'}"


def _contains(outer: str, inner: str) -> bool:
    return not outer or inner == outer or inner.startswith(outer + ".")


def _users_line(trace: TracebackType | None) -> str:
    """The last line outside torch and shardwise."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if "/torch/" not in frame.filename and "/shardwise/" not in frame.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _flat(text: str) -> str:
    return " ".join(text.split())
