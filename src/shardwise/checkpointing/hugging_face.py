"""How Hugging Face's files differ from the model: renamed, fused and transposed tensors, and the files beside them."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import itertools
import math
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.checkpointing.contents import ITEM_BYTES, Box, Contents, Piece, StoredTensor
from shardwise.checkpointing.reading import read_box
from shardwise.checkpointing.state.slices import dtype_name
from shardwise.checkpointing.storage import files
from shardwise.checkpointing.storage.memory import bytes_of
from shardwise.errors import CheckpointError

_MAX_PIECES = 1 << 16


def stack(tensors: Sequence[StoredTensor], dim: int) -> StoredTensor:
    """As `torch.stack`: one more dimension, along which each tensor is one row.

    Raises:
        ValueError: Shapes or dtypes differ.
    """
    widened = []
    for tensor in tensors:
        pieces = tuple(
            replace(piece, box=Box(_insert(piece.box.starts, dim, 0), _insert(piece.box.sizes, dim, 1)))
            for piece in tensor.pieces
        )
        widened.append(replace(tensor, shape=_insert(tensor.shape, dim, 1), pieces=pieces))
    return concatenate(widened, dim)


def concatenate(tensors: Sequence[StoredTensor], dim: int) -> StoredTensor:
    """As `torch.cat`.

    Raises:
        ValueError: Shapes or dtypes differ.
    """
    first = tensors[0]
    dim %= len(first.shape)
    others = {(tensor.dtype, tensor.shape[:dim], tensor.shape[dim + 1 :]) for tensor in tensors}
    if len(others) > 1 or any(len(tensor.shape) != len(first.shape) for tensor in tensors):
        raise ValueError(f"{first.name} and what it is joined with do not have the same shape and dtype")
    pieces: list[Piece] = []
    end = 0
    for tensor in tensors:
        for piece in tensor.pieces:
            starts = list(piece.box.starts)
            starts[dim] += end
            pieces.append(replace(piece, box=Box(tuple(starts), piece.box.sizes)))
        end += tensor.shape[dim]
    shape = (*first.shape[:dim], end, *first.shape[dim + 1 :])
    name = first.name if len(tensors) == 1 else f"{first.name} … {tensors[-1].name}"
    return StoredTensor(name, first.dtype, shape, tuple(pieces))


def split(tensor: StoredTensor, sizes: Sequence[int], dim: int) -> list[StoredTensor]:
    """As `torch.split`.

    Raises:
        ValueError: The sizes do not add up, or it would take too many pieces.
    """
    dim %= len(tensor.shape)
    if sum(sizes) != tensor.shape[dim]:
        raise ValueError(f"{tensor.name} of shape {list(tensor.shape)} cannot be split into {list(sizes)}")
    parts = []
    for start, end in itertools.pairwise([0, *itertools.accumulate(sizes)]):
        shape = (*tensor.shape[:dim], end - start, *tensor.shape[dim + 1 :])
        starts = (*(0,) * dim, start, *(0,) * (len(shape) - dim - 1))
        pieces = tuple(cut for piece in tensor.pieces for cut in _cut(piece, Box(starts, shape), dim, tensor.dtype))
        parts.append(StoredTensor(tensor.name, tensor.dtype, shape, pieces))
    return parts


def _cut(piece: Piece, box: Box, dim: int, dtype: str) -> list[Piece]:
    """What of a piece lies in `box`, relative to its start; as many pieces as it takes for each to be one run."""
    shared = piece.box.overlap(box)
    if shared is None:
        return []
    if piece.data is not None:
        raise ValueError("a tensor that is held in memory cannot be split")
    leading = shared.sizes[:dim]
    if math.prod(leading) > _MAX_PIECES:
        raise ValueError(f"splitting along dimension {dim} would take {math.prod(leading):,} pieces")
    strides = [math.prod(piece.box.sizes[index + 1 :]) for index in range(len(piece.box.sizes))]
    cuts = []
    for index in itertools.product(*map(range, leading)):
        starts = (*(start + step for start, step in zip(shared.starts, index, strict=False)), *shared.starts[dim:])
        first = sum((at - begin) * stride for at, begin, stride in zip(starts, piece.box.starts, strides, strict=True))
        target = tuple(at - begin for at, begin in zip(starts, box.starts, strict=True))
        sizes = (*(1,) * dim, *shared.sizes[dim:])
        # The checksums are of blocks of the whole piece, in which this one may begin anywhere.
        cuts.append(Piece(Box(target, sizes), piece.file, piece.offset + first * ITEM_BYTES[dtype]))
    return cuts


def _insert(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    dim = dim % (len(values) + 1)
    return (*values[:dim], value, *values[dim:])


_MAX_HELD = 2  # readers go through a checkpoint in order, a few threads at a time


class Computations:
    """Groups of tensors that are computed together; the last few outcomes are held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[Callable[[], Mapping[str, torch.Tensor]], dict[str, memoryview]] = OrderedDict()

    def bytes_of(self, compute: Callable[[], Mapping[str, torch.Tensor]], name: str) -> memoryview:
        """The bytes of tensor `name`, of those that `compute` makes."""
        with self._lock:
            if compute not in self._held:
                while len(self._held) >= _MAX_HELD:
                    self._held.popitem(last=False)
                made = compute()
                self._held[compute] = {key: bytes_of(tensor.contiguous()) for key, tensor in made.items()}
            self._held.move_to_end(compute)
            return self._held[compute][name]


class ComputedBytes:
    """What a `Piece` holds in place of bytes.

    Args:
        computations: Shared by all tensors of a checkpoint.
        compute: Makes this tensor, and perhaps others.
        name: Of this one among them.
    """

    def __init__(
        self, computations: Computations, compute: Callable[[], Mapping[str, torch.Tensor]], name: str
    ) -> None:
        self._computations, self._compute, self._name = computations, compute, name

    def __getitem__(self, part: slice) -> memoryview:
        return self._computations.bytes_of(self._compute, self._name)[part]


_MAX_BYTES = 64 << 20
_NAMES = re.compile(
    r"(config|generation_config|preprocessor_config|processor_config|tokenizer|tokenizer_config|special_tokens_map|"
    r"added_tokens|vocab|chat_template)\.json|tokenizer\.model|merges\.txt|vocab\.txt|chat_template\.jinja|LICENSE(\..*)?"
)


def read_companions(place: files.Place) -> dict[str, bytes]:
    """The files beside weights that transformers looks for, by name.

    Args:
        place: The folder, or one such file (then only that).

    Raises:
        CheckpointError: It is not there, or a file is far larger than such files are.

    Ranks:
        Local.
    """
    if files.size_of(place) is not None:
        return {files.split(place)[1]: files.read_small(place, _MAX_BYTES)}
    if not files.exists(place):
        raise CheckpointError("there is no such file or folder", where=str(place), fix="check the path of the config")
    return {
        name: files.read_small(files.join(place, name), _MAX_BYTES)
        for name in files.names_in(place)
        if _NAMES.fullmatch(name) and files.size_of(files.join(place, name)) is not None
    }


_LOADING = "core_model_loading"
_AS_IN_THE_MODEL = ("sharded", "dcp", "fsdp1-full", "fsdp1-sharded", "fsdp1-local")


@dataclass(slots=True)
class _Group:
    """What becomes one or several tensors of the model: stored tensors by the pattern that matched them."""

    converter: Any
    sources: dict[str, list[StoredTensor]] = field(default_factory=dict)


def in_model_layout(contents: Contents, model: nn.Module, names: Collection[str]) -> Contents:
    """The contents under the model's own names and shapes, where transformers says how; else as they are.

    Args:
        contents: Weights, under the names they are stored with.
        model: Any; only transformers' own are described.
        names: Canonical names of the model's tensors.

    Raises:
        CheckpointError: The description does not fit what is stored.

    Ranks:
        Local.
    """
    if contents.format in _AS_IN_THE_MODEL or not _is_described(model):
        return contents
    mapping = importlib.import_module("transformers.conversion_mapping")
    with _unsharded_classes(model):
        transforms = mapping.get_model_conversion_mapping(model)
    loading = importlib.import_module(f"transformers.{_LOADING}")
    return _Layout(loading, model, transforms, names).apply(contents)


class _Layout:
    def __init__(self, loading: Any, model: nn.Module, transforms: list[Any], names: Collection[str]) -> None:
        self._loading, self._model = loading, model
        self._names = dict.fromkeys(names, True)
        self._renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
        self._computations = Computations()
        self._by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}

    def apply(self, contents: Contents) -> Contents:
        tensors: dict[str, StoredTensor] = {}
        groups: dict[str, _Group] = {}
        for stored in sorted(contents.tensors, key=self._loading.dot_natural_key):
            name, pattern = self._rename(stored)
            if pattern is None or name not in self._names:
                tensors[name if name in self._names else stored] = contents.tensors[stored]
                continue
            group = groups.setdefault(name, _Group(self._by_pattern[pattern]))
            group.sources.setdefault(pattern, []).append(contents.tensors[stored])
        for name, group in groups.items():
            tensors |= self._convert(name, group, contents)
        return replace(contents, tensors=tensors, structure={})

    def _rename(self, stored: str) -> tuple[str, str | None]:
        prefix = getattr(self._model, "base_model_prefix", None)
        rename = self._loading.rename_source_key
        name, pattern = rename(stored, self._renamings, self._converters, prefix, self._names)
        if name not in self._names and stored in self._names:
            return rename(stored, [], [], prefix, self._names)
        return name, pattern

    def _convert(self, name: str, group: _Group, contents: Contents) -> dict[str, StoredTensor]:
        found: dict[str, list[StoredTensor]] | None = dict(group.sources)
        try:
            for operation in group.converter.operations:
                found = self._step(operation, found, group.converter, name) if found is not None else None
        except ValueError as error:
            raise CheckpointError(
                f"what is stored does not make up {name}",
                where=str(contents.path),
                why=str(error),
                fix="check that the folder is complete and belongs to this architecture",
            ) from None
        if found is None:
            return self._computed(name, group, contents)
        return {self._target(name, key, group.converter): tensors[0] for key, tensors in found.items()}

    def _step(
        self, operation: Any, found: dict[str, list[StoredTensor]], converter: Any, name: str
    ) -> dict[str, list[StoredTensor]] | None:
        """One operation on boxes; None when it takes more than that."""
        kind, targets = type(operation).__name__, converter.target_patterns
        if kind == "MergeModulelist":
            single = targets[0] if len(found) == 1 else None
            return {single or key: [stack(tensors, operation.dim)] for key, tensors in found.items()}
        if kind == "Concatenate":
            parts = [part for key in converter.source_patterns for part in found.get(key, [])]
            return {targets[0]: [concatenate(parts, operation.dim)]}
        if kind in ("Chunk", "Split") and len(found) == 1 and len(targets) > 1:
            (tensor,) = next(iter(found.values()))
            length = tensor.shape[operation.dim]
            sizes = [-(-length // len(targets))] * (len(targets) - 1)
            if kind == "Split":
                whole = [self._model.get_parameter(name.replace(targets[0], target)) for target in targets]
                sizes = [parameter.shape[operation.dim] for parameter in whole[:-1]]
            cut = split(tensor, [*sizes, length - sum(sizes)], operation.dim)
            return {target: [part] for target, part in zip(targets, cut, strict=True)}
        return None

    def _target(self, name: str, key: str, converter: Any) -> str:
        return name if key == converter.target_patterns[0] else name.replace(converter.target_patterns[0], key, 1)

    def _computed(self, name: str, group: _Group, contents: Contents) -> dict[str, StoredTensor]:
        """Let transformers convert the tensors themselves, when their turn to be read comes."""

        def compute() -> dict[str, torch.Tensor]:
            return self._run(name, group, lambda source: read_box(contents, source, Box.whole(source.shape)))

        tensors = {}
        for key, made in self._run(name, group, _on_meta).items():
            # The label keeps the reads of one group together: they are sorted by file.
            data = ComputedBytes(self._computations, compute, key)
            piece = Piece(Box.whole(tuple(made.shape)), file=f"computed {name}", data=data)  # pyrefly: ignore
            tensors[key] = StoredTensor(key, dtype_name(made.dtype), tuple(made.shape), (piece,))
        return tensors

    def _run(self, name: str, group: _Group, read: Callable[[StoredTensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(group.converter)
        for pattern, sources in group.sources.items():
            for source in sources:
                converter.add_tensor(name, source.name, pattern, read(source))
        converted = converter.convert(name, model=self._model, config=self._model.config)
        return {key: made[0] if isinstance(made, list) else made for key, made in converted.items()}


def _on_meta(stored: StoredTensor) -> torch.Tensor:
    return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")


def _is_described(model: nn.Module) -> bool:
    """Whether the model is one of transformers' own, in a version that describes conversions (from 5)."""
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, getattr(library, "PreTrainedModel", ())):
        return False
    return all(importlib.util.find_spec(f"transformers.{name}") for name in ("conversion_mapping", _LOADING))


@contextlib.contextmanager
def _unsharded_classes(model: nn.Module) -> Iterator[None]:
    """Let modules have the classes their authors gave them: transformers looks its descriptions up by class."""
    changed: list[tuple[nn.Module, type]] = []
    try:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                changed.append((module, type(module)))
                kinds = type(module).__mro__
                module.__class__ = kinds[kinds.index(FSDPModule) + 1]
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind
