"""Match the model's names with the checkpoint's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.checkpointing.contents import Contents, StoredTensor
from shardwise.checkpointing.state import names as state_names
from shardwise.checkpointing.state.names import MODEL_SECTIONS, KeyReport, Mismatch, Rename, canonical_name, rename_with
from shardwise.checkpointing.state.slices import ModelTensor, model_tensors, non_persistent_names
from shardwise.errors import CheckpointError

_INTEGERS = ("int", "uint")
_FRACTIONS = ("float", "bfloat", "complex")


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
            where="\n".join(
                [str(contents.path), *state_names.describe_problems(missing, unexpected, report.mismatched)]
            ),
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
    return dataclasses.replace(contents, tensors=tensors, details={**contents.details, "renamed_away": renamed_away})


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
    prefixes = ("", state_names.PARALLEL_PREFIX, *sections, *([f"{base}."] if isinstance(base, str) and base else []))
    matching = state_names.match_names(names, contents.tensors, prefixes=prefixes)
    has_sections = contents.format != "safetensors" and matching.prefix in MODEL_SECTIONS
    left = [name for name in matching.left if not has_sections or canonical_name(name).startswith(matching.prefix)]
    computed = non_persistent_names(model)
    ignorable = _patterns(model, "_keys_to_ignore_on_load_unexpected")
    ignored = [name for name in left if _is_ignored(name.removeprefix(matching.prefix), computed, ignorable)]
    tolerable = _patterns(model, "_keys_to_ignore_on_load_missing")
    found, stored = matching.found, contents.tensors
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
        unexpected=tuple(name for name in left if name not in set(ignored)),
        mismatched=tuple(mismatched),
        tied=tied,
        renamed={name: stored[key].name for name, key in stored_names.items() if stored[key].name != name},
        cast=cast,
        ignored=tuple(ignored),
    )
    tolerated = frozenset(name for name in missing if any(pattern.search(name) for pattern in tolerable))
    return Matched(stored_names, copies, report, tolerated)


def _converts(stored: str, expected: str) -> bool:
    """Fractions to fractions and integers to integers: anything else means another thing (quantised weights)."""
    if stored == expected:
        return True
    return any(stored.startswith(kind) and expected.startswith(kind) for kind in (_INTEGERS, _FRACTIONS)) and (
        stored.startswith("complex") == expected.startswith("complex")
    )


def _describe(tensor: ModelTensor | StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _is_ignored(name: str, computed: Iterable[str], patterns: Sequence[re.Pattern[str]]) -> bool:
    if name.rpartition(".")[2] == "_extra_state":  # what a module keeps for itself: no tensor of the model
        return True
    return canonical_name(name) in computed or any(pattern.search(name) for pattern in patterns)


def _patterns(model: nn.Module, attribute: str) -> list[re.Pattern[str]]:
    """What transformers' classes say about keys that may be too many or too few."""
    listed = getattr(model, attribute, None)
    return [re.compile(text) for text in listed] if isinstance(listed, (list, tuple, set)) else []
