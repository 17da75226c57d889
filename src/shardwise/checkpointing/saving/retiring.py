"""Remove old checkpoints once a newer one is committed."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.checkpointing.saving.retention import Retention, removable
from shardwise.checkpointing.sharded.committing import committed_steps, remove_checkpoint, step_folder
from shardwise.checkpointing.sharded.manifest import read_manifest
from shardwise.checkpointing.sharded.writing import FileRecord
from shardwise.checkpointing.storage.files import Place, join, size_of
from shardwise.errors import CheckpointError


class Retiring:
    """Carries a retention out in a folder.

    Args:
        folder: Of the run.
        retention: What is kept.

    Ranks:
        Local: rank 0 does it.
    """

    def __init__(self, folder: Place, retention: Retention) -> None:
        self._folder, self._retention = folder, retention
        self.metrics: dict[int, float | None] = {}
        """By step; those of earlier runs are read from their checkpoints."""

    def after(self, newest: int, records: Sequence[FileRecord]) -> None:
        """Remove what need not be kept.

        Args:
            newest: The step that was just committed.
            records: The files it was written to.

        Raises:
            CheckpointError: The newest is not whole, and nothing was removed; or something could not be removed.
        """
        _check_whole(step_folder(self._folder, newest), records)
        steps = committed_steps(self._folder)
        metrics = self._known_metrics(steps) if self._retention.keep_best is not None else {}
        for step in removable(steps, newest, self._retention, metrics):
            remove_checkpoint(step_folder(self._folder, step))

    def _known_metrics(self, steps: Sequence[int]) -> dict[int, float]:
        for step in steps:
            if step not in self.metrics:
                self.metrics[step] = read_manifest(step_folder(self._folder, step)).details.get("metric")
        return {step: value for step, value in self.metrics.items() if value is not None}


def _check_whole(folder: Place, records: Sequence[FileRecord]) -> None:
    """Raise unless the files are as large as they were written: an older checkpoint may be all there is."""
    short = [record.file for record in records if size_of(join(folder, record.file)) != record.num_bytes]
    if short:
        raise CheckpointError(
            f"{', '.join(short)} changed after it was written",
            where=str(folder),
            why="a file of the newest checkpoint does not have the size it had",
            fix="see who else writes there; older checkpoints were kept",
        )
