"""Read requested chunks of tensors from files into memory, on several threads, with their checksums verified."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch

from shardwise.checkpointing.contents import ITEM_BYTES, Box, Contents, Piece, StoredTensor, coverage_problem
from shardwise.checkpointing.storage.files import Reader, join, open_reader, size_of
from shardwise.checkpointing.storage.memory import bytes_of, checksum, checksum_of_parts, counting
from shardwise.errors import CheckpointError
from shardwise.progress import Progress


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a stored row-major box, in that box's own coordinates and in the reader's."""

    sizes: tuple[int, ...]
    """Of the stored box."""
    starts: tuple[int, ...]
    """Of the part, in the stored box."""
    lengths: tuple[int, ...]
    """Of the part."""
    target_starts: tuple[int, ...]
    """Of the part, in the box that is being read."""

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return math.prod(self.lengths)


@dataclass(frozen=True, slots=True)
class Slab:
    """Some consecutive elements of the stored box, and the part of them that is wanted."""

    first: int
    """Index of the slab's first element in the stored box."""
    sizes: tuple[int, ...]
    """Of the slab, whose elements lie one after another; as many dimensions as the box."""
    starts: tuple[int, ...]
    """Of the wanted part, in the slab."""
    lengths: tuple[int, ...]
    target_starts: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the slab, wanted or not."""
        return math.prod(self.sizes)


def part_of(stored: Box, wanted: Box) -> Part | None:
    """What of `stored` is in `wanted`; None when nothing is."""
    overlap = stored.overlap(wanted)
    if overlap is None:
        return None
    return Part(
        stored.sizes,
        tuple(a - b for a, b in zip(overlap.starts, stored.starts, strict=True)),
        overlap.sizes,
        tuple(a - b for a, b in zip(overlap.starts, wanted.starts, strict=True)),
    )


def run_length(part: Part) -> int:
    """How many wanted elements lie one after another in the stored box before the first gap."""
    length, gap = 1, False
    for size, wanted in zip(reversed(part.sizes), reversed(part.lengths), strict=True):
        if gap and wanted != 1:
            break
        length *= wanted
        gap = gap or wanted != size
    return length


def runs(part: Part) -> Iterator[Part]:
    """The part, cut so that each cut lies in one run."""
    inner = len(part.sizes)  # dimensions from here on are wholly wanted
    while inner > 0 and part.lengths[inner - 1] == part.sizes[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)  # and this one in part: a run goes along it
    while outer > 0 and part.lengths[outer - 1] == 1:
        outer -= 1
    lengths = (1,) * outer + part.lengths[outer:]
    for place in itertools.product(*(range(length) for length in part.lengths[:outer])):
        move = (*place, *(0,) * (len(part.sizes) - outer))
        yield Part(part.sizes, _add(part.starts, move), lengths, _add(part.target_starts, move))


def slabs(part: Part, max_elements: int) -> Iterator[Slab]:
    """Whole rows of the stored box, at most `max_elements` at a time, that hold all wanted elements."""
    dim, row = 0, math.prod(part.sizes[1:])
    while dim < len(part.sizes) - 1 and (part.lengths[dim] == 1 or row > max_elements):
        dim += 1
        row = math.prod(part.sizes[dim + 1 :])
    if not part.sizes:
        yield Slab(0, (), (), (), ())
        return
    count = max(max_elements // max(row, 1), 1)
    ones = (1,) * dim
    for place in itertools.product(*(range(length) for length in part.lengths[:dim])):
        for begin in range(0, part.lengths[dim], count):
            rows = min(count, part.lengths[dim] - begin)
            move = (*place, begin, *(0,) * (len(part.sizes) - dim - 1))
            corner = _add(part.starts, move)[: dim + 1] + (0,) * (len(part.sizes) - dim - 1)
            yield Slab(
                _index_of(corner, part.sizes),
                (*ones, rows, *part.sizes[dim + 1 :]),
                (0,) * (dim + 1) + part.starts[dim + 1 :],
                (*ones, rows, *part.lengths[dim + 1 :]),
                _add(part.target_starts, move),
            )


def first_element(part: Part) -> int:
    """The index of the part's first element in the stored box."""
    return _index_of(part.starts, part.sizes)


def _add(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _index_of(place: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    index = 0
    for position, size in zip(place, sizes, strict=True):
        index = index * size + position
    return index


_NUM_PINNED = 2  # one is read into while the other is copied to the device


class Buffers:
    """The buffers of one thread, made when first needed and used over and over.

    Args:
        num_bytes: Of each.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._plain: torch.Tensor | None = None
        self._pinned: list[tuple[torch.Tensor, Any]] = []
        self._turn = 0

    def next(self, device: torch.device) -> torch.Tensor:
        """A buffer for bytes on their way to `device`; nothing is using it any more."""
        if device.type != "cuda":
            if self._plain is None:
                self._plain = torch.empty(self._num_bytes, dtype=torch.uint8)
            return self._plain
        if len(self._pinned) < _NUM_PINNED:
            self._pinned.append((torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()))
            self._turn = len(self._pinned) - 1
        else:
            self._turn = (self._turn + 1) % _NUM_PINNED
        buffer, copied = self._pinned[self._turn]
        copied.synchronize()
        return buffer

    def hand_over(self, buffer: torch.Tensor, dtype: torch.dtype, slab: Slab, target: torch.Tensor) -> None:
        """Copy what is wanted of the slab in `buffer` to its place in `target`."""
        stored = buffer[: slab.numel * dtype.itemsize].view(dtype).view(slab.sizes)
        wanted = narrowed(stored, slab.starts, slab.lengths)
        place = narrowed(target, slab.target_starts, slab.lengths)
        if target.device.type != "cuda":
            place.copy_(wanted)
            return
        with torch.cuda.device(target.device):
            if wanted.is_contiguous() and wanted.dtype == place.dtype:
                place.copy_(wanted, non_blocking=True)
            else:  # the device casts and strides far faster than the CPU
                place.copy_(narrowed(stored.to(target.device, non_blocking=True), slab.starts, slab.lengths))
            self._pinned[self._turn][1].record()

    def wait(self) -> None:
        """Return once every copy has arrived."""
        for _, copied in self._pinned:
            copied.synchronize()


def narrowed(tensor: torch.Tensor, starts: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
    """The part of `tensor` from `starts` on; `tensor` itself when that is all of it."""
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


_MAX_OPEN = 32


class OpenFiles:
    """The files of a checkpoint, opened when first read; any thread may read any of them.

    Few are open at a time, however many ranks wrote the checkpoint: systems allow a process some thousand.
    """

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self._readers: dict[str, Reader] = {}
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()

    @contextlib.contextmanager
    def using(self, file: str) -> Iterator[Reader]:
        """The open file; it stays open while the context is."""
        with self._lock:
            reader = self._readers.pop(file, None) or open_reader(join(self.contents.folder, file))
            self._readers[file] = reader  # last: those at the front were not needed for the longest time
            self._users[file] += 1
            self._close_unused()
        try:
            yield reader
        finally:
            with self._lock:
                self._users[file] -= 1

    def _close_unused(self) -> None:
        surplus = len(self._readers) - _MAX_OPEN
        for file in [file for file in self._readers if not self._users[file]][: max(surplus, 0)]:
            self._readers.pop(file).close()


class BlockReader:
    """Reads for one thread.

    Args:
        files: Shared by all threads.
        verify: Compare checksums, where the checkpoint has them.
    """

    def __init__(self, files: OpenFiles, *, verify: bool) -> None:
        self._files, self._verify = files, verify
        self._block_bytes = files.contents.block_bytes
        # What a part shares its first and last block with: read so that the block can be verified, then dropped.
        self._before = self._after = memoryview(b"")

    def read(self, tensor: StoredTensor, piece: Piece, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `piece` from its byte `start` on.

        Raises:
            CheckpointError: The file is missing, short or damaged.
        """
        if piece.data is not None:
            buffer[:] = piece.data[start : start + len(buffer)]
            return
        if not self._verify or not piece.checksums:
            with self._files.using(piece.file) as reader:
                reader.read_into(piece.offset + start, [buffer])
            return
        block, stop = self._block_bytes, start + len(buffer)
        begin = start // block * block
        end = min(-(-stop // block) * block, piece.box.numel * ITEM_BYTES[tensor.dtype])
        if (start > begin or end > stop) and not self._before:
            self._before, self._after = (memoryview(bytearray(block)) for _ in range(2))
        before, after = self._before[: start - begin], self._after[: end - stop]
        with self._files.using(piece.file) as reader:
            reader.read_into(piece.offset + begin, [before, buffer, after])
        for first in range(begin, end, block):
            last = min(first + block, end)
            inner = buffer[max(first - start, 0) : last - start]
            if first >= start and last <= stop:
                found = checksum(inner)
            else:
                parts = ([before] if first < start else []) + [inner] + ([after] if last > stop else [])
                found = checksum_of_parts(parts)
            if found != piece.checksums[first // block]:
                raise self._damaged(tensor, piece, first, last)

    def _damaged(self, tensor: StoredTensor, piece: Piece, first: int, last: int) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint is damaged: bytes of {tensor.name} are not those that were saved",
            where=f"{join(self._files.contents.folder, piece.file)}, "
            f"bytes {piece.offset + first:,} to {piece.offset + last:,}",
            why="their checksum differs: the disk, the network or a program has changed the file",
            fix="load an older checkpoint, or copy this one again; `shardwise ckpt verify` lists all damage",
        )


CHUNK_BYTES = 8 << 20
"""The most that is read at once; the bounded buffers have this size."""
_MIN_RUN_BYTES = 64 << 10  # shorter runs are read together with what lies between them


@dataclass(frozen=True, slots=True)
class Request:
    """Read a box of the tensor `name` into `target`."""

    name: str
    target: torch.Tensor
    """This rank's own memory for that box: its shape is the box's sizes; any device, dtype and strides."""
    box: Box


@dataclass(frozen=True, slots=True)
class Window:
    """What is wanted of the bytes in a buffer, and the tensor it goes to."""

    slab: Slab
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class Job:
    """One read of at most `CHUNK_BYTES` of a piece."""

    tensor: StoredTensor
    piece: Piece
    start: int
    """The first byte, counted from the piece's own first."""
    num_bytes: int
    place: memoryview | Window
    """Memory that the bytes are read into, or where they go from a buffer."""


def jobs_of(tensor: StoredTensor, request: Request, verify: bool) -> Iterator[Job]:
    """How to serve a request."""
    target, item_bytes = request.target.detach(), ITEM_BYTES[tensor.dtype]
    in_place = target.device.type == "cpu" and target.dtype == getattr(torch, tensor.dtype)
    for piece in tensor.pieces:
        part = part_of(piece.box, request.box)
        if part is None:
            continue
        run = run_length(part)
        checked = verify and bool(piece.checksums)
        if run == part.numel or (run * item_bytes >= _MIN_RUN_BYTES and not checked and piece.data is None):
            for cut in runs(part):
                place = narrowed(target, cut.target_starts, cut.lengths) if in_place and piece.data is None else None
                if place is not None and place.is_contiguous() and not place.is_conj() and not place.is_neg():
                    yield from _direct_jobs(tensor, piece, first_element(cut) * item_bytes, bytes_of(place))
                else:
                    yield from _buffered_jobs(tensor, piece, cut, target)
        else:
            yield from _buffered_jobs(tensor, piece, part, target)


def _direct_jobs(tensor: StoredTensor, piece: Piece, start: int, place: memoryview) -> Iterator[Job]:
    stop = start + len(place)
    begin = start
    while begin < stop:
        end = min((begin // CHUNK_BYTES + 1) * CHUNK_BYTES, stop)  # cut between blocks, not within
        yield Job(tensor, piece, begin, end - begin, place=place[begin - start : end - start])
        begin = end


def _buffered_jobs(tensor: StoredTensor, piece: Piece, part: Part, target: torch.Tensor) -> Iterator[Job]:
    item_bytes = ITEM_BYTES[tensor.dtype]
    for slab in slabs(part, CHUNK_BYTES // item_bytes):
        num_bytes = slab.numel * item_bytes
        yield Job(tensor, piece, slab.first * item_bytes, num_bytes, Window(slab, target))


def read_job(job: Job, reader: BlockReader, buffers: Buffers) -> None:
    """Bring the bytes to where they belong."""
    if isinstance(job.place, memoryview):
        reader.read(job.tensor, job.piece, job.start, job.place)
        return
    buffer = buffers.next(job.place.target.device)
    reader.read(job.tensor, job.piece, job.start, bytes_of(buffer)[: job.num_bytes])
    buffers.hand_over(buffer, getattr(torch, job.tensor.dtype), job.place.slab, job.place.target)


def check_job(job: Job, reader: BlockReader, buffers: Buffers) -> None:
    """Read the bytes for the sake of their checksums alone."""
    buffer = buffers.next(torch.device("cpu"))
    reader.read(job.tensor, job.piece, job.start, bytes_of(buffer)[: job.num_bytes])


def run_jobs(
    contents: Contents,
    jobs: list[Job],
    num_threads: int,
    do: Callable[[Job, BlockReader, Buffers], None],
    *,
    verify: bool,
    count: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Do all jobs, on several threads where that pays; the first error ends them all.

    Args:
        contents: What is read.
        jobs: In the order in which they are taken.
        num_threads: At most.
        do: What a thread does with a job.
        verify: Compare checksums.
        count: Is told the bytes of each job that is done, by one thread at a time.
    """
    todo = iter(jobs)
    lock = threading.Lock()

    def work() -> None:
        nonlocal todo
        reader, buffers = BlockReader(files, verify=verify), Buffers(CHUNK_BYTES)
        try:
            while (job := take()) is not None:
                do(job, reader, buffers)
                with lock:
                    count(job.num_bytes)
            buffers.wait()
        except BaseException:
            todo = iter(())
            raise

    def take() -> Job | None:
        with lock:
            return next(todo, None)

    _wait_for_queued_work(jobs)
    with OpenFiles(contents) as files:
        if num_threads == 1 or sum(job.num_bytes for job in jobs) <= CHUNK_BYTES:
            work()
            return
        with ThreadPoolExecutor(num_threads, thread_name_prefix="shardwise-read") as pool:
            futures = [pool.submit(work) for _ in range(min(num_threads, len(jobs)))]
        for future in futures:
            future.result()


def _wait_for_queued_work(jobs: list[Job]) -> None:
    """What the caller's stream has still to do to the targets must not come after our copies on another."""
    devices = {job.place.target.device for job in jobs if isinstance(job.place, Window)}
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


__all__ = ["Problem", "Request", "Verify", "check_requests", "read_box", "read_requests", "verify_requests"]

Verify = Literal["while", "before", "no"]
"""Checksums are verified as the bytes arrive, in a pass of its own before the first is written, or not at all."""

_MAX_THREADS = 8  # a thread copies 5 to 10 GB/s from the page cache; more than a disk gives, less than memory does


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a request cannot be served."""

    kind: Literal["missing", "shape", "dtype", "coverage", "file"]
    name: str
    """Of the tensor; of the file when that is what is wrong."""
    text: str


def check_requests(contents: Contents, requests: Iterable[Request]) -> list[Problem]:
    """What is wrong with the requests or the checkpoint's files, found before anything is written.

    Every tensor is there, every element of each box is stored exactly once, and every file needed is there and as
    large as it should be.

    Ranks:
        Local.
    """
    problems: list[Problem] = []
    files: dict[str, int] = {}
    for request in requests:
        tensor = contents.tensors.get(request.name)
        if tensor is None:
            problems.append(Problem("missing", request.name, "not in the checkpoint"))
            continue
        problem = _shape_problem(tensor, request) or _coverage_problem(tensor, request)
        if problem is not None:
            problems.append(problem)
        for piece in tensor.pieces:
            if piece.data is None and piece.box.overlap(request.box) is not None:
                end = piece.offset + piece.box.numel * ITEM_BYTES[tensor.dtype]
                files[piece.file] = max(files.get(piece.file, 0), end)
    return problems + _file_problems(contents, files)


def read_requests(
    contents: Contents,
    requests: Iterable[Request],
    *,
    verify: Verify = "while",
    progress: Progress | None = None,
    num_threads: int | None = None,
) -> None:
    """Fill every request's target.

    Args:
        contents: The checkpoint.
        requests: Checked by `check_requests` first.
        verify: `while`: checksums are compared as the bytes arrive, so that damaged bytes may have been written
            when the error comes. `before`: in a pass of its own, and the targets are untouched by an error.
            Where the format has no checksums there is nothing to compare.
        progress: Is told the bytes as they arrive.
        num_threads: That read at the same time; default: as many cores as there are, at most 8.

    Raises:
        CheckpointError: A file is missing, short or damaged; names the file and the tensor.

    Ranks:
        Local. Callers make the ranks fail together.
    """
    jobs = _all_jobs(contents, requests, verify != "no")
    checks = [job for job in jobs if job.piece.checksums] if verify == "before" else []
    threads = num_threads or _num_threads()
    with counting(progress, _num_bytes(checks) + _num_bytes(jobs), "loading") as count:
        run_jobs(contents, checks, threads, check_job, verify=True, count=count)
        run_jobs(contents, jobs, threads, read_job, verify=verify != "no", count=count)


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
    jobs = [job for job in _all_jobs(contents, requests, True) if job.piece.checksums]
    with counting(progress, _num_bytes(jobs), "verifying") as count:
        run_jobs(contents, jobs, _num_threads(), check_job, verify=True, count=count)


def read_box(
    contents: Contents, tensor: StoredTensor, box: Box, *, verify: Literal["while", "no"] = "while"
) -> torch.Tensor:
    """A part of a stored tensor, as a new CPU tensor.

    Raises:
        CheckpointError: The part is not stored, or its file is missing, short or damaged.

    Ranks:
        Local.
    """
    request = Request(tensor.name, torch.empty(box.sizes, dtype=getattr(torch, tensor.dtype)), box)
    if (problem := _shape_problem(tensor, request) or _coverage_problem(tensor, request)) is not None:
        raise CheckpointError(
            f"cannot read {tensor.name}: {problem.text}",
            where=str(contents.path),
            why="the checkpoint's index does not fit its files: a part is missing, or the index is damaged",
            fix="load an older checkpoint, or copy this one again",
        )
    run_jobs(contents, list(jobs_of(tensor, request, verify != "no")), 1, read_job, verify=verify != "no")
    return request.target


def _all_jobs(contents: Contents, requests: Iterable[Request], verify: bool) -> list[Job]:
    jobs = [job for request in requests for job in jobs_of(contents.tensors[request.name], request, verify)]
    jobs.sort(key=lambda job: (job.piece.file, job.piece.offset + job.start))  # the order on the disk
    return jobs


def _num_bytes(jobs: list[Job]) -> int:
    return sum(job.num_bytes for job in jobs)


def _num_threads() -> int:
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return min(_MAX_THREADS, len(allowed))


def _shape_problem(tensor: StoredTensor, request: Request) -> Problem | None:
    if not request.box.lies_in(tensor.shape):
        text = f"has shape {list(tensor.shape)}, in which {request.box} does not lie"
        return Problem("shape", request.name, text)
    if tuple(request.target.shape) != request.box.sizes:
        text = f"is to be read into memory of shape {list(request.target.shape)}, which {request.box} does not fit"
        return Problem("shape", request.name, text)
    return None


def _coverage_problem(tensor: StoredTensor, request: Request) -> Problem | None:
    text = coverage_problem(request.box, (piece.box for piece in tensor.pieces))
    return Problem("coverage", request.name, text) if text else None


def _file_problems(contents: Contents, needed: dict[str, int]) -> list[Problem]:
    """Files that are not there, or not as large as the checkpoint says or its tensors need."""
    problems = []
    for file, least in sorted(needed.items()):
        found, expected = size_of(join(contents.folder, file)), contents.file_bytes.get(file)
        if found is None:
            problems.append(Problem("file", file, "is missing"))
        elif expected is not None and found != expected:
            problems.append(Problem("file", file, f"has {found:,} bytes, but {expected:,} were written"))
        elif found < least:
            problems.append(Problem("file", file, f"has {found:,} bytes, but its tensors end at {least:,}"))
    return problems
