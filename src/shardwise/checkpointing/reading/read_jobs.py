"""Cut what is to be read into small independent reads, and do them on a few threads.

A part that lies in one run, for a contiguous CPU tensor of the stored dtype, is read with `preadv` into its place.
Everything else goes through a bounded buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from shardwise.checkpointing.contents import ITEM_BYTES, Box, Contents, Piece, StoredTensor
from shardwise.checkpointing.reading.block_reading import BlockReader, OpenFiles
from shardwise.checkpointing.reading.runs import Part, Slab, first_element, part_of, run_length, runs, slabs
from shardwise.checkpointing.reading.transfer import Buffers, narrowed
from shardwise.checkpointing.storage.memory import bytes_of

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
