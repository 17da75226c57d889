"""Torch's tensors and containers in pickles, as descriptions without data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.checkpointing.contents import DTYPES, ITEM_BYTES, ChunkSpec, count_of, sizes_of
from shardwise.checkpointing.pickles.machine import Record, Symbol, load_pickle, makers, record, symbols

STORAGE_DTYPES = {storage: dtype for dtype, (_, _, storage) in DTYPES.items() if storage}
STORAGE_DTYPES["UntypedStorage"] = "uint8"


@dataclass(frozen=True, slots=True)
class StorageRef:
    """One storage of a `torch.save` file."""

    key: str
    """Its record is `data/<key>` of the zip."""
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided view of one storage."""

    storage: StorageRef
    dtype: str
    offset: int
    """In elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after another, row-major."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return math.prod(self.shape) == 0
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class ShardedRef:
    """A ShardedTensor: this rank's parts of a larger tensor."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[ChunkSpec, TensorRef], ...]


@dataclass(frozen=True, slots=True)
class DTensorRef:
    """A DTensor: this rank's part of a larger tensor."""

    dtype: str
    shape: tuple[int, ...]
    local: TensorRef
    placements: tuple[tuple[Any, ...], ...]
    """One a mesh axis: `("shard", dim)`, `("strided", dim)`, `("replicate",)` or `("partial",)`."""
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    """Where in the mesh the rank that wrote it stood; None where the file does not say."""


def dtype_name(symbol: Any) -> str:
    """`float32` from the symbol `torch.float32`."""
    if isinstance(symbol, Symbol) and (name := symbol.name.removeprefix("torch.")) in ITEM_BYTES:
        return name
    raise ValueError(f"{symbol!r} is not a dtype")


def make_storage(identity: Any) -> StorageRef:
    """The storage that a persistent id of torch means."""
    kind, storage_type, key, _location, numel = identity
    if kind != "storage" or not isinstance(key, str) or not isinstance(storage_type, Symbol):
        raise ValueError(f"{identity!r} is not a storage")
    dtype = STORAGE_DTYPES[storage_type.name.rpartition(".")[2]]
    return StorageRef(key, dtype, count_of(numel) * ITEM_BYTES[dtype])


def make_tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> TensorRef:
    """`_rebuild_tensor` and `_rebuild_tensor_v2`."""
    return make_tensor_v3(storage, offset, size, stride, None, None, None)


def make_tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_rest: Any
) -> TensorRef:
    """`_rebuild_tensor_v3`: dtypes that have no storage class."""
    if not isinstance(storage, StorageRef):
        raise ValueError("a tensor without a storage")
    name = storage.dtype if dtype is None else dtype_name(dtype)
    tensor = TensorRef(storage, name, count_of(offset), sizes_of(size), sizes_of(stride))
    if len(tensor.shape) != len(tensor.strides):
        raise ValueError("a tensor with strides of another number of dimensions")
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    if math.prod(tensor.shape) and (last + 1) * ITEM_BYTES[name] > storage.num_bytes:
        raise ValueError(f"a tensor of shape {tensor.shape} that reaches beyond its storage")
    return tensor


def make_subclass(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """`_rebuild_from_type_v2`: a tensor subclass, or a tensor with attributes."""
    if not isinstance(function, Symbol) or function.make is None:
        raise ValueError("a tensor that is rebuilt by nothing known")
    made = function.make(*args)
    if not isinstance(made, Record):
        return made  # a tensor with Python attributes of its own
    made.state = state
    return _sharded(made) if kind.name.endswith("ShardedTensor") else _dtensor(made)


def _sharded(made: Record) -> ShardedRef:
    parts, metadata = made.state[:2]
    local = tuple((_shard_spec(part.fields["metadata"]), part.fields["tensor"]) for part in parts)
    shape = sizes_of(metadata.fields["size"])
    for spec, tensor in local:
        if not isinstance(tensor, TensorRef) or tensor.shape != spec.sizes or not spec.lies_in(shape):
            raise ValueError("a shard whose tensor does not have its size")
    properties = metadata.fields["tensor_properties"].state
    return ShardedRef(dtype_name(properties[0]), shape, local)


def _shard_spec(entry: Record) -> ChunkSpec:
    return ChunkSpec(sizes_of(entry.fields["shard_offsets"]), sizes_of(entry.fields["shard_sizes"]))


def _dtensor(made: Record) -> DTensorRef:
    local, spec = made.fields["_local_tensor"], made.fields["_spec"].fields
    if not isinstance(local, TensorRef):
        raise ValueError("a DTensor without its local tensor")
    shape, _strides, dtype = spec["tensor_meta"].args
    mesh = spec["mesh"].fields
    mesh_shape, coordinate = _mesh_shape(mesh), mesh.get("_coordinate_on_dim")
    placements = tuple(_placement(placement) for placement in spec["placements"])
    if len(placements) != len(mesh_shape):
        raise ValueError("a DTensor with another number of placements than mesh axes")
    place = None if coordinate is None else sizes_of(coordinate)
    return DTensorRef(dtype_name(dtype), sizes_of(shape), local, placements, mesh_shape, place)


def _mesh_shape(fields: Mapping[str, Any]) -> tuple[int, ...]:
    if isinstance(mesh := fields.get("mesh", fields.get("_mesh")), TensorRef):  # torch before 2.9
        return mesh.shape
    layout = fields["_layout"]
    if "axes" in layout.fields:  # torch from 2.13 on
        return tuple(_axis_length(axis.fields["shape"]) for axis in layout.fields["axes"])
    shape = layout.fields["shape"] if layout.fields else layout.args[0]
    return tuple(map(_axis_length, shape)) if isinstance(shape, tuple) else (_axis_length(shape),)


def _axis_length(shape: Any) -> int:
    """The ranks along one mesh axis; a flattened axis keeps those it was made of."""
    return math.prod(sizes_of(shape)) if isinstance(shape, (tuple, list)) else count_of(shape)


def _placement(placement: Record) -> tuple[Any, ...]:
    values = placement.fields or dict(zip(("dim", "split_factor"), placement.args, strict=False)) | placement.kwargs
    kind = {"Shard": "shard", "_StridedShard": "strided", "Replicate": "replicate"}
    name = kind.get(placement.name.rpartition(".")[2], "partial")
    return (name, count_of(values["dim"])) if name in ("shard", "strided") else (name,)


def read_torch_pickle(data: bytes | bytearray | memoryview, *, where: str = "") -> Any:
    """Read `data.pkl` of a `torch.save` file as data.

    Args:
        data: The pickle.
        where: The file, for messages.

    Returns:
        Nested dictionaries, lists, tuples and plain values, in which tensors are `TensorRef`, `ShardedRef` or
        `DTensorRef`, and dtypes and the like are `Symbol`s. Values may be shared or cyclic: walk them with a limit.

    Raises:
        CheckpointError: It names something no checkpoint needs, or is damaged.
    """
    return load_pickle(data, allowed=_KNOWN, records=_DATA_CLASSES, persistent_load=make_storage, where=where)


def read_dcp_pickle(data: bytes, *, where: str, max_bytes: int) -> Any:
    """Read the `.metadata` of a Distributed Checkpoint as data; see `read_torch_pickle`. It has no tensors."""
    return load_pickle(data, allowed=_KNOWN, records=_DATA_CLASSES, where=where, max_bytes=max_bytes)


def _ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    if pairs:
        raise ValueError("an OrderedDict with arguments")  # pickles set the items one by one
    return {}


def _get_attribute(owner: Any, name: Any) -> Symbol:
    """How pickles before protocol 4 name a nested class or a member of an enumeration: we only note the name."""
    if not isinstance(owner, Symbol) or not isinstance(name, str):
        raise ValueError("getattr of something that is not a known class")
    return record(f"{owner.name}.{name}")


def _as_set(values: Any = ()) -> set[Any]:
    if not isinstance(values, list) or not all(isinstance(value, (str, int, float, type(None))) for value in values):
        raise ValueError("a set of something else than plain values")
    return set(values)


def _encode(text: Any, encoding: Any = "utf-8") -> bytes:
    """How pickles before protocol 3 write bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes in another way than pickles write them")
    return text.encode("latin1")


def _path(*parts: Any) -> str:
    return "/".join(map(str, parts))


_BUILTINS = {
    "getattr": _get_attribute,
    "set": _as_set,
    "frozenset": lambda values=(): frozenset(_as_set(values)),
    "complex": complex,
    "bytes": lambda: b"",  # how pickles before protocol 3 write empty ones
}
_KNOWN: Mapping[str, Symbol] = {
    **makers(
        {
            "collections.OrderedDict": _ordered_dict,
            "collections.defaultdict": lambda factory=None: {},
            "torch.Size": lambda sizes=(): sizes_of(sizes),
            "torch.device": lambda *parts: Symbol(":".join(map(str, parts))),
            "torch.serialization._get_layout": lambda name: Symbol(str(name)),
            "_codecs.encode": _encode,
            "pathlib.PosixPath": _path,
            "pathlib.WindowsPath": _path,
            "pathlib._local.PosixPath": _path,
        }
    ),
    **makers({f"{module}.{name}": make for module in ("builtins", "__builtin__") for name, make in _BUILTINS.items()}),
    **symbols(*(f"torch.{name}" for name in ITEM_BYTES)),
    **symbols(*(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("dict", "list", "int"))),
    **symbols(*(f"torch.{name}" for name in STORAGE_DTYPES)),
    **symbols("torch.storage.UntypedStorage", "torch.Tensor", "torch.nn.parameter.Parameter"),
    **makers(
        {
            "torch._utils._rebuild_tensor": make_tensor,
            "torch._utils._rebuild_tensor_v2": make_tensor,
            "torch._utils._rebuild_tensor_v3": make_tensor_v3,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
            "torch._tensor._rebuild_from_type_v2": make_subclass,
        }
    ),
}
"""What `.metadata` and `torch.save` files may name besides `_DATA_CLASSES`."""

_DATA_CLASSES = (
    "argparse.Namespace",
    "numpy.",
    "torch._utils._rebuild_wrapper_subclass",
    "torch.distributed._mesh_layout.",
    "torch.distributed._shard.",
    "torch.distributed._tensor.",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.metadata.",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed.remote_device._remote_device",
    "torch.distributed.tensor.",
)
"""Beginnings of the names of classes whose objects are kept as what they say: tensors' metadata, and what stands beside
tensors in many training states."""
