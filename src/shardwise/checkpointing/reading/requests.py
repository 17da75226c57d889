"""Read parts of stored tensors straight into memory, verified on the way; no tensor is ever read in full first."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from shardwise.checkpointing.contents import ITEM_BYTES, Box, Contents, StoredTensor
from shardwise.checkpointing.reading.coverage import coverage_problem
from shardwise.checkpointing.reading.read_jobs import Job, Request, check_job, jobs_of, read_job, run_jobs
from shardwise.checkpointing.storage.byte_progress import counting
from shardwise.checkpointing.storage.files import join, size_of
from shardwise.errors import CheckpointError
from shardwise.progress import Progress

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
