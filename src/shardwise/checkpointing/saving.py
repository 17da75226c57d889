"""One save: describe and stage the state, share the work among ranks, write it, commit it."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpointing.background_writer import Work, WriterProcess, bytes_of_item, commit, write_items
from shardwise.checkpointing.contents import ITEM_BYTES, Box
from shardwise.checkpointing.formats.sharded import FileRecord, Header, Item, file_name
from shardwise.checkpointing.formats.sharded_commit import begin_checkpoint, partial_of
from shardwise.checkpointing.sharing import (
    PER_RANK,
    HeldBox,
    HeldTensor,
    digest,
    ranks_without_state,
    share_boxes,
    share_tensors,
    share_values,
)
from shardwise.checkpointing.staging import Arena, Copying, Holding
from shardwise.checkpointing.state.nested import FlatState, Path
from shardwise.checkpointing.state.run import Run
from shardwise.checkpointing.state.slices import dtype_name, parts_of
from shardwise.checkpointing.storage.files import Place, join, remove_tree
from shardwise.checkpointing.storage.memory import checksum
from shardwise.distributed.agreement import Channel, as_shardwise_error, first_error, run_and_gather
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.planning.plan import Plan, encode_plan
from shardwise.progress import Progress
from shardwise.sharding.full_params import refuse_missing
from shardwise.sharding.inventory import local_tensor
from shardwise.sharding.registry import sharded_state

_RNG = "rng."
Retire = Callable[[Sequence[FileRecord]], None]
"""Called on rank 0 after a commit, with what was written: removes old checkpoints."""


def describe_run(run: Run) -> dict[str, Any]:
    """Meshes, plans and dtypes of the models, as JSON.

    Ranks:
        Local; the same on every rank.
    """
    described: dict[str, Any] = {}
    for name, model in run.models.items():
        state = sharded_state(model)
        mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
        described[name] = {
            "class": type(model).__qualname__,
            "dtypes": sorted(map(dtype_name, {p.dtype for p in model.parameters()})),
            "mesh": None if mesh is None else _axes(mesh),
            "plan": None if state is None else _encoded(state.plan),
        }
    return {"models": described}


@lru_cache(maxsize=8)
def _encoded(plan: Plan) -> dict[str, Any]:
    # Training waits for it at every save, and a plan has a line for each parameter.
    return json.loads(encode_plan(plan))


def _axes(mesh: Any) -> dict[str, int]:
    names = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
    return {name: mesh.size(axis) for axis, name in enumerate(names)}


def _path(name: str, paths: Mapping[str, Path]) -> Path:
    if name in paths:
        return paths[name]
    if name.startswith(f"{PER_RANK}."):
        _, rank, rest = name.split(".", 2)
        return (PER_RANK, rank, *paths.get(rest, (rest,)))
    return tuple(name.split("."))  # other ranks' random numbers


def _holdings(name: str, tensor: torch.Tensor, *, is_steady: bool) -> list[Holding]:
    """This rank's boxes of a tensor."""
    local = local_tensor(tensor)
    shape, dtype = tuple(tensor.shape), dtype_name(local.dtype)
    plain_types = (torch.Tensor, nn.Parameter, nn.Buffer)
    if type(local) not in plain_types or local.layout is not torch.strided or dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"a {type(local).__name__} of {local.dtype}, {str(local.layout).removeprefix('torch.')} cannot be stored",
            where=name,
            why="a checkpoint holds tensors as plain bytes: dense, of a dtype that files know",
            fix="leave it out, or store what it is made of in a state_dict() of your own",
        )
    if isinstance(tensor, DTensor) and tensor.numel():
        kind, boxes = "box", [(part.box, part.memory) for part in parts_of(tensor)]
    elif isinstance(tensor, DTensor):  # no rank has a part of it, yet it must be in the checkpoint
        kind, boxes = "box", [(Box.whole(shape), torch.empty(shape, dtype=local.dtype, device="cpu"))]
    else:
        kind, boxes = "own" if name.startswith(_RNG) else "plain", [(Box.whole(shape), local)]
    return [Holding(HeldBox(name, dtype, shape, box), memory, tensor, kind, is_steady) for box, memory in boxes]


@dataclass(slots=True)
class Started:
    """A save whose state is fixed: the ranks agree on it, and it is copied or being copied."""

    step: int
    folder: Place
    collected: FlatState
    items: list[Item] = field(default_factory=list)
    """What this rank may have to write; the memory of each is a tensor, or a place in the arena."""
    plain: frozenset[str] = frozenset()
    """Those of them that every rank holds whole, and that may differ between ranks."""
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
        self._writer: WriterProcess | None = None
        self._marks: list[int] = []
        self._chosen: list[int] = []

    def prepare(self, collect: Callable[[], FlatState]) -> None:
        """Do now what the first save in the background would else do: start the writer, get the memory."""
        holdings, _ = self._share(0, collect, self._ensure_writer)
        self._arena.place(holdings)
        self._arena.touch()

    @torch.no_grad()  # a switch that thousands of small calls would else flip one by one
    def start(self, folder: Place, step: int, collect: Callable[[], FlatState], *, background: bool) -> Started:
        """Fix the state that is saved. Training waits for this, and for no more.

        Args:
            folder: Where the checkpoint will lie.
            step: The same on all ranks.
            collect: Gives this rank's state.
            background: Copy the state, so that training can go on.

        Raises:
            ShardwiseError: The same on every rank: something cannot be stored, or the folder cannot be written.
        """

        def begin() -> None:
            if background:
                self._ensure_writer()
            if self._front.rank == 0:
                begin_checkpoint(folder)

        holdings, collected = self._share(step, collect, begin)
        started = Started(step, folder, collected)
        try:  # from here on the others count on this rank to take part in `finish`
            if background or any(holding.memory.device.type != "cpu" for holding in holdings):
                self._arena.place(holdings)
                started.copying = Copying(holdings, self._arena)
                collected.tensors.clear()  # what is written is the copy; the run's own tensors must be free to go
            started.items = [self._item(holding, started.copying is not None) for holding in holdings]
            started.plain = frozenset(holding.held.name for holding in holdings if holding.kind == "plain")
        except Exception as caught:
            started.error = caught
        return started

    def finish(self, started: Started, *, retire: Retire, progress: Progress | None = None) -> None:
        """Write and commit; on the thread that `back` belongs to.

        Args:
            started: What `start` returned.
            retire: See `Retire`.
            progress: Is told the bytes as they are written.

        Raises:
            ShardwiseError: The same on every rank. Nothing is committed then, unless `retire` raised it.
        """
        back, values = self._back, started.collected.values
        plain: dict[str, HeldTensor] = {}
        error: Exception | None = None
        try:
            if started.error is not None:
                raise started.error
            if started.copying is not None:
                started.copying.run()
            plain = self._plain_tensors(started)
        except Exception as caught:
            error = caught
        told = back.all_gather((_portable(error), digest(plain), digest(values)))
        failed = first_error([each[0] for each in told])
        record: FileRecord | None = None
        if failed is None:  # where the ranks' tables are equal, nothing is sent
            tables = [plain] * back.size if len({each[1] for each in told}) == 1 else back.all_gather(plain)
            values_of_ranks = [values] if len({each[2] for each in told}) == 1 else back.gather(values)
            values = share_values(values_of_ranks) if back.rank == 0 else {}
            try:
                record = self._write(started, share_tensors(tables)[back.rank], values, progress)
            except Exception as caught:
                error = caught
        outcomes = back.gather((_portable(error), record))
        verdict = None
        if back.rank == 0:
            verdict = failed or first_error([outcome[0] for outcome in outcomes])
            records = [outcome[1] for outcome in outcomes if outcome[1] is not None]
            verdict = self._conclude(started, records, values, verdict, retire)
        verdict = back.all_gather(verdict)[0]
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

    def _share(
        self, step: int, collect: Callable[[], FlatState], begin: Callable[[], None]
    ) -> tuple[list[Holding], FlatState]:
        """Agree with the other ranks; return what this one may have to write, of what `collect` finds."""

        def work() -> tuple[tuple[FlatState, list[Holding]], tuple[int, int]]:
            collected = collect()
            holdings = [
                holding
                for name, tensor in collected.tensors.items()
                for holding in _holdings(name, tensor, is_steady=name in collected.steady)
            ]
            begin()
            # Another number when the boxes are not those of the last time; only this process understands it.
            return (collected, holdings), (step, hash(tuple(each.held for each in holdings if each.kind == "box")))

        (collected, holdings), told = run_and_gather(work, self._front, CheckpointError)
        if len({each[0] for each in told}) > 1:
            raise CheckpointError(
                f"ranks save different steps: {[each[0] for each in told]}",
                where="Checkpointer.save(step)",
                why="a checkpoint is of one step of the whole run",
                fix="call save with the same step on every rank",
            )
        boxes = [holding for holding in holdings if holding.kind == "box"]
        marks = [each[1] for each in told]
        if marks != self._marks:  # as a rule only the first time
            tables = self._front.all_gather([holding.held for holding in boxes])
            refuse_missing(ranks_without_state(tables))
            self._chosen, self._marks = share_boxes(tables)[self._front.rank], marks
        chosen = {id(boxes[index]) for index in self._chosen}
        return [holding for holding in holdings if holding.kind != "box" or id(holding) in chosen], collected

    def _item(self, holding: Holding, is_copied: bool) -> Item:
        held = holding.held
        memory = holding.offset if is_copied else holding.memory.resolve_conj().resolve_neg().contiguous()
        return Item(held.name, held.dtype, held.shape, held.box, memory)

    def _plain_tensors(self, started: Started) -> dict[str, HeldTensor]:
        is_alone = self._back.size == 1  # nobody to differ from
        memory = self._arena.view()
        return {
            item.name: HeldTensor(item.dtype, item.shape, 0 if is_alone else checksum(bytes_of_item(item, memory)))
            for item in started.items
            if item.name in started.plain
        }

    def _write(
        self, started: Started, names: Mapping[str, str], values: dict[str, Any], progress: Progress | None
    ) -> FileRecord:
        path = join(partial_of(started.folder), file_name(self._back.rank))
        items = [item for item in started.items if item.name not in started.plain or item.name in names]
        renamed = [replace(item, name=names.get(item.name, item.name)) for item in items]
        return self._run(started, partial(write_items, path, renamed, values, self._fsync), progress)

    def _run(self, started: Started, work: Work, progress: Progress | None = None) -> Any:
        if started.copying is not None and self._writer is not None:
            return self._writer.run(work, self._arena, progress)
        return work(self._arena.view(), progress)

    def _conclude(
        self,
        started: Started,
        records: Sequence[FileRecord],
        values: dict[str, Any],
        error: ShardwiseError | None,
        retire: Retire,
    ) -> ShardwiseError | None:
        """On rank 0: commit, or clear away what was written."""
        try:
            if error is not None:
                raise error
            header = self._header(started, records, values)
            self._run(started, partial(commit, started.folder, records, header, self._fsync))
        except Exception as caught:
            with contextlib.suppress(ShardwiseError):
                remove_tree(partial_of(started.folder))
            return _portable(caught)
        try:
            retire(records)
        except Exception as caught:
            return _portable(caught)
        return None

    def _header(self, started: Started, records: Iterable[FileRecord], values: dict[str, Any]) -> Header:
        """The head of the manifest; rank 0's state knows how names came about."""
        collected = started.collected
        names = {tensor.name for record in records for tensor, _ in record.tensors} | {*values, *collected.aliases}
        if lost := sorted(collected.paths.keys() - names):
            raise CheckpointError(
                f"no rank has written {len(lost)} entries of the run's state; nothing was committed",
                where="\n".join([str(started.folder), *lost[:10]]),
                why="everything that rank 0 holds must be stored under its name",
                fix="report this with the text above: the ranks did not agree on who writes what",
            )
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Header(
            step=started.step,
            world_size=self._back.size,
            values=values,
            aliases=collected.aliases,
            structure={name: _path(name, collected.paths) for name in sorted(names)},
            details={**collected.details, "torch": str(torch.__version__), "date": now},
        )


def _portable(error: BaseException | None) -> ShardwiseError | None:
    """An error that can be sent to other ranks."""
    return None if error is None else as_shardwise_error(error, CheckpointError)
