"""Train every model family of transformers on two ranks and in one process, and record how each ended.

`python -m benchmarks.families [FAMILY ...] [--again OUTCOME] [--output FILE]`; goes on where it stopped. The results
are what `tests/distributed/test_parity_sweep.py` expects: of each family the class and batch that can be trained here,
and whether the sharded model was equal. After a family whose ranks crash or hang the next one gets new ranks.
"""

import argparse
import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent / "results" / "families.json"
_TIMEOUT_S = 240.0


def load(path: Path = RESULTS) -> dict[str, dict]:
    """The recorded outcomes by family."""
    return {row["family"]: row for row in json.loads(path.read_text())} if path.exists() else {}


def save(rows: dict[str, dict], path: Path) -> None:
    """Write them, one line a family."""
    lines = ",\n".join(json.dumps(rows[family], sort_keys=True) for family in sorted(rows))
    path.write_text(f"[\n{lines}\n]\n")


def main() -> None:
    """Run what has no outcome yet."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    from tests.ranks import shut_down_pools
    from tests.zoo import families
    from tests.zoo.family_job import check_family

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--again", action="append", default=[], help="also families of this outcome")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = load(arguments.output)
    wanted = arguments.families or [
        family for family in families.names() if family not in rows or rows[family]["outcome"] in arguments.again
    ]
    answer = arguments.output.with_suffix(".family")
    for family in wanted:
        start = time.monotonic()
        answer.unlink(missing_ok=True)
        try:
            found = rows.get(family, {}).get("found")
            check_family(family=family, found=found and families.Found(*found), answer=answer)
            row = json.loads(answer.read_text())
        except (Exception, pytest.fail.Exception) as error:
            row = {"family": family, "outcome": "crashed", "reason": str(error)[-4000:]}
        row["seconds"] = round(time.monotonic() - start, 1)
        rows[family] = row
        save(rows, arguments.output)
        print(json.dumps({name: row[name] for name in ("family", "outcome", "seconds")}), flush=True)
    answer.unlink(missing_ok=True)
    shut_down_pools()
    print(json.dumps(Counter(row["outcome"] for row in rows.values())))


if __name__ == "__main__":
    main()
