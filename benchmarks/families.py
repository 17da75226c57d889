"""Train every model family of transformers on two ranks and in one process, and record how each ended.

`python -m benchmarks.families [FAMILY ...] [--again OUTCOME] [--output FILE]`; it resumes. The record is
what `tests/distributed/test_parity_sweep.py` counts, and what it draws its families from: of each the class and batch
that can be trained here, and how that ended. What was found before is tried first. After a family whose ranks crash or
hang the next one gets new ranks. A row with `earlier` is of an older tree and was not run again with the others.
"""

import argparse
import json
import os
import time
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent / "results" / "families.json"
_MAX_REASON = 300


def load(path: Path = RESULTS) -> dict[str, dict]:
    """The recorded outcomes by family."""
    return {row["family"]: row for row in json.loads(path.read_text())["families"]} if path.exists() else {}


def save(rows: dict[str, dict], path: Path) -> None:
    """Write them, one line a family."""
    lines = ",\n".join(json.dumps(rows[family], sort_keys=True) for family in sorted(rows))
    path.write_text(f'{{"transformers": "{metadata.version("transformers")}", "families": [\n{lines}\n]}}\n')


def transformers_version(path: Path = RESULTS) -> str:
    """The version whose families are recorded."""
    return json.loads(path.read_text())["transformers"]


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
        if row["outcome"] == "cannot run":
            row["reason"] = row["reason"][:_MAX_REASON]
        row["seconds"] = round(time.monotonic() - start, 1)
        rows[family] = row
        save(rows, arguments.output)
        print(json.dumps({name: row[name] for name in ("family", "outcome", "seconds")}), flush=True)
    answer.unlink(missing_ok=True)
    shut_down_pools()
    print(json.dumps(Counter(row["outcome"] for row in rows.values())))


if __name__ == "__main__":
    main()
