"""One save, from a run's live state to a committed checkpoint: what training waits for, and what it does not.

In this order: the ranks agree on the step and on who writes what; tensors are copied (or, where training waits anyway,
written straight from their memory); plain tensors and values that ranks share are compared; every rank writes its
file; rank 0 commits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpointing.agreeing.channel import Channel
from shardwise.checkpointing.agreeing.exchange import all_values, digest, first_error, names_to_write, portable
from shardwise.checkpointing.contents import Box
from shardwise.checkpointing.saving.arena import Arena, place_in_arena
from shardwise.checkpointing.saving.background import WriterProcess
from shardwise.checkpointing.saving.background_writer import Commit, PlacedItem, WriteFile, value_streams
from shardwise.checkpointing.saving.describing import make_header
from shardwise.checkpointing.saving.holdings import Fixed, Holding, Holdings
from shardwise.checkpointing.saving.sharing import HeldBox, HeldTensor, share_boxes
from shardwise.checkpointing.saving.staging import Copying, Source
from shardwise.checkpointing.sharded.committing import begin_checkpoint, commit_checkpoint, partial_of
from shardwise.checkpointing.sharded.writing import FileRecord, Item, file_name, write_rank_file
from shardwise.checkpointing.state.run import Collected
from shardwise.checkpointing.storage.checksums import checksum
from shardwise.checkpointing.storage.files import Place, join, remove_tree
from shardwise.checkpointing.storage.memory import bytes_of
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.progress import Progress
from shardwise.sharding.gathering import refuse_missing

Retire = Callable[[Sequence[FileRecord]], None]
"""Called on rank 0 after a commit, with what was written: removes old checkpoints."""


@dataclass(slots=True)
class Started:
    """A save whose state is fixed: the ranks agree on it, and it is copied or being copied."""

    step: int
    folder: Place
    collected: Collected
    parts: list[Fixed]
    copying: Copying | None = None
    """None: the tensors are written from where they are."""
    error: Exception | None = None
    """Why this rank has nothing to write; the others learn it when they finish."""


class Saver:
    """What is kept from save to save on one rank.

    Args:
        front: For the training thread.
        back: For the thread that finishes saves.
        fsync: Commit only what the disk has.

    Ranks:
        Collective, like its methods.
    """

    def __init__(self, front: Channel, back: Channel, *, fsync: bool) -> None:
        self._front, self._back, self._fsync = front, back, fsync
        self._arena = Arena()
        self._holdings = Holdings()
        self._writer: WriterProcess | None = None
        self._marks: list[tuple[int, int]] = []
        self._chosen: list[int] = []

    def prepare(self, collect: Callable[[], Collected]) -> None:
        """Do now what the first save in the background would else do: start the writer, get the memory."""
        error: BaseException | None = None
        holdings: list[Holding] = []
        try:
            holdings = self._holdings.of(collect().leaves)
            self._ensure_writer()
        except Exception as caught:
            error = caught
        self._reserve(self._share(0, holdings, error))
        self._arena.touch()

    @torch.no_grad()  # a switch that thousands of small calls would else flip one by one
    def start(self, folder: Place, step: int, collect: Callable[[], Collected], *, background: bool) -> Started:
        """Fix the state that is saved. Training waits for this, and for no more.

        Args:
            folder: Where the checkpoint will lie.
            step: The same on all ranks.
            collect: Gives this rank's state.
            background: Copy the state, so that training can go on.

        Raises:
            ShardwiseError: The same on every rank: something cannot be stored, or the folder cannot be written.
        """
        error: BaseException | None = None
        collected, holdings = Collected(), []
        try:
            collected = collect()
            holdings = self._holdings.of(collected.leaves)
            if background:
                self._ensure_writer()
            if self._front.rank == 0:
                begin_checkpoint(folder)
        except Exception as caught:
            error = caught
        mine = self._share(step, holdings, error)
        started = Started(step, folder, collected, [])
        try:  # from here on the others count on this rank to take part in `finish`
            if background or any(holding.memory.device.type != "cpu" for holding in mine):
                started.parts, started.copying = self._copy(mine)
                collected.leaves.clear()  # what is written is the copy; the run's own tensors must be free to go
            else:
                started.parts = [Fixed(each.held, each.kind, memory=each.memory) for each in mine]
        except Exception as caught:
            started.error = caught
        return started

    def finish(
        self, started: Started, *, retire: Callable[[Sequence[FileRecord]], None], progress: Progress | None = None
    ) -> None:
        """Write and commit; on the thread that `back` belongs to.

        Args:
            started: What `start` returned.
            retire: See `Retire`.
            progress: Is told the bytes as they are written.

        Raises:
            ShardwiseError: The same on every rank. Nothing is committed then, unless `retire` raised it.
        """
        plain: dict[str, HeldTensor] = {}
        error: BaseException | None = None
        try:
            if started.error is not None:
                raise started.error
            if started.copying is not None:
                started.copying.run()
            plain = self._plain_tensors(started)
        except Exception as caught:
            error = caught
        collected = started.collected
        signs = self._back.all_gather((portable(error), digest(plain), digest(collected.values)))
        failed = first_error([sign[0] for sign in signs])
        record: FileRecord | None = None
        values: dict[str, Any] = {}
        if failed is None:
            names = names_to_write(self._back, plain, [sign[1] for sign in signs])
            values = all_values(self._back, collected.values, [sign[2] for sign in signs])
            try:
                record = self._write(started, names, values, progress)
            except Exception as caught:
                error = caught
        outcomes = self._back.gather((portable(error), record))
        verdict = None
        if self._back.rank == 0:
            verdict = failed or first_error([outcome[0] for outcome in outcomes])
            verdict = self._conclude(started, [outcome[1] for outcome in outcomes], values, verdict, retire)
        verdict = self._back.broadcast(verdict)
        if verdict is not None:
            raise verdict

    def close(self) -> None:
        """End the writer, give the memory back, leave the ranks' lines."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        self._arena.close()
        self._front.close()
        self._back.close()

    def _ensure_writer(self) -> None:
        if self._writer is not None and not self._writer.is_alive:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            self._writer = WriterProcess()

    def _share(self, step: int, holdings: list[Holding], error: BaseException | None) -> list[Holding]:
        """Agree with the other ranks; return what this one may have to write."""
        boxes = [holding for holding in holdings if holding.kind == "box"]
        others = [holding for holding in holdings if holding.kind != "box"]
        signs = self._front.all_gather((step, self._holdings.mark(boxes), portable(error)))
        if error is not None:
            raise error
        if (failed := first_error([sign[2] for sign in signs])) is not None:
            raise failed
        if len({sign[0] for sign in signs}) > 1:
            raise CheckpointError(
                f"ranks save different steps: {[sign[0] for sign in signs]}",
                where="Checkpointer.save(step)",
                why="a checkpoint is of one step of the whole run",
                fix="call save with the same step on every rank",
            )
        marks = [sign[1] for sign in signs]
        if marks != self._marks:  # as a rule only the first time
            tables = self._front.all_gather([holding.held for holding in boxes])
            refuse_missing(_lacking(tables))
            self._chosen = share_boxes(tables)[self._front.rank]
            self._marks = marks
        chosen = {id(boxes[index]) for index in self._chosen} | {id(holding) for holding in others}
        return [holding for holding in holdings if id(holding) in chosen]

    def _copy(self, holdings: list[Holding]) -> tuple[list[Fixed], Copying]:
        placed = list(zip(holdings, self._reserve(holdings), strict=True))
        sources = [
            Source(each.held.name, each.memory, each.leaf.tensor, offset, each.leaf.is_steady)
            for each, offset in placed
        ]
        parts = [Fixed(each.held, each.kind, offset) for each, offset in placed]
        return parts, Copying(sources, self._arena)

    def _reserve(self, holdings: list[Holding]) -> list[int]:
        """Make room for copies; return where each goes."""
        offsets, total = place_in_arena([holding.held.num_bytes for holding in holdings])
        self._arena.reserve(total, pinned=any(holding.memory.device.type == "cuda" for holding in holdings))
        return offsets

    def _memory(self, part: Fixed) -> memoryview:
        if part.memory is None:
            return self._arena.buffer(part.offset, part.held.num_bytes)
        return bytes_of(part.memory.resolve_conj().resolve_neg().contiguous())

    def _plain_tensors(self, started: Started) -> dict[str, HeldTensor]:
        is_alone = self._back.size == 1  # nobody to differ from
        return {
            part.held.name: HeldTensor(
                part.held.dtype, part.held.shape, 0 if is_alone else checksum(self._memory(part))
            )
            for part in started.parts
            if part.kind == "plain"
        }

    def _write(
        self, started: Started, names: dict[str, str], values: dict[str, Any], progress: Progress | None
    ) -> FileRecord:
        path = join(partial_of(started.folder), file_name(self._back.rank))
        chosen = [
            (names.get(part.held.name, "") if part.kind == "plain" else part.held.name, part) for part in started.parts
        ]
        if started.copying is not None and self._writer is not None:
            items = [
                PlacedItem(name, part.held.dtype, part.held.shape, part.held.box, part.offset, part.held.num_bytes)
                for name, part in chosen
                if name
            ]
            return self._writer.run(WriteFile(path, tuple(items), values, self._fsync), self._arena, progress)
        direct = [
            Item(name, part.held.dtype, part.held.shape, part.held.box, self._memory(part))
            for name, part in chosen
            if name
        ]
        return write_rank_file(path, direct, value_streams(values), fsync=self._fsync, progress=progress)

    def _conclude(
        self,
        started: Started,
        records: list[FileRecord | None],
        values: dict[str, Any],
        error: ShardwiseError | None,
        retire: Retire,
    ) -> ShardwiseError | None:
        """On rank 0: commit, or clear away what was written."""
        written = tuple(record for record in records if record is not None)
        try:
            if error is not None:
                raise error
            header = make_header(started.step, self._back.size, written, values, started.collected)
            if lost := sorted(started.collected.paths.keys() - header.structure.keys()):
                raise CheckpointError(
                    f"no rank has written {len(lost)} entries of the run's state; nothing was committed",
                    where="\n".join([str(started.folder), *lost[:10]]),
                    why="everything that rank 0 holds must be stored under its name",
                    fix="report this with the text above: the ranks did not agree on who writes what",
                )
            job = Commit(started.folder, written, header, self._fsync)
            if started.copying is not None and self._writer is not None:
                self._writer.run(job)
            else:
                commit_checkpoint(job.folder, job.records, job.header, fsync=job.fsync)
        except Exception as caught:
            with contextlib.suppress(ShardwiseError):
                remove_tree(partial_of(started.folder))
            return portable(caught)
        try:
            retire(written)
        except Exception as caught:
            return portable(caught)
        return None


def _lacking(tables: Sequence[Sequence[HeldBox]]) -> dict[str, set[int]]:
    """By name of an optimizer state, the ranks that hold a part of its parameter and should hold one of it.

    They should where the parts of all ranks do not make up the whole; and where another rank has the same part of
    the parameter, a replica of theirs, and does hold one.
    """
    held: dict[str, dict[int, set[Box]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, table in enumerate(tables):
        for each in table:
            held.setdefault(each.name, {}).setdefault(rank, set()).add(each.box)
            shapes[each.name] = each.shape
    lacking: dict[str, set[int]] = {}
    for name, holders in held.items():
        if not name.startswith("optim."):
            continue
        parameter = name.partition(".state.")[2]
        while parameter and f"model.{parameter}" not in held:
            parameter = parameter.rpartition(".")[0]
        parts = held.get(f"model.{parameter}", {})
        others = parts.keys() - holders.keys()
        if others and sum(box.numel for box in set().union(*holders.values())) >= math.prod(shapes[name]):
            replicated = [parts[rank] for rank in holders if rank in parts]
            others = {rank for rank in others if parts[rank] in replicated}
        if others:
            lacking[name] = set(others)
    return lacking
