"""Notes what is synced and renamed, and with which content, in this process or in any that starts with it on its path.

`record(log)` wraps `os.fsync`, `os.rename` and `os.replace`; `Disk(log)` says afterwards what a crash of the machine
would have left. A process whose `sitecustomize` calls `record` is followed from its start.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

SITE = """import sys
sys.path.insert(0, {root!r})
from tests.faults.disk_log import record
record({log!r})
"""


def record(log: str) -> Callable[[], None]:
    """Follow this process; returns what ends it."""
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def note(event: dict[str, Any]) -> None:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(descriptor, json.dumps(event).encode() + b"\n")
        os.close(descriptor)

    def noted_fsync(fd: Any) -> None:
        fsync(fd)
        descriptor = fd if isinstance(fd, int) else fd.fileno()
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        note({"do": "sync", **_seen(path)})

    def noted(move: Callable[..., None]) -> Callable[..., None]:
        def moved(source: Any, target: Any, **options: Any) -> None:
            inside = [Path(source), *sorted(Path(source).rglob("*"))]
            before = [_seen(str(path)) for path in inside]
            move(source, target, **options)
            note({"do": "rename", "source": os.path.abspath(source), "target": os.path.abspath(target), "was": before})

        return moved

    os.fsync, os.rename, os.replace = noted_fsync, noted(rename), noted(replace)  # pyrefly: ignore[bad-assignment]

    def end() -> None:
        os.fsync, os.rename, os.replace = fsync, rename, replace

    return end


def _seen(path: str) -> dict[str, Any]:
    """A file with a digest of what has reached it, or a folder with the names in it."""
    status = os.lstat(path)
    if stat.S_ISDIR(status.st_mode):
        return {"inode": status.st_ino, "path": path, "holds": sorted(os.listdir(path))}
    return {"inode": status.st_ino, "path": path, "holds": hashlib.sha256(Path(path).read_bytes()).hexdigest()}


class Disk:
    """What was made durable, and when."""

    def __init__(self, log: Path) -> None:
        lines = log.read_text().splitlines() if log.exists() else []
        self.events = [json.loads(line) for line in lines]

    @property
    def num_syncs(self) -> int:
        """How often anything was synced."""
        return sum(event["do"] == "sync" for event in self.events)

    def assert_published(self, target: Path) -> None:
        """All of `target` was on the disk before it got its name, and the name is there too."""
        moves = [
            index
            for index, event in enumerate(self.events)
            if event["do"] == "rename" and event["target"] == str(target)
        ]
        assert moves, f"nothing was renamed to {target}"
        durable: dict[int, Any] = {}
        for event in self.events[: moves[-1]]:
            if event["do"] == "sync":
                durable[event["inode"]] = event["holds"]
        for entry in self.events[moves[-1]]["was"]:
            assert entry["inode"] in durable, f"{entry['path']} was renamed before it was synced"
            assert durable[entry["inode"]] == entry["holds"], f"{entry['path']} was synced before all was in it"
        later = [event["path"] for event in self.events[moves[-1] + 1 :] if event["do"] == "sync"]
        assert str(target.parent) in later, "the folder that holds the new name was not synced"
        renamed = {entry["inode"]: entry["holds"] for entry in self.events[moves[-1]]["was"]}
        now = [_seen(str(path)) for path in (target, *target.rglob("*"))]
        assert {entry["inode"]: entry["holds"] for entry in now} == renamed, "it changed after it got its name"
