"""Events on the board: which collective of which group, in 32 bits, and in words. No torch."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence


class Kind(enum.IntEnum):
    """What a rank is about to do together with the others."""

    GATHER_FORWARD = 0
    GATHER_EVALUATION = 1
    """A forward without gradients."""
    GATHER_BACKWARD = 2
    REDUCE = 3


_NAMES = {
    Kind.GATHER_FORWARD: "gather of {} for a forward",
    Kind.GATHER_EVALUATION: "gather of {} for a forward without gradients",
    Kind.GATHER_BACKWARD: "gather of {} for backward",
    Kind.REDUCE: "reduction of the gradients of {}",
}


def encode(kind: Kind, group: int, num_elements: int) -> int:
    """Two bits of kind, fourteen of the group, sixteen that tell buffers of different sizes apart."""
    return kind << 30 | (group & 0x3FFF) << 16 | zlib.crc32(num_elements.to_bytes(8, "little")) & 0xFFFF


def kind_of(event: int) -> Kind:
    """What kind of collective it is."""
    return Kind(event >> 30)


def group_of(event: int) -> int:
    """Which group it is about."""
    return event >> 16 & 0x3FFF


def in_words(event: int, groups: Sequence[str]) -> str:
    """As in "gather of `layers.0` for backward"."""
    return _NAMES[kind_of(event)].format(f"`{groups[group_of(event)]}`")


def comes_first(event: int, other: int) -> bool:
    """Whether, in a usual step, `event` would happen before `other`; groups are numbered as the modules stand."""
    kinds = kind_of(event), kind_of(other)
    forward = {Kind.GATHER_FORWARD, Kind.GATHER_EVALUATION}
    if kinds[0] in forward and kinds[1] in forward:
        return group_of(event) < group_of(other)
    if kinds[0] in forward or kinds[1] in forward:
        # A rank in a forward while another is in backward has a forward more to do.
        return kinds[0] in forward
    return group_of(event) > group_of(other)
