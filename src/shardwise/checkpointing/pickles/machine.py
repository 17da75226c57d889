"""A pickle reader that builds data only: no imports, no calls, limits on sizes; tensors become descriptions."""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from shardwise.checkpointing.contents import DTYPES, ITEM_BYTES, ChunkSpec, count_of, sizes_of
from shardwise.checkpointing.storage import damaged
from shardwise.errors import CheckpointError

MAX_PICKLE_BYTES = 256 << 20
_FREE_OBJECTS = 1 << 16
_KEYS = (str, int, float, bytes, type(None))


@dataclass(frozen=True, eq=False, slots=True)
class Symbol:
    """A name in a pickle, of a dtype, class or function, which is never imported."""

    name: str
    make: Callable[..., Any] | None = field(default=None, repr=False)


@dataclass(eq=False, repr=False, slots=True)
class Record:
    """An object of a known class in a pickle: its arguments and its state, as plain values.

    Items that the pickle appends to a list subclass, or sets in a dict subclass, are dropped.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    state: Any = None

    @property
    def fields(self) -> dict[str, Any]:
        """Attributes by name; empty if the state has another form."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and state[0] is None:  # (__dict__ is None, __slots__)
            state = state[1]
        return state if isinstance(state, dict) else {}


class Refused(Exception):
    """Raised for pickles with features that no checkpoint needs."""


# The unpickler in Python, whose instructions can be replaced; type stubs know only the C one.
_PythonUnpickler: Any = vars(pickle)["_Unpickler"]


class _Unpickler(_PythonUnpickler):
    """Python's unpickler without the instructions that no checkpoint needs; instructions that call are replaced."""

    def __init__(
        self, data: bytes, allowed: Mapping[str, Symbol], records: tuple[str, ...], with_storages: bool
    ) -> None:
        super().__init__(_Whole(data))
        self._allowed, self._records, self._with_storages = allowed, records, with_storages
        # One byte of a pickle can create a container of 200 bytes; real pickles have fewer objects than bytes / 4.
        self.objects_left = _FREE_OBJECTS + len(data) // 3

    def find_class(self, module: str, name: str) -> Symbol:
        """Return the symbol for a name, without importing it."""
        full = f"{module}.{name}"
        if full in self._allowed:
            return self._allowed[full]
        if full.startswith(self._records):
            return record(full)
        raise Refused(f"the pickle asks for '{full}', which no checkpoint needs")

    def persistent_load(self, pid: Any) -> Any:
        """Return the description of a storage."""
        if not self._with_storages:
            raise Refused("the pickle refers to storages outside it, which this file cannot have")
        return make_storage(pid)

    def make(self, symbol: Any, args: Any, kwargs: Any) -> None:
        """Push the result of a call: a record, or the result of a function of this module."""
        if not isinstance(symbol, Symbol) or symbol.make is None:
            raise Refused(f"the pickle calls {symbol!r}, which may only be named")
        if not isinstance(args, tuple):
            raise ValueError("arguments that are not a tuple")
        self.append(symbol.make(*args, **kwargs))

    def set_items(self, values: list[Any]) -> None:
        """Set alternating keys and values in the dictionary or record on the stack."""
        target = self.stack[-1]
        if type(target) is dict:
            target.update((_checked_key(key), value) for key, value in zip(values[::2], values[1::2], strict=True))
        elif not isinstance(target, Record):
            raise ValueError(f"items set in a {type(target).__name__}")

    def append_items(self, values: list[Any]) -> None:
        """Append the values to the list or record on the stack."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, Record):
            raise ValueError(f"items appended to a {type(target).__name__}")

    def add_items(self, values: list[Any]) -> None:
        """Add the values to the set on the stack."""
        if type(self.stack[-1]) is not set:
            raise ValueError(f"elements added to a {type(self.stack[-1]).__name__}")
        self.stack[-1].update(map(_checked_key, values))

    def set_state(self, state: Any) -> None:
        """Set the state of the record on the stack."""
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state
        elif type(self.stack[-1]) is not dict:  # attributes of an OrderedDict (`_metadata` of a state dict)
            raise ValueError(f"state given to a {type(self.stack[-1]).__name__}")


class _Whole(io.BytesIO):
    """A stream that raises when a read goes beyond its end."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if size is not None and len(data) < size:
            raise ValueError("it ends inside a value")
        return data


def _checked_key(key: Any) -> Any:
    # Hashing nested tuples visits every path to every leaf, which can take years for a few hundred bytes.
    is_flat_tuple = isinstance(key, tuple) and all(isinstance(part, _KEYS) for part in key)
    if not is_flat_tuple and not isinstance(key, (*_KEYS, Symbol, Record)):
        raise ValueError(f"a dictionary key that is a {type(key).__name__}")
    return key


def _reduce(machine: _Unpickler) -> None:
    args, symbol = machine.stack.pop(), machine.stack.pop()
    machine.make(symbol, args, {})


def _new_with_keywords(machine: _Unpickler) -> None:
    kwargs, args, symbol = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.make(symbol, args, kwargs)


def _new_dict(machine: _Unpickler) -> None:
    values = machine.pop_mark()  # `pop_mark` changes the list that `append` uses
    machine.append({})
    machine.set_items(values)


def _new_frozenset(machine: _Unpickler) -> None:
    values = machine.pop_mark()
    machine.append(frozenset(map(_checked_key, values)))


def _counted(step: Callable[[_Unpickler], None]) -> Callable[[_Unpickler], None]:
    def counted(machine: _Unpickler) -> None:
        machine.objects_left -= 1
        if machine.objects_left < 0:
            raise ValueError("it contains too many objects")
        step(machine)

    return counted


class _Instructions(dict[int, Callable[[Any], Any]]):
    def __missing__(self, opcode: int) -> Any:
        raise Refused(f"the pickle uses the instruction {opcode:#04x}, which no checkpoint needs")


_TAKEN_OVER = b"(012N)}]JKMGXBCltQchjqr\x80\x85\x86\x87\x88\x89\x8a\x8c\x8d\x8e\x8f\x93\x94\x95."
"""Instructions kept from Python: they read data, build containers, use the stack and the memo, or look up names."""
_REPLACED: dict[str, Callable[[_Unpickler], None]] = {
    "REDUCE": _reduce,
    "NEWOBJ": _reduce,  # equivalent here
    "NEWOBJ_EX": _new_with_keywords,
    "BUILD": lambda machine: machine.set_state(machine.stack.pop()),
    "APPEND": lambda machine: machine.append_items([machine.stack.pop()]),
    "APPENDS": lambda machine: machine.append_items(machine.pop_mark()),
    "SETITEM": lambda machine: machine.set_items([machine.stack.pop(), machine.stack.pop()][::-1]),
    "SETITEMS": lambda machine: machine.set_items(machine.pop_mark()),
    "DICT": _new_dict,
    "ADDITEMS": lambda machine: machine.add_items(machine.pop_mark()),
    "FROZENSET": _new_frozenset,
}
_COUNTED = b"}]ltdQRqr\x81\x85\x86\x87\x8f\x91\x92\x94"
"""Instructions that create an object or a memo entry."""


def _instructions() -> _Instructions:
    steps = {opcode: _Unpickler.dispatch[opcode] for opcode in _TAKEN_OVER}
    steps |= {getattr(pickle, name)[0]: step for name, step in _REPLACED.items()}
    return _Instructions(steps | {opcode: _counted(steps[opcode]) for opcode in _COUNTED})


_Unpickler.dispatch = _instructions()


def record(name: str) -> Symbol:
    """Return the symbol of a class whose objects become `Record`s."""
    return Symbol(name, lambda *args, **kwargs: Record(name, args, kwargs))


def symbols(*names: str) -> dict[str, Symbol]:
    """Return table entries for names that may occur but not be called, such as dtypes."""
    return {name: Symbol(name) for name in names}


def makers(functions: Mapping[str, Callable[..., Any]]) -> dict[str, Symbol]:
    """Return table entries for constructors, by qualified name, that are replaced by functions of this module."""
    return {name: Symbol(name, make) for name, make in functions.items()}


def load_pickle(
    data: bytes | bytearray | memoryview | BinaryIO,
    *,
    allowed: Mapping[str, Symbol],
    records: tuple[str, ...] = (),
    with_storages: bool = False,
    where: str = "",
    max_bytes: int = MAX_PICKLE_BYTES,
) -> Any:
    """Read one pickle without importing or calling anything it names.

    Names are looked up in `allowed`; objects of classes whose names start with one of `records` become `Record`s.
    torch storages are allowed only `with_storages`. The result may be shared or cyclic: walk it with a limit.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        data = data.read(max_bytes + 1)
    if len(data) > max_bytes:
        what = f"the checkpoint holds a pickle of more than {max_bytes} bytes"
        raise damaged(what, where, "no checkpoint needs one so large")
    try:
        return _Unpickler(bytes(data), allowed, records, with_storages).load()
    except Refused as refusal:
        raise CheckpointError(
            str(refusal),
            where=where,
            why="a pickle can run any code; only names that checkpoints need are known here, and none is ever called",
            fix="get the file from a trusted source; if you trust this file, load it with torch yourself "
            "and save it again (save_weights, or safetensors)",
        ) from None
    except (pickle.UnpicklingError, IndexError, struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
        what = "the checkpoint holds a pickle that cannot be read"
        raise damaged(what, where, str(error) or type(error).__name__) from None


STORAGE_DTYPES = {storage: dtype for dtype, (_, _, storage) in DTYPES.items() if storage}
STORAGE_DTYPES["UntypedStorage"] = "uint8"


@dataclass(frozen=True, slots=True)
class StorageRef:
    """One storage of a `torch.save` file."""

    key: str
    """Name of its record in the zip, without `data/`."""
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided view of one storage."""

    storage: StorageRef
    dtype: str
    offset: int
    """Offset in elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are contiguous in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return math.prod(self.shape) == 0
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class ShardedRef:
    """A ShardedTensor: one rank's chunks of a larger tensor."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[ChunkSpec, TensorRef], ...]


@dataclass(frozen=True, slots=True)
class DTensorRef:
    """A DTensor: one rank's shard of a larger tensor."""

    dtype: str
    shape: tuple[int, ...]
    local: TensorRef
    placements: tuple[tuple[Any, ...], ...]
    """One placement per mesh axis: `("shard", dim)`, `("strided", dim)`, `("replicate",)` or `("partial",)`."""
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    """Mesh coordinate of the rank that wrote it; None if the file does not record it."""


def dtype_name(symbol: Any) -> str:
    """Return the dtype's name, such as `float32` for the symbol `torch.float32`."""
    if isinstance(symbol, Symbol) and (name := symbol.name.removeprefix("torch.")) in ITEM_BYTES:
        return name
    raise ValueError(f"{symbol!r} is not a dtype")


def make_storage(identity: Any) -> StorageRef:
    """Return the storage that a persistent id of torch describes."""
    kind, storage_type, key, _location, numel = identity
    if kind != "storage" or not isinstance(key, str) or not isinstance(storage_type, Symbol):
        raise ValueError(f"{identity!r} is not a storage")
    dtype = STORAGE_DTYPES[storage_type.name.rpartition(".")[2]]
    return StorageRef(key, dtype, count_of(numel) * ITEM_BYTES[dtype])


def make_tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> TensorRef:
    """Replace `_rebuild_tensor`, `_v2`, and `_v3`; the last has an argument for dtypes without a storage class."""
    if not isinstance(storage, StorageRef):
        raise ValueError("a tensor without a storage")
    dtypes = [each for each in rest if isinstance(each, Symbol)]
    name = dtype_name(dtypes[0]) if dtypes else storage.dtype
    tensor = TensorRef(storage, name, count_of(offset), sizes_of(size), sizes_of(stride))
    if len(tensor.shape) != len(tensor.strides):
        raise ValueError("a tensor with strides of another number of dimensions")
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    if math.prod(tensor.shape) and (last + 1) * ITEM_BYTES[name] > storage.num_bytes:
        raise ValueError(f"a tensor of shape {tensor.shape} that reaches beyond its storage")
    return tensor


def make_subclass(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Replace `_rebuild_from_type_v2`: a tensor subclass, or a tensor with attributes."""
    if not isinstance(function, Symbol) or function.make is None:
        raise ValueError("a tensor with an unknown rebuild function")
    made = function.make(*args)
    if not isinstance(made, Record):
        return made  # a tensor with Python attributes
    made.state = state
    return _sharded(made) if kind.name.endswith("ShardedTensor") else _dtensor(made)


def _sharded(made: Record) -> ShardedRef:
    parts, metadata = made.state[:2]
    local, shape = [], sizes_of(metadata.fields["size"])
    for part in parts:
        place, tensor = part.fields["metadata"].fields, part.fields["tensor"]
        spec = ChunkSpec(sizes_of(place["shard_offsets"]), sizes_of(place["shard_sizes"]))
        local.append((spec, tensor))
        if not isinstance(tensor, TensorRef) or tensor.shape != spec.sizes or not spec.lies_in(shape):
            raise ValueError("a shard whose tensor does not have its size")
    properties = metadata.fields["tensor_properties"].state
    return ShardedRef(dtype_name(properties[0]), shape, tuple(local))


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
    if "axes" in layout.fields:  # torch 2.13 or newer
        return tuple(_axis_length(axis.fields["shape"]) for axis in layout.fields["axes"])
    shape = layout.fields["shape"] if layout.fields else layout.args[0]
    return tuple(map(_axis_length, shape)) if isinstance(shape, tuple) else (_axis_length(shape),)


def _axis_length(shape: Any) -> int:
    """Return the number of ranks along one mesh axis; a flattened axis has the sizes of its original axes."""
    return math.prod(sizes_of(shape)) if isinstance(shape, (tuple, list)) else count_of(shape)


def _placement(placement: Record) -> tuple[Any, ...]:
    values = placement.fields or dict(zip(("dim", "split_factor"), placement.args, strict=False)) | placement.kwargs
    kind = {"Shard": "shard", "_StridedShard": "strided", "Replicate": "replicate"}
    name = kind.get(placement.name.rpartition(".")[2], "partial")
    return (name, count_of(values["dim"])) if name in ("shard", "strided") else (name,)


def read_torch_pickle(data: bytes, *, where: str = "", max_bytes: int = MAX_PICKLE_BYTES) -> Any:
    """Read `data.pkl` of a `torch.save` file, or the `.metadata` of a Distributed Checkpoint.

    Tensors are replaced by `TensorRef`, `ShardedRef` or `DTensorRef`.
    """
    return load_pickle(
        data, allowed=_KNOWN, records=_DATA_CLASSES, with_storages=True, where=where, max_bytes=max_bytes
    )


def _ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    if pairs:
        raise ValueError("an OrderedDict with arguments")  # pickles set the items one by one
    return {}


def _get_attribute(owner: Any, name: Any) -> Symbol:
    """Replace `getattr`, by which pickles before protocol 4 name nested classes and enum members."""
    if not isinstance(owner, Symbol) or not isinstance(name, str):
        raise ValueError("getattr of something that is not a known class")
    return record(f"{owner.name}.{name}")


def _as_set(values: Any = ()) -> set[Any]:
    if not isinstance(values, list) or not all(isinstance(value, (str, int, float, type(None))) for value in values):
        raise ValueError("a set of something else than plain values")
    return set(values)


def _encode(text: Any, encoding: Any = "utf-8") -> bytes:
    """Replace `_codecs.encode`, by which pickles before protocol 3 store bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes in an unknown encoding")
    return text.encode("latin1")


def _path(*parts: Any) -> str:
    return "/".join(map(str, parts))


_BUILTINS = {
    "getattr": _get_attribute,
    "set": _as_set,
    "frozenset": lambda values=(): frozenset(_as_set(values)),
    "complex": complex,
    "bytes": lambda: b"",  # pickles before protocol 3 store empty bytes so
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
            **{f"torch._utils._rebuild_tensor{version}": make_tensor for version in ("", "_v2", "_v3")},
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
            "torch._tensor._rebuild_from_type_v2": make_subclass,
        }
    ),
    **makers({f"{module}.{name}": make for module in ("builtins", "__builtin__") for name, make in _BUILTINS.items()}),
    **symbols(*(f"torch.{name}" for name in ITEM_BYTES)),
    **symbols(*(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("dict", "list", "int"))),
    **symbols(*(f"torch.{name}" for name in STORAGE_DTYPES)),
    **symbols("torch.storage.UntypedStorage", "torch.Tensor", "torch.nn.parameter.Parameter"),
}
"""Names that `.metadata` and `torch.save` files may contain in addition to `_DATA_CLASSES`."""

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
"""Prefixes of classes whose objects become `Record`s: metadata of tensors, and other objects common in training
states."""
