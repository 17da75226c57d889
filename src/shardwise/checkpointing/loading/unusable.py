"""A model into which corrupt data went is marked, and refuses to run or be saved until it is loaded again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from shardwise.errors import CheckpointError

# In the module's own dict, so that the mark lives as long as the model.
_ATTRIBUTE = "_shardwise_unusable"


@dataclass(frozen=True, slots=True)
class _Mark:
    why: str
    handles: tuple[Any, ...]


def mark_unusable(model: nn.Module, why: str) -> None:
    """Let every forward in the model's tree raise, until `mark_usable`.

    Args:
        model: Some of its values are not to be trusted.
        why: What was found, for the error.

    Ranks:
        Local. Mark it on every rank, or the others wait for this one in their next collective.
    """
    mark_usable(model)

    def refuse(*_unused: object) -> NoReturn:
        refuse_unusable(model)
        raise AssertionError  # the hook goes with the mark

    # On every module: parts of a model are called on their own, and FSDP2's hooks must not run first.
    handles = tuple(module.register_forward_pre_hook(refuse, prepend=True) for module in model.modules())
    model.__dict__[_ATTRIBUTE] = _Mark(why, handles)


def mark_usable(model: nn.Module) -> None:
    """Take the mark away: all values were written anew.

    Ranks:
        Local.
    """
    mark = model.__dict__.pop(_ATTRIBUTE, None)
    for handle in mark.handles if mark is not None else ():
        handle.remove()


def refuse_unusable(model: nn.Module) -> None:
    """Raise if the model is marked; called before it is run or saved.

    Raises:
        CheckpointError: With what was found.

    Ranks:
        Local.
    """
    mark = model.__dict__.get(_ATTRIBUTE)
    if mark is not None:
        raise CheckpointError(
            f"this {type(model).__name__} holds corrupt values",
            where=mark.why,
            why="a checkpoint turned out corrupt after part of it had been written into the model",
            fix="load a good checkpoint into it; verify='before' proves a checkpoint before it touches the model",
        )
