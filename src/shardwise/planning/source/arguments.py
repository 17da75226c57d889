"""The arguments of a call, with `*` and `**` unpacked where their content is known."""

import ast

from shardwise.planning.source.containers import dict_items, list_items
from shardwise.planning.source.frames import Frame, evaluate
from shardwise.planning.source.functions import Arguments
from shardwise.planning.source.values import (
    Mapping,
    Sequence,
    Value,
)


def evaluate_arguments(node: ast.Call, frame: Frame) -> Arguments:
    """The arguments of a call in the code, with `*` and `**` unpacked where their content is known."""
    arguments = Arguments()
    for argument in node.args:
        if isinstance(argument, ast.Starred):
            _unpack(evaluate(argument.value, frame), arguments)
        else:
            arguments.positional.append(evaluate(argument, frame))
    for keyword in node.keywords:
        value = evaluate(keyword.value, frame)
        if keyword.arg is not None:
            arguments.keywords[keyword.arg] = value
        else:
            _unpack(value, arguments)
    return arguments


def _unpack(value: Value, arguments: Arguments) -> None:
    atoms = list(value.atoms)
    if len(atoms) == 1 and isinstance(atoms[0], Sequence):
        arguments.positional += atoms[0].items
    elif len(atoms) == 1 and isinstance(atoms[0], Mapping):
        arguments.keywords.update({key: inner for key, inner in atoms[0].items if isinstance(key, str)})
    elif _unpack_real(value, arguments):
        return
    else:
        arguments.spread = True
        if atoms:  # modules may hide in there: keep them where a callee can find them
            arguments.keywords["*"] = value
    arguments.spread = arguments.spread or value.open


def _unpack_real(value: Value, arguments: Arguments) -> bool:
    """Unpack a real list, tuple or dictionary that is known exactly."""
    thing = value.only()
    if (items := list_items(thing)) is not None:
        arguments.positional += items
        return True
    if (by_key := dict_items(thing)) is not None:
        arguments.keywords.update({key: inner for key, inner in by_key.items() if isinstance(key, str)})
        return True
    return False
