"""Conversion of Hugging Face files to the model's layout (renamed, fused and transposed tensors), and sidecar files."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.checkpointing import storage
from shardwise.checkpointing.contents import ChunkSpec, Contents, StoredChunk, StoredTensor
from shardwise.checkpointing.reading import read_chunk
from shardwise.errors import CheckpointError
from shardwise.planning.settings import dtype_name


def stack(tensors: Sequence[StoredTensor], dim: int) -> StoredTensor:
    """Like `torch.stack`; raises ValueError if shapes or dtypes differ."""
    widened = []
    for tensor in tensors:
        chunks = tuple(
            replace(chunk, spec=ChunkSpec(_insert(chunk.spec.starts, dim, 0), _insert(chunk.spec.sizes, dim, 1)))
            for chunk in tensor.chunks
        )
        widened.append(replace(tensor, shape=_insert(tensor.shape, dim, 1), chunks=chunks))
    return concatenate(widened, dim)


def concatenate(tensors: Sequence[StoredTensor], dim: int) -> StoredTensor:
    """Like `torch.cat`; raises ValueError if shapes or dtypes differ."""
    first = tensors[0]
    dim %= len(first.shape)
    others = {(tensor.dtype, tensor.shape[:dim], tensor.shape[dim + 1 :]) for tensor in tensors}
    if len(others) > 1 or any(len(tensor.shape) != len(first.shape) for tensor in tensors):
        raise ValueError(f"{first.name} and the tensors to concatenate with it differ in shape or dtype")
    chunks: list[StoredChunk] = []
    end = 0
    for tensor in tensors:
        for chunk in tensor.chunks:
            starts = list(chunk.spec.starts)
            starts[dim] += end
            chunks.append(replace(chunk, spec=ChunkSpec(tuple(starts), chunk.spec.sizes)))
        end += tensor.shape[dim]
    shape = (*first.shape[:dim], end, *first.shape[dim + 1 :])
    name = first.name if len(tensors) == 1 else f"{first.name} … {tensors[-1].name}"
    return StoredTensor(name, first.dtype, shape, tuple(chunks))


def _insert(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    dim = dim % (len(values) + 1)
    return (*values[:dim], value, *values[dim:])


class ComputedBytes:
    """Bytes of a `StoredChunk` that are computed when read: `name` of the result of `compute`, under a lock."""

    def __init__(self, compute: Callable[[], Mapping[str, memoryview]], name: str, lock: threading.Lock) -> None:
        self._compute, self._name, self._lock = compute, name, lock

    def __getitem__(self, part: slice) -> memoryview:
        with self._lock:
            return self._compute()[self._name][part]


_MAX_BYTES = 64 << 20
_NAMES = re.compile(
    r"(config|generation_config|preprocessor_config|processor_config|tokenizer|tokenizer_config|special_tokens_map|"
    r"added_tokens|vocab|chat_template)\.json|tokenizer\.model|merges\.txt|vocab\.txt|chat_template\.jinja|LICENSE(\..*)?"
)


def read_sidecar_files(place: storage.Place) -> dict[str, bytes]:
    """Return the files in a folder that transformers reads beside weights, or one such file, by name."""
    if storage.size_of(place) is not None:
        return {storage.split(place)[1]: storage.read_small(place, _MAX_BYTES)}
    if not storage.exists(place):
        raise CheckpointError("there is no such file or folder", where=str(place), fix="check the path of the config")
    return {name: storage.read_small(storage.join(place, name), _MAX_BYTES) for name in sidecar_names(place)}


def sidecar_names(folder: storage.Place) -> list[str]:
    """Return the names of files in a folder that transformers reads beside weights."""
    names = [name for name in storage.names_in(folder) if _NAMES.fullmatch(name)]
    return [name for name in names if storage.size_of(storage.join(folder, name)) is not None]


_LOADING = "core_model_loading"
_PUBLISHED = ("safetensors", "full")
"""Formats of models that Hugging Face publishes; their layout may differ from the model's."""


_Group = tuple[Any, dict[str, list[StoredTensor]]]
"""A converter, and its stored tensors by matching pattern; it yields one or several tensors of the model."""


def in_model_layout(contents: Contents, model: nn.Module, names: Collection[str]) -> Contents:
    """Return the contents in the model's layout if transformers or the model describes it; otherwise unchanged."""
    if (parts := getattr(model, "published_experts", None)) is not None:
        return _with_stacked_experts(contents, parts)
    if contents.format not in _PUBLISHED or not _is_described(model):
        return contents
    mapping = importlib.import_module("transformers.conversion_mapping")
    with _unsharded_classes(model):
        transforms = mapping.get_model_conversion_mapping(model)
    loading = importlib.import_module(f"transformers.{_LOADING}")
    return _Layout(loading, model, transforms, names).apply(contents)


def _with_stacked_experts(contents: Contents, parts: Mapping[str, Sequence[str]]) -> Contents:
    """Stack experts that are stored separately (`experts.0.w1.weight`) into one tensor (`experts.gate_up_proj`)."""
    known = {name for names in parts.values() for name in names}
    tensors: dict[str, StoredTensor] = {}
    found: dict[tuple[str, str], dict[int, StoredTensor]] = {}
    for name, tensor in contents.tensors.items():
        if (named := re.fullmatch(r"(.*experts)\.(\d+)\.(.+)", name)) is None or named[3] not in known:
            tensors[name] = tensor
        else:
            found.setdefault((named[1], named[3]), {})[int(named[2])] = tensor
    try:
        for prefix in dict.fromkeys(prefix for prefix, _ in found):
            for target, names in parts.items():
                numbered = [found.get((prefix, name), {}) for name in names]
                stacks = [stack([each[number] for number in sorted(each)], 0) for each in numbered if each]
                tensors |= {f"{prefix}.{target}": concatenate(stacks, 1)} if stacks else {}
    except ValueError as error:
        raise _does_not_make_up("the stacked experts", contents, error) from None
    return replace(contents, tensors=tensors, structure={})


def _does_not_make_up(name: str, contents: Contents, error: ValueError) -> CheckpointError:
    return CheckpointError(
        f"the stored tensors do not form {name}",
        where=str(contents.path),
        why=str(error),
        fix="check that the folder is complete and belongs to this architecture",
    )


class _Layout:
    def __init__(self, loading: Any, model: nn.Module, transforms: list[Any], names: Collection[str]) -> None:
        self._loading, self._model = loading, model
        self._names = dict.fromkeys(names, True)
        self._renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self._compute = lru_cache(maxsize=2)(self._bytes_of_group)  # groups are read in order, by a few threads
        self._by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}

    def apply(self, contents: Contents) -> Contents:
        self._contents = contents
        tensors: dict[str, StoredTensor] = {}
        for stored in sorted(contents.tensors, key=self._loading.dot_natural_key):
            name, pattern = self._rename(stored)
            if pattern is None or name not in self._names:
                tensors[name if name in self._names else stored] = contents.tensors[stored]
                continue
            _, sources = self._groups.setdefault(name, (self._by_pattern[pattern], {}))
            sources.setdefault(pattern, []).append(contents.tensors[stored])
        for name, group in self._groups.items():
            tensors |= self._convert(name, group)
        return replace(contents, tensors=tensors, structure={})

    def _rename(self, stored: str) -> tuple[str, str | None]:
        prefix = getattr(self._model, "base_model_prefix", None)
        rename = self._loading.rename_source_key
        name, pattern = rename(stored, self._renamings, self._converters, prefix, self._names)
        if name not in self._names and stored in self._names:
            return rename(stored, [], [], prefix, self._names)
        return name, pattern

    def _convert(self, name: str, group: _Group) -> dict[str, StoredTensor]:
        converter, sources = group
        found: dict[str, list[StoredTensor]] | None = dict(sources)
        try:
            for operation in converter.operations:
                found = self._step(operation, found, converter) if found is not None else None
        except ValueError as error:
            raise _does_not_make_up(name, self._contents, error) from None
        if found is None:
            return self._computed(name, group)
        first = converter.target_patterns[0]
        return {name if key == first else name.replace(first, key, 1): tensors[0] for key, tensors in found.items()}

    def _step(
        self, operation: Any, found: dict[str, list[StoredTensor]], converter: Any
    ) -> dict[str, list[StoredTensor]] | None:
        """Apply one operation on chunks; return None if it needs the values."""
        kind, targets = type(operation).__name__, converter.target_patterns
        if kind == "MergeModulelist":
            single = targets[0] if len(found) == 1 else None
            return {single or key: [stack(tensors, operation.dim)] for key, tensors in found.items()}
        if kind == "Concatenate":
            parts = [part for key in converter.source_patterns for part in found.get(key, [])]
            return {targets[0]: [concatenate(parts, operation.dim)]}
        return None

    def _computed(self, name: str, group: _Group) -> dict[str, StoredTensor]:
        """Let transformers convert the tensors when they are read."""

        def on_meta(stored: StoredTensor) -> torch.Tensor:
            return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")

        tensors = {}
        for key, made in self._run(name, group, on_meta).items():
            # The file label sorts the reads of one group next to each other.
            data = ComputedBytes(lambda: self._compute(name), key, self._lock)
            chunk = StoredChunk(ChunkSpec.whole(tuple(made.shape)), file=f"computed {name}", data=data)  # pyrefly: ignore
            tensors[key] = StoredTensor(key, dtype_name(made.dtype), tuple(made.shape), (chunk,))
        return tensors

    def _bytes_of_group(self, name: str) -> dict[str, memoryview]:
        made = self._run(name, self._groups[name], lambda source: read_chunk(self._contents, source))
        return {key: storage.bytes_of(tensor.contiguous()) for key, tensor in made.items()}

    def _run(self, name: str, group: _Group, read: Callable[[StoredTensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(group[0])
        for pattern, sources in group[1].items():
            for source in sources:
                converter.add_tensor(name, source.name, pattern, read(source))
        converted = converter.convert(name, model=self._model, config=self._model.config)
        return {key: made[0] if isinstance(made, list) else made for key, made in converted.items()}


def _is_described(model: nn.Module) -> bool:
    """Whether the model is from transformers, in a version that describes conversions (5 or newer)."""
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, getattr(library, "PreTrainedModel", ())):
        return False
    return all(importlib.util.find_spec(f"transformers.{name}") for name in ("conversion_mapping", _LOADING))


@contextlib.contextmanager
def _unsharded_classes(model: nn.Module) -> Iterator[None]:
    """Temporarily restore modules' original classes: transformers looks up its descriptions by class."""
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
