"""Offloaded gradients are on the CPU, where NCCL cannot reduce them: the process group needs gloo beside it."""

from __future__ import annotations

import ast

from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.program import Program

CODE = "SW129"


def rewrite_backends(draft: Draft, program: Program) -> None:
    """Add gloo to `init_process_group("nccl")` where the program offloads."""
    context = draft.context
    if not _offloads(draft, program):
        return
    for call in context.calls_to("torch.distributed.init_process_group"):
        backend = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "backend"), None)
        if isinstance(backend, ast.Constant) and backend.value == "nccl":
            draft.replace(backend, '"cpu:gloo,cuda:nccl"')
            draft.rewritten(CODE, call, "gloo joins nccl: offloaded gradients are on the CPU")
        elif backend is not None and not isinstance(backend, ast.Constant):
            draft.reported(
                CODE,
                call,
                "offloaded gradients are on the CPU, where NCCL cannot reduce them",
                'use "cpu:gloo,cuda:nccl" where the backend is "nccl"',
            )


def _offloads(draft: Draft, program: Program) -> bool:
    """Whether this file, or one that it belongs to, asks FSDP to offload."""
    return (
        "CPUOffloadPolicy" in draft.names
        or "_offload_policy" in draft.helpers
        or ("offload=" in draft.context.text and ("CPUOffload(" in draft.context.text))
    )
