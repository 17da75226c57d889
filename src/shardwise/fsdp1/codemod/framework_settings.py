"""How a framework's FSDP settings are read, and what becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class _Computed:
    """A value that is only known when the program runs."""

    def __repr__(self) -> str:
        return "a computed value"


COMPUTED = _Computed()


@dataclass(frozen=True, slots=True)
class Keep:
    """The setting means the same under FSDP2."""

    note: str = ""
    """What a reader should know all the same."""


@dataclass(frozen=True, slots=True)
class Drop:
    """FSDP2 has no such setting and needs none."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Become:
    """The setting has another name or value under FSDP2."""

    key: str
    value: Any
    note: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """A person has to decide; the whole config stays as it is."""

    why: str
    fix: str


Step = Keep | Drop | Become | Block
Settings = Mapping[str, Any]
Rule = Callable[[Any, Settings], Step]
"""From a setting's value and all the settings around it."""


@dataclass(slots=True)
class Conversion:
    """What becomes of one config: a step for each of its keys, and what is added."""

    steps: dict[str, Step]
    added: dict[str, Any] = field(default_factory=dict)
    """New settings of the same mapping."""
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    """New mappings next to it."""
    blocks: list[Block] = field(default_factory=list)
    """Reasons that belong to no single key."""
    notes: list[str] = field(default_factory=list)

    @property
    def blocked(self) -> list[tuple[str, Block]]:
        """Each key that a person must decide about; an empty key stands for the config as a whole."""
        keyed = [(key, step) for key, step in self.steps.items() if isinstance(step, Block)]
        return keyed + [("", block) for block in self.blocks]


def is_true(value: Any) -> bool:
    """Whether a config's author meant true: `true`, `"true"`, `1`, `yes`."""
    return value is True or (not isinstance(value, _Computed) and str(value).lower() in {"true", "1", "yes", "on"})


def is_none(value: Any) -> bool:
    """Whether a setting is given but empty."""
    return value is None or (isinstance(value, str) and value.lower() in {"", "none", "null"})


def keep(value: Any, around: Settings) -> Step:
    """Rule: the setting is FSDP2's too."""
    return Keep()


def drop(value: Any, around: Settings) -> Step:
    """Rule: FSDP2 always does this, or never needs it."""
    return Drop()


def drop_with(note: str, *, when: Callable[[Any], bool] = is_true) -> Rule:
    """Rule: gone under FSDP2, which is worth a note for some values and cannot be told for computed ones."""

    def rule(value: Any, around: Settings) -> Step:
        return Drop(note if isinstance(value, _Computed) or when(value) else "")

    return rule


def only_false(why: str, fix: str) -> Rule:
    """Rule: nothing to do unless the setting is switched on, which FSDP2 there cannot honour."""

    def rule(value: Any, around: Settings) -> Step:
        is_off = is_none(value) or (not isinstance(value, _Computed) and not is_true(value) and _is_boolean(value))
        return Drop() if is_off else Block(why, fix)

    return rule


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool) or str(value).lower() in {"false", "0", "no", "off", "true", "1", "yes", "on"}
