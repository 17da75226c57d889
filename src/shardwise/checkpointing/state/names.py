"""Names of a run's tensors and values, and the sections of a checkpoint they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardwise.checkpointing.contents import Contents, KeyPath, StoredTensor
from shardwise.errors import CheckpointError

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module")
"""Parts that torch.compile, activation checkpointing, FSDP1 and Lightning put into names, wherever they wrap."""
PARALLEL_PREFIX = "module."
"""What DistributedDataParallel puts in front of all names. Further inside, a module may really be called so."""
MODEL_SECTIONS = ("model.", "state_dict.", "model_state_dict.", "module.")
"""Where the weights are in a file that holds more than weights, as in `{"model": ..., "optimizer": ...}`."""


def canonical_name(name: str) -> str:
    """`name` without the parts that wrappers put into it; `module.` in front is another matter, see `match_names`."""
    if "_" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


_MODEL_NAMES = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "network", "params")
_STEP_NAMES = ("step", "global_step", "iteration", "iter")


def find_sections(contents: Contents) -> tuple[KeyPath | None, tuple[KeyPath, ...]]:
    """Where the model and the optimizers lie in the nested dictionary that was saved.

    They are found by their shape, and by the usual names where that leaves a choice.

    Returns:
        The path to the one model's tensors, None where there is no model, or several; and those of the optimizers.
    """
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
        return next(iter(roots)) if len(roots) == 1 else named[0], optimizers
    return () if () in roots and not named else None, optimizers


def with_our_names(contents: Contents) -> Contents:
    """The same contents under `model.` and `optim.`, without what wrappers put into names.

    Loose values (`epoch`) go under `extra.`; a checkpoint that already has our names keeps them.

    Raises:
        CheckpointError: Two names become the same.
    """
    if contents.format == "sharded" or contents.details.get("has_our_names"):
        return contents
    model, optimizers = find_sections(contents)
    paths = [_path(contents, name) for name in contents.tensors]
    bare = [str(path[-1]) for path in paths if path[:-1] == model]
    strip = bool(bare) and all(name.startswith(PARALLEL_PREFIX) for name in bare)  # by DistributedDataParallel
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Any] = {}
    structure: dict[str, KeyPath] = {}
    step = contents.step
    for name in (*contents.tensors, *contents.values):
        path = _path(contents, name)
        renamed = _our_path(path, model, optimizers, strip, is_tensor=name in contents.tensors)
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
            values[new] = value = contents.values[name]
            if renamed[0] == "optim" and renamed[-1] in ("params", "param_names") and isinstance(value, list):
                values[new] = [_our_name(entry, strip) if isinstance(entry, str) else entry for entry in value]
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
    if is_tensor and model is not None and path[:-1] == model:
        return ("model", _our_name(str(path[-1]), strip))
    if len(path) == 1 and not is_tensor:
        return ("extra", path[0])
    return path


def _our_name(name: str, strip: bool) -> str:
    name = canonical_name(name)
    return name.removeprefix(PARALLEL_PREFIX) if strip else name
