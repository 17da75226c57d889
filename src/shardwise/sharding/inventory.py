"""Parameters and buffers of a model: layouts, names, detection of unwritten values, comparison of replicas."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise import compat
from shardwise.distributed.agreement import gather_over_mesh
from shardwise.errors import CheckpointError, ShardError
from shardwise.sharding.nf4 import NF4Tensor


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """A tensor sharded on one dimension over one mesh axis, and replicated over all other axes.

    All parts but the last ones have `part_size` rows; the last ones may be shorter or empty, as in torch.chunk.
    """

    mesh: DeviceMesh
    axis: int
    dim: int
    size: int
    """Number of rows of the full tensor along `dim`."""

    @property
    def num_parts(self) -> int:
        """Number of ranks that one copy is sharded over."""
        return self.mesh.size(self.axis)

    @property
    def part_size(self) -> int:
        """Number of rows of the first part, which is the largest."""
        return -(-self.size // self.num_parts)

    def bounds(self, part: int) -> tuple[int, int]:
        """Return the first row and the number of rows of a part."""
        start = min(part * self.part_size, self.size)
        return start, min(self.part_size, self.size - start)


def layout_of(tensor: DTensor) -> ShardLayout | None:
    """Return the layout of `tensor`, or None unless it has one plain `Shard` placement over one mesh axis."""
    axes = sharded_axes(tensor)
    if len(axes) != 1:
        return None
    placement = tensor.placements[axes[0]]
    if type(placement) is not Shard:  # tensor parallelism interleaves parts (_StridedShard)
        return None
    dim = placement.dim % tensor.ndim
    return ShardLayout(tensor.device_mesh, axes[0], dim, tensor.shape[dim])


def sharded_axes(tensor: DTensor) -> tuple[int, ...]:
    """Return the mesh axes over which ranks have different values of `tensor`."""
    return tuple(axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate())


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, sharing its memory, without gradient; a plain tensor unchanged.

    A tensor subclass that only wraps a plain tensor, for another form of all-gather, is unwrapped.
    """
    if not isinstance(tensor, DTensor):
        return _unwrapped(tensor.detach())
    if not torch.is_grad_enabled():  # switching grad mode costs more than the rest, and there may be thousands of calls
        return _unwrapped(tensor.to_local())
    with torch.no_grad():
        return _unwrapped(tensor.to_local())


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor or not hasattr(tensor, "fsdp_pre_all_gather"):
        return tensor
    held = [value for value in vars(tensor).values() if isinstance(value, torch.Tensor)]
    same = [value for value in held if value.shape == tensor.shape and value.dtype == tensor.dtype]
    others = [value for value in held if value.numel() > 1 and value is not same[0]] if same else []
    return same[0].detach() if len(same) == 1 and not others else tensor


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a local tensor as a plain tensor, without a copy unless a subclass stores another form."""
    return tensor.dequantize() if isinstance(tensor, NF4Tensor) else local_tensor(tensor)


def local_part(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `full` in the layout of `like`.

    Ranks:
        Local. Every rank must pass the same `full`, or at least its own part of it.
    """
    if not isinstance(like, DTensor) or not sharded_axes(like):
        return full
    chunks = local_chunks(like)
    if len(chunks) == 1:
        return full[slices_of(chunks[0].starts, chunks[0].sizes)]
    part = full.new_empty(local_tensor(like).shape)
    for chunk in chunks:
        part[slices_of(chunk.position, chunk.sizes)] = full[slices_of(chunk.starts, chunk.sizes)]
    return part


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangular part of a tensor on one rank."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    position: tuple[int, ...]
    """Start of the chunk in the rank's local tensor."""


def local_chunks(tensor: DTensor) -> list[Chunk]:
    """Return the chunks of a DTensor on this rank; empty if the rank has no elements or is not in the mesh.

    There is one chunk, unless a placement interleaves rows (`_StridedShard` on a separate axis).

    Raises:
        CheckpointError: The placement is partial, or the size of the local tensor does not match the placements.
    """
    coordinate, local = tensor.device_mesh.get_coordinate(), local_tensor(tensor)
    if coordinate is None or local.numel() == 0:
        return []
    shape, chunks = _chunks_at(compat.spec_of(tensor), tuple(coordinate))
    if shape != local.shape:
        raise CheckpointError(
            f"a tensor of shape {list(tensor.shape)} is cut unevenly into parts of {list(local.shape)}",
            where=f"placements {tensor.placements} on {tensor.device_mesh}",
            why="the rows of this rank do not follow from the placement",
            fix="choose sizes that the mesh divides evenly",
        )
    return chunks


@lru_cache(maxsize=4096)  # called by saves while training waits
def _chunks_at(spec: Any, coordinate: tuple[int, ...]) -> tuple[tuple[int, ...], list[Chunk]]:
    """Return the shape of the local tensor at a mesh coordinate, and its chunks."""
    if any(placement.is_partial() for placement in spec.placements):
        raise CheckpointError(
            f"a tensor of shape {list(spec.shape)} consists of partial sums",
            where=f"placements {spec.placements}",
            why="no rank has its values before they are reduced",
            fix="redistribute it to Replicate() or Shard(dim) first",
        )
    runs = [_runs_along(spec, dim, coordinate) for dim in range(spec.ndim)]
    chunks = [Chunk(*zip(*chosen, strict=True)) if chosen else Chunk((), (), ()) for chosen in itertools.product(*runs)]
    return tuple(sum(length for _, length, _ in along) for along in runs), chunks


def _runs_along(spec: Any, dim: int, coordinate: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return ranges of rows along `dim`, contiguous in the tensor and in the local part: first row, count, position."""
    cuts = compat.cuts_along(spec, dim)
    if all(type(placement) is Shard for _, placement in cuts):
        start, length = 0, spec.shape[dim]
        for axis, _ in cuts:
            size = -(-length // spec.mesh.size(axis))  # as torch.chunk: the last ranks may have fewer rows, or none
            offset = min(coordinate[axis] * size, length)
            start, length = start + offset, min(size, length - offset)
        return [(start, length, 0)]
    # A placement that interleaves rows: let it split the row numbers, then merge adjacent ones.
    rows = torch.arange(spec.shape[dim], device="cpu")
    for axis, placement in cuts:
        rows = compat.split_rows(placement, rows, spec.mesh.size(axis))[coordinate[axis]]
    breaks = ((rows[1:] - rows[:-1]) != 1).nonzero().flatten().add(1).tolist()
    ends = itertools.pairwise([0, *breaks, len(rows)]) if len(rows) else ()
    return [(int(rows[first]), end - first, first) for first, end in ends]


def slices_of(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a rectangular part."""
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def cut_by(tensor: torch.Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """Return the mesh and its axes that shard a DTensor; None if it is replicated or torch must gather it.

    torch gathers partial placements, and shards of unknown tensor subclasses.
    """
    if not isinstance(tensor, DTensor) or any(placement.is_partial() for placement in tensor.placements):
        return None
    axes = sharded_axes(tensor)
    return (tensor.device_mesh, axes) if axes and type(local_tensor(tensor)) in (torch.Tensor, NF4Tensor) else None


def full_tensor(tensor: DTensor) -> torch.Tensor:
    """Return the full tensor of a DTensor, in new memory.

    torch's own `full_tensor` hangs or mixes rows if several mesh axes shard one dimension unevenly (2.13).

    Ranks:
        Collective over the mesh axes that shard the tensor.
    """
    if cut_by(tensor) is not None:
        return gather_full([tensor], [tensor.dtype])[0]
    return tensor.full_tensor() if sharded_axes(tensor) else local_tensor(tensor).clone()


_ALIGNMENT_BYTES = 16  # the widest dtype, so that every tensor can be viewed in place


def gather_full(tensors: Sequence[DTensor], dtypes: Sequence[torch.dtype], *, keep: bool = True) -> list[Any]:
    """Return the full tensors of DTensors sharded over the same mesh axes, in these dtypes, by one all-gather per axis.

    Tensors are gathered as bytes, so that dtypes may differ, and parts are padded to the largest one. Without `keep`
    this rank takes part, but gets None for each tensor.

    Ranks:
        Collective over those axes.
    """
    mesh, axes = tensors[0].device_mesh, sharded_axes(tensors[0])
    own = list(mesh.get_coordinate() or ())
    along = [range(size) if axis in axes else (own[axis],) for axis, size in enumerate(mesh.shape)]
    places = list(itertools.product(*along))
    parts = [[_chunks_at(compat.spec_of(tensor), place) for place in places] for tensor in tensors]
    sizes = [
        max(math.prod(shape) for shape, _ in each) * dtype.itemsize for each, dtype in zip(parts, dtypes, strict=True)
    ]
    # A single tensor is not padded: the gathered memory can then be the full tensor itself.
    alignment = _ALIGNMENT_BYTES if len(tensors) > 1 else 1
    *starts, num_bytes = itertools.accumulate((-(-size // alignment) * alignment for size in sizes), initial=0)
    # Copy offloaded shards to the mesh's device: not every process group supports CPU tensors.
    local = local_tensor(tensors[0])
    is_sent_as_it_is = len(tensors) == 1 and type(local) is torch.Tensor and local.dtype == dtypes[0]
    if is_sent_as_it_is and local.nbytes == num_bytes and len(places) > 1:
        gathered = local.contiguous().to(mesh.device_type).view(-1).view(torch.uint8)
    else:
        gathered = torch.empty(num_bytes, dtype=torch.uint8, device=mesh.device_type)
        for tensor, dtype, start in zip(tensors, dtypes, starts, strict=True):
            local = local_tensor(tensor)
            place = gathered[start : start + local.numel() * dtype.itemsize]
            place.view(dtype).view(local.shape).copy_(local)
    for axis in reversed(axes) if num_bytes else ():
        if mesh.size(axis) > 1:
            sent, gathered = gathered, gathered.new_empty(mesh.size(axis) * len(gathered))
            compat.all_gather_flat(gathered, sent, mesh.get_group(axis))
    return [
        _join(tensor, dtype, each, gathered.view(len(places), num_bytes)[:, start : start + size]) if keep else None
        for tensor, dtype, each, start, size in zip(tensors, dtypes, parts, starts, sizes, strict=True)
    ]


def _join(tensor: DTensor, dtype: torch.dtype, parts: list[Any], stored: torch.Tensor) -> torch.Tensor:
    """Join a tensor from its parts, each given as the bytes of one row of `stored`."""
    device, layout = local_tensor(tensor).device, layout_of(tensor)
    if layout is not None and layout.dim == 0:  # the parts are contiguous, and only the last ones are padded
        return stored.reshape(-1)[: tensor.numel() * dtype.itemsize].view(dtype).view(tensor.shape).to(device)
    full = torch.empty(tensor.shape, dtype=dtype, device=stored.device)
    for (shape, chunks), data in zip(parts, stored, strict=True):
        part = data.view(dtype)[: math.prod(shape)].view(shape)
        for chunk in chunks:
            full[slices_of(chunk.starts, chunk.sizes)] = part[slices_of(chunk.position, chunk.sizes)]
    return full.to(device)


# No bool has this value, and no table or mask has it as a 2, 4 or 8 byte integer.
_POISON_BYTE = 0xA5
_WORD_BYTES = 2**16  # chunk of a fingerprint, which needs several times the memory


def poison(tensor: torch.Tensor) -> None:
    """Fill with values that no initializer writes: NaN, or a byte pattern for dtypes without NaN.

    Args:
        tensor: Contiguous, unless its dtype has NaN.
    """
    with torch.no_grad():
        if _has_nan(tensor.dtype):
            tensor.fill_(float("nan"))
        else:
            _bytes(tensor).fill_(_POISON_BYTE)


def is_poisoned(tensor: torch.Tensor) -> bool:
    """Whether any element is still poison, or all elements for 8-bit integers.

    A single 8-bit integer may legitimately equal the poison, so only an untouched tensor counts.
    """
    if tensor.numel() == 0:
        return False
    with torch.no_grad():
        if _has_nan(tensor.dtype):
            return bool(tensor.isnan().any())
        left = _bytes(tensor.contiguous()) == _POISON_BYTE
        is_byte = tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool
        return bool(left.all() if is_byte else left.view(-1, tensor.dtype.itemsize).all(dim=1).any())


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 0-d int64 hash of the tensor's bits and their order."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    with torch.no_grad():
        stored = _bytes(plain_values(tensor).contiguous())
        if stored.storage_offset() % 4:
            stored = stored.clone()  # the view as int32 needs alignment
        for place, chunk in enumerate(stored.split(_WORD_BYTES)):
            is_whole = chunk.numel() % 4 == 0
            words = chunk.view(torch.int32) if is_whole else chunk  # 32 bits times a position: no overflow
            first = place * _WORD_BYTES + 1
            total += torch.arange(first, first + words.numel(), device=words.device).mul_(words).sum()
    return total


def _has_nan(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point and dtype.itemsize > 1) or dtype.is_complex


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of a contiguous tensor as a flat view of bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Place:
    """Registration of a tensor: a module and an attribute name."""

    module: nn.Module
    name: str
    is_parameter: bool

    @property
    def _registered(self) -> dict[str, Any]:
        return self.module._parameters if self.is_parameter else self.module._buffers

    def get(self) -> torch.Tensor | None:
        """Return the registered tensor."""
        return self._registered.get(self.name)

    def put(self, tensor: torch.Tensor) -> None:
        """Register `tensor`."""
        if type(self.module).__setattr__ is not nn.Module.__setattr__:
            setattr(self.module, self.name, tensor)  # recurrent layers update their list of weights
        else:
            self._registered[self.name] = tensor


@dataclass(eq=False, slots=True)
class TensorEntry:
    """One parameter or buffer; tied ones have several places."""

    fqn: str
    tensor: torch.Tensor
    """The registered object. Materialization preserves its identity, and so ties and optimizers."""
    pending: bool
    """Whether it was on the meta device and has to be initialized."""
    fsdp_param: Any = None
    """FSDP2's record of the parameter, if a group shards it."""
    places: list[Place] = field(default_factory=list)
    written: bool = False
    """Whether an initializer has written all elements. Equal on all ranks, even on those without a part."""
    fingerprint: torch.Tensor | None = None
    """Fingerprint of the full tensor of a sharded parameter, computed when it was last written."""

    @property
    def local(self) -> torch.Tensor:
        """Return this rank's part."""
        return self.tensor.to_local() if isinstance(self.tensor, DTensor) else self.tensor

    def allocate(self, device: torch.device, *, poisoned: bool = True) -> None:
        """Allocate this rank's part of a meta tensor; poison it unless the caller writes all of it."""
        if self.fsdp_param is None:
            new = _empty_like(self.local, device)
        else:
            new = _empty_like(self.local.contiguous(), compat.devices_of(self.fsdp_param)[0])
        new = compat.dtensor_like(new, self.tensor) if isinstance(self.tensor, DTensor) else new
        self.set_tensor(compat.replace_in_place(self.tensor, new))
        if self.fsdp_param is not None:
            compat.adopt_shard(self.fsdp_param)
        if poisoned:
            poison(self.local)

    def set_tensor(self, tensor: torch.Tensor) -> None:
        """Replace the tensor of this entry in all places."""
        if tensor is not self.tensor:
            self.tensor = tensor
            for place in self.places:
                place.put(tensor)

    def store(self, full: torch.Tensor) -> None:
        """Copy this rank's part of `full` into the tensor."""
        with torch.no_grad():
            self.local.copy_(local_part(full, self.tensor))

    def gather(self, device: torch.device) -> torch.Tensor:
        """Return a copy of the full tensor.

        Ranks:
            Collective if the tensor is sharded.
        """
        with torch.no_grad():
            if isinstance(self.tensor, DTensor):
                # A copy: collectives keep references to their buffers, and `materialize` counts references.
                return full_tensor(compat.dtensor_like(self.local.to(device), self.tensor)).clone()
            return self.tensor.detach().to(device, copy=True)

    @contextmanager
    def with_full_tensor(self, device: torch.device) -> Iterator[None]:
        """Register a poisoned full tensor in all places of a sharded one, and restore the places on exit."""
        full = _empty_like(self.tensor, device)
        poison(full)
        if isinstance(self.tensor, nn.Parameter):
            full = nn.Parameter(full, requires_grad=self.tensor.requires_grad)
        full.__dict__.update(self.tensor.__dict__)
        full.__dict__.pop("_is_hf_initialized", None)  # a loader's mark, but nothing was loaded into this tensor
        for place in self.places:
            place.put(full)
        try:
            yield
        finally:
            for place in self.places:
                place.put(self.tensor)


def take_inventory(model: nn.Module) -> list[TensorEntry]:
    """List the model's distinct parameters and buffers."""
    shards = {
        id(compat.sharded_parameter(record)): record for record in compat.parameter_records(compat.param_groups(model))
    }
    entries: dict[int, TensorEntry] = {}
    for path, module in model.named_modules():
        for place, tensor in _places_of(module):
            if id(tensor) not in entries:
                fqn = f"{path}.{place.name}" if path else place.name
                entries[id(tensor)] = TensorEntry(fqn, tensor, tensor.is_meta, shards.get(id(tensor)))
            entries[id(tensor)].places.append(place)
    return list(entries.values())


def class_name(module: nn.Module) -> str:
    """Return the original class name; `fully_shard` adds the prefix FSDP."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module")
"""Components that torch.compile, activation checkpointing, FSDP1 and Lightning add to names."""


def canonical_name(name: str, wrappers: Iterable[str] = WRAPPERS) -> str:
    """Return the name without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in wrappers) if "_" in name else name


def meta_left_in(model: nn.Module) -> Iterable[str]:
    """Return names of meta tensors: registered ones, and plain attributes that nothing initializes."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for place, tensor in _places_of(module):
            if tensor.is_meta:
                yield prefix + place.name
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                yield f"{prefix}{name} (a plain attribute, not a buffer)"


def _places_of(module: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    for is_parameter, registered in ((True, module._parameters), (False, module._buffers)):
        for name, tensor in list(registered.items()):
            if tensor is not None:
                yield Place(module, name, is_parameter), tensor


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(tensor, DTensor) or not tensor.dtype.is_floating_point:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_like(tensor, device=device, requires_grad=False)


def broadcast_from_first(tensor: torch.Tensor, mesh: DeviceMesh, axes: Iterable[int]) -> None:
    """Overwrite `tensor` with the values of the first rank of each of the axes.

    Ranks:
        Collective over these axes. Needs memory for at most one copy of the tensor.
    """
    with torch.no_grad():
        sent = plain_values(tensor).to(mesh.device_type).contiguous().view(-1).view(torch.uint8)
        for axis in axes:
            dist.broadcast(sent, group=mesh.get_group(axis), group_src=0)
        tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))


def check_equal(entries: Sequence[TensorEntry], mesh: DeviceMesh) -> None:
    """Raise on every rank if a tensor differs between ranks that should have equal copies.

    Plain and newly initialized tensors must be equal on all ranks, shards along the replicating axes.

    Raises:
        ShardError: A tensor differs; names the first one.

    Ranks:
        Collective. Two small all-reduces per mesh axis.
    """
    differing: dict[str, str] = {}
    for axis, axis_name in enumerate(_axis_names(mesh)):
        compared = [entry for entry in entries if axis in replicated_axes(entry, mesh)]
        if mesh.size(axis) > 1 and compared:
            differing |= dict.fromkeys(_differing(compared, mesh, axis), axis_name)
    # Ranks without another copy of the tensor found no difference, but must not continue alone.
    found = {name: axis for part in gather_over_mesh(mesh, differing) for name, axis in part.items()}
    if found:
        first = next(entry.fqn for entry in entries if entry.fqn in found)
        raise ShardError(
            f"{first} differs between ranks" + (f", and {len(found) - 1} more" if len(found) > 1 else ""),
            where=f"mesh axis {found[first]}",
            why="copies of a tensor must start from equal values, or ranks diverge",
            fix="materialize(model, init, sync_from_rank_zero=True); before sharding, if it has values",
        )


def replicated_axes(entry: TensorEntry, mesh: DeviceMesh) -> list[int]:
    """Return the axes of `mesh` along which all ranks must have, or must have drawn, the same tensor."""
    if entry.fingerprint is not None or not isinstance(entry.tensor, DTensor):
        return list(range(mesh.ndim))
    placements = dict(zip(_axis_names(entry.tensor.device_mesh), entry.tensor.placements, strict=True))
    return [axis for axis, name in enumerate(_axis_names(mesh)) if isinstance(placements.get(name), Replicate)]


def _differing(entries: Sequence[TensorEntry], mesh: DeviceMesh, axis: int) -> list[str]:
    """Return the tensors whose values differ along an axis. Collective over the axis."""
    prints = [entry.fingerprint if entry.fingerprint is not None else fingerprint(entry.local) for entry in entries]
    lowest = torch.stack([value.to(mesh.device_type) for value in prints])
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=mesh.get_group(axis))
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return [entries[index].fqn for index in (lowest != highest).nonzero().flatten().tolist()]


def _axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"axis {index}" for index in range(mesh.ndim))
