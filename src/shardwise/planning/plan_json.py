"""Plans as JSON, for files and for comparing ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from shardwise.errors import PlanError
from shardwise.planning.plan import Group, Plan, PlannedParameter

PLAN_FORMAT = 1


def encode_plan(plan: Plan, indent: int | None = None) -> str:
    """The plan as JSON with sorted keys: equal plans give equal text."""
    return json.dumps({"format": PLAN_FORMAT, **asdict(plan)}, indent=indent, sort_keys=True)


def decode_plan(text: str) -> Plan:
    """Read what `encode_plan` wrote.

    Raises:
        PlanError: The text was written by a version with another layout.
    """
    data = json.loads(text)
    if (found := data.pop("format", None)) != PLAN_FORMAT:
        raise PlanError(
            f"plan has format {found!r}, this version reads {PLAN_FORMAT}",
            why="the layout of a plan may change between releases",
            fix="make the plan again with shardwise.plan(...)",
        )
    plan: dict[str, Any] = _with_tuples(Plan, data)
    plan["axes"] = tuple((name, size) for name, size in data["axes"])
    plan["replicated"] = _parameters(data["replicated"])
    plan["ignored"] = _parameters(data["ignored"])
    plan["groups"] = tuple(_group(group) for group in data["groups"])
    return Plan(**plan)


def _group(data: dict[str, Any]) -> Group:
    group: dict[str, Any] = _with_tuples(Group, data)
    group["parameters"] = _parameters(data["parameters"])
    return Group(**group)


def _parameters(rows: list[dict[str, Any]]) -> tuple[PlannedParameter, ...]:
    return tuple(PlannedParameter(**_with_tuples(PlannedParameter, row)) for row in rows)


def _with_tuples(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    """JSON lists back to the tuples the dataclass holds; keys it does not know are left out."""
    known = {field.name for field in fields(kind)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if name in known}
