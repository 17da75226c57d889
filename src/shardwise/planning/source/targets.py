"""Assignment: names, unpacking, and everything that is assigned to but not followed."""

import ast

from shardwise.planning.source.containers import item
from shardwise.planning.source.frames import Frame, evaluate
from shardwise.planning.source.records import consume
from shardwise.planning.source.values import PLAIN, Many, Sequence, Value, join, known


def assign(target: ast.expr, value: Value, frame: Frame) -> None:
    """`target = value`."""
    if isinstance(target, ast.Name):
        frame.names[target.id] = value
    elif isinstance(target, ast.Tuple | ast.List):
        _unpack(target.elts, value, frame)
    elif isinstance(target, ast.Starred):
        assign(target.value, Value(frozenset({Many(value)})), frame)
    elif isinstance(target, ast.Subscript):
        _assign_item(target, value, frame)
    elif isinstance(target, ast.Attribute):
        evaluate(target.value, frame)


def _unpack(targets: list[ast.expr], value: Value, frame: Frame) -> None:
    starred = any(isinstance(target, ast.Starred) for target in targets)
    rows = [atom for atom in value.atoms if isinstance(atom, Sequence) and len(atom.items) == len(targets)]
    for position, target in enumerate(targets):
        if rows and not starred:
            parts = [row.items[position] for row in rows]
            if value.open:
                parts.append(PLAIN.like(source=value.source))
            assign(target, join(parts), frame)
        else:
            index = PLAIN if starred else known(position)
            assign(target, item(value, index, frame), frame)


def _assign_item(target: ast.Subscript, value: Value, frame: Frame) -> None:
    """`blocks[i] = block` makes the list hold one more; on a tensor it is a computation."""
    holder = evaluate(target.value, frame)
    evaluate(target.slice, frame)
    consume(value, frame)
    if isinstance(target.value, ast.Name) and value.atoms and target.value.id in frame.names:
        pieces = [value, *(part for atom in holder.atoms for part in _parts(atom))]
        frame.names[target.value.id] = join([holder.like(atoms=frozenset()), Value(frozenset({Many(join(pieces))}))])


def _parts(atom: object) -> tuple[Value, ...]:
    if isinstance(atom, Sequence):
        return atom.items
    return (atom.element,) if isinstance(atom, Many) else ()
