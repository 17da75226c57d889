"""Compare the public contract with what was recorded of it, or record it anew.

python -m tests.contract.record            prints the drift; exit status 1 if there is any
python -m tests.contract.record --write    rewrites contract.json
Names of pieces, as in `python -m tests.contract.record settings "command line"`, leave the others alone.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.contract.codes import describe_codes, read_checks
from tests.contract.command_line import describe_command_line
from tests.contract.drift import ADVICE, RECORD, drift, read_record, write_record
from tests.contract.import_paths import describe_import_paths
from tests.contract.outputs import Work, describe_files, describe_outputs, describe_statuses, describe_training
from tests.contract.python_names import describe_python
from tests.contract.samples import write_samples
from tests.contract.settings import describe_settings

CHECKS = "checks.json"


class Subject:
    """The working tree, with samples that it has just written; made once for all pieces that need them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cache  # noqa: B019 - one for a session
    def samples(self) -> Path:
        """Every sample; what `sw.check` found on the ranks lies beside them."""
        write_samples(self._folder / "samples")
        return self._folder / "samples"

    def work(self, name: str) -> Work:
        """A new folder to run commands in."""
        folder = self._folder / name
        folder.mkdir()
        return Work(self.samples(), folder)

    def checks(self) -> dict[str, str]:
        """Codes of `sw.check` and their severities."""
        return read_checks(self.samples().parent / CHECKS)


PIECES: dict[str, Callable[[Subject], Any]] = {
    "python": lambda subject: describe_python(),
    "import paths": lambda subject: describe_import_paths(),
    "command line": lambda subject: describe_command_line(),
    "exit statuses": lambda subject: describe_statuses(subject.work("statuses")),
    "settings": lambda subject: describe_settings(),
    "json": lambda subject: describe_outputs(subject.work("outputs")),
    "json of ranks": lambda subject: describe_training(subject.work("training")),
    "files": lambda subject: describe_files(subject.samples()),
    "codes": lambda subject: describe_codes(subject.work("codes"), subject.checks()),
}


def main(arguments: list[str]) -> int:
    """Print the drift, or write it down."""
    names = [name for name in arguments if name != "--write"] or list(PIECES)
    if unknown := set(names) - set(PIECES):
        raise SystemExit(f"no piece is called {', '.join(sorted(unknown))}; there are {', '.join(PIECES)}\n{__doc__}")
    recorded = read_record()
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(Path(folder).resolve())
        described = json.loads(json.dumps({name: PIECES[name](subject) for name in names}))
    current = {**recorded, **described}
    lines = list(drift(recorded, current))
    print("\n".join(lines) or "the contract is as recorded")
    if "--write" in arguments:
        write_record(current)
        print(f"{len(lines)} changes written to {RECORD.name}")
        return 0
    if lines:
        print(ADVICE)
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
