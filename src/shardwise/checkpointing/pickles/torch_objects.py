"""What torch's own pickles may name, and what each becomes here. No torch.

Covers `torch.save` files (tensors, parameters, ShardedTensor, DTensor) and the `.metadata` of Distributed
Checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.checkpointing.contents import ITEM_BYTES
from shardwise.checkpointing.pickles.pickle_machine import Symbol
from shardwise.checkpointing.pickles.safe_pickle import load_pickle, makers, record, records, symbols
from shardwise.checkpointing.pickles.torch_refs import (
    STORAGE_DTYPES,
    make_parameter,
    make_storage,
    make_subclass,
    make_tensor,
    make_tensor_v3,
    sizes_of,
)

_SHARD = "torch.distributed._shard."
_TENSOR = "torch.distributed.tensor."
_PROCESS_GROUP = _SHARD + "sharded_tensor.api.ShardedTensor.ProcessGroupState"


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

    Ranks:
        Local.
    """
    return load_pickle(data, allowed=TORCH_SAVE, persistent_load=make_storage, where=where)


def _ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    if pairs:
        raise ValueError("an OrderedDict with arguments")  # pickles set the items one by one
    return {}


def _get_attribute(owner: Any, name: Any) -> Symbol:
    """How pickles before protocol 4 name a nested class or a member of an enumeration: we only note the name."""
    if not isinstance(owner, Symbol) or not isinstance(name, str):
        raise ValueError("getattr of something that is no known class")
    nested = f"{owner.name}.{name}"
    return record(nested) if nested == _PROCESS_GROUP else Symbol(nested)


def _as_set(values: Any = ()) -> set[Any]:
    if not isinstance(values, list) or not all(isinstance(value, (str, int, float, type(None))) for value in values):
        raise ValueError("a set of something else than plain values")
    return set(values)


def _encode(text: Any, encoding: Any = "utf-8") -> bytes:
    """How pickles before protocol 3 write bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes in another way than pickles write them")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """`bytes()`: how pickles before protocol 3 write empty ones."""
    return b""


def _path(*parts: Any) -> str:
    return "/".join(map(str, parts))


_BUILTINS = {
    "getattr": _get_attribute,
    "set": _as_set,
    "frozenset": lambda values=(): frozenset(_as_set(values)),
    "complex": complex,
    "bytes": _no_bytes,
}
_PLAIN = {
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
    # Beside the tensors in many training states; kept as what they say, never made.
    **records(
        "argparse.Namespace",
        "numpy.dtype",
        "numpy.ndarray",
        *(f"numpy.{module}.multiarray.{name}" for module in ("core", "_core") for name in ("scalar", "_reconstruct")),
    ),
}

_METADATA = (
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
DCP_METADATA: Mapping[str, Symbol] = {
    **_PLAIN,
    **records(
        *(f"torch.distributed.checkpoint.metadata.{name}" for name in _METADATA),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        # Written by torch before 2.3, and for ShardedTensors of FSDP1.
        _SHARD + "sharded_tensor.metadata.TensorProperties",
        _SHARD + "sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    ),
}
"""What the `.metadata` of a Distributed Checkpoint folder may name."""

_OLD_TENSOR = "torch.distributed._tensor."
TORCH_SAVE: Mapping[str, Symbol] = {
    **_PLAIN,
    **symbols(*(f"torch.{name}" for name in STORAGE_DTYPES)),
    **symbols("torch.storage.UntypedStorage", "torch.Tensor", "torch.nn.parameter.Parameter"),
    **symbols(_SHARD + "sharded_tensor.api.ShardedTensor", _TENSOR + "DTensor", _TENSOR + "_api.DTensor"),
    **symbols(_OLD_TENSOR + "DTensor", _OLD_TENSOR + "api.DTensor"),
    **makers(
        {
            "torch._utils._rebuild_tensor": make_tensor,
            "torch._utils._rebuild_tensor_v2": make_tensor,
            "torch._utils._rebuild_tensor_v3": make_tensor_v3,
            "torch._utils._rebuild_parameter": make_parameter,
            "torch._utils._rebuild_parameter_with_state": make_parameter,
            "torch._tensor._rebuild_from_type_v2": make_subclass,
        }
    ),
    **records(
        "torch._utils._rebuild_wrapper_subclass",
        _PROCESS_GROUP,
        _SHARD + "metadata.ShardMetadata",
        _SHARD + "sharded_tensor.metadata.ShardedTensorMetadata",
        _SHARD + "sharded_tensor.metadata.TensorProperties",
        _SHARD + "sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        _SHARD + "sharded_tensor.shard.Shard",
        _SHARD + "sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
        _SHARD + "sharding_spec.api.EnumerableShardingSpec",
        "torch.distributed.remote_device._remote_device",
        "torch.distributed.device_mesh.DeviceMesh",
        "torch.distributed._mesh_layout._FlatLayout",
        "torch.distributed._mesh_layout._MeshLayout",
        *(
            module + name
            for module in (_TENSOR + "_dtensor_spec.", _OLD_TENSOR + "placement_types.")
            for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
        ),
        *(
            module + "placement_types." + name
            for module in (_TENSOR, _OLD_TENSOR)
            for name in ("Shard", "_StridedShard", "Replicate", "Partial", "_Partial")
        ),
    ),
}
"""What a `torch.save` file may name."""
