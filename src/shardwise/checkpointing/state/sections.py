"""Which part of a checkpoint is the model and which the optimizer, whoever wrote it, under the names we use. No torch.

People save `{"model": ..., "optimizer": ...}`, `{"state_dict": ...}`, or the bare state dict, with the prefixes of
whatever wrapped the model. Conversion and comparison need one spelling: `model.<name>`, `optim.state.<name>.<key>`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from shardwise.checkpointing.contents import Contents, StoredTensor
from shardwise.checkpointing.state.keys import PARALLEL_PREFIX, canonical_name
from shardwise.errors import CheckpointError

KeyPath = tuple[str | int, ...]
_MODEL_NAMES = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "network", "params")
_STEP_NAMES = ("step", "global_step", "iteration", "iter")
_OURS = ("extra", "rng", "per_rank")


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
    roots: dict[KeyPath, int] = {}
    for name in contents.tensors:
        path = paths[name]
        if path[0] not in _OURS[1:] and not any(_starts_with(path, (*root, "state")) for root in optimizers):
            roots[path[:-1]] = roots.get(path[:-1], 0) + 1
    return Sections(_model_root(roots), optimizers)


def with_our_names(contents: Contents) -> Contents:
    """The same contents under `model.` and `optim.`, without what wrappers put into names.

    Loose values (`epoch`) go under `extra.`; a checkpoint that already has our names keeps them.

    Raises:
        CheckpointError: Two names become the same.

    Ranks:
        Local.
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


def _starts_with(path: KeyPath, root: KeyPath) -> bool:
    return path[: len(root)] == root


def _model_root(roots: dict[KeyPath, int]) -> KeyPath | None:
    if len(roots) == 1:
        return next(iter(roots))
    named = [root for root in roots if len(root) == 1 and root[0] in _MODEL_NAMES]
    if len(named) == 1:
        return named[0]
    return () if () in roots and not named else None


def _parallel_prefix(contents: Contents, root: KeyPath | None) -> bool:
    """Whether every name of the model begins with what DistributedDataParallel puts there."""
    if root is None:
        return False
    names = [path[-1] for path in (_path(contents, name) for name in contents.tensors) if path[:-1] == root]
    return bool(names) and all(str(name).startswith(PARALLEL_PREFIX) for name in names)


def _our_path(path: KeyPath, sections: Sections, strip: bool, *, is_tensor: bool) -> KeyPath:
    for root in sections.optimizers:
        if _starts_with(path, root) and len(path) > len(root) and path[len(root)] in ("state", "param_groups"):
            rest = path[len(root) :]
            if rest[0] == "state" and len(rest) == 3:
                rest = ("state", _our_name(str(rest[1]), strip), rest[2])
            return ("optim", *rest) if len(sections.optimizers) == 1 else ("optim", *_below(root), *rest)
    if is_tensor and sections.model is not None and path[:-1] == sections.model:
        return ("model", _our_name(str(path[-1]), strip))
    if len(path) == 1 and not is_tensor:
        return ("extra", path[0])
    return path


def _below(root: KeyPath) -> Iterable[str | int]:
    return root[1:] if root[:1] == ("optim",) else root


def _our_name(name: str, strip: bool) -> str:
    name = canonical_name(name)
    return name.removeprefix(PARALLEL_PREFIX) if strip else name


def _our_value(path: KeyPath, value: Any, strip: bool) -> Any:
    if path[0] == "optim" and path[-1] in ("params", "param_names") and isinstance(value, list):
        return [_our_name(entry, strip) if isinstance(entry, str) else entry for entry in value]
    return value
