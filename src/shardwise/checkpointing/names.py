"""Names of tensors: names in the model without wrapper prefixes, sections of a checkpoint, and their mapping."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.checkpointing.contents import ChunkSpec, Contents, KeyPath, StoredTensor
from shardwise.errors import CheckpointError, listed, nearest, raise_listed
from shardwise.planning.settings import dtype_name
from shardwise.sharding import inventory
from shardwise.sharding.adapters import adapter_keys
from shardwise.sharding.full_params import reshard
from shardwise.sharding.inventory import canonical_name, class_name
from shardwise.sharding.registry import names_elsewhere

PARALLEL_PREFIX = "module."
"""Prefix that DistributedDataParallel adds to all names. Elsewhere in a name, a submodule may be called `module`."""
MODEL_SECTIONS = ("model.", "state_dict.", "model_state_dict.", "module.")
"""Prefixes of the weights in a file with more than weights, as in `{"model": ..., "optimizer": ...}`."""

_MODEL_NAMES = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "network", "params")
_STEP_NAMES = ("step", "global_step", "iteration", "iter")


def find_sections(contents: Contents) -> tuple[KeyPath | None, tuple[KeyPath, ...]]:
    """Return the path to the model's tensors (None: no model, or several), and the paths to the optimizers' states.

    They are identified by their structure, and by common names if several candidates remain.
    """
    paths = {name: contents.path_of(name) for name in (*contents.tensors, *contents.values)}
    optimizers = tuple(
        dict.fromkeys(path[: path.index("param_groups")] for path in paths.values() if "param_groups" in path[:-1])
    )
    states = [(*root, "state") for root in optimizers]
    roots = {
        paths[name][:-1]
        for name in contents.tensors
        if paths[name][0] not in ("rng", "per_rank")
        and not any(paths[name][: len(root)] == root for root in states)
        and not _is_extra_state(paths[name])
    }
    named = [root for root in roots if len(root) == 1 and root[0] in _MODEL_NAMES]
    if len(roots) == 1 or len(named) == 1:
        return next(iter(roots)) if len(roots) == 1 else named[0], optimizers
    return () if () in roots and not named else None, optimizers


def with_our_names(contents: Contents) -> Contents:
    """Return the contents under `model.` and `optim.`, without wrapper prefixes.

    Other values (`epoch`) are moved to `extra.`; contents that already have these names are returned unchanged.
    """
    if contents.format == "sharded" or contents.details.get("has_our_names"):
        return contents
    contents = _nested_optimizers(contents)
    model, optimizers = find_sections(contents)
    paths = [contents.path_of(name) for name in contents.tensors]
    bare = [str(path[-1]) for path in paths if path[:-1] == model]
    strip = bool(bare) and all(name.startswith(PARALLEL_PREFIX) for name in bare)  # by DistributedDataParallel
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Any] = {}
    structure: dict[str, KeyPath] = {}
    step = contents.step
    for name in (*contents.tensors, *contents.values):
        path = contents.path_of(name)
        renamed = _our_path(path, model, optimizers, strip, is_tensor=name in contents.tensors)
        new = ".".join(map(str, renamed))
        if new in structure:
            raise CheckpointError(
                f"{name} would be renamed to {new}, which already exists",
                where=str(contents.path),
                why="wrapper prefixes are removed from names, which makes two names equal",
                fix="save the models or optimizers in separate dictionaries",
            )
        structure[new] = renamed
        if name in contents.tensors:
            tensors[new] = replace(contents.tensors[name], name=new)
        else:
            values[new] = value = contents.values[name]
            if renamed[0] == "optim" and renamed[-1] in ("params", "param_names") and isinstance(value, list):
                values[new] = [_our_name(entry, strip) if isinstance(entry, str) else entry for entry in value]
            if step is None and path[-1] in _STEP_NAMES and len(path) <= 2 and type(values[new]) is int:
                step = values[new]
    return replace(contents, tensors=tensors, values=values, structure=structure, step=step)


def _nested_optimizers(contents: Contents) -> Contents:
    """Convert flattened optimizer state (`state.<name>.exp_avg`, `param_groups.<name>.lr`) to the nested layout.

    Parameters with the same options become one group; a parameter with a tensor among its options gets a separate one.
    """
    paths = {name: contents.path_of(name) for name in (*contents.tensors, *contents.values)}
    leaves = {name: str(path[-1]).split(".", 1) for name, path in paths.items()}
    roots = {paths[name][:-1] for name, leaf in leaves.items() if leaf[0] == "param_groups" and len(leaf) > 1}
    structure: dict[str, KeyPath] = dict(contents.structure)
    options: dict[tuple[KeyPath, str], dict[str, str]] = {}
    for name, (kind, *rest) in leaves.items():
        if paths[name][:-1] in roots and rest and kind in ("state", "param_groups"):
            parameter, _, key = rest[0].rpartition(".")
            structure[name] = (*paths[name][:-1], kind, parameter, key)
            if kind == "param_groups":
                options.setdefault((paths[name][:-1], parameter), {})[key] = name
    values, tensors = dict(contents.values), dict(contents.tensors)
    groups: dict[str, tuple[KeyPath, list[str]]] = {}
    for (root, parameter), named in options.items():
        same = repr((root, sorted((key, contents.values.get(name, name)) for key, name in named.items())))
        path, parameters = groups.setdefault(same, ((*root, "param_groups", len(groups)), []))
        parameters.append(parameter)
        values[name := ".".join(map(str, (*path, "params")))] = parameters
        structure[name] = (*path, "params")
        for key, name in named.items():
            value, structure[name] = values.pop(name, None), (*path, key)
            if name not in tensors and len(parameters) == 1:
                values[name] = value
    details = {**contents.details, "has_flat_groups": bool(groups)}
    return (
        replace(contents, tensors=tensors, values=values, structure=structure, details=details) if groups else contents
    )


def only_model(contents: Contents) -> Contents:
    """Return only the model's tensors, without `model.`; the contents must hold one model under shardwise's names."""
    paths = {name: contents.path_of(name) for name in contents.tensors if contents.path_of(name)[0] == "model"}
    paths = {name: path for name, path in paths.items() if len(path) == 2 or not _is_extra_state(path)}
    if not paths or any(len(path) != 2 for path in paths.values()):
        models = sorted({str(path[1]) for path in paths.values() if len(path) > 2})
        raise CheckpointError(
            f"the checkpoint holds {len(models)} models: {', '.join(models)}" if models else "the file holds no model",
            where=str(contents.path),
            why="a file of weights holds one model",
            fix="convert to dcp or full instead, which store several models",
        )
    tensors = {str(path[1]): replace(contents.tensors[name], name=str(path[1])) for name, path in paths.items()}
    structure: dict[str, KeyPath] = {name: (name,) for name in tensors}
    return replace(contents, tensors=tensors, values={}, structure=structure)


def _our_path(
    path: KeyPath, model: KeyPath | None, optimizers: Sequence[KeyPath], strip: bool, *, is_tensor: bool
) -> KeyPath:
    for root in optimizers:
        rest = path[len(root) :]
        if path[: len(root)] == root and rest and rest[0] in ("state", "param_groups"):
            if rest[0] == "state" and len(rest) == 3:
                rest = ("state", _our_name(str(rest[1]), strip), rest[2])
            several = root[1:] if root[:1] == ("optim",) else root
            return ("optim", *rest) if len(optimizers) == 1 else ("optim", *several, *rest)
    if model is not None and path[: len(model)] == model and len(path) > len(model):
        name, *inner = path[len(model) :]
        if (is_tensor and not inner) or _is_extra_state(path):
            return ("model", _our_name(str(name), strip), *inner)
    if len(path) == 1 and not is_tensor:
        return ("extra", path[0])
    return path


def _is_extra_state(path: KeyPath) -> bool:
    """Whether the path is that of a module's extra state (`get_extra_state`), or inside it."""
    return any("_extra_state" in str(key).split(".") for key in path)


def _our_name(name: str, strip: bool) -> str:
    name = canonical_name(name)
    return name.removeprefix(PARALLEL_PREFIX) if strip else name


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One tensor of a model's state dict."""

    name: str
    """Canonical name, without prefixes of torch.compile, activation checkpointing or DistributedDataParallel."""
    aliases: tuple[str, ...]
    """Other canonical names of a tied tensor."""
    tensor: torch.Tensor
    """The registered tensor: a DTensor if sharded."""
    is_parameter: bool

    @property
    def is_frozen(self) -> bool:
        """Whether it is a parameter that does not require gradients."""
        return self.is_parameter and not self.tensor.requires_grad

    @property
    def names(self) -> tuple[str, ...]:
        """All names, `name` first."""
        return (self.name, *self.aliases)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        """Name of the dtype, as in `contents.ITEM_BYTES`."""
        return dtype_name(self.tensor.dtype)


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Return each parameter and persistent buffer once, in the order of the state dict; reshards the model first."""
    reshard(model)
    found: dict[object, tuple[torch.Tensor, bool, list[str]]] = {}
    for name, tensor in named_state(model):
        _, _, names = found.setdefault(_identity(tensor), (tensor, isinstance(tensor, nn.Parameter), []))
        names.append(name)
    return [
        ModelTensor(names[0], tuple(dict.fromkeys(names[1:])), tensor, is_parameter)
        for tensor, is_parameter, names in found.values()
    ]


def named_state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return canonical names and tensors of the model's state dict; tied tensors are listed under each name."""
    return [(canonical_name(name), tensor) for name, tensor in _registered(_unwrapped(model))]


def _registered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in compat.non_persistent_buffers(module):
                yield f"{path}.{name}" if path else name, tensor


def refuse_unregistered(model: nn.Module, *, trainable_only: bool = False) -> None:
    """Raise a CheckpointError if modules add entries to the state dict that are not registered.

    With `trainable_only`, modules with only frozen parameters are ignored.
    """
    problems = []
    for path, module in _unwrapped(model).named_modules():
        if found := _unregistered(module):
            parameters = list(module.parameters())
            if not (trainable_only and parameters and not any(each.requires_grad for each in parameters)):
                problems.append(f"{path or '(root)'} ({class_name(module)}): {', '.join(found)}")
    raise_listed(
        problems,
        "{num} modules write state into their state dict that is neither parameters nor buffers",
        why="a checkpoint contains parameters, persistent buffers and get_extra_state(); this state would be lost",
        fix="register it with register_buffer(), or return it from get_extra_state()",
        kind=CheckpointError,
    )


def _unregistered(module: nn.Module) -> list[str]:
    """Return the entries added by a module's `_save_to_state_dict` or state-dict hooks, except renamed tensors."""
    saves = type(module)._save_to_state_dict is not nn.Module._save_to_state_dict
    if not saves and not module._state_dict_hooks:
        return []
    entries: Any = OrderedDict(_registered(module))
    known, tensors = set(map(canonical_name, entries)), set(map(_identity, entries.values()))
    entries._metadata = OrderedDict()
    if saves:
        module._save_to_state_dict(entries, "", True)
    for hook in module._state_dict_hooks.values():
        entries = hook(module, entries, "", {}) or entries
    return [
        name
        for name, value in entries.items()
        if canonical_name(name) not in known
        and name.rpartition(".")[2] != "_extra_state"
        and not (isinstance(value, torch.Tensor) and _identity(value) in tensors)
    ]


def non_persistent_names(model: nn.Module) -> set[str]:
    """Return canonical names of the buffers that no state dict contains, because the model computes them."""
    return {
        canonical_name(f"{path}.{name}" if path else name)
        for path, module in _unwrapped(model).named_modules(remove_duplicate=False)
        for name in compat.non_persistent_buffers(module)
    }


def local_chunks(tensor: torch.Tensor) -> list[tuple[ChunkSpec, torch.Tensor]]:
    """Return this rank's chunks of a tensor with their memory; see `inventory.local_chunks`."""
    memory = inventory.local_tensor(tensor)
    if not isinstance(tensor, DTensor):
        return [(ChunkSpec.whole(tuple(tensor.shape)), memory)] if tensor.numel() else []
    chunks = inventory.local_chunks(tensor)
    if len(chunks) == 1:
        return [(ChunkSpec(chunks[0].starts, chunks[0].sizes), memory)]
    return [
        (ChunkSpec(chunk.starts, chunk.sizes), memory[inventory.slices_of(chunk.position, chunk.sizes)])
        for chunk in chunks
    ]


def _identity(tensor: torch.Tensor) -> object:
    """Return a key that is equal for two names of one tensor: the same object, or the same view of the same memory."""
    has_storage = type(tensor) in (nn.Parameter, torch.Tensor) and tensor.numel() and tensor.device.type != "meta"
    if not has_storage:
        return id(tensor)
    return compat.storage_id(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's module, which may be wrapped in DistributedDataParallel."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


Rename = Mapping["str | re.Pattern[str]", "str | None"] | Callable[[str], "str | None"]
"""Maps stored names to model names, or to None to omit a tensor: a function, or a mapping whose keys are whole names,
prefixes (up to a dot) or compiled patterns (applied with `re.sub`)."""

_MAX_LISTED = 20
_KINDS = (("int", "uint"), ("float", "bfloat"), ("complex",))


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A stored tensor whose shape differs, or whose dtype cannot be cast to the model's (integer to floating point)."""

    name: str
    stored: str
    """Dtype and shape, as in `float32 [4, 8]`."""
    expected: str

    def __str__(self) -> str:
        return f"{self.name}: stored as {self.stored}, the model's is {self.expected}"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyReport:
    """Which tensors of a model were loaded, and mismatches. Names are the model's, without wrapper prefixes."""

    loaded: tuple[str, ...] = ()
    """Loaded from the checkpoint."""
    missing: tuple[str, ...] = ()
    """In the model, but not in the checkpoint: unchanged, or initialized if they were on the meta device."""
    unexpected: tuple[str, ...] = ()
    """In the checkpoint, but not in the model."""
    mismatched: tuple[Mismatch, ...] = ()
    """In both, with different shapes or incompatible dtypes."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Other names of a loaded tensor, each with the name under which it was loaded."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Loaded tensors with a different stored name, with that name."""
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Loaded tensors with a different stored dtype: stored dtype, dtype in the model."""
    ignored: tuple[str, ...] = ()
    """In the checkpoint, but deliberately not loaded: tables that the model computes, extra state of modules
    (`_extra_state`), names that `rename` maps to None."""
    rebuilt: tuple[str, ...] = ()
    """On the meta device and initialized, because missing or not part of any checkpoint (non-persistent buffers)."""

    @property
    def is_exact(self) -> bool:
        """Whether every tensor of the model was loaded, and every stored tensor was loaded or deliberately ignored."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        rebuilt = set(self.rebuilt) - {*self.missing, *(each.name for each in self.mismatched)}  # already counted
        counts = [(len(self.loaded), "loaded"), (len(self.tied), "tied"), (len(rebuilt), "rebuilt")]
        counts += [(len(self.missing), "missing"), (len(self.unexpected), "unexpected")]
        counts += [(len(self.mismatched), "of another shape"), (len(self.ignored), "ignored")]
        first = ", ".join(f"{count} {what}" for count, what in counts if count) or "nothing loaded"
        return "\n".join([first, *describe_problems(self.missing, self.unexpected, self.mismatched)])


def describe_problems(
    missing: Sequence[str], unexpected: Sequence[str], mismatched: Sequence[Mismatch], *, limit: int = _MAX_LISTED
) -> list[str]:
    """Return one line per mismatched name; a missing name gets its most similar unexpected name as a suggestion."""
    lines = []
    for index, name in enumerate(missing):
        near = suggest(name, unexpected) if index < limit else ""
        lines.append(f"missing     {name}" + (f" (did you mean {near}?)" if near else ""))
    groups = [lines, [f"unexpected  {name}" for name in unexpected], [f"mis-shaped  {item}" for item in mismatched]]
    return [line for group in groups for line in listed(group, limit)]


def suggest(name: str, candidates: Iterable[str]) -> str:
    """Return the candidate most similar to `name`; empty if none is similar."""
    last = name.rpartition(".")[2]
    others = [candidate for candidate in candidates if candidate != name]  # equal if `rename` changed it
    alike = [candidate for candidate in others if candidate.rpartition(".")[2] == last]
    return nearest(name, alike or others)


def rename_with(rename: Rename) -> Callable[[str], str | None]:
    """Return a function from stored names to model names; see `Rename`."""
    if callable(rename):
        return rename
    rules = rename

    def apply(name: str) -> str | None:
        for old, new in rules.items():
            is_pattern = isinstance(old, re.Pattern)
            if not (old.search(name) if is_pattern else name == old or name.startswith(old.rstrip(".") + ".")):
                continue
            if new is None:
                return None
            if not is_pattern:
                return (new.rstrip(".") + name[len(old.rstrip(".")) :]).lstrip(".")
            name = old.sub(new, name)
        return name

    return apply


def match_names(
    names: Iterable[str], stored: Collection[str], *, prefixes: Sequence[str] = ("", PARALLEL_PREFIX)
) -> tuple[dict[str, str], list[str], str]:
    """Return stored names by model name, unused stored names, and the prefix of the stored names.

    Any of `prefixes` may precede all stored names or all model names; the prefix with the most matches is used.
    """
    wanted = dict.fromkeys(names)
    canonical: dict[str, str] = {}
    for name in stored:
        canonical.setdefault(canonical_name(name), name)
    best: dict[str, str] = {}
    stripped = ""
    for prefix in dict.fromkeys(prefixes):
        longer = {name: canonical[prefix + name] for name in wanted if prefix + name in canonical}
        bare = {name: name.removeprefix(prefix) for name in wanted}
        shorter = {name: canonical[short] for name, short in bare.items() if short in canonical}
        if len(longer) > len(best):
            best, stripped = longer, prefix
        if len(shorter) > len(best):
            best, stripped = shorter, ""
    used = set(best.values())
    return best, [name for name in stored if name not in used], stripped


@dataclass(frozen=True, slots=True)
class Matched:
    """Result of matching a model with a checkpoint by name."""

    stored_names: Mapping[str, str]
    """Stored names of the tensors to load, by `ModelTensor.name`."""
    copies: Mapping[str, tuple[str, ...]]
    """Other stored names of tied tensors that are stored several times, by `ModelTensor.name`."""
    report: KeyReport
    tolerated: frozenset[str]
    """Missing names that the model declares optional."""

    def refuse(self, contents: Contents, strict: bool) -> None:
        """Raise a CheckpointError that lists mismatches, unless `strict` is False and the mismatches are allowed."""
        report = self.report
        missing = [name for name in report.missing if name not in self.tolerated] if strict else []
        unexpected = report.unexpected if strict else ()
        if not report.loaded and (report.missing or report.unexpected):
            missing, unexpected = list(report.missing), report.unexpected  # no name matches: probably the wrong file
        counts = [(len(missing), "missing"), (len(unexpected), "unexpected"), (len(report.mismatched), "mis-shaped")]
        what = ", ".join(f"{count} {kind}" for count, kind in counts if count)
        if not what:
            return
        fix = 'leave them out with rename={"name": None} and strict=False, or build the model with these shapes'
        if strict and (missing or unexpected):
            fix = 'map the names with rename={"old.prefix": "new.prefix"}, or pass strict=False to load what fits'
        total = len(report.loaded) + len(report.missing) + len(report.mismatched)
        raise CheckpointError(
            f"the weights do not match the model of {total} tensors: {what}",
            where="\n".join([str(contents.path), *describe_problems(missing, unexpected, report.mismatched)]),
            why="every tensor of the model is loaded exactly once" if strict else "shapes are never adapted",
            fix=fix,
        )


def rename_contents(contents: Contents, rename: Rename) -> Contents:
    """Rename the stored tensors with `rename`; `details["renamed_away"]` lists names that it maps to None."""
    apply = rename_with(rename)
    tensors: dict[str, StoredTensor] = {}
    renamed_away = []
    for stored, tensor in contents.tensors.items():
        name = apply(canonical_name(stored))
        if name is None:
            renamed_away.append(stored)
            continue
        if name in tensors:
            raise CheckpointError(
                f"{tensors[name].name!r} and {stored!r} are both renamed to {name!r}",
                where=str(contents.path),
                why="one of them would be lost",
                fix="map one of the two to None in rename=",
            )
        tensors[name] = tensor
    return replace(contents, tensors=tensors, details={**contents.details, "renamed_away": renamed_away})


def match(model: nn.Module, contents: Contents, tensors: Sequence[ModelTensor] | None = None) -> Matched:
    """Compare names, shapes and dtypes of a model and a checkpoint, without reading or writing tensors."""
    tensors = model_tensors(model) if tensors is None else tensors
    names = [name for tensor in tensors for name in tensor.names]
    sections = (*MODEL_SECTIONS, contents.details.get("section", "")) if contents.format != "safetensors" else ()
    base = getattr(model, "base_model_prefix", None)  # transformers' attribute name of the inner model
    parallel = [section + PARALLEL_PREFIX for section in sections]
    prefixes = ("", PARALLEL_PREFIX, *sections, *parallel, *([f"{base}."] if isinstance(base, str) and base else []))
    stored = contents.tensors
    found, left, prefix = match_names(names, stored, prefixes=prefixes)
    section = next((each for each in sections if prefix and prefix in (each, each + PARALLEL_PREFIX)), "")
    left = [name for name in left if canonical_name(name).startswith(section)]
    computed = non_persistent_names(model) | names_elsewhere(model)
    ignorable = _patterns(model, "_keys_to_ignore_on_load_unexpected")

    def is_ignored(name: str) -> bool:
        if _is_extra_state((name,)):  # not a tensor of the model
            return True
        return canonical_name(name) in computed or any(pattern.search(name) for pattern in ignorable)

    ignored = {name: None for name in left if is_ignored(name.removeprefix(prefix))}
    tolerable = _patterns(model, "_keys_to_ignore_on_load_missing")
    stored_names: dict[str, str] = {}
    copies: dict[str, tuple[str, ...]] = {}
    missing, mismatched, tied, cast = [], [], {}, {}
    for tensor in tensors:
        names = [name for name in tensor.names if name in found]
        if not names:
            missing.append(tensor.name)
            continue
        theirs = stored[found[names[0]]]
        if theirs.shape != tensor.shape or not _converts(theirs.dtype, tensor.dtype):
            mismatched.append(Mismatch(names[0], _describe(theirs), _describe(tensor)))
            continue
        stored_names[tensor.name] = found[names[0]]
        tied |= {name: names[0] for name in tensor.names if name != names[0]}
        if theirs.dtype != tensor.dtype:
            cast[names[0]] = (theirs.dtype, tensor.dtype)
        if len(names) > 1:
            copies[tensor.name] = tuple(dict.fromkeys(found[name] for name in names[1:]))
    report = KeyReport(
        loaded=tuple(stored_names),
        missing=tuple(missing),
        unexpected=tuple(name for name in left if name not in ignored),
        mismatched=tuple(mismatched),
        tied=tied,
        renamed={name: stored[key].name for name, key in stored_names.items() if stored[key].name != name},
        cast=cast,
        ignored=tuple(ignored),
    )
    tolerated = {name for name in missing if any(pattern.search(name) for pattern in tolerable)}
    if missing and stored_names.keys().isdisjoint(adapters := adapter_keys(model)):
        tolerated.update(adapters)  # adapter parameters are missing from weights of the base model
    return Matched(stored_names, copies, report, frozenset(tolerated))


def _converts(stored: str, expected: str) -> bool:
    """Whether a dtype can be cast: only within floating-point or within integer dtypes (not quantized weights)."""
    return stored == expected or any(stored.startswith(kind) and expected.startswith(kind) for kind in _KINDS)


def _describe(tensor: ModelTensor | StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _patterns(model: nn.Module, attribute: str) -> list[re.Pattern[str]]:
    """Return the patterns of a transformers class for keys that may be unexpected or missing."""
    listed = getattr(model, attribute, None)
    return [re.compile(text) for text in listed] if isinstance(listed, (list, tuple, set)) else []
