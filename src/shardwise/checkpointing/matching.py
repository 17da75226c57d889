"""Match the model's names with the checkpoint's."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from shardwise.checkpointing.contents import Contents, StoredTensor
from shardwise.checkpointing.state.names import MODEL_SECTIONS, PARALLEL_PREFIX, canonical_name
from shardwise.checkpointing.state.slices import ModelTensor, model_tensors, non_persistent_names
from shardwise.errors import CheckpointError, listed, nearest
from shardwise.sharding.adapters import adapter_keys
from shardwise.sharding.registry import names_elsewhere

Rename = Mapping["str | re.Pattern[str]", "str | None"] | Callable[[str], "str | None"]
"""Stored name to model name, None to leave it out: a function; or a mapping from a whole name, a leading part of one
(up to a dot), or a compiled pattern (then `re.sub`)."""

_MAX_LISTED = 20
_KINDS = (("int", "uint"), ("float", "bfloat"), ("complex",))


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
    """Find the stored name of each of a model's names.

    Args:
        names: Canonical names of the model.
        stored: Names in the checkpoint, with whatever wrappers put into them.
        prefixes: What may stand in front of all stored names, or of all the model's. The one under which most
            names match is taken, the earlier of equals.

    Returns:
        Stored names by the model's names; those that belong to no name of the model; and the prefix of stored names.
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
    """A model and a checkpoint, name by name."""

    stored_names: Mapping[str, str]
    """`ModelTensor.name` to the name in the checkpoint, for what will be loaded."""
    copies: Mapping[str, tuple[str, ...]]
    """Tied tensors that are stored several times: the further stored names, by `ModelTensor.name`."""
    report: KeyReport
    tolerated: frozenset[str]
    """Missing names that the model itself says may be missing."""

    def refuse(self, contents: Contents, strict: bool) -> None:
        """Refuse what does not fit well enough.

        Raises:
            CheckpointError: Listing all that does not fit.
        """
        report = self.report
        missing = [name for name in report.missing if name not in self.tolerated] if strict else []
        unexpected = report.unexpected if strict else ()
        if not report.loaded and (report.missing or report.unexpected):
            missing, unexpected = list(report.missing), report.unexpected  # nothing fits: surely the wrong file
        counts = [(len(missing), "missing"), (len(unexpected), "unexpected"), (len(report.mismatched), "mis-shaped")]
        what = ", ".join(f"{count} {kind}" for count, kind in counts if count)
        if not what:
            return
        fix = 'leave them out with rename={"name": None} and strict=False, or build the model with these shapes'
        if strict and (missing or unexpected):
            fix = 'map the names with rename={"old.prefix": "new.prefix"}, or pass strict=False to load what fits'
        total = len(report.loaded) + len(report.missing) + len(report.mismatched)
        raise CheckpointError(
            f"the weights do not fit the model of {total} tensors: {what}",
            where="\n".join([str(contents.path), *describe_problems(missing, unexpected, report.mismatched)]),
            why="every tensor of the model is loaded exactly once" if strict else "shapes are never adapted",
            fix=fix,
        )


def rename_contents(contents: Contents, rename: Rename) -> Contents:
    """The contents under the names that `rename` gives; `details["renamed_away"]` lists those that it maps to None.

    Raises:
        CheckpointError: Two tensors get the same name.
    """
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
    """Compare names, shapes and dtypes; nothing is read or written.

    Args:
        model: Sharded or not.
        contents: The weights, under the model's names as far as that is known.
        tensors: The model's, where they are known already.

    Ranks:
        Local. The outcome is the same on every rank that has the same model and files.
    """
    tensors = model_tensors(model) if tensors is None else tensors
    names = [name for tensor in tensors for name in tensor.names]
    sections = MODEL_SECTIONS if contents.format != "safetensors" else ()
    base = getattr(model, "base_model_prefix", None)  # how transformers' models name their inner one
    prefixes = ("", PARALLEL_PREFIX, *sections, *([f"{base}."] if isinstance(base, str) and base else []))
    stored = contents.tensors
    found, left, prefix = match_names(names, stored, prefixes=prefixes)
    if contents.format != "safetensors" and prefix in MODEL_SECTIONS:
        left = [name for name in left if canonical_name(name).startswith(prefix)]
    computed = non_persistent_names(model) | names_elsewhere(model)
    ignorable = _patterns(model, "_keys_to_ignore_on_load_unexpected")

    def is_ignored(name: str) -> bool:
        if name.rpartition(".")[2] == "_extra_state":  # what a module keeps for itself: no tensor of the model
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
        tolerated.update(adapters)  # the weights of the model that they were added to
    return Matched(stored_names, copies, report, frozenset(tolerated))


def _converts(stored: str, expected: str) -> bool:
    """Fractions to fractions and integers to integers: anything else means another thing (quantised weights)."""
    return stored == expected or any(stored.startswith(kind) and expected.startswith(kind) for kind in _KINDS)


def _describe(tensor: ModelTensor | StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _patterns(model: nn.Module, attribute: str) -> list[re.Pattern[str]]:
    """What transformers' classes say about keys that may be too many or too few."""
    listed = getattr(model, attribute, None)
    return [re.compile(text) for text in listed] if isinstance(listed, (list, tuple, set)) else []
