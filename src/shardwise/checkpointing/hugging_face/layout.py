"""Checkpoints of transformers that are laid out in another way than its models: other names, experts one by one.

transformers describes for each architecture how stored tensors become the model's. We follow its description on names
and boxes, so that merged experts are still read straight into a shard; what is more than stacking, joining and cutting
(a transposition, say) is computed by transformers itself, one group of tensors at a time.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.checkpointing.contents import Box, Contents, Piece, StoredTensor
from shardwise.checkpointing.reading.composing import concatenate, split, stack
from shardwise.checkpointing.reading.computed_bytes import Computations, ComputedBytes
from shardwise.checkpointing.reading.requests import read_box
from shardwise.checkpointing.state.slices import dtype_name
from shardwise.errors import CheckpointError

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
