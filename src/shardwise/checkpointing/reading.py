"""Read requested chunks of tensors from files into memory, with several threads, and verify their checksums."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.checkpointing import storage
from shardwise.checkpointing.contents import ITEM_BYTES, ChunkSpec, Contents, StoredChunk, StoredTensor
from shardwise.checkpointing.names import ModelTensor, local_chunks
from shardwise.distributed.agreement import gather_over_mesh, is_first, on_rank_zero, raise_on_all_ranks, run_on_all
from shardwise.errors import CheckpointError
from shardwise.progress import Progress
from shardwise.sharding.inventory import broadcast_from_first

CHUNK_BYTES = 2 << 20
"""Maximum size of one read, and size of the buffers. The reads of all threads fit into what the kernel reads ahead."""
_MIN_RUN_BYTES = 64 << 10  # smaller runs are read together with the bytes between them
_MAX_FILES = 16  # open at once
_MAX_THREADS = 8  # one thread copies 5 to 10 GB/s from the page cache: faster than a disk, slower than memory
_BROADCAST_BYTES = 32 << 20
T = TypeVar("T")
Verify = Literal["while", "before", "no"]
"""`while`: verify checksums as bytes are read. `before`: verify all before the first write. `no`: do not verify."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request to read a chunk of the tensor `name` into `target`."""

    name: str
    target: torch.Tensor
    """This rank's memory for the chunk, with the chunk's shape and any device, dtype and strides."""
    spec: ChunkSpec


@dataclass(frozen=True, slots=True)
class Range:
    """One read of at most `CHUNK_BYTES` contiguous bytes of a stored chunk."""

    tensor: StoredTensor
    chunk: StoredChunk
    start: int
    """Offset of the first byte in the stored chunk."""
    num_bytes: int
    request: Request
    memory: memoryview | None = None
    """Memory to read directly into, if the bytes are contiguous in the target as well."""
    stored: ChunkSpec | None = None
    """Otherwise, the chunk to read into a buffer, from which the requested part is copied to the target."""


def ranges_of(tensor: StoredTensor, request: Request, verify: bool) -> Iterator[Range]:
    """Yield the reads that serve a request."""
    item_bytes = ITEM_BYTES[tensor.dtype]
    target = request.target.detach()
    in_place = target.device.type == "cpu" and target.dtype == getattr(torch, tensor.dtype)
    in_place = in_place and not hasattr(target, "fsdp_pre_all_gather")  # a subclass packs what is copied into it
    for chunk in tensor.chunks:
        wanted = chunk.spec.overlap(request.spec)
        if wanted is None:
            continue
        # Along this dimension, and within one row of the dimensions before it, the wanted elements are contiguous.
        along = max((dim for dim, size in enumerate(wanted.sizes) if size != chunk.spec.sizes[dim]), default=0)
        is_one_run = math.prod(wanted.sizes[:along]) == 1
        run_bytes = math.prod(wanted.sizes[along:]) * item_bytes
        is_free = chunk.data is None and not (verify and chunk.checksums)  # may read only the wanted bytes
        if not is_one_run and not (is_free and run_bytes >= _MIN_RUN_BYTES):
            yield from _buffered(tensor, chunk, request, wanted)
            continue
        for run in chunk.spec.rows(wanted, wanted.numel, along):
            place = part_of(target, request.spec, run)
            if in_place and chunk.data is None and place.is_contiguous() and not (place.is_conj() or place.is_neg()):
                yield from _direct(
                    tensor, chunk, request, _first(chunk.spec, run) * item_bytes, storage.bytes_of(place)
                )
            else:
                yield from _buffered(tensor, chunk, request, run)


def requests_for(tensors: Iterable[ModelTensor], stored_names: Mapping[str, str]) -> list[Request]:
    """Return read requests for this rank's chunks of each model tensor that has a stored name."""
    return [
        Request(stored_names[tensor.name], memory, spec)
        for tensor in tensors
        if tensor.name in stored_names
        for spec, memory in local_chunks(tensor.tensor)
    ]


def write_part(target: torch.Tensor, spec: ChunkSpec, part: ChunkSpec, source: torch.Tensor) -> None:
    """Copy `source`, the values of `part`, to its position in a target that holds `spec`."""
    place = part_of(target, spec, part)
    if hasattr(target, "fsdp_pre_all_gather") and type(place) is not type(target):
        raise CheckpointError(
            f"{part} cannot be read into a {type(target).__name__} of shape {list(target.shape)}",
            where=type(target).__name__,
            why="its rows are packed, and the checkpoint stores parts of rows",
            fix="convert the checkpoint first: convert_checkpoint(path, folder, format='safetensors')",
        )
    place.copy_(source)


def part_of(tensor: torch.Tensor, spec: ChunkSpec, part: ChunkSpec) -> torch.Tensor:
    """Return the view of `part` in a tensor that holds `spec`; the tensor itself if `part` is all of it."""
    for dim, (start, size) in enumerate(zip(part.starts, part.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start - spec.starts[dim], size)
    return tensor


def _direct(
    tensor: StoredTensor, chunk: StoredChunk, request: Request, start: int, place: memoryview
) -> Iterator[Range]:
    begin, stop = start, start + len(place)
    while begin < stop:
        end = min((begin // CHUNK_BYTES + 1) * CHUNK_BYTES, stop)  # split at block boundaries
        yield Range(tensor, chunk, begin, end - begin, request, memory=place[begin - start : end - start])
        begin = end


def _buffered(tensor: StoredTensor, chunk: StoredChunk, request: Request, wanted: ChunkSpec) -> Iterator[Range]:
    item_bytes = ITEM_BYTES[tensor.dtype]
    for stored in chunk.spec.rows(wanted, CHUNK_BYTES // item_bytes):
        start = _first(chunk.spec, stored) * item_bytes
        yield Range(tensor, chunk, start, stored.numel * item_bytes, request, stored=stored)


def _first(outer: ChunkSpec, inner: ChunkSpec) -> int:
    """Return the row-major index in `outer` of the first element of `inner`."""
    index = 0
    for start, origin, size in zip(inner.starts, outer.starts, outer.sizes, strict=True):
        index = index * size + start - origin
    return index


class RangeReader(threading.local):
    """Reads ranges; each thread has its own buffers, allocated on first use and reused."""

    def __init__(self, contents: Contents, files: Callable[[str], storage.FileReader], *, verify: bool) -> None:
        self._contents, self._files, self._verify = contents, files, verify
        self._buffers: dict[bool, torch.Tensor] = {}

    def read(self, item: Range) -> int:
        """Read a range into its target; return the number of bytes."""
        if item.memory is not None:
            return self._read(item, item.memory)
        target, spec = item.request.target.detach(), item.request.spec
        buffer = self._buffer(pinned=target.device.type == "cuda")[: item.num_bytes]
        self._read(item, storage.bytes_of(buffer))
        assert item.stored is not None
        wanted = item.stored.overlap(spec)
        assert wanted is not None
        stored = buffer.view(getattr(torch, item.tensor.dtype)).view(item.stored.sizes)
        if not part_of(stored, item.stored, wanted).is_contiguous() or stored.dtype != target.dtype:
            stored = stored.to(target.device)  # the GPU casts and copies with strides much faster than the CPU
        write_part(target, spec, wanted, part_of(stored, item.stored, wanted))
        return item.num_bytes

    def check(self, item: Range) -> int:
        """Read a range only to verify its checksums; return the number of bytes."""
        return self._read(item, storage.bytes_of(self._buffer(pinned=False))[: item.num_bytes])

    def _buffer(self, *, pinned: bool) -> torch.Tensor:
        if pinned not in self._buffers:
            self._buffers[pinned] = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._buffers[pinned]

    def _read(self, item: Range, buffer: memoryview) -> int:
        """Fill `buffer` with the bytes of the range; raise if the file is missing, short or damaged."""
        chunk, start, count = item.chunk, item.start, len(buffer)
        if chunk.data is not None:
            buffer[:] = chunk.data[start : start + count]
            return count
        file = self._files(chunk.file)
        if not self._verify or not chunk.checksums:
            file.read_into(chunk.offset + start, [buffer])
            return count
        block, stop = self._contents.block_bytes, start + count
        begin = start // block * block
        end = min(-(-stop // block) * block, chunk.spec.numel * ITEM_BYTES[item.tensor.dtype])
        # The rest of the first and last block: read to verify the block, then discarded.
        before, after = memoryview(bytearray(start - begin)), memoryview(bytearray(end - stop))
        file.read_into(chunk.offset + begin, [before, buffer, after])
        for first in range(begin, end, block):
            last = min(first + block, end)
            parts = [buffer[max(first - start, 0) : last - start]]
            parts = ([before] if first < start else []) + parts + ([after] if last > stop else [])
            if storage.checksum_of_parts(parts) != chunk.checksums[first // block]:
                raise storage.damaged(
                    f"the checkpoint is damaged: bytes of {item.tensor.name} differ from those that were saved",
                    f"{file.path}, bytes {chunk.offset + first:,} to {chunk.offset + last:,}",
                    "their checksum differs: the disk, the network or a program has changed the file",
                    storage.COPY_AGAIN + "; `shardwise ckpt verify` lists all damage",
                )
        return count


def read_ranges(
    contents: Contents,
    ranges: list[Range],
    num_threads: int,
    *,
    verify: bool,
    write: bool = True,
    count: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Read all ranges in order, with several threads if large; without `write`, only verify checksums."""
    # Threads share the files that are being read: the kernel reads ahead in a file that is read in order.
    files = lru_cache(_MAX_FILES)(lambda name: storage.FileReader(storage.join(contents.folder, name)))
    reader = RangeReader(contents, files, verify=verify)
    # Pending writes to the targets on the caller's stream must complete before copies on other streams.
    for device in {item.request.target.device for item in ranges if write}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    is_small = num_threads == 1 or _num_bytes(ranges) <= CHUNK_BYTES
    with ThreadPoolExecutor(num_threads, "shardwise-read") as pool:
        for num_bytes in (map if is_small else pool.map)(reader.read if write else reader.check, ranges):
            count(num_bytes)


def check_requests(contents: Contents, requests: Iterable[Request]) -> list[str]:
    """Return problems: tensors not in the checkpoint, elements not stored exactly once, files of the wrong size."""
    problems: list[str] = []
    needed: dict[str, int] = {}
    for request in requests:
        tensor = contents.tensors.get(request.name)
        if tensor is None:
            problems.append(f"{request.name}: not in the checkpoint")
            continue
        if problem := _problem(tensor, request):
            problems.append(f"{request.name}: {problem}")
        for chunk in tensor.chunks:
            if chunk.data is None and chunk.spec.overlap(request.spec) is not None:
                end = chunk.offset + chunk.spec.numel * ITEM_BYTES[tensor.dtype]
                needed[chunk.file] = max(needed.get(chunk.file, 0), end)
    for file, least in sorted(needed.items()):
        if problem := storage.size_problem(storage.join(contents.folder, file), contents.file_bytes.get(file), least):
            problems.append(f"{file}: {problem}")
    return problems


def _problem(tensor: StoredTensor, request: Request) -> str:
    """Return why a request cannot be served; empty if it can."""
    if not request.spec.lies_in(tensor.shape):
        return f"has shape {list(tensor.shape)}, but {request.spec} was requested"
    if tuple(request.target.shape) != request.spec.sizes:
        return f"is read into memory of shape {list(request.target.shape)}, which {request.spec} does not fit"
    return tensor.problem(request.spec)


def read_requests(
    contents: Contents,
    requests: Iterable[Request],
    *,
    verify: bool = True,
    write: bool = True,
    progress: Progress | None = None,
    num_threads: int | None = None,
) -> None:
    """Fill the targets of requests that passed `check_requests`, and verify checksums as bytes are read.

    Without `write`, only verify the checksums of these bytes: targets may be on the meta device.
    """
    ranges = [item for request in requests for item in ranges_of(contents.tensors[request.name], request, verify)]
    ranges = [item for item in ranges if write or item.chunk.checksums]
    ranges.sort(key=lambda item: (item.chunk.file, item.chunk.offset + item.start))  # in the order of the files
    with storage.counting(progress, _num_bytes(ranges), "loading" if write else "verifying") as count:
        num_threads = num_threads or min(_MAX_THREADS, os.cpu_count() or 1)
        read_ranges(contents, ranges, num_threads, verify=verify, write=write, count=count)


def read_chunk(
    contents: Contents,
    tensor: StoredTensor,
    spec: ChunkSpec | None = None,
    memory: torch.Tensor | None = None,
    *,
    verify: bool = True,
) -> torch.Tensor:
    """Read a stored tensor or a part of it into new CPU memory, or into `memory`: as many bytes, of type uint8.

    Raises:
        CheckpointError: It is not stored, or is damaged.
    """
    spec, dtype = spec or ChunkSpec.whole(tensor.shape), getattr(torch, tensor.dtype)
    if memory is None:
        target = torch.empty(spec.sizes, dtype=dtype, device="cpu")
    else:
        target = memory.view(dtype).view(spec.sizes)
    request = Request(tensor.name, target, spec)
    if problem := _problem(tensor, request):
        why = "the checkpoint's index does not fit its files: a part is missing, or the index is damaged"
        raise storage.damaged(f"cannot read {tensor.name}: {problem}", contents.path, why)
    read_ranges(contents, list(ranges_of(tensor, request, verify)), 1, verify=verify)
    return request.target


def stored_differ(contents: Contents, first: StoredTensor, copy: StoredTensor, specs: Iterable[ChunkSpec]) -> bool:
    """Whether two stored tensors differ within the chunks; reads them only if locations and checksums differ."""
    if (copy.shape, copy.dtype) != (first.shape, first.dtype):
        return True
    known = [
        [(chunk.spec, chunk.checksums or (chunk.file, chunk.offset, id(chunk.data))) for chunk in tensor.chunks]
        for tensor in (first, copy)
    ]
    return known[0] != known[1] and any(
        storage.bytes_of(read_chunk(contents, first, part)) != storage.bytes_of(read_chunk(contents, copy, part))
        for spec in specs
        for part in first.portions(spec, _BROADCAST_BYTES)
    )


def _num_bytes(ranges: list[Range]) -> int:
    return sum(item.num_bytes for item in ranges)


def open_on_ranks(open_here: Callable[[], Contents], mesh: DeviceMesh | None, *, broadcast: bool) -> Contents:
    """Open a checkpoint on every rank, or on the first, which broadcasts all but the chunks' locations. Collective."""
    opened: list[Contents] = []

    def work() -> Contents:
        opened.append(open_here())
        tensors = {name: replace(tensor, chunks=()) for name, tensor in opened[0].tensors.items()}
        return replace(opened[0], tensors=tensors, streams=())

    described = on_rank_zero(work, group=mesh) if broadcast else run_on_all(work, mesh, CheckpointError)
    return opened[0] if opened else described


class RequestReader:
    """Checks, verifies and serves the requests of all ranks: each rank reads, or the first reads and broadcasts."""

    def __init__(self, broadcast: bool = False, mesh: DeviceMesh | None = None) -> None:
        self.broadcasts, self._mesh = broadcast, mesh

    def check(self, contents: Contents, requests: Sequence[Request]) -> list[str]:
        """See `check_requests`; if the first rank reads, it checks the requests of all ranks."""
        return self._run(check_requests, contents, requests)

    def verify(self, contents: Contents, requests: Sequence[Request], progress: Progress | None = None) -> None:
        """Verify the checksums of the requests; if the first rank reads, it verifies the requests of all ranks."""
        self._run(partial(read_requests, write=False, progress=progress), contents, requests)

    def read(
        self, contents: Contents, requests: Sequence[Request], *, verify: bool = True, progress: Progress | None = None
    ) -> None:
        """See `read_requests`; if the first rank reads, it broadcasts a tensor in parts of complete rows."""
        if not self.broadcasts:
            read_requests(contents, requests, verify=verify, progress=progress)
            return
        wanted: dict[str, list[Request]] = {name: [] for name in self._names(requests)}
        for request in requests:
            wanted[request.name].append(request)
        stored = {name: contents.tensors[name] for name in wanted}
        parts = [(name, spec) for name in wanted for spec in stored[name].portions(max_bytes=_BROADCAST_BYTES)]
        num_bytes = [spec.numel * ITEM_BYTES[stored[name].dtype] for name, spec in parts]
        # One buffer for all: new ones, allocated between the targets, would fragment the heap. Last byte: it failed.
        buffer = torch.zeros(max(num_bytes, default=0) + 1, dtype=torch.uint8, device="cpu")
        with storage.counting(progress, sum(num_bytes), "loading") as count:
            for (name, spec), size in zip(parts, num_bytes, strict=True):
                self._read_and_send(contents, stored[name], spec, wanted[name], verify, buffer[: size + 1])
                count(size)

    @torch.no_grad()
    def _read_and_send(
        self,
        contents: Contents,
        stored: StoredTensor,
        spec: ChunkSpec,
        own: list[Request],
        verify: bool,
        data: torch.Tensor,
    ) -> None:
        """Read a part on the first rank, broadcast it, and write what this rank requests of it.

        Ranks:
            Collective over the mesh.
        """
        mesh, error = self._mesh, None
        data[-1] = 0
        if is_first(mesh):
            try:
                read_chunk(contents, stored, spec, data[:-1], verify=verify)
            except BaseException as caught:
                error, data[-1] = caught, 1
        if mesh is not None:
            data = data.to(mesh.device_type)
            broadcast_from_first(data, mesh, range(mesh.ndim))
        if bool(data[-1]):
            raise_on_all_ranks(error, group=mesh, kind=CheckpointError)
        rows = data[:-1].view(getattr(torch, stored.dtype)).view(spec.sizes)
        for request in own:
            if (shared := request.spec.overlap(spec)) is not None:
                write_part(request.target, request.spec, shared, part_of(rows, spec, shared))

    def _run(self, work: Callable[[Contents, Sequence[Request]], T], contents: Contents, own: Sequence[Request]) -> T:
        """Run `work` for this rank's requests, or on the first rank for those of all ranks. Then collective."""
        if not self.broadcasts:
            return work(contents, own)
        shapes = {name: contents.tensors[name].shape if name in contents.tensors else () for name in self._names(own)}
        whole = [
            Request(name, torch.empty(shape, device="meta"), ChunkSpec.whole(shape)) for name, shape in shapes.items()
        ]
        return on_rank_zero(lambda: work(contents, whole), group=self._mesh)

    def _names(self, requests: Sequence[Request]) -> list[str]:
        """Return the names that any rank requests, in one order on all ranks; a rank may hold no part of a tensor.

        Ranks:
            Collective over the mesh.
        """
        own = list(dict.fromkeys(request.name for request in requests))
        return list(dict.fromkeys(name for names in gather_over_mesh(self._mesh, own) for name in names))
