"""Find the files of the ranks in a folder by their names. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.checkpointing.pickles.torch_files import is_torch_file
from shardwise.checkpointing.storage import files
from shardwise.errors import CheckpointError

DIGITS = re.compile(r"\d+")
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_WORLD_SIZE = re.compile(r"(?:of|world_size|ws)[-_]?(\d+)")


@dataclass(frozen=True, slots=True)
class Series:
    """Files that differ in nothing but the rank's number, by rank."""

    template: str
    names: tuple[str, ...]


def find_series(folder: files.Place) -> list[Series]:
    """The sets of per-rank files in a folder.

    Raises:
        CheckpointError: A rank's file is missing, or there are several checkpoints in the folder.

    Ranks:
        Local.
    """
    groups: dict[str, list[str]] = {}
    for name in files.names_in(folder):
        if name.endswith(_SUFFIXES) and DIGITS.search(name):
            groups.setdefault(DIGITS.sub("#", name), []).append(name)
    series = [_in_order(folder, template, names) for template, names in groups.items()]
    return [found for found in series if len(found.names) > 1 or is_torch_file(files.join(folder, found.names[0]))]


def do_not_belong_together(place: files.Place, why: str) -> CheckpointError:
    """The error for files that are not those of one checkpoint."""
    return CheckpointError(
        "the files of the ranks do not belong together",
        where=str(place),
        why=why,
        fix="put the files of one step, of all ranks, in a folder of their own",
    )


def _in_order(folder: files.Place, template: str, names: list[str]) -> Series:
    """The files by rank: the one number in which their names differ counts the ranks."""
    numbers = {name: tuple(map(int, DIGITS.findall(name))) for name in names}
    varying = [at for at in range(template.count("#")) if len({values[at] for values in numbers.values()}) > 1]
    if len(varying) > 1:
        raise do_not_belong_together(
            folder, f"the files {template} differ in {len(varying)} numbers: they are of several checkpoints"
        )
    at = varying[0] if varying else 0
    names = sorted(names, key=lambda name: numbers[name][at])
    ranks = [numbers[name][at] for name in names]
    announced = _WORLD_SIZE.search(names[0])
    expected = max(int(announced[1]) if announced else 0, ranks[-1] + 1 if varying else 0)
    if expected > len(names):
        missing = sorted(set(range(expected)) - set(ranks))
        raise CheckpointError(
            f"the files of ranks {missing[:10]} are missing",
            where=f"{folder}: {template}",
            why=f"there should be {expected}; each rank wrote its own part of every tensor",
            fix="copy the missing files into the folder",
        )
    return Series(template, tuple(names))
