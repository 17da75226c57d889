"""One save: describe and stage the state, divide the work among ranks, write and commit."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpointing.background_writer import Work, WriterProcess, bytes_of_item, commit, write_items
from shardwise.checkpointing.contents import ITEM_BYTES, ChunkSpec, KeyPath, LocalChunk, StoredChunk, StoredTensor
from shardwise.checkpointing.formats import sharded
from shardwise.checkpointing.names import local_chunks
from shardwise.checkpointing.staging import Arena, AsyncCopy, StagedTensor
from shardwise.checkpointing.state import PER_RANK, FlatState, RunObjects
from shardwise.checkpointing.storage import Place, checksum, join
from shardwise.distributed.agreement import Channel, as_shardwise_error, run_and_gather
from shardwise.distributed.mesh import widest_mesh
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.planning.plan import Plan
from shardwise.planning.settings import dtype_name
from shardwise.progress import Progress
from shardwise.sharding.full_params import refuse_missing
from shardwise.sharding.inventory import local_tensor, plain_values
from shardwise.sharding.registry import sharded_state


def name_of_rank(rank: int, name: str) -> str:
    """Return the name under which a rank's value is stored if it differs from rank 0's."""
    return f"{PER_RANK}.{rank}.{name}"


def dedup_chunks(tables: Sequence[Sequence[LocalChunk]]) -> list[list[int]]:
    """For each rank, the chunks of its table that it writes: indices into the table, ascending."""
    holders: dict[tuple[str, ChunkSpec], list[tuple[int, int]]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, table in enumerate(tables):
        for index, held in enumerate(table):
            dtype, shape = kinds.setdefault(held.name, (held.dtype, held.shape))
            if (dtype, shape) != (held.dtype, held.shape):
                raise CheckpointError(
                    f"ranks do not agree on {held.name}: {held.dtype} {list(held.shape)} on rank {rank}, "
                    f"{dtype} {list(shape)} on another",
                    where=held.name,
                    why="ranks hold parts of one tensor under one name",
                    fix="build the same model on every rank; give different models different names",
                )
            holders.setdefault((held.name, held.spec), []).append((rank, index))
    chosen: list[list[int]] = [[] for _ in tables]
    loads = [0] * len(tables)
    # First chunks that only one rank holds; then the others, largest first, each to the rank with the fewest bytes.
    sized = [(tables[where[0][0]][where[0][1]].num_bytes, where) for where in holders.values()]
    for num_bytes, where in sorted(sized, key=lambda item: (len(item[1]) > 1, -item[0])):
        rank, index = min(where, key=lambda place: loads[place[0]])
        chosen[rank].append(index)
        loads[rank] += num_bytes
    return [sorted(indices) for indices in chosen]


def dedup_tensors(tables: Sequence[Mapping[str, StoredTensor]]) -> list[dict[str, str]]:
    """For each rank, the plain tensors of its table that it writes, with their names in the checkpoint."""
    written: list[dict[str, str]] = [{} for _ in tables]
    loads = [0] * len(tables)
    first = dict(tables[0])
    for table in tables:  # a later pipeline stage holds tensors of the model that rank 0 lacks
        first = {name: held for name, held in table.items() if name.startswith(("model.", "optim."))} | first
    for rank, table in enumerate(tables):
        for name, held in table.items():
            if first.get(name) != held:
                written[rank][name] = name_of_rank(rank, name)
                loads[rank] += held.num_bytes
    # Sorted by name as well, because ranks may list the same tensors in different orders.
    for name, held in sorted(first.items(), key=lambda item: (-item[1].num_bytes, item[0])):
        rank = min((rank for rank, table in enumerate(tables) if table.get(name) == held), key=lambda each: loads[each])
        written[rank][name] = name
        loads[rank] += held.num_bytes
    return written


def merge_values(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge all ranks' encoded values: rank 0's by name, and other ranks' different values under per-rank names."""
    merged = dict(tables[0])
    for rank, table in enumerate(tables):
        for name, value in table.items():
            if name not in tables[0] or repr(tables[0][name]) != repr(value):  # 1 == 1.0 == True
                merged[name_of_rank(rank, name)] = value
    return merged


def digest(held: Mapping[str, Any]) -> int:
    """Return a hash of plain tensors or encoded values."""
    texts = {name: repr(value) if isinstance(value, StoredTensor) else value for name, value in held.items()}
    return xxhash.xxh3_64_intdigest(json.dumps(texts, sort_keys=True).encode())


def ranks_without_state(tables: Sequence[Sequence[LocalChunk]]) -> dict[str, set[int]]:
    """For each optimizer state, the ranks that should hold a part of it but do not.

    A rank that holds a part of the parameter should hold the same part of the state if the existing parts do not cover
    the whole state, or if another rank with the same part of the parameter (a replica) holds a part of the state.
    """
    held: dict[str, dict[int, set[ChunkSpec]]] = {}
    numels: dict[str, int] = {}
    for rank, table in enumerate(tables):
        for each in table:
            held.setdefault(each.name, {}).setdefault(rank, set()).add(each.spec)
            numels[each.name] = math.prod(each.shape)
    lacking: dict[str, set[int]] = {}
    for name, holders in held.items():
        if not name.startswith("optim."):
            continue
        parameter = name.partition(".state.")[2]
        while parameter and f"model.{parameter}" not in held:
            parameter = parameter.rpartition(".")[0]
        parts = held.get(f"model.{parameter}", {})
        others = parts.keys() - holders.keys()
        if others and sum(spec.numel for spec in set().union(*holders.values())) >= numels[name]:
            replicated = [parts[rank] for rank in holders if rank in parts]
            others = {rank for rank in others if parts[rank] in replicated}
        if others:
            lacking[name] = set(others)
    return lacking


_RNG = "rng."
Collect = Callable[[], tuple[RunObjects, FlatState]]
"""Returns the run's objects and this rank's state, without communication."""
Retire = Callable[[Sequence[sharded.FileRecord]], None]
"""Called on rank 0 after a commit with the records of the written files; removes old checkpoints."""


def describe_run(run: RunObjects) -> dict[str, Any]:
    """Meshes, plans and dtypes of the models, as JSON; the same on every rank."""
    described: dict[str, Any] = {}
    for name, model in run.models.items():
        state, mesh = sharded_state(model), widest_mesh(model.parameters())
        names = () if mesh is None else mesh.mesh_dim_names or [f"axis {axis}" for axis in range(mesh.ndim)]
        described[name] = {
            "class": type(model).__qualname__,
            "dtypes": sorted(map(dtype_name, {p.dtype for p in model.parameters()})),
            "mesh": None if mesh is None else dict(zip(names, mesh.shape, strict=True)),
            "plan": None if state is None else _encoded(state.plan),
        }
    return {"models": described, **({"trainable_only": True} if run.trainable_only else {})}


@lru_cache(maxsize=8)
def _encoded(plan: Plan) -> dict[str, Any]:
    # Cached: training waits for this at every save, and a plan has an entry for each parameter.
    return json.loads(plan.to_json())


def _path(name: str, paths: Mapping[str, KeyPath]) -> KeyPath:
    if name in paths:
        return paths[name]
    if name.startswith(f"{PER_RANK}."):
        _, rank, rest = name.split(".", 2)
        return (PER_RANK, rank, *paths.get(rest, (rest,)))
    return tuple(name.split("."))  # random states of other ranks


def _row_major(memory: torch.Tensor) -> torch.Tensor:
    return memory.resolve_conj().resolve_neg().contiguous()


def _staged_tensors(name: str, tensor: torch.Tensor) -> list[StagedTensor]:
    """Return this rank's chunks of a tensor."""
    local = plain_values(local_tensor(tensor))
    shape, dtype = tuple(tensor.shape), dtype_name(local.dtype)
    plain_types = (torch.Tensor, nn.Parameter, nn.Buffer)
    if type(local) not in plain_types or local.layout is not torch.strided or dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"a {type(local).__name__} of {local.dtype}, {str(local.layout).removeprefix('torch.')} cannot be stored",
            where=name,
            why="a checkpoint stores dense tensors of supported dtypes",
            fix="omit it, or store its components in a state_dict()",
        )
    if isinstance(tensor, DTensor) and tensor.numel():
        kind, chunks = "sharded", [(spec, plain_values(memory)) for spec, memory in local_chunks(tensor)]
    elif isinstance(tensor, DTensor):  # empty on every rank, but the checkpoint must contain it
        kind, chunks = "sharded", [(ChunkSpec.whole(shape), torch.empty(shape, dtype=local.dtype, device="cpu"))]
    else:
        kind, chunks = "own" if name.startswith(_RNG) else "plain", [(ChunkSpec.whole(shape), local)]
    return [StagedTensor(LocalChunk(name, dtype, shape, spec), memory, kind) for spec, memory in chunks]


@dataclass(slots=True)
class PendingSave:
    """A save whose state is fixed: all ranks agree, and copies are complete or queued."""

    step: int
    folder: Place
    collected: FlatState
    items: list[LocalChunk] = field(default_factory=list)
    """Chunks that this rank may have to write; the memory of each is a tensor or an offset in the arena."""
    plain: frozenset[str] = frozenset()
    """Names of items that every rank holds whole, and that may differ between ranks."""
    copy: AsyncCopy | None = None
    """None: tensors are written without a copy."""
    error: Exception | None = None
    """Error of this rank; the other ranks receive it in `finish`."""


class Saver:
    """State kept between saves on one rank; `front` is the training thread's channel, `back` the saving thread's."""

    def __init__(self, front: Channel, back: Channel, *, fsync: bool) -> None:
        self._front, self._back, self._fsync = front, back, fsync
        self._arena = Arena()
        self._writer: WriterProcess | None = None
        self._layouts: list[int] = []
        self._chosen: list[int] = []

    def prepare(self, collect: Collect) -> None:
        """Start the writer process and allocate memory before the first background save."""
        staged_tensors, _ = self._share(0, collect, self._ensure_writer)
        self._arena.place(staged_tensors)
        self._arena.touch()

    @torch.no_grad()  # set once for thousands of small calls
    def start(self, folder: Place, step: int, collect: Collect, *, background: bool) -> PendingSave:
        """Fix the state from `collect` and start copying it. Training waits only for this method."""

        def begin() -> None:
            if background:
                self._ensure_writer()
            if self._front.rank == 0:
                sharded.begin_checkpoint(folder)

        staged_tensors, collected = self._share(step, collect, begin)
        pending = PendingSave(step, folder, collected)
        try:  # from here on the other ranks wait for this rank in `finish`
            if background or any(staged.memory.device.type != "cpu" for staged in staged_tensors):
                self._arena.place(staged_tensors)
                pending.copy = AsyncCopy(staged_tensors, self._arena)
                collected.tensors.clear()  # the copy is written; the run's tensors must not be kept alive
            pending.items = [
                replace(staged.chunk, memory=staged.offset if pending.copy is not None else _row_major(staged.memory))
                for staged in staged_tensors
            ]
            pending.plain = frozenset(staged.chunk.name for staged in staged_tensors if staged.kind == "plain")
        except Exception as caught:
            pending.error = caught
        return pending

    def finish(self, pending: PendingSave, *, retire: Retire, progress: Progress | None = None) -> None:
        """Write and commit, on the thread of `back`; if any rank fails, every rank raises and nothing is committed.

        Ranks:
            Collective; one exchange between the ranks' writers.
        """
        back, values = self._back, pending.collected.values
        records: list[sharded.FileRecord] = []
        failed: ShardwiseError | None = None

        def copy() -> tuple[dict[str, StoredTensor], tuple[int, int]]:
            if pending.error is not None:
                raise pending.error
            if pending.copy is not None:
                pending.copy.run()
            plain = self._plain_tensors(pending)
            return plain, (digest(plain), digest(values))

        try:
            plain, digests = run_and_gather(copy, back, CheckpointError)
            same_plain, same_values = (len(set(of_ranks)) == 1 for of_ranks in zip(*digests, strict=True))
            names = dedup_tensors([plain] * back.size if same_plain else back.all_gather(plain))[back.rank]
            of_ranks = [values] if same_values else back.gather(values)  # nothing is sent if all hold the same values
            values = merge_values(of_ranks) if back.rank == 0 else {}
            records = back.gather(back.run_on_all(lambda: self._write(pending, names, values, progress)))
            back.run_on_all(lambda: self._commit(pending, records, values) if back.rank == 0 else None)
        except Exception as error:
            with contextlib.suppress(ShardwiseError):
                if back.rank == 0:
                    sharded.discard_partial(pending.folder)
            failed = as_shardwise_error(error, CheckpointError)

        def conclude() -> None:
            if failed is not None:
                raise failed
            if back.rank == 0:
                retire(records)

        back.run_on_all(conclude)  # no rank returns before rank 0 has removed uncommitted files

    def close(self) -> None:
        """End the writer process, free the memory and close the channels."""
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

    def _share(self, step: int, collect: Collect, begin: Callable[[], None]) -> tuple[list[StagedTensor], FlatState]:
        """Agree with the other ranks; return the tensors this rank may have to write, and the collected state.

        Ranks:
            Collective.
        """

        def work() -> tuple[tuple[RunObjects, FlatState, list[StagedTensor]], tuple[int, int]]:
            run, collected = collect()
            staged_tensors = [
                staged for name, tensor in collected.tensors.items() for staged in _staged_tensors(name, tensor)
            ]
            begin()
            # Changes when the chunks differ from those of the last save; comparable only within this process.
            layout = hash(tuple(staged.chunk for staged in staged_tensors if staged.kind == "sharded"))
            return (run, collected, staged_tensors), (step, layout)

        (run, collected, staged_tensors), of_ranks = run_and_gather(work, self._front, CheckpointError)
        steps, layouts = [step for step, _ in of_ranks], [layout for _, layout in of_ranks]
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"ranks save different steps: {steps}",
                where="Checkpointer.save(step)",
                why="a checkpoint belongs to one step on all ranks",
                fix="call save with the same step on every rank",
            )
        run.add_other_stages(collected)
        chunks = [staged for staged in staged_tensors if staged.kind == "sharded"]
        if layouts != self._layouts:  # usually only in the first save
            tables = self._front.all_gather([staged.chunk for staged in chunks])
            refuse_missing(ranks_without_state(tables))
            self._chosen, self._layouts = dedup_chunks(tables)[self._front.rank], layouts
        chosen = {id(chunks[index]) for index in self._chosen}
        return [staged for staged in staged_tensors if staged.kind != "sharded" or id(staged) in chosen], collected

    def _plain_tensors(self, pending: PendingSave) -> dict[str, StoredTensor]:
        memory = self._arena.view()

        def identified(chunk: LocalChunk) -> StoredTensor:  # with a single rank no checksums are needed
            checksums = (checksum(bytes_of_item(chunk, memory)),) if self._back.size > 1 else ()
            return StoredTensor(chunk.name, chunk.dtype, chunk.shape, (StoredChunk(chunk.spec, checksums=checksums),))

        return {chunk.name: identified(chunk) for chunk in pending.items if chunk.name in pending.plain}

    def _write(
        self, pending: PendingSave, names: Mapping[str, str], values: dict[str, Any], progress: Progress | None
    ) -> sharded.FileRecord:
        path = join(sharded.partial_of(pending.folder), sharded.file_name(self._back.rank))
        items = [item for item in pending.items if item.name not in pending.plain or item.name in names]
        renamed = [replace(item, name=names.get(item.name, item.name)) for item in items]
        return self._run(pending, partial(write_items, path, renamed, values, self._fsync), progress)

    def _run(self, pending: PendingSave, work: Work, progress: Progress | None = None) -> Any:
        if pending.copy is not None and self._writer is not None:
            return self._writer.run(work, self._arena, progress)
        return work(self._arena.view(), progress)

    def _commit(self, pending: PendingSave, records: Sequence[sharded.FileRecord], values: dict[str, Any]) -> None:
        """Commit the files of all ranks; names and paths come from rank 0's state."""
        collected, now = pending.collected, datetime.datetime.now(datetime.UTC)
        names = {tensor.name for record in records for tensor, _ in record.tensors}
        names.update(values, collected.paths, collected.aliases)
        header = sharded.Header(
            step=pending.step,
            world_size=self._back.size,
            values=values,
            aliases=collected.aliases,
            structure={name: _path(name, collected.paths) for name in sorted(names)},
            details={
                **collected.details,
                "torch": str(torch.__version__),
                "date": now.isoformat(timespec="seconds"),
            },
        )
        self._run(pending, partial(commit, pending.folder, records, header, self._fsync))
