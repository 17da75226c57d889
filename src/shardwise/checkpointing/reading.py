"""Read requested chunks of tensors from files into memory, on several threads, with their checksums verified."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shardwise.checkpointing import contents as checkpoint_contents
from shardwise.checkpointing.contents import ITEM_BYTES, ChunkSpec, Contents, StoredChunk, StoredTensor, rows_of
from shardwise.checkpointing.state.slices import ModelTensor, local_chunks
from shardwise.checkpointing.storage.files import COPY_AGAIN, FileReader, damaged, join, size_problem
from shardwise.checkpointing.storage.memory import bytes_of, checksum_of_parts, counting
from shardwise.progress import Progress

CHUNK_BYTES = 8 << 20
"""The most that is read at once; the bounded buffers have this size."""
_MIN_RUN_BYTES = 64 << 10  # shorter runs are read together with what lies between them
_NUM_PINNED = 2  # one is read into while the other is copied to the device


@dataclass(frozen=True, slots=True)
class Request:
    """Read a chunk of the tensor `name` into `target`."""

    name: str
    target: torch.Tensor
    """This rank's own memory for that chunk: its shape is the chunk's sizes; any device, dtype and strides."""
    spec: ChunkSpec


@dataclass(frozen=True, slots=True)
class Range:
    """One read of at most `CHUNK_BYTES` of consecutive bytes of a stored chunk."""

    tensor: StoredTensor
    chunk: StoredChunk
    start: int
    """The first byte, counted from the chunk's own first."""
    num_bytes: int
    request: Request
    memory: memoryview | None = None
    """What the bytes are read into, where they lie in the target as they lie in the file."""
    stored: ChunkSpec | None = None
    """Else the chunk of the tensor that is read into a buffer, of which what the request wants is copied on."""


def ranges_of(tensor: StoredTensor, request: Request, verify: bool) -> Iterator[Range]:
    """How to serve a request."""
    item_bytes = ITEM_BYTES[tensor.dtype]
    target = request.target.detach()
    in_place = target.device.type == "cpu" and target.dtype == getattr(torch, tensor.dtype)
    for chunk in tensor.chunks:
        wanted = chunk.spec.overlap(request.spec)
        if wanted is None:
            continue
        # Along this dimension, and within one row of those before it, wanted elements lie one after another.
        along = max((dim for dim, size in enumerate(wanted.sizes) if size != chunk.spec.sizes[dim]), default=0)
        is_one_run = math.prod(wanted.sizes[:along]) == 1
        run_bytes = math.prod(wanted.sizes[along:]) * item_bytes
        is_free = chunk.data is None and not (verify and chunk.checksums)  # to read just what is wanted
        if not is_one_run and not (is_free and run_bytes >= _MIN_RUN_BYTES):
            along = checkpoint_contents.row_dim(chunk.spec, wanted, CHUNK_BYTES // item_bytes)
            yield from _buffered(tensor, chunk, request, wanted, along)
            continue
        for run in rows_of(chunk.spec, wanted, along, wanted.numel):
            place = part_of(target, request.spec, run)
            if in_place and chunk.data is None and place.is_contiguous() and not (place.is_conj() or place.is_neg()):
                yield from _direct(tensor, chunk, request, _first(chunk.spec, run) * item_bytes, bytes_of(place))
            else:
                yield from _buffered(
                    tensor, chunk, request, run, checkpoint_contents.row_dim(chunk.spec, run, CHUNK_BYTES // item_bytes)
                )


def requests_for(tensors: Iterable[ModelTensor], stored_names: Mapping[str, str]) -> list[Request]:
    """Read requests for this rank's chunks of each tensor that has a stored name.

    Args:
        tensors: The model's.
        stored_names: `ModelTensor.name` to the name in the checkpoint; others are left out.
    """
    return [
        Request(stored_names[tensor.name], memory, spec)
        for tensor in tensors
        if tensor.name in stored_names
        for spec, memory in local_chunks(tensor.tensor)
    ]


def part_of(tensor: torch.Tensor, spec: ChunkSpec, part: ChunkSpec) -> torch.Tensor:
    """The view of `part` in a tensor that holds `spec`; the tensor itself when that is all of it."""
    for dim, (start, size) in enumerate(zip(part.starts, part.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start - spec.starts[dim], size)
    return tensor


def _direct(
    tensor: StoredTensor, chunk: StoredChunk, request: Request, start: int, place: memoryview
) -> Iterator[Range]:
    begin, stop = start, start + len(place)
    while begin < stop:
        end = min((begin // CHUNK_BYTES + 1) * CHUNK_BYTES, stop)  # cut between blocks, not within
        yield Range(tensor, chunk, begin, end - begin, request, memory=place[begin - start : end - start])
        begin = end


def _buffered(
    tensor: StoredTensor, chunk: StoredChunk, request: Request, wanted: ChunkSpec, along: int
) -> Iterator[Range]:
    item_bytes = ITEM_BYTES[tensor.dtype]
    for stored in rows_of(chunk.spec, wanted, along, CHUNK_BYTES // item_bytes):
        start = _first(chunk.spec, stored) * item_bytes
        yield Range(tensor, chunk, start, stored.numel * item_bytes, request, stored=stored)


def _first(outer: ChunkSpec, inner: ChunkSpec) -> int:
    """The index in a chunk of the first element of a smaller one in it."""
    index = 0
    for start, origin, size in zip(inner.starts, outer.starts, outer.sizes, strict=True):
        index = index * size + start - origin
    return index


class RangeReader(contextlib.ExitStack):
    """Reads for one thread: its open file, and buffers that are made when first needed and used over and over.

    Args:
        contents: What is read.
        verify: Compare checksums, where the checkpoint has them.
    """

    def __init__(self, contents: Contents, *, verify: bool) -> None:
        super().__init__()
        self._contents, self._verify = contents, verify
        self._file = ""
        self._open_file = self.enter_context(contextlib.ExitStack())
        # What a range shares its first and last block with: read so that the block can be verified, then dropped.
        self._before = self._after = memoryview(b"")
        self._plain: torch.Tensor | None = None
        self._pinned: list[tuple[torch.Tensor, Any]] = []
        self._turn = 0

    def bring(self, item: Range) -> None:
        """Read the bytes to where they belong."""
        if item.memory is not None:
            self._read(item, item.memory)
            return
        target = item.request.target.detach()
        buffer = self._buffer(target.device)
        self._read(item, bytes_of(buffer)[: item.num_bytes])
        assert item.stored is not None
        wanted = item.stored.overlap(item.request.spec)
        assert wanted is not None
        stored = buffer[: item.num_bytes].view(getattr(torch, item.tensor.dtype)).view(item.stored.sizes)
        place, source = part_of(target, item.request.spec, wanted), part_of(stored, item.stored, wanted)
        if target.device.type != "cuda":
            place.copy_(source)
            return
        with torch.cuda.device(target.device):
            if source.is_contiguous() and source.dtype == place.dtype:
                place.copy_(source, non_blocking=True)
            else:  # the device casts and strides far faster than the CPU
                place.copy_(part_of(stored.to(target.device, non_blocking=True), item.stored, wanted))
            self._pinned[self._turn][1].record()

    def check(self, item: Range) -> None:
        """Read the bytes for the sake of their checksums alone."""
        self._read(item, bytes_of(self._buffer(torch.device("cpu")))[: item.num_bytes])

    def wait(self) -> None:
        """Return once every copy to a device has arrived."""
        for _, copied in self._pinned:
            copied.synchronize()

    def _buffer(self, device: torch.device) -> torch.Tensor:
        """A buffer for bytes on their way to `device`; nothing is using it any more."""
        if device.type != "cuda":
            if self._plain is None:
                self._plain = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
            return self._plain
        if len(self._pinned) < _NUM_PINNED:
            self._pinned.append((torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()))
        self._turn = (self._turn + 1) % len(self._pinned)
        buffer, copied = self._pinned[self._turn]
        copied.synchronize()
        return buffer

    def _open(self, file: str) -> FileReader:
        if file != self._file:  # ranges are sorted by file
            self._open_file.close()
            self._reader = self._open_file.enter_context(FileReader(join(self._contents.folder, file)))
            self._file = file
        return self._reader

    def _read(self, item: Range, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of the range.

        Raises:
            CheckpointError: The file is missing, short or damaged.
        """
        chunk, start = item.chunk, item.start
        if chunk.data is not None:
            buffer[:] = chunk.data[start : start + len(buffer)]
            return
        if not self._verify or not chunk.checksums:
            self._open(chunk.file).read_into(chunk.offset + start, [buffer])
            return
        block, stop = self._contents.block_bytes, start + len(buffer)
        begin = start // block * block
        end = min(-(-stop // block) * block, chunk.spec.numel * ITEM_BYTES[item.tensor.dtype])
        if (start > begin or end > stop) and not self._before:
            self._before, self._after = (memoryview(bytearray(block)) for _ in range(2))
        before, after = self._before[: start - begin], self._after[: end - stop]
        self._open(chunk.file).read_into(chunk.offset + begin, [before, buffer, after])
        for first in range(begin, end, block):
            last = min(first + block, end)
            parts = [buffer[max(first - start, 0) : last - start]]
            parts = ([before] if first < start else []) + parts + ([after] if last > stop else [])
            if checksum_of_parts(parts) != chunk.checksums[first // block]:
                file = join(self._contents.folder, chunk.file)
                raise damaged(
                    f"the checkpoint is damaged: bytes of {item.tensor.name} are not those that were saved",
                    f"{file}, bytes {chunk.offset + first:,} to {chunk.offset + last:,}",
                    "their checksum differs: the disk, the network or a program has changed the file",
                    COPY_AGAIN + "; `shardwise ckpt verify` lists all damage",
                )


def read_ranges(
    contents: Contents,
    ranges: list[Range],
    num_threads: int,
    *,
    verify: bool,
    write: bool = True,
    count: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Read all ranges, on several threads where that pays; the first error ends them all.

    Args:
        contents: What is read.
        ranges: In the order in which they are taken.
        num_threads: At most.
        verify: Compare checksums.
        write: Bring the bytes to their targets; else only the checksums are compared.
        count: Is told the bytes of each range that is done, by one thread at a time.
    """
    todo = iter(ranges)
    lock = threading.Lock()

    def work() -> None:
        nonlocal todo
        try:
            with RangeReader(contents, verify=verify) as reader:
                while (item := take()) is not None:
                    reader.bring(item) if write else reader.check(item)
                    with lock:
                        count(item.num_bytes)
                reader.wait()
        except BaseException:
            todo = iter(())
            raise

    def take() -> Range | None:
        with lock:
            return next(todo, None)

    # What the caller's stream has still to do to the targets must not come after our copies on another.
    for device in {item.request.target.device for item in ranges if write}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    if num_threads == 1 or _num_bytes(ranges) <= CHUNK_BYTES:
        work()
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="shardwise-read") as pool:
        futures = [pool.submit(work) for _ in range(min(num_threads, len(ranges)))]
    for future in futures:
        future.result()


Verify = Literal["while", "before", "no"]
"""Checksums are verified as the bytes arrive, in a pass of its own before the first is written, or not at all."""

_MAX_THREADS = 8  # a thread copies 5 to 10 GB/s from the page cache; more than a disk gives, less than memory does


def check_requests(contents: Contents, requests: Iterable[Request]) -> list[str]:
    """What is wrong with the requests or the checkpoint's files, found before anything is written.

    Every tensor is there, every element of each chunk is stored exactly once, and every file needed is there and as
    large as it should be.
    """
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
        if problem := size_problem(join(contents.folder, file), contents.file_bytes.get(file), least):
            problems.append(f"{file}: {problem}")
    return problems


def _problem(tensor: StoredTensor, request: Request) -> str:
    """Why a request cannot be served; empty when it can."""
    if not request.spec.lies_in(tensor.shape):
        return f"has shape {list(tensor.shape)}, in which {request.spec} does not lie"
    if tuple(request.target.shape) != request.spec.sizes:
        return f"is to be read into memory of shape {list(request.target.shape)}, which {request.spec} does not fit"
    return checkpoint_contents.coverage_problem(request.spec, (chunk.spec for chunk in tensor.chunks))


def read_requests(
    contents: Contents,
    requests: Iterable[Request],
    *,
    verify: bool = True,
    progress: Progress | None = None,
    num_threads: int | None = None,
) -> None:
    """Fill every request's target.

    Args:
        contents: The checkpoint.
        requests: Checked by `check_requests` first.
        verify: Compare checksums as the bytes arrive, where the format has any; damaged bytes may have been written
            when the error comes.
        progress: Is told the bytes as they arrive.
        num_threads: That read at the same time; default: as many cores as there are, at most 8.

    Raises:
        CheckpointError: A file is missing, short or damaged; names the file and the tensor.

    Ranks:
        Local. Callers make the ranks fail together.
    """
    ranges = _all_ranges(contents, requests, verify)
    with counting(progress, _num_bytes(ranges), "loading") as count:
        read_ranges(contents, ranges, num_threads or _num_threads(), verify=verify, count=count)


def verify_requests(contents: Contents, requests: Iterable[Request], *, progress: Progress | None = None) -> None:
    """Compare the checksums of all that the requests would read, and write nothing.

    Args:
        contents: The checkpoint.
        requests: Their targets are not touched, and may be on the meta device.
        progress: Is told the bytes as they arrive.

    Raises:
        CheckpointError: A file is missing, short or damaged; names the file and the tensor.

    Ranks:
        Local. Callers make the ranks fail together.
    """
    ranges = [item for item in _all_ranges(contents, requests, True) if item.chunk.checksums]
    with counting(progress, _num_bytes(ranges), "verifying") as count:
        read_ranges(contents, ranges, _num_threads(), verify=True, write=False, count=count)


def read_chunk(contents: Contents, tensor: StoredTensor, spec: ChunkSpec, *, verify: bool = True) -> torch.Tensor:
    """A part of a stored tensor, as a new CPU tensor.

    Raises:
        CheckpointError: The part is not stored, or its file is missing, short or damaged.
    """
    request = Request(tensor.name, torch.empty(spec.sizes, dtype=getattr(torch, tensor.dtype)), spec)
    if problem := _problem(tensor, request):
        why = "the checkpoint's index does not fit its files: a part is missing, or the index is damaged"
        raise damaged(f"cannot read {tensor.name}: {problem}", contents.path, why)
    read_ranges(contents, list(ranges_of(tensor, request, verify)), 1, verify=verify)
    return request.target


def _all_ranges(contents: Contents, requests: Iterable[Request], verify: bool) -> list[Range]:
    ranges = [item for request in requests for item in ranges_of(contents.tensors[request.name], request, verify)]
    ranges.sort(key=lambda item: (item.chunk.file, item.chunk.offset + item.start))  # the order on the disk
    return ranges


def _num_bytes(ranges: list[Range]) -> int:
    return sum(item.num_bytes for item in ranges)


def _num_threads() -> int:
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return min(_MAX_THREADS, len(allowed))
