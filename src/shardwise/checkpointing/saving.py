"""One save: describe and stage the state, share the work among ranks, write it, commit it."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpointing.agreement import (
    PER_RANK,
    Channel,
    HeldBox,
    HeldTensor,
    all_values,
    digest,
    names_to_write,
    portable,
    share_boxes,
)
from shardwise.checkpointing.background_writer import (
    Advanced,
    Commit,
    PlacedItem,
    UseArena,
    WriteFile,
    value_streams,
)
from shardwise.checkpointing.contents import ITEM_BYTES, Box
from shardwise.checkpointing.formats.sharded import FileRecord, Header, Item, file_name, write_rank_file
from shardwise.checkpointing.formats.sharded_commit import begin_checkpoint, commit_checkpoint, partial_of
from shardwise.checkpointing.staging import Arena, Copying, Source, place_in_arena
from shardwise.checkpointing.state.nested import Path
from shardwise.checkpointing.state.run import Collected, Leaf, Run
from shardwise.checkpointing.state.slices import dtype_name, parts_of
from shardwise.checkpointing.storage.files import Place, join, remove_tree
from shardwise.checkpointing.storage.memory import bytes_of, checksum, counting
from shardwise.distributed.agreement import first_error, run_and_gather
from shardwise.errors import CheckpointError, EnvironmentProblem, ShardwiseError
from shardwise.planning.plan import Plan, encode_plan
from shardwise.progress import Progress
from shardwise.sharding.full_params import refuse_missing
from shardwise.sharding.inventory import local_tensor
from shardwise.sharding.registry import sharded_state


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


def make_header(
    step: int,
    world_size: int,
    records: Iterable[FileRecord],
    values: dict[str, Any],
    collected: Collected,
) -> Header:
    """The head of a manifest.

    Args:
        step: Of the run.
        world_size: Ranks that saved.
        records: What each of them wrote.
        values: Everything that is no tensor, encoded.
        collected: Rank 0's state, which knows how names came about.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    names = {tensor.name for record in records for tensor in record.tensors} | {*values, *collected.aliases}
    return Header(
        step=step,
        world_size=world_size,
        values=values,
        aliases=collected.aliases,
        structure={name: _path(name, collected.paths) for name in sorted(names)},
        details={**collected.details, "torch": str(torch.__version__), "date": now},
    )


@lru_cache(maxsize=8)
def _encoded(plan: Plan) -> dict[str, Any]:
    # Training waits for it at every save, and a plan has a line for each parameter.
    return json.loads(encode_plan(plan))


def _path(name: str, paths: Mapping[str, Path]) -> Path:
    if name in paths:
        return paths[name]
    if name.startswith(f"{PER_RANK}."):
        _, rank, rest = name.split(".", 2)
        return (PER_RANK, rank, *paths.get(rest, (rest,)))
    return tuple(name.split("."))  # other ranks' random numbers


def _axes(mesh: Any) -> dict[str, int]:
    names = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
    return {name: mesh.size(axis) for axis, name in enumerate(names)}


RNG = "rng."
Kind = Literal["box", "plain", "own"]


@dataclass(frozen=True, slots=True)
class Holding:
    """A box of a tensor in this rank's memory."""

    leaf: Leaf
    held: HeldBox
    memory: torch.Tensor
    kind: Kind
    """`box`: of a DTensor, equal on all ranks that hold it. `plain`: whole on each rank, which may differ. `own`: of
    this rank alone."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A box whose values no longer change: copied, or in memory that nobody touches until it is written."""

    held: HeldBox
    kind: Kind
    offset: int = 0
    """Where the copy lies in the arena."""
    memory: torch.Tensor | None = None
    """The run's own memory, where there is no copy."""


class Holdings:
    """This rank's boxes, remembered from save to save: which tensors there are hardly ever changes."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[weakref.ref[torch.Tensor], tuple[HeldBox, ...]]] = {}
        self._num_changes = 0

    def of(self, leaves: Iterable[Leaf]) -> list[Holding]:
        """This rank's boxes of all leaves, in their order.

        Raises:
            CheckpointError: A tensor is not made of plain bytes.

        Ranks:
            Local.
        """
        return [holding for leaf in leaves for holding in self._known_holding(leaf) or self._look_at(leaf)]

    def mark(self, holdings: Iterable[Holding]) -> tuple[int, int]:
        """Another one when the boxes among them are not those of the last time; only this process understands it."""
        return self._num_changes, hash(tuple(holding.held.name for holding in holdings))

    def _known_holding(self, leaf: Leaf) -> tuple[Holding] | None:
        known = self._known.get(leaf.name)
        if known is None or known[0]() is not leaf.tensor or len(known[1]) != 1:
            return None
        held, memory = known[1][0], local_tensor(leaf.tensor)
        return (Holding(leaf, held, memory, "box"),) if memory.shape == held.box.sizes else None

    def _look_at(self, leaf: Leaf) -> list[Holding]:
        holdings = _holdings(leaf)
        if isinstance(leaf.tensor, DTensor):
            held = tuple(holding.held for holding in holdings)
            if leaf.name not in self._known or self._known[leaf.name][1] != held:
                self._num_changes += 1
            self._known[leaf.name] = (weakref.ref(leaf.tensor), held)
        return holdings


def _holdings(leaf: Leaf) -> list[Holding]:
    _refuse_odd(leaf)
    shape, dtype = tuple(leaf.tensor.shape), dtype_name(leaf.tensor.dtype)
    whole = Box.whole(shape)
    if not isinstance(leaf.tensor, DTensor):
        kind = "own" if leaf.name.startswith(RNG) else "plain"
        return [Holding(leaf, HeldBox(leaf.name, dtype, shape, whole), leaf.tensor.detach(), kind)]
    if whole.numel == 0:  # no rank has a part of it, yet it must be in the checkpoint
        empty = torch.empty(shape, dtype=leaf.tensor.dtype, device="cpu")
        return [Holding(leaf, HeldBox(leaf.name, dtype, shape, whole), empty, "box")]
    return [
        Holding(leaf, HeldBox(leaf.name, dtype, shape, part.box), part.memory, "box") for part in parts_of(leaf.tensor)
    ]


def _refuse_odd(leaf: Leaf) -> None:
    local = local_tensor(leaf.tensor)
    plain_types = (torch.Tensor, nn.Parameter, nn.Buffer)
    if type(local) in plain_types and local.layout is torch.strided and dtype_name(local.dtype) in ITEM_BYTES:
        return
    raise CheckpointError(
        f"a {type(local).__name__} of {local.dtype}, {str(local.layout).removeprefix('torch.')} cannot be stored",
        where=leaf.name,
        why="a checkpoint holds tensors as plain bytes: dense, of a dtype that files know",
        fix="leave it out, or store what it is made of in a state_dict() of your own",
    )


# The same modules as here, however this process came by them.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from shardwise.checkpointing.background_writer import main; main(int(sys.argv[2]))"
)
_END_S = 10.0


class WriterProcess:
    """A process of its own that writes checkpoints.

    Raises:
        EnvironmentProblem: The system starts no process.

    Ranks:
        Local: every rank has one.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
        except OSError as error:
            ours.close()
            raise EnvironmentProblem(
                "the process that writes checkpoints in the background does not start",
                where=sys.executable,
                why=str(error),
                fix="Checkpointer(..., asynchronous=False)",
            ) from error
        self._connection = Connection(ours.detach())
        self._arena = -1

    @property
    def is_alive(self) -> bool:
        """Whether it can take a job."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    def run(self, job: Any, arena: Arena | None = None, progress: Progress | None = None) -> Any:
        """Have a job done, and wait for it.

        Args:
            job: One of those in `background_writer.py`.
            arena: Where its tensors lie.
            progress: Is told the bytes of a `WriteFile` as they are written.

        Raises:
            CheckpointError: What the job raised; or the process died.
        """
        if arena is not None and arena.generation != self._arena:
            self._call(UseArena(arena.num_bytes), arena.descriptor)
            self._arena = arena.generation
        if progress is None or not isinstance(job, WriteFile):
            return self._call(job)
        with counting(progress, job.num_bytes, "writing") as count:
            return self._call(replace(job, tells=True), count=count)

    def close(self) -> None:
        """End it; a job that it is at is finished first."""
        self._connection.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _call(
        self, job: Any, descriptor: int | None = None, count: Callable[[int], None] = lambda num_bytes: None
    ) -> Any:
        uncounted: Exception | None = None
        try:
            self._connection.send(job)
            if descriptor is not None:
                send_handle(self._connection, descriptor, self.pid)
            while isinstance(message := self._connection.recv(), Advanced):
                try:
                    count(message.num_bytes)
                except Exception as error:  # the caller's; the answer must be taken all the same
                    uncounted = uncounted or error
            succeeded, answer = message
        except (EOFError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            raise CheckpointError(
                f"the process that writes checkpoints died (exit status {self._process.poll()})",
                where=f"process {self.pid}",
                why="it was killed, perhaps because the machine ran out of memory",
                fix="see the system's log; the next save starts a new one, and committed checkpoints are intact",
            ) from error
        if not succeeded:
            raise answer
        if uncounted is not None:
            raise uncounted
        return answer


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

        def look() -> list[Holding]:
            holdings = self._holdings.of(collect().leaves)
            self._ensure_writer()
            return holdings

        self._reserve(self._share(0, look))
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
        found: list[Collected] = []

        def look() -> list[Holding]:
            found.append(collect())
            holdings = self._holdings.of(found[0].leaves)
            if background:
                self._ensure_writer()
            if self._front.rank == 0:
                begin_checkpoint(folder)
            return holdings

        mine = self._share(step, look)
        collected = found[0]
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

    def _share(self, step: int, look: Callable[[], list[Holding]]) -> list[Holding]:
        """Agree with the other ranks; return what this one may have to write, of what `look` finds."""

        def work() -> tuple[list[Holding], tuple[int, tuple[int, int]]]:
            holdings = look()
            return holdings, (step, self._holdings.mark(each for each in holdings if each.kind == "box"))

        holdings, signs = run_and_gather(work, self._front.all_gather, CheckpointError)
        boxes = [holding for holding in holdings if holding.kind == "box"]
        others = [holding for holding in holdings if holding.kind != "box"]
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
