"""How one version of the contract differs from another, a line for each item that was added, removed or changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "contract.json"
ADVICE = "if this is intended, run `python -m tests.contract.record --write` and note it in CHANGELOG.md"
_MAX_CHARACTERS = 400


def read_record(path: Path = RECORD) -> dict[str, Any]:
    """The recorded contract."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_record(contract: dict[str, Any], path: Path = RECORD) -> None:
    """Record a contract: sorted, a line an item, so that a diff of the file reads well."""
    path.write_text(json.dumps(contract, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def drift(recorded: Any, current: Any, where: str = "") -> Iterator[str]:
    """One line for each difference; nothing where the two are equal."""
    if isinstance(recorded, dict) and isinstance(current, dict):
        for name in sorted({*recorded, *current}):
            path = f"{where} > {name}" if where else name
            if name not in current:
                yield f"removed  {path}: {_short(recorded[name])}"
            elif name not in recorded:
                yield f"added    {path}: {_short(current[name])}"
            else:
                yield from drift(recorded[name], current[name], path)
    elif recorded != current:
        yield f"changed  {where}\n           from {_short(recorded)}\n           to   {_short(current)}"


def check(piece: str, current: Any) -> None:
    """Fail, with every difference, unless a piece of the contract is as it was recorded.

    Raises:
        AssertionError: It is not.
    """
    lines = list(drift(read_record().get(piece, {}), json.loads(json.dumps(current)), piece))
    if lines:
        raise AssertionError(f"the public contract has changed in {len(lines)} places\n" + "\n".join([*lines, ADVICE]))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + " ..."
