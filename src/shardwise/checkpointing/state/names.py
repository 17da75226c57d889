"""Names of a run's tensors and values, and the sections of a checkpoint they belong to."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.checkpointing.contents import Contents, KeyPath, StoredTensor
from shardwise.errors import CheckpointError, listed, nearest

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module")
"""Parts that torch.compile, activation checkpointing, FSDP1 and Lightning put into names, wherever they wrap."""
PARALLEL_PREFIX = "module."
"""What DistributedDataParallel puts in front of all names. Further inside, a module may really be called so."""
MODEL_SECTIONS = ("model.", "state_dict.", "model_state_dict.", "module.")
"""Where the weights are in a file that holds more than weights, as in `{"model": ..., "optimizer": ...}`."""

Rename = Mapping["str | re.Pattern[str]", "str | None"] | Callable[[str], "str | None"]
"""Stored name to model name, None to leave it out: a function; or a mapping from a whole name, a leading part of one
(up to a dot), or a compiled pattern (then `re.sub`)."""

_MAX_LISTED = 20


def canonical_name(name: str) -> str:
    """`name` without the parts that wrappers put into it; `module.` in front is another matter, see `match_names`."""
    if "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor that is there, in another shape, or in a dtype that does not convert (integers to fractions)."""

    name: str
    stored: str
    """As in `float32 [4, 8]`."""
    expected: str

    def __str__(self) -> str:
        return f"{self.name}: stored as {self.stored}, the model's is {self.expected}"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyReport:
    """Which tensors of a model got their values, and what did not fit. Names are the model's, without wrappers."""

    loaded: tuple[str, ...] = ()
    """Got their values from the checkpoint."""
    missing: tuple[str, ...] = ()
    """In the model, not in the checkpoint: kept as they were, or initialised where they had no values."""
    unexpected: tuple[str, ...] = ()
    """In the checkpoint, not in the model."""
    mismatched: tuple[Mismatch, ...] = ()
    """In both, in different shapes."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further names of a loaded tensor, each with the name under which it was loaded."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Loaded tensors whose stored name is another, with that name."""
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Loaded tensors whose stored dtype is another: stored dtype, the model's."""
    ignored: tuple[str, ...] = ()
    """In the checkpoint and left there: tables that the model computes itself, what modules keep for themselves
    (`_extra_state`), names that `rename` left out."""
    rebuilt: tuple[str, ...] = ()
    """Not part of any checkpoint (non-persistent buffers), or missing; they were on meta and were initialised."""

    @property
    def is_exact(self) -> bool:
        """Whether every tensor of the model was loaded and every stored one was used or is known to be of no use."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        rebuilt = set(self.rebuilt) - {*self.missing, *(each.name for each in self.mismatched)}  # counted there
        counts = [(len(self.loaded), "loaded"), (len(self.tied), "tied"), (len(rebuilt), "rebuilt")]
        counts += [(len(self.missing), "missing"), (len(self.unexpected), "unexpected")]
        counts += [(len(self.mismatched), "of another shape"), (len(self.ignored), "ignored")]
        first = ", ".join(f"{count} {what}" for count, what in counts if count) or "nothing loaded"
        return "\n".join([first, *describe_problems(self.missing, self.unexpected, self.mismatched)])


def describe_problems(
    missing: Sequence[str], unexpected: Sequence[str], mismatched: Sequence[Mismatch], *, limit: int = _MAX_LISTED
) -> list[str]:
    """A line for each name that does not fit, with the likely counterpart of those that are missing."""
    lines = []
    for index, name in enumerate(missing):
        near = suggest(name, unexpected) if index < limit else ""
        lines.append(f"missing     {name}" + (f" (did you mean {near}?)" if near else ""))
    groups = [lines, [f"unexpected  {name}" for name in unexpected], [f"mis-shaped  {item}" for item in mismatched]]
    return [line for group in groups for line in listed(group, limit)]


def suggest(name: str, candidates: Iterable[str]) -> str:
    """The candidate that `name` is most likely called by someone else; empty if none is near."""
    last = name.rpartition(".")[2]
    others = [candidate for candidate in candidates if candidate != name]  # the same, when `rename` made it another
    alike = [candidate for candidate in others if candidate.rpartition(".")[2] == last]
    return nearest(name, alike or others)


def rename_with(rename: Rename) -> Callable[[str], str | None]:
    """A function from stored names to model names; see `Rename`."""
    if callable(rename):
        return rename
    rules = rename

    def apply(name: str) -> str | None:
        for old, new in rules.items():
            if isinstance(old, re.Pattern):
                if not old.search(name):
                    continue
                if new is None:
                    return None
                name = old.sub(new, name)
            elif name == old or name.startswith(old.rstrip(".") + "."):
                if new is None:
                    return None
                return (new.rstrip(".") + name[len(old.rstrip(".")) :]).lstrip(".")
        return name

    return apply


@dataclass(frozen=True, slots=True)
class Matching:
    """Which stored name each of a model's names means."""

    found: Mapping[str, str]
    """Name in the model to name in the checkpoint."""
    left: tuple[str, ...]
    """Stored names that belong to no name of the model."""
    prefix: str = ""
    """What stands in front of the stored names and not of the model's."""


def match_names(
    names: Iterable[str], stored: Collection[str], *, prefixes: Sequence[str] = ("", PARALLEL_PREFIX)
) -> Matching:
    """Find the stored name of each of a model's names.

    Args:
        names: Canonical names of the model.
        stored: Names in the checkpoint, with whatever wrappers put into them.
        prefixes: What may stand in front of all stored names, or of all the model's. The one under which most
            names match is taken, the earlier of equals.
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
    return Matching(best, tuple(name for name in stored if name not in used), stripped)


_MODEL_NAMES = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "network", "params")
_STEP_NAMES = ("step", "global_step", "iteration", "iter")


@dataclass(frozen=True, slots=True)
class Sections:
    """Where the parts lie in the nested dictionary that was saved."""

    model: KeyPath | None
    """The path to the one model's tensors; None when there is no model, or several."""
    optimizers: tuple[KeyPath, ...]


def find_sections(contents: Contents) -> Sections:
    """Find the model and the optimizers by their shape, and by the usual names where that leaves a choice."""
    paths = {name: _path(contents, name) for name in (*contents.tensors, *contents.values)}
    optimizers = tuple(
        dict.fromkeys(path[: path.index("param_groups")] for path in paths.values() if "param_groups" in path[:-1])
    )
    states = [(*root, "state") for root in optimizers]
    roots = {
        paths[name][:-1]
        for name in contents.tensors
        if paths[name][0] not in ("rng", "per_rank") and not any(paths[name][: len(root)] == root for root in states)
    }
    named = [root for root in roots if len(root) == 1 and root[0] in _MODEL_NAMES]
    if len(roots) == 1 or len(named) == 1:
        return Sections(next(iter(roots)) if len(roots) == 1 else named[0], optimizers)
    return Sections(() if () in roots and not named else None, optimizers)


def with_our_names(contents: Contents) -> Contents:
    """The same contents under `model.` and `optim.`, without what wrappers put into names.

    Loose values (`epoch`) go under `extra.`; a checkpoint that already has our names keeps them.

    Raises:
        CheckpointError: Two names become the same.
    """
    if contents.format == "sharded" or contents.details.get("has_our_names"):
        return contents
    sections = find_sections(contents)
    strip = _parallel_prefix(contents, sections.model)
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Any] = {}
    structure: dict[str, KeyPath] = {}
    step = contents.step
    for name in (*contents.tensors, *contents.values):
        path = _path(contents, name)
        renamed = _our_path(path, sections, strip, is_tensor=name in contents.tensors)
        new = ".".join(map(str, renamed))
        if new in structure:
            raise CheckpointError(
                f"{name} would be called {new}, which is taken",
                where=str(contents.path),
                why="names lose what wrappers put into them, and two of them are then the same",
                fix="save the models or optimizers in dictionaries of their own",
            )
        structure[new] = renamed
        if name in contents.tensors:
            tensors[new] = replace(contents.tensors[name], name=new)
        else:
            values[new] = _our_value(renamed, contents.values[name], strip)
            if step is None and path[-1] in _STEP_NAMES and len(path) <= 2 and type(values[new]) is int:
                step = values[new]
    return replace(contents, tensors=tensors, values=values, structure=structure, step=step)


def only_model(contents: Contents) -> Contents:
    """Just the model's tensors, under bare names; contents with our names are expected.

    Raises:
        CheckpointError: There is no model, or there are several.
    """
    paths = {name: _path(contents, name) for name in contents.tensors if _path(contents, name)[0] == "model"}
    if not paths or any(len(path) != 2 for path in paths.values()):
        models = sorted({str(path[1]) for path in paths.values() if len(path) > 2})
        raise CheckpointError(
            f"the checkpoint holds {len(models)} models: {', '.join(models)}" if models else "there is no model in it",
            where=str(contents.path),
            why="a file of weights holds one model",
            fix="convert to dcp or full instead, which hold all of them",
        )
    tensors = {str(path[1]): replace(contents.tensors[name], name=str(path[1])) for name, path in paths.items()}
    structure: dict[str, KeyPath] = {name: (name,) for name in tensors}
    return replace(contents, tensors=tensors, values={}, structure=structure)


def _path(contents: Contents, name: str) -> KeyPath:
    return contents.structure.get(name, (name,))


def _parallel_prefix(contents: Contents, root: KeyPath | None) -> bool:
    """Whether every name of the model begins with what DistributedDataParallel puts there."""
    paths = [_path(contents, name) for name in contents.tensors]
    names = [str(path[-1]) for path in paths if path[:-1] == root]
    return bool(names) and all(name.startswith(PARALLEL_PREFIX) for name in names)


def _our_path(path: KeyPath, sections: Sections, strip: bool, *, is_tensor: bool) -> KeyPath:
    for root in sections.optimizers:
        rest = path[len(root) :]
        if path[: len(root)] == root and rest and rest[0] in ("state", "param_groups"):
            if rest[0] == "state" and len(rest) == 3:
                rest = ("state", _our_name(str(rest[1]), strip), rest[2])
            several = root[1:] if root[:1] == ("optim",) else root
            return ("optim", *rest) if len(sections.optimizers) == 1 else ("optim", *several, *rest)
    if is_tensor and sections.model is not None and path[:-1] == sections.model:
        return ("model", _our_name(str(path[-1]), strip))
    if len(path) == 1 and not is_tensor:
        return ("extra", path[0])
    return path


def _our_name(name: str, strip: bool) -> str:
    name = canonical_name(name)
    return name.removeprefix(PARALLEL_PREFIX) if strip else name


def _our_value(path: KeyPath, value: Any, strip: bool) -> Any:
    if path[0] == "optim" and path[-1] in ("params", "param_names") and isinstance(value, list):
        return [_our_name(entry, strip) if isinstance(entry, str) else entry for entry in value]
    return value
