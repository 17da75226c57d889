"""Results kept to the letter: `same_as_kept("plans", name, value)` compares with tests/golden/plans.json.

After a change that is meant, keep the new results and look at their difference before committing it:

    python -c "import pytest, tests.golden as golden; golden.KEEP = True; pytest.main(['PATH OF THE TEST'])"
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"
KEEP = False


@functools.cache
def _kept(kind: str) -> dict[str, Any]:
    path = FOLDER / f"{kind}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def same_as_kept(kind: str, name: str, value: Any) -> None:
    """Fail unless `value`, as JSON, is what was kept under `name`."""
    value = json.loads(json.dumps(value))
    if KEEP:
        _kept(kind)[name] = value
        FOLDER.mkdir(exist_ok=True)
        text = json.dumps(dict(sorted(_kept(kind).items())), indent=1, ensure_ascii=False)
        (FOLDER / f"{kind}.json").write_text(text + "\n", encoding="utf-8")
        return
    assert name in _kept(kind), f"tests/golden/{kind}.json has no {name}"
    assert value == _kept(kind)[name]
