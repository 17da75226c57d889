"""Loops and comprehensions: one turn stands for all, and knows which loop it belongs to."""

import ast
from collections.abc import Callable

from shardwise.planning.source.containers import walk
from shardwise.planning.source.frames import Frame, Loop, evaluate, join_counts, join_names
from shardwise.planning.source.targets import assign
from shardwise.planning.source.values import Many, Sequence, Source, Value, join


def run_loop(iterable: Value | None, body: Callable[[Value], None], frame: Frame) -> None:
    """Run a loop's body for one turn, twice, so that names set in a turn are seen by the next.

    Args:
        iterable: What the loop walks through; None for `while`.
        body: Gets the element, marked as belonging to this loop.
        frame: Where the loop is written.
    """
    analysis = frame.analysis
    analysis.num_loops += 1
    element, count, dynamic = walk(iterable, frame) if iterable is not None else (Value(open=True), None, False)
    if count == 0:
        return
    loop = Loop(analysis.num_loops, count)
    element = _mark(element, loop.identity)
    before = (frame.loops, frame.conditional, frame.skipping, frame.jumps)
    names_before, counts_before = dict(frame.names), analysis.counts
    frame.loops = (*frame.loops, loop)
    frame.conditional = frame.conditional or dynamic
    counts_after = counts_before
    for turn in range(2):
        analysis.counts, frame.jumps = dict(counts_before), []
        body(element)
        # A turn ends with its code, or at a `continue` or `break`; one that returns or raises does not go on.
        ends = [*frame.jumps, *([] if frame.dead else [(frame.names, analysis.counts)])]
        if turn == 0 and ends:
            counts_after = join_counts([counts for _, counts in ends])
        frame.names = join_names([names_before, *(names for names, _ in ends)])
        frame.dead, frame.skipping = "", before[2]
    analysis.counts = counts_after
    frame.loops, frame.conditional, frame.skipping, frame.jumps = before


def _mark(element: Value, identity: int) -> Value:
    """The element and, where it is a row, each part of it, as chosen by this loop's turn."""
    atoms = frozenset(
        Sequence(tuple(_mark(inner, identity) for inner in atom.items)) if isinstance(atom, Sequence) else atom
        for atom in element.atoms
    )
    return element.like(atoms=atoms, loops=element.loops | {identity})


def comprehension(generators: list[ast.comprehension], results: list[ast.expr], frame: Frame) -> Value:
    """The values a comprehension makes; its names stay its own."""
    outside = dict(frame.names)
    made: list[Value] = []

    def level(depth: int) -> None:
        if depth == len(generators):
            made.append([evaluate(result, frame) for result in results][-1])
            return
        generator = generators[depth]
        iterable = evaluate(generator.iter, frame)

        def body(element: Value) -> None:
            assign(generator.target, element, frame)
            tests = [evaluate(test, frame) for test in generator.ifs]
            with frame.under(any(test.source >= Source.TENSOR for test in tests)):
                level(depth + 1)

        run_loop(iterable, body, frame)

    level(0)
    walrus = {name: value for name, value in frame.names.items() if name in outside}
    frame.names = {**outside, **walrus} if walrus else outside
    element = join(made) if made else Value()
    count = _count(generators, frame)
    picked = element.like(loops=frozenset())
    return Value(frozenset({Many(picked, count)}), source=Source.PLAIN)


def _count(generators: list[ast.comprehension], frame: Frame) -> int | None:
    if len(generators) != 1 or generators[0].ifs:
        return None
    return walk(evaluate(generators[0].iter, frame), frame).count
