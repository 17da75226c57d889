"""The first rank reads and sends; the others keep their part of what passes by. For files that one machine has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.checkpointing.agreeing.together import is_first, raise_over
from shardwise.checkpointing.contents import ITEM_BYTES, Box, Contents, StoredTensor
from shardwise.checkpointing.reading.copies import row_portions
from shardwise.checkpointing.reading.requests import Request, read_requests
from shardwise.checkpointing.storage.byte_progress import counting
from shardwise.progress import Progress
from shardwise.sharding.replicas import broadcast_from_first

_BUCKET_BYTES = 64 << 20
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class _Portion:
    """Rows of a stored tensor, and where in the bucket they travel."""

    name: str
    """In the contents."""
    stored: StoredTensor
    box: Box
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.box.numel * ITEM_BYTES[self.stored.dtype]

    def in_bucket(self, bucket: torch.Tensor) -> torch.Tensor:
        """The memory of these rows in the bucket."""
        flat = bucket[self.offset : self.offset + self.num_bytes]
        return flat.view(getattr(torch, self.stored.dtype)).view(self.box.sizes)


def describe(contents: Contents) -> Contents:
    """Names, dtypes, shapes and values, without where tensors lie: what ranks that read nothing need to know."""
    tensors = {name: dataclasses.replace(tensor, pieces=()) for name, tensor in contents.tensors.items()}
    return dataclasses.replace(contents, tensors=tensors)


def read_and_broadcast(
    contents: Contents,
    names: Sequence[str],
    requests: Sequence[Request],
    mesh: DeviceMesh | None,
    *,
    verify: bool = True,
    progress: Progress | None = None,
) -> None:
    """Fill targets on all ranks from files that only the first can read, a bucket at a time.

    Args:
        contents: On the first rank the checkpoint; elsewhere `describe` of it will do.
        names: The tensors to send, the same on every rank.
        requests: What this rank wants of them.
        mesh: The ranks that take part.
        verify: Whether checksums are compared.
        progress: Is told the bytes that have come.

    Raises:
        CheckpointError: A file is damaged; on every rank, and targets may have been written by then.

    Ranks:
        Collective over the mesh. Holds one bucket besides the model.
    """
    device = mesh.device_type if mesh is not None else "cpu"
    wanted: dict[str, list[Request]] = {name: [] for name in names}
    for request in requests:
        wanted[request.name].append(request)
    with counting(progress, sum(contents.tensors[name].num_bytes for name in names), "loading") as count:
        for bucket in _buckets({name: contents.tensors[name] for name in names}):
            size = bucket[-1].offset + bucket[-1].num_bytes
            data = torch.empty(size + 1, dtype=torch.uint8)  # the last byte says whether the first rank failed
            error = _read(contents, bucket, data, verify) if is_first(mesh) else None
            data[-1] = error is not None
            data = data.to(device)
            if mesh is not None:
                broadcast_from_first(data, mesh, range(mesh.ndim))
            if bool(data[-1]):
                raise_over(mesh, error)
            _keep(bucket, data, wanted)
            count(sum(portion.num_bytes for portion in bucket))


def _buckets(tensors: Mapping[str, StoredTensor]) -> Iterator[list[_Portion]]:
    bucket: list[_Portion] = []
    end = 0
    for name, stored in tensors.items():
        if stored.num_bytes == 0:
            continue
        for box in row_portions(Box.whole(stored.shape), ITEM_BYTES[stored.dtype], _BUCKET_BYTES):
            portion = _Portion(name, stored, box, end)
            if bucket and end + portion.num_bytes > _BUCKET_BYTES:
                yield bucket
                bucket, portion = [], dataclasses.replace(portion, offset=0)
            bucket.append(portion)
            end = -(-(portion.offset + portion.num_bytes) // _ALIGNMENT) * _ALIGNMENT
    if bucket:
        yield bucket


def _read(contents: Contents, bucket: list[_Portion], data: torch.Tensor, verify: bool) -> Exception | None:
    requests = [Request(portion.name, portion.in_bucket(data), portion.box) for portion in bucket]
    try:
        read_requests(contents, requests, verify="while" if verify else "no")
    except Exception as error:
        return error
    return None


def _keep(bucket: list[_Portion], data: torch.Tensor, wanted: Mapping[str, Sequence[Request]]) -> None:
    with torch.no_grad():
        for portion in bucket:
            rows = portion.in_bucket(data)
            for request in wanted[portion.name]:
                _copy_overlap(request, portion.box, rows)


def _copy_overlap(request: Request, box: Box, rows: torch.Tensor) -> None:
    shared = request.box.overlap(box)
    if shared is None:
        return
    target, source = request.target, rows
    for dim, (start, size) in enumerate(zip(shared.starts, shared.sizes, strict=True)):
        target = target.narrow(dim, start - request.box.starts[dim], size)
        source = source.narrow(dim, start - box.starts[dim], size)
    target.copy_(source)
