"""Flight recorder dumps: which rank hangs in which collective."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpointing.pickles.machine import load_pickle
from shardwise.errors import ConfigError

_DUMP = re.compile(r"(?:^|.*_)(?P<rank>\d+)$")
_MAX_DUMP_BYTES = 256 << 20
_GATHERS = ("all_gather", "_allgather", "allgather")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of one rank, as torch recorded it."""

    number: int
    """Sequence number in its process group."""
    name: str
    """`gloo:all_gather`."""
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_done: bool
    line: str
    """Line of the user's code that started it."""

    @property
    def what(self) -> tuple[Any, ...]:
        """Return the fields that must be equal on all ranks."""
        return self.name, self.sizes, self.dtypes


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """The point where the ranks of one process group diverged."""

    process_group: str
    number: int
    """Sequence number of the collective."""
    odd: tuple[int, ...]
    """Ranks that did not reach it, or ran another collective."""
    doing: Mapping[int, str]
    """Collective of each rank."""

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.odd))
        rows = [f"  rank {rank}: {text}" for rank, text in sorted(self.doing.items())]
        who = f"rank {ranks} is" if len(self.odd) == 1 else f"ranks {ranks} are"
        head = f"{who} not where the others are, at collective {self.number} of {self.process_group}:"
        return "\n".join([head, *rows])


def explain_hang(folder: str | Path) -> list[Hang]:
    """Read the dumps of a run that hung and find the diverging rank.

    Args:
        folder: Has one dump per rank (`..._0`, `..._1`), written by torch's flight recorder or `dump_collectives`, and
            optionally `groups.json` from `dump_collectives`, which maps buffer sizes to module names.

    Returns:
        One entry for each process group whose ranks diverged; empty if the dumps show no difference.

    Raises:
        ConfigError: There are no dumps.
        CheckpointError: A dump is damaged, or its pickle would run code, which is never executed.

    Ranks:
        Local; no process group needed.
    """
    folder = Path(folder)
    dumps = {int(match["rank"]): path for path in sorted(folder.iterdir()) if (match := _DUMP.match(path.name))}
    if not dumps:
        raise ConfigError(
            "there are no flight recorder dumps",
            where=str(folder),
            why="they have names like nccl_trace_rank_0, one per rank",
            fix="start the run with TORCH_FR_BUFFER_SIZE=2000, TORCH_NCCL_DUMP_ON_TIMEOUT=1 and "
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE=FOLDER/rank_",
        )
    sizes = folder / "groups.json"
    names = json.loads(sizes.read_text()) if sizes.is_file() else {}
    records: dict[tuple[str, ...], dict[int, dict[int, Collective]]] = {}
    for rank, path in dumps.items():
        for group, collectives in _read_dump(path).items():
            records.setdefault(group, {})[rank] = collectives
    found = (
        _divergence(group[-1], ranks, names) for group, ranks in sorted(records.items(), key=lambda each: each[0][::-1])
    )
    return [hang for hang in found if hang is not None]


def _read_dump(path: Path) -> dict[tuple[str, ...], dict[int, Collective]]:
    """Return a dump's collectives by process group (name and description, as neither is unique) and number."""
    with path.open("rb") as file:
        dump = load_pickle(file, allowed={}, where=str(path), max_bytes=_MAX_DUMP_BYTES)
    entries = dump.get("entries", []) if isinstance(dump, dict) else []
    groups: dict[tuple[str, ...], dict[int, Collective]] = {}
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("is_p2p"):
            continue
        group = entry.get("process_group") or ("?", "?")
        collective = Collective(
            number=int(entry["collective_seq_id"]),
            name=str(entry["profiling_name"]),
            sizes=tuple(tuple(size) for size in entry.get("input_sizes", ())),
            dtypes=tuple(entry.get("input_dtypes", ())),
            is_done=bool(entry.get("time_discovered_completed_ns")) or entry.get("state") == "completed",
            line=_users_line(entry.get("frames") or ()),
        )
        groups.setdefault(tuple(map(str, group)), {})[collective.number] = collective
    return groups


def _divergence(group: str, ranks: Mapping[int, Mapping[int, Collective]], names: Mapping[str, str]) -> Hang | None:
    """Return the first collective at which the ranks differ."""
    oldest = max(min(collectives, default=0) for collectives in ranks.values())
    last = max(max(collectives, default=0) for collectives in ranks.values())
    for number in range(oldest, last + 1):
        at = {rank: collectives.get(number) for rank, collectives in ranks.items()}
        kinds: dict[Any, list[int]] = {}
        for rank, collective in at.items():
            kinds.setdefault(None if collective is None else collective.what, []).append(rank)
        if len(kinds) < 2:
            continue
        usual = max(kinds, key=lambda kind: (kind is not None, len(kinds[kind])))
        odd = tuple(sorted(rank for kind, members in kinds.items() if kind != usual for rank in members))
        doing = {rank: _in_words(collective, ranks[rank], names) for rank, collective in at.items()}
        return Hang(process_group=group, number=number, odd=odd, doing=doing)
    return None


def _in_words(collective: Collective | None, all_of_rank: Mapping[int, Collective], names: Mapping[str, str]) -> str:
    if collective is None:
        latest = all_of_rank[max(all_of_rank)] if all_of_rank else None
        after = "" if latest is None else f"; its last was {_in_words(latest, {}, names)}"
        return f"never came to it{after}"
    module = names.get(_key(collective.name, collective.sizes))
    about = (
        f" of `{module}`" if module else f" of {'x'.join(map(str, collective.sizes[0]))}" if collective.sizes else ""
    )
    return f"{collective.name}{about}" + (f", from {collective.line}" if collective.line else "")


def _key(name: str, sizes: Sequence[Sequence[int]]) -> str:
    kind = "gather" if any(part in name for part in _GATHERS) else "reduce" if "reduce_scatter" in name else name
    return f"{kind} {math.prod(sizes[0] if sizes else ())}"


def _users_line(frames: Sequence[Mapping[str, Any]]) -> str:
    for frame in frames:
        name = str(frame.get("filename", ""))
        if "/torch/" not in name and "/shardwise/" not in name and name:
            return f"{name}:{frame.get('line')}"
    return ""
