"""Where a part of a stored box lies among its bytes: which runs, and how to walk them in bounded slabs. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.checkpointing.contents import Box


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a stored row-major box, in that box's own coordinates and in the reader's."""

    sizes: tuple[int, ...]
    """Of the stored box."""
    starts: tuple[int, ...]
    """Of the part, in the stored box."""
    lengths: tuple[int, ...]
    """Of the part."""
    target_starts: tuple[int, ...]
    """Of the part, in the box that is being read."""

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return math.prod(self.lengths)


@dataclass(frozen=True, slots=True)
class Slab:
    """Some consecutive elements of the stored box, and the part of them that is wanted."""

    first: int
    """Index of the slab's first element in the stored box."""
    sizes: tuple[int, ...]
    """Of the slab, whose elements lie one after another; as many dimensions as the box."""
    starts: tuple[int, ...]
    """Of the wanted part, in the slab."""
    lengths: tuple[int, ...]
    target_starts: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the slab, wanted or not."""
        return math.prod(self.sizes)


def part_of(stored: Box, wanted: Box) -> Part | None:
    """What of `stored` is in `wanted`; None when nothing is."""
    overlap = stored.overlap(wanted)
    if overlap is None:
        return None
    return Part(
        stored.sizes,
        tuple(a - b for a, b in zip(overlap.starts, stored.starts, strict=True)),
        overlap.sizes,
        tuple(a - b for a, b in zip(overlap.starts, wanted.starts, strict=True)),
    )


def run_length(part: Part) -> int:
    """How many wanted elements lie one after another in the stored box before the first gap."""
    length, gap = 1, False
    for size, wanted in zip(reversed(part.sizes), reversed(part.lengths), strict=True):
        if gap and wanted != 1:
            break
        length *= wanted
        gap = gap or wanted != size
    return length


def runs(part: Part) -> Iterator[Part]:
    """The part, cut so that each cut lies in one run."""
    inner = len(part.sizes)  # dimensions from here on are wholly wanted
    while inner > 0 and part.lengths[inner - 1] == part.sizes[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)  # and this one in part: a run goes along it
    while outer > 0 and part.lengths[outer - 1] == 1:
        outer -= 1
    lengths = (1,) * outer + part.lengths[outer:]
    for place in itertools.product(*(range(length) for length in part.lengths[:outer])):
        move = (*place, *(0,) * (len(part.sizes) - outer))
        yield Part(part.sizes, _add(part.starts, move), lengths, _add(part.target_starts, move))


def slabs(part: Part, max_elements: int) -> Iterator[Slab]:
    """Whole rows of the stored box, at most `max_elements` at a time, that hold all wanted elements."""
    dim, row = 0, math.prod(part.sizes[1:])
    while dim < len(part.sizes) - 1 and (part.lengths[dim] == 1 or row > max_elements):
        dim += 1
        row = math.prod(part.sizes[dim + 1 :])
    if not part.sizes:
        yield Slab(0, (), (), (), ())
        return
    count = max(max_elements // max(row, 1), 1)
    ones = (1,) * dim
    for place in itertools.product(*(range(length) for length in part.lengths[:dim])):
        for begin in range(0, part.lengths[dim], count):
            rows = min(count, part.lengths[dim] - begin)
            move = (*place, begin, *(0,) * (len(part.sizes) - dim - 1))
            corner = _add(part.starts, move)[: dim + 1] + (0,) * (len(part.sizes) - dim - 1)
            yield Slab(
                _index_of(corner, part.sizes),
                (*ones, rows, *part.sizes[dim + 1 :]),
                (0,) * (dim + 1) + part.starts[dim + 1 :],
                (*ones, rows, *part.lengths[dim + 1 :]),
                _add(part.target_starts, move),
            )


def first_element(part: Part) -> int:
    """The index of the part's first element in the stored box."""
    return _index_of(part.starts, part.sizes)


def _add(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _index_of(place: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    index = 0
    for position, size in zip(place, sizes, strict=True):
        index = index * size + position
    return index
