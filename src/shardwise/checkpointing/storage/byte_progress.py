"""Progress of work that is measured in bytes: how many, of how many, how fast. No torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from shardwise.progress import Progress
from shardwise.units import format_bytes, format_seconds


@contextlib.contextmanager
def counting(progress: Progress | None, total: int, label: str) -> Iterator[Callable[[int], None]]:
    """A function to call with every number of bytes that is done; one thread at a time.

    Args:
        progress: Whom to tell; None: nobody.
        total: All bytes there will be; 0 where nobody knows.
        label: What is done, as in "loading".
    """
    if progress is None:
        yield lambda num_bytes: None
        return
    start, done = time.monotonic(), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        rate = done / max(time.monotonic() - start, 1e-9)
        of_total = f" of {format_bytes(total)}" if total else ""
        progress.advance(num_bytes, f"{format_bytes(done)}{of_total}, {format_bytes(rate)}/s")

    progress.start(total, label)
    try:
        yield count
    except BaseException:
        progress.finish()
        raise
    seconds = max(time.monotonic() - start, 1e-9)
    progress.finish(
        f"{label}: {format_bytes(done)} in {format_seconds(seconds)}, {format_bytes(done / seconds)}/s" if done else ""
    )
