"""Full tensors from shards, many per collective, with bounded memory."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.errors import CheckpointError
from shardwise.sharding.layout import ShardLayout, layout_of, local_tensor, sharded_axes
from shardwise.sharding.replicas import values_of_ranks

_MAX_NAMED = 10
_ALIGNMENT_BYTES = 16  # no dtype is wider, so every tensor in a bucket can be viewed where it lies


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a bucket; `layout` is None when it is not gathered with the others."""

    name: str
    tensor: torch.Tensor
    layout: ShardLayout | None
    dtype: torch.dtype

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the fullest part; shorter ones travel padded to it."""
        assert self.layout is not None
        shape = list(self.tensor.shape)
        shape[self.layout.dim] = self.layout.part_size
        return tuple(shape)

    @property
    def part_bytes(self) -> int:
        return math.prod(self.part_shape) * self.dtype.itemsize

    @property
    def full_bytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize


def gather_in_buckets(
    named: Iterable[tuple[str, torch.Tensor]],
    *,
    bucket_bytes: int,
    keep: bool,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield each name with its full tensor, in order, holding about two buckets of memory at a time.

    Args:
        named: DTensors and plain tensors, the same names in the same order on every rank.
        bucket_bytes: Full tensors gathered by one collective; a larger tensor is gathered alone.
        keep: False takes part in the collectives and yields None instead of tensors.
        dtype: Cast floating-point tensors to it, before they travel.

    Ranks:
        Collective, lazily: every rank must consume the same number of items.
    """
    bucket: list[_Entry] = []
    for name, tensor in named:
        entry = _make_entry(name, tensor, dtype)
        if bucket and not _fits(entry, bucket, bucket_bytes):
            yield from _gather(bucket, keep)
            bucket = []
        bucket.append(entry)
    yield from _gather(bucket, keep)


def in_first_rank_order(
    named: Sequence[tuple[str, torch.Tensor]], mesh: DeviceMesh | None
) -> list[tuple[str, torch.Tensor]]:
    """The tensors in the order of the mesh's first rank, as `gather_in_buckets` needs them.

    Ranks may list the same parameters in different orders: groups built from Python sets. What the first rank lacks is
    left out; a plain tensor that only this rank lacks is an empty one on the meta device, which no collective touches.

    Args:
        named: This rank's, each name once.
        mesh: The ranks that hold them.

    Raises:
        CheckpointError: The same on every rank: some hold no part of a sharded tensor. It names them.

    Ranks:
        Collective over the mesh.
    """
    listed = tuple((name, isinstance(tensor, DTensor), tensor.shape, tensor.dtype) for name, tensor in named)
    digest = hashlib.blake2b(repr(listed).encode()).digest()
    if all(other == digest for other in values_of_ranks(digest, mesh)):  # on every rank, or on none
        return list(named)
    lists = values_of_ranks(listed, mesh)
    holders: dict[str, list[int]] = {}
    for rank, other in enumerate(lists):
        for name, is_sharded, _, _ in other:
            if is_sharded:
                holders.setdefault(name, []).append(rank)
    everyone = set(range(len(lists)))
    refuse_missing({name: everyone - set(ranks) for name, ranks in holders.items() if len(ranks) < len(lists)})
    own = dict(named)
    return [
        (name, own[name] if name in own else torch.empty(shape, dtype=dtype, device="meta"))
        for name, _, shape, dtype in lists[0]
    ]


def refuse_missing(lacking: Mapping[str, set[int]]) -> None:
    """Raise if a sharded tensor has no part on some ranks.

    Args:
        lacking: By name of the tensor, the ranks that hold no part of it and should.

    Ranks:
        Local; call it with the same on every rank.
    """
    if not lacking:
        return
    names, ranks = sorted(lacking), sorted(set().union(*lacking.values()))
    have = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
    raise CheckpointError(
        f"{have} no part of {len(names)} tensor{'s' if len(names) > 1 else ''} that other ranks have a part of",
        where="\n".join(
            [*names[:_MAX_NAMED], *([f"... and {len(names) - _MAX_NAMED} more"] if names[_MAX_NAMED:] else [])]
        ),
        why="each rank holds a shard of the tensor; without one of them it is not whole",
        fix="keep the same state on every rank: an optimizer that skips a parameter on one rank (no gradient there, "
        "its state deleted) must skip it on all",
    )


def _make_entry(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> _Entry:
    target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    layout = layout_of(tensor) if isinstance(tensor, DTensor) else None
    # Tensor subclasses (quantised shards) know best how to gather themselves.
    if layout is not None and type(local_tensor(tensor)) is not torch.Tensor:
        layout = None
    return _Entry(name, tensor, layout, target)


def _fits(entry: _Entry, bucket: list[_Entry], bucket_bytes: int) -> bool:
    if sum(other.full_bytes for other in bucket) + entry.full_bytes > bucket_bytes:
        return False
    layouts = [layout for layout in (other.layout for other in bucket) if layout is not None]
    if entry.layout is None or not layouts:
        return True
    return (layouts[0].mesh, layouts[0].axis) == (entry.layout.mesh, entry.layout.axis)


def _gather(bucket: list[_Entry], keep: bool) -> Iterator[tuple[str, torch.Tensor | None]]:
    with torch.no_grad():
        full = _gather_sharded([entry for entry in bucket if entry.layout is not None], keep)
        tensors = [full.pop(0) if entry.layout is not None else _whole(entry, keep) for entry in bucket]
    del full
    for index, entry in enumerate(bucket):
        tensor, tensors[index] = tensors[index], None  # the consumer may drop it before the bucket ends
        yield entry.name, tensor


def _whole(entry: _Entry, keep: bool) -> torch.Tensor | None:
    tensor = entry.tensor
    is_split = isinstance(tensor, DTensor) and sharded_axes(tensor)
    tensor = tensor.full_tensor() if is_split else local_tensor(tensor)
    return tensor.detach().to(entry.dtype) if keep else None


def _gather_sharded(entries: list[_Entry], keep: bool) -> list[torch.Tensor | None]:
    """One all-gather for all entries; each is laid out as bytes, so that dtypes may mix."""
    if not entries:
        return []
    layout = entries[0].layout
    assert layout is not None
    offsets, total_bytes = _offsets(entries)
    # Offloaded shards travel on the mesh's device: not every process group can send from CPU memory.
    sent = torch.empty(total_bytes, dtype=torch.uint8, device=layout.mesh.device_type)
    for entry, offset in zip(entries, offsets, strict=True):
        _write_part(entry, sent[offset : offset + entry.part_bytes])
    received = sent
    if layout.num_parts > 1 and total_bytes > 0:
        received = torch.empty(layout.num_parts * total_bytes, dtype=torch.uint8, device=sent.device)
        compat.all_gather_flat(received, sent, layout.mesh.get_group(layout.axis))
    if not keep:
        return [None] * len(entries)
    parts = received.view(layout.num_parts, total_bytes)
    return [_read_full(entry, parts, offset) for entry, offset in zip(entries, offsets, strict=True)]


def _offsets(entries: list[_Entry]) -> tuple[list[int], int]:
    if len(entries) == 1:  # no padding: the gathered memory is then the full tensor itself
        return [0], entries[0].part_bytes
    offsets, end = [], 0
    for entry in entries:
        offsets.append(end)
        end += -(-entry.part_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return offsets, end


def _write_part(entry: _Entry, place: torch.Tensor) -> None:
    assert entry.layout is not None
    local = local_tensor(entry.tensor)
    part = place.view(entry.dtype).view(entry.part_shape)
    part.narrow(entry.layout.dim, 0, local.shape[entry.layout.dim]).copy_(local)


def _read_full(entry: _Entry, parts: torch.Tensor, offset: int) -> torch.Tensor:
    """Join the parts of one tensor; only the last ones are padded, so the real rows come first."""
    layout = entry.layout
    assert layout is not None
    shape, dim = entry.part_shape, layout.dim
    joined = parts[:, offset : offset + entry.part_bytes].contiguous().view(entry.dtype)
    joined = joined.view(layout.num_parts, *shape).movedim(0, dim)
    full = joined.reshape(*shape[:dim], layout.num_parts * shape[dim], *shape[dim + 1 :])
    return full.narrow(dim, 0, layout.size).contiguous().to(local_tensor(entry.tensor).device)
