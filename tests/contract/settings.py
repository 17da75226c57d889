"""Settings files' side of the contract: every key of a run file and of a lint table, with its type and default."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import shardwise as sw
from tests.contract.annotations import type_text, value_text


def describe_settings() -> dict[str, Any]:
    """Every setting of the two roots, by its path in the file, and of what lists of settings hold."""
    return {
        "run file": dict(_keys(sw.RunConfig)),
        "shard settings": dict(_keys(sw.ShardConfig)),
        "entry of overrides": dict(_keys(sw.GroupOverride)),
    }


def _keys(kind: type, above: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """The keys below a class of settings: dataclass or pydantic model."""
    for name, annotation, default, alias in _fields(kind):
        path = f"{above}{name}"
        inner: list[type] = []
        text = type_text(annotation, kind.__module__, met=inner.append)
        nested = inner[0] if len(inner) == 1 and text == inner[0].__name__ and _is_settings(inner[0]) else None
        described = {"type": "section" if nested else text, "default": "" if nested else default}
        yield path, {**described, **({"alias": alias} if alias else {})}
        if nested is not None:
            yield from _keys(nested, f"{path}.")


def _is_settings(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields")


def _fields(kind: type) -> Iterator[tuple[str, Any, str, str]]:
    if hasattr(kind, "model_fields"):
        for name, field in kind.model_fields.items():
            default = "(required)" if field.is_required() else value_text(field.get_default(call_default_factory=True))
            yield name, field.annotation, default, field.alias or ""
        return
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            default = value_text(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = value_text(field.default_factory())
        else:
            default = "(required)"
        yield field.name, field.type, default, field.metadata.get("alias", "")
