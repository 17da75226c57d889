"""Count what `shardwise migrate` makes of whole repositories.

python -m benchmarks.migrate_corpus FOLDER [NAME ...]

FOLDER holds one checkout a repository. Each is copied and migrated twice with `--write`. A row has the constructor
calls, those rewritten, the files changed, the changed files that do not compile, and the files that the second run
changed.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 900


def migrate(folder: Path) -> dict:
    """Run the command in a folder, with `--write`."""
    command = [str(Path(sys.executable).with_name("shardwise")), "migrate", ".", "--write", "--format", "json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    return json.loads(done.stdout)


def measure(repository: Path) -> dict[str, Any]:
    """One repository's row."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as copy:
        folder = Path(shutil.copytree(repository, Path(copy) / repository.name))
        first, broken = migrate(folder), []
        changed = [Path(one["path"]) for one in first["files"] if one["changed"]]
        for path in (one for one in changed if one.suffix == ".py"):
            try:
                compile((folder / path).read_bytes(), path, "exec")
            except SyntaxError:
                broken.append(str(path))
        again = [one["path"] for one in migrate(folder)["files"] if one["changed"]]
    counts = {name: first["summary"][name] for name in ("constructors", "constructors_rewritten")}
    seconds = round(time.perf_counter() - started, 1)
    return {**counts, "changed": len(changed), "broken": broken, "again": again, "seconds": seconds}


def main() -> None:
    """Print a row a repository, then the sums."""
    chosen, total = sys.argv[2:], [0, 0, 0, 0, 0]
    for repository in sorted(one for one in Path(sys.argv[1]).iterdir() if one.is_dir()):
        if chosen and repository.name not in chosen:
            continue
        try:
            row = measure(repository)
        except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
            print(repository.name, type(error).__name__, flush=True)
            continue
        numbers = [one if isinstance(one, int) else len(one) for one in list(row.values())[:5]]
        total = [one + other for one, other in zip(total, numbers, strict=True)]
        print(repository.name, json.dumps(row), flush=True)
    share = 100 * total[1] / max(1, total[0])
    print(f"native {total[1]} of {total[0]} ({share:.1f} %), changed {total[2]}, broken {total[3]}, again {total[4]}")


if __name__ == "__main__":
    main()
