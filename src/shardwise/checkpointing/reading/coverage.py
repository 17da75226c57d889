"""Is every element of a box stored, and stored once? No torch, no I/O."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.checkpointing.contents import Box


def coverage_problem(wanted: Box, pieces: Iterable[Box]) -> str:
    """Why the pieces do not hold every element of `wanted` exactly once; empty when they do."""
    parts = sorted(
        (part for piece in pieces if (part := piece.overlap(wanted)) is not None), key=lambda part: part.starts
    )
    num_held = sum(part.numel for part in parts)
    active: list[Box] = []
    for part in parts:
        # Sorted by start along dim 0: only boxes that reach this far can still meet it.
        active = [other for other in active if not part.starts or other.starts[0] + other.sizes[0] > part.starts[0]]
        if any(part.overlap(other) is not None for other in active):
            return "some elements are stored twice"
        active.append(part)
    if num_held != wanted.numel:
        return f"{wanted.numel - num_held:,} of {wanted.numel:,} elements are not stored"
    return ""
