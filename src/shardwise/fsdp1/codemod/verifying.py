"""Run a program before and after its rewrite, in copies of its folder, and compare the losses that it prints."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import SourceError
from shardwise.fsdp1.codemod.migrate import MigratedFile, Migration
from shardwise.source.files import write_bytes

RELATIVE_TOLERANCE = 1e-3
"""Beside one unit of the last printed digit."""
_MAX_COPY_BYTES = 2 * 1024**3
_SKIPPED = shutil.ignore_patterns(".git", "__pycache__", ".venv", "venv", "node_modules", ".tox")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf|-inf"
_LOSS = re.compile(rf"(?i)\b(\w*loss)\b[\"']?\s*[:=(]?\s*(?:tensor\()?\s*({_NUMBER})(?![\w.])")
_PLACE = re.compile(r"(?i)\b(rank|epoch|step|iter(?:ation)?|batch)\b[\"']?\W{0,3}(\d+)")
_GLUED = re.compile(r"(?<=\d)(?=[a-zA-Z]{3})")
"""Where ranks write into one line: each writes the end of its line apart, as Python does when it is not buffered."""
_NUM_LINES = 40
_MIN_TIMEOUT_S, _SLOWER = 120.0, 10
"""The rewritten program may take this many times as long as the original: ranks that wait for each other never end."""
_NEVER = -1000
"""Status of a program that was ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """How the losses that a command prints before and after the rewrite compare."""

    num_losses: int
    """Losses that the original program prints."""
    difference: str = ""
    """What differs first; empty where nothing does."""
    output: str = ""
    """The last lines of the rewritten program, where it failed."""

    @property
    def is_same(self) -> bool:
        """Whether the rewritten program prints the losses of the original."""
        return not self.difference

    def __str__(self) -> str:
        if self.is_same:
            return f"verified: {self.num_losses} losses are the same before and after, to {RELATIVE_TOLERANCE:g}"
        return f"not verified: {self.difference}" + (f"\n{self.output}" if self.output else "")


def verify_migration(migration: Migration, command: str, folder: Path | None = None) -> Verification:
    """Run a command on the original files and on the rewritten ones, without GPUs, and compare the printed losses.

    Both runs have a copy of the folder of their own; nothing in the folder itself is changed.

    Args:
        migration: Not yet written.
        command: For the shell, as `torchrun --nproc-per-node 2 train.py --steps 5`.
        folder: The project, in which the command runs. Default: the current folder.

    Raises:
        SourceError: A rewritten file is not in the folder, the folder is too large to copy, or the original program
            fails or prints no loss.

    Ranks:
        Local.
    """
    folder = (folder or Path.cwd()).resolve()
    changed = [file for file in migration.files if file.changed]
    inside = {_path_inside(file, folder): file for file in changed}
    _check_size(folder)
    started = time.monotonic()
    status, output = _run(command, folder, {})
    losses, timeout_s = read_losses(output), max(_MIN_TIMEOUT_S, _SLOWER * (time.monotonic() - started))
    if status or not losses:
        what = f"fails (status {status})" if status else "prints no loss"
        raise SourceError(
            f"the command of --verify {what} before the rewrite",
            where=command,
            why=f"it is run without GPUs in a copy of the folder; its last lines:\n{_tail(output)}",
            fix="give a command that runs on CPU (backend gloo) and prints lines such as `step 3 loss 0.25`",
        )
    status, output = _run(command, folder, inside, timeout_s)
    if status:
        how = f"does not end in {timeout_s:.0f} s" if status == _NEVER else f"fails (status {status})"
        difference = f"the rewritten program {how}; its last lines:"
        return Verification(num_losses=_count(losses), difference=difference, output=_tail(output))
    return Verification(num_losses=_count(losses), difference=first_difference(losses, read_losses(output)))


def read_losses(output: str) -> dict[str, list[str]]:
    """The losses that a program prints, by where in the training they are, in the order of printing.

    A loss is a number behind a word that ends in `loss`, with at most `:`, `=` or a bracket between. It belongs to the
    step, epoch, batch and rank that stand on the same line; ranks that print the same place are not told apart.
    """
    found: dict[str, list[str]] = {}
    for line in _GLUED.sub("\n", output).splitlines():
        place = " ".join(f"{name.lower()} {number}" for name, number in _PLACE.findall(line))
        for name, number in _LOSS.findall(line):
            found.setdefault(f"{place} {name}".strip(), []).append(number)
    for key, numbers in found.items():
        if _PLACE.search(key):
            numbers.sort(key=_value)
    return found


def first_difference(before: dict[str, list[str]], after: dict[str, list[str]]) -> str:
    """The first place where two programs print different losses; empty where there is none."""
    for place, old in before.items():
        new = after.get(place, [])
        for index, (one, other) in enumerate(zip(old, new, strict=False)):
            if not _is_close(one, other):
                number = "" if _PLACE.search(place) else f" number {index + 1}"
                return f"{place}{number} differs first: {one} before, {other} after"
        if len(old) != len(new):
            return f"{place} is printed {len(old)} times before and {len(new)} times after"
    return next((f"{place} is printed only after the rewrite" for place in after if place not in before), "")


def _value(number: str) -> float:
    value = float(number)
    return math.inf if math.isnan(value) else value


def _is_close(one: str, other: str) -> bool:
    a, b = float(one), float(other)
    if not (math.isfinite(a) and math.isfinite(b)):
        return one.lower().lstrip("+") == other.lower().lstrip("+")
    unit = max(map(_last_digit, (one, other)))
    return abs(a - b) <= RELATIVE_TOLERANCE * max(abs(a), abs(b)) + unit


def _last_digit(number: str) -> float:
    """The worth of one unit in the last digit of a printed number; an integer is exact."""
    mantissa, _, exponent = number.lower().partition("e")
    digits = len(mantissa.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - digits) if digits else 0.0


def _count(losses: dict[str, list[str]]) -> int:
    return sum(map(len, losses.values()))


def _path_inside(file: MigratedFile, folder: Path) -> Path:
    path = Path(file.path).resolve()
    if not path.is_relative_to(folder):
        raise SourceError(
            f"{file.path} is not in the folder that --verify copies",
            where=str(folder),
            fix="run shardwise migrate in the project's folder",
        )
    return path.relative_to(folder)


def _check_size(folder: Path) -> None:
    total = 0
    for parent, folders, files in os.walk(folder):
        folders[:] = set(folders) - _SKIPPED(parent, folders)
        total += sum(os.lstat(os.path.join(parent, name)).st_size for name in files)
        if total > _MAX_COPY_BYTES:
            raise SourceError(
                f"the folder has more than {_MAX_COPY_BYTES // 1024**3} GiB, and --verify copies it twice",
                where=str(folder),
                fix="keep data and checkpoints outside, reached by an absolute path or a link",
            )


def _run(
    command: str, folder: Path, changed: dict[Path, MigratedFile], timeout_s: float | None = None
) -> tuple[int, str]:
    """Run a command in a copy of a folder with some files changed: its exit status, and all that it prints."""
    with tempfile.TemporaryDirectory(prefix="shardwise-verify-") as temporary:
        copy = Path(temporary).resolve() / folder.name
        shutil.copytree(folder, copy, symlinks=True, ignore=_SKIPPED)
        for path, file in changed.items():
            write_bytes(str(copy / path), file.output.encode(file.encoding))
        with subprocess.Popen(
            ["sh", "-c", command],
            cwd=copy,
            env=_environment(folder, copy),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all ranks can be ended
        ) as process:
            try:
                status, output = 0, process.communicate(timeout=timeout_s)[0]
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                status, output = _NEVER, process.communicate()[0]
        return status or process.returncode, output.decode("utf-8", errors="replace")


def _environment(folder: Path, copy: Path) -> dict[str, str]:
    """Without GPUs, and with the copy in place of the folder wherever Python looks for modules."""
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), "")
    searched = [Path(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    moved = [
        copy / one.resolve().relative_to(folder) if one.resolve().is_relative_to(folder) else one for one in searched
    ]
    paths = [str(one) for one in (copy, copy / "src", *moved)]
    # Unbuffered, a line and its end would be written apart, and the lines of ranks would mix.
    return {**os.environ, **hidden, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": ""}


def _tail(output: str) -> str:
    return "\n".join(output.rstrip().splitlines()[-_NUM_LINES:])
