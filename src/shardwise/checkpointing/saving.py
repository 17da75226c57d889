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
    """Return the name of a rank's value that differs from rank 0's."""
    return f"{PER_RANK}.{rank}.{name}"


def dedup_chunks(tables: Sequence[Sequence[LocalChunk]]) -> list[list[int]]:
    """For each rank, which of the chunks in its table it writes: indices into the table, ascending."""
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
    # What only one rank has comes first; then the large ones, to whoever has least so far.
    sized = [(tables[where[0][0]][where[0][1]].num_bytes, where) for where in holders.values()]
    for num_bytes, where in sorted(sized, key=lambda item: (len(item[1]) > 1, -item[0])):
        rank, index = min(where, key=lambda place: loads[place[0]])
        chosen[rank].append(index)
        loads[rank] += num_bytes
    return [sorted(indices) for indices in chosen]


def dedup_tensors(tables: Sequence[Mapping[str, StoredTensor]]) -> list[dict[str, str]]:
    """For each rank, which of the plain tensors in its table it writes, and under which name."""
    written: list[dict[str, str]] = [{} for _ in tables]
    loads = [0] * len(tables)
    first = dict(tables[0])
    for table in tables:  # a later stage of a pipeline has parts of a model that rank 0 has not
        first = {name: held for name, held in table.items() if name.startswith(("model.", "optim."))} | first
    for rank, table in enumerate(tables):
        for name, held in table.items():
            if first.get(name) != held:
                written[rank][name] = name_of_rank(rank, name)
                loads[rank] += held.num_bytes
    # Sorted by name too: ranks that hold the same may hold it in different orders.
    for name, held in sorted(first.items(), key=lambda item: (-item[1].num_bytes, item[0])):
        rank = min((rank for rank, table in enumerate(tables) if table.get(name) == held), key=lambda each: loads[each])
        written[rank][name] = name
        loads[rank] += held.num_bytes
    return written


def merge_values(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All ranks' encoded values: rank 0's under their names, what differs from them under names of the rank."""
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
    """By name of an optimizer state, the ranks that hold a part of its parameter and should hold one of it.

    They should where the parts of all ranks do not make up the whole; and where another rank has the same part of
    the parameter, a replica of theirs, and does hold one.
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
"""Returns a run and the state that this rank holds of it, without communication."""
Retire = Callable[[Sequence[sharded.FileRecord]], None]
"""Called on rank 0 after a commit, with what was written: removes old checkpoints."""


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
    # Training waits for it at every save, and a plan has a line for each parameter.
    return json.loads(plan.to_json())


def _path(name: str, paths: Mapping[str, KeyPath]) -> KeyPath:
    if name in paths:
        return paths[name]
    if name.startswith(f"{PER_RANK}."):
        _, rank, rest = name.split(".", 2)
        return (PER_RANK, rank, *paths.get(rest, (rest,)))
    return tuple(name.split("."))  # other ranks' random numbers


def _row_major(memory: torch.Tensor) -> torch.Tensor:
    return memory.resolve_conj().resolve_neg().contiguous()


def _staged_tensors(name: str, tensor: torch.Tensor) -> list[StagedTensor]:
    """This rank's chunks of a tensor."""
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
    elif isinstance(tensor, DTensor):  # no rank has a part of it, yet it must be in the checkpoint
        kind, chunks = "sharded", [(ChunkSpec.whole(shape), torch.empty(shape, dtype=local.dtype, device="cpu"))]
    else:
        kind, chunks = "own" if name.startswith(_RNG) else "plain", [(ChunkSpec.whole(shape), local)]
    return [StagedTensor(LocalChunk(name, dtype, shape, spec), memory, kind) for spec, memory in chunks]


@dataclass(slots=True)
class PendingSave:
    """A save whose state is fixed: all ranks agree, and it is copied or being copied."""

    step: int
    folder: Place
    collected: FlatState
    items: list[LocalChunk] = field(default_factory=list)
    """What this rank may have to write; the memory of each is a tensor, or a place in the arena."""
    plain: frozenset[str] = frozenset()
    """Those of them that every rank holds whole, and that may differ between ranks."""
    copy: AsyncCopy | None = None
    """None: the tensors are written from where they are."""
    error: Exception | None = None
    """Error of this rank, which the others receive when they finish."""


class Saver:
    """What is kept from save to save on one rank; `front` is the training thread's channel, `back` the saving one's."""

    def __init__(self, front: Channel, back: Channel, *, fsync: bool) -> None:
        self._front, self._back, self._fsync = front, back, fsync
        self._arena = Arena()
        self._writer: WriterProcess | None = None
        self._layouts: list[int] = []
        self._chosen: list[int] = []

    def prepare(self, collect: Collect) -> None:
        """Start the writer and allocate memory before the first background save."""
        staged_tensors, _ = self._share(0, collect, self._ensure_writer)
        self._arena.place(staged_tensors)
        self._arena.touch()

    @torch.no_grad()  # a switch that thousands of small calls would else flip one by one
    def start(self, folder: Place, step: int, collect: Collect, *, background: bool) -> PendingSave:
        """Fix the state of `collect` and start copying it. Training waits only for this."""

        def begin() -> None:
            if background:
                self._ensure_writer()
            if self._front.rank == 0:
                sharded.begin_checkpoint(folder)

        staged_tensors, collected = self._share(step, collect, begin)
        pending = PendingSave(step, folder, collected)
        try:  # from here on the others count on this rank to take part in `finish`
            if background or any(staged.memory.device.type != "cpu" for staged in staged_tensors):
                self._arena.place(staged_tensors)
                pending.copy = AsyncCopy(staged_tensors, self._arena)
                collected.tensors.clear()  # what is written is the copy; the run's own tensors must be free to go
            pending.items = [
                replace(staged.chunk, memory=staged.offset if pending.copy is not None else _row_major(staged.memory))
                for staged in staged_tensors
            ]
            pending.plain = frozenset(staged.chunk.name for staged in staged_tensors if staged.kind == "plain")
        except Exception as caught:
            pending.error = caught
        return pending

    def finish(self, pending: PendingSave, *, retire: Retire, progress: Progress | None = None) -> None:
        """Write and commit, on the thread of `back`; on failure every rank raises and nothing is committed."""
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
            of_ranks = [values] if same_values else back.gather(values)  # nothing is sent where all hold the same
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

        back.run_on_all(conclude)  # nobody returns before rank 0 has cleared away what is not committed

    def close(self) -> None:
        """End the writer, free the memory and close the channels."""
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
        """Agree with the other ranks; return what this one may have to write, of what `collect` finds."""

        def work() -> tuple[tuple[RunObjects, FlatState, list[StagedTensor]], tuple[int, int]]:
            run, collected = collect()
            staged_tensors = [
                staged for name, tensor in collected.tensors.items() for staged in _staged_tensors(name, tensor)
            ]
            begin()
            # Another number when the chunks are not those of the last time; only this process understands it.
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
        if layouts != self._layouts:  # as a rule only the first time
            tables = self._front.all_gather([staged.chunk for staged in chunks])
            refuse_missing(ranks_without_state(tables))
            self._chosen, self._layouts = dedup_chunks(tables)[self._front.rank], layouts
        chosen = {id(chunks[index]) for index in self._chosen}
        return [staged for staged in staged_tensors if staged.kind != "sharded" or id(staged) in chosen], collected

    def _plain_tensors(self, pending: PendingSave) -> dict[str, StoredTensor]:
        memory = self._arena.view()

        def identified(chunk: LocalChunk) -> StoredTensor:  # where there is only one rank, by anything
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
        """Commit what all ranks have written; rank 0's state knows how names came about."""
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
