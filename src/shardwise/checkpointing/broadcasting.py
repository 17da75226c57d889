"""Read what several ranks need on one of them, and send it to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.checkpointing.contents import ITEM_BYTES, ChunkSpec, Contents, portions
from shardwise.checkpointing.reading import Request, check_requests, part_of, read_requests, verify_requests
from shardwise.checkpointing.storage.memory import counting
from shardwise.distributed.agreement import gather_over_mesh, is_first, on_rank_zero, raise_together, run_on_all
from shardwise.errors import CheckpointError
from shardwise.progress import Progress
from shardwise.sharding.inventory import broadcast_from_first

T = TypeVar("T")
_PORTION_BYTES = 32 << 20


def open_on_ranks(open_here: Callable[[], Contents], mesh: DeviceMesh | None, *, broadcast: bool) -> Contents:
    """Open a checkpoint on every rank; or on the first, and tell the others all but where tensors lie.

    Args:
        open_here: Opens it.
        mesh: The ranks.
        broadcast: Only the first rank opens files.

    Ranks:
        Collective over the mesh.
    """
    opened: list[Contents] = []

    def work() -> Contents:
        contents = open_here()
        opened.append(contents)
        tensors = {name: replace(tensor, chunks=()) for name, tensor in contents.tensors.items()}
        return replace(contents, tensors=tensors, streams=())

    described = on_rank_zero(work, group=mesh) if broadcast else run_on_all(work, mesh, CheckpointError)
    return opened[0] if opened else described


def read_and_broadcast(
    contents: Contents,
    names: Sequence[str],
    requests: Sequence[Request],
    mesh: DeviceMesh | None,
    *,
    verify: bool = True,
    progress: Progress | None = None,
) -> None:
    """Fill targets on all ranks from files that only the first can read, some rows of a tensor at a time.

    Args:
        contents: On the first rank the checkpoint; elsewhere what `open_on_ranks` gives.
        names: The tensors to send, the same on every rank.
        requests: What this rank wants of them.
        mesh: The ranks that take part.
        verify: Whether checksums are compared.
        progress: Is told the bytes that have come.

    Raises:
        CheckpointError: A file is damaged; on every rank, and targets may have been written by then.

    Ranks:
        Collective over the mesh. Holds the rows that are sent besides the model.
    """
    device = mesh.device_type if mesh is not None else "cpu"
    wanted: dict[str, list[Request]] = {name: [] for name in names}
    for request in requests:
        wanted[request.name].append(request)
    with counting(progress, sum(contents.tensors[name].num_bytes for name in names), "loading") as count:
        for name in names:
            stored = contents.tensors[name]
            for spec in portions(ChunkSpec.whole(stored.shape), ITEM_BYTES[stored.dtype], _PORTION_BYTES):
                num_bytes = spec.numel * ITEM_BYTES[stored.dtype]
                data = torch.empty(num_bytes + 1, dtype=torch.uint8)  # the last byte says whether the first rank failed
                error = _read(contents, name, spec, data[:-1], verify) if is_first(mesh) else None
                data[-1] = error is not None
                data = data.to(device)
                if mesh is not None:
                    broadcast_from_first(data, mesh, range(mesh.ndim))
                if bool(data[-1]):
                    raise_together(error, group=mesh, kind=CheckpointError)
                for request in wanted[name]:
                    _copy_overlap(request, spec, data[:-1].view(getattr(torch, stored.dtype)).view(spec.sizes))
                count(num_bytes)


def _read(contents: Contents, name: str, spec: ChunkSpec, data: torch.Tensor, verify: bool) -> BaseException | None:
    target = data.view(getattr(torch, contents.tensors[name].dtype)).view(spec.sizes)
    try:
        read_requests(contents, [Request(name, target, spec)], verify=verify)
    except BaseException as error:
        return error
    return None


@torch.no_grad()
def _copy_overlap(request: Request, spec: ChunkSpec, rows: torch.Tensor) -> None:
    if (shared := request.spec.overlap(spec)) is not None:
        part_of(request.target, request.spec, shared).copy_(part_of(rows, spec, shared))


class RequestReader:
    """Checks, verifies and serves the requests of all ranks.

    Args:
        broadcast: Only the first rank opens files; see `open_on_ranks`. Else every rank reads what
            it needs.
        mesh: The ranks, for `broadcast`.

    Ranks:
        Collective over the mesh, where it broadcasts; else local.
    """

    def __init__(self, broadcast: bool = False, mesh: DeviceMesh | None = None) -> None:
        self._broadcast, self._mesh = broadcast, mesh

    def check(self, contents: Contents, requests: Sequence[Request]) -> list[str]:
        """See `check_requests`; where the first rank reads, of all that any rank asks for."""
        return self._run(check_requests, contents, requests)

    def verify(self, contents: Contents, requests: Sequence[Request], progress: Progress | None = None) -> None:
        """See `verify_requests`; where the first rank reads, of all that any rank asks for."""
        self._run(partial(verify_requests, progress=progress), contents, requests)

    def read(
        self, contents: Contents, requests: Sequence[Request], *, verify: bool = True, progress: Progress | None = None
    ) -> None:
        """See `read_requests`."""
        if self._broadcast:
            names = self._names(requests)
            read_and_broadcast(contents, names, requests, self._mesh, verify=verify, progress=progress)
        else:
            read_requests(contents, requests, verify=verify, progress=progress)

    def _run(self, work: Callable[[Contents, Sequence[Request]], T], contents: Contents, own: Sequence[Request]) -> T:
        if not self._broadcast:
            return work(contents, own)
        shapes = {name: contents.tensors[name].shape if name in contents.tensors else () for name in self._names(own)}
        whole = [
            Request(name, torch.empty(shape, device="meta"), ChunkSpec.whole(shape)) for name, shape in shapes.items()
        ]
        return on_rank_zero(lambda: work(contents, whole), group=self._mesh)

    def _names(self, requests: Sequence[Request]) -> list[str]:
        """What any rank asks for, in one order on all: a rank may hold no part of a tensor."""
        own = list(dict.fromkeys(request.name for request in requests))
        return list(dict.fromkeys(name for names in gather_over_mesh(self._mesh, own) for name in names))
