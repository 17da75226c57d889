"""A run in one `torch.save` file: model, optimizers and extras gathered to the first rank, which writes as they come.

For handing over and for small models; a run resumes faster from the sharded checkpoints of `Checkpointer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardwise.checkpointing.contents import Contents, KeyPath, StoredTensor
from shardwise.checkpointing.formats.detect import open_checkpoint, require_names
from shardwise.checkpointing.formats.full import NOTES, FullWriter, make_notes, plain_values
from shardwise.checkpointing.loading import load_run
from shardwise.checkpointing.reading import RequestReader, Verify, open_on_ranks
from shardwise.checkpointing.state.names import with_our_names
from shardwise.checkpointing.state.nested import FlatState, put_together
from shardwise.checkpointing.state.run import Run, Stateful
from shardwise.checkpointing.weights import refuse_remote, refuse_stage, stream_gathered
from shardwise.distributed.agreement import Channel, run_on_all
from shardwise.distributed.mesh import widest_mesh
from shardwise.errors import CheckpointError
from shardwise.planning.settings import dtype_name
from shardwise.progress import Progress
from shardwise.sharding.inventory import take_inventory
from shardwise.sharding.materialize import mesh_of

Optimizers = Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer]


def save_full(
    path: str | Path,
    *,
    model: nn.Module | Mapping[str, nn.Module],
    optimizers: Optimizers = (),
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **objects: Stateful,
) -> None:
    """Write `{"model": ..., "optim": ..., "extra": ..., ...}` with full tensors, for `torch.load(weights_only=True)`.

    Optimizer state stands under parameter names, as `get_optimizer_state_dict` gives it. Of values that differ
    between ranks (batch statistics) the first rank's are kept. Tied parameters stand under each of their names.

    Args:
        path: The file.
        model: Sharded or not; one, or several by name.
        optimizers: One, several, or several by name, with all the state they hold now.
        extra: Plain values and tensors to keep beside them, such as the step.
        overwrite: Replace a file that is there already. It stays until the new one is whole and on the disk.
        progress: Is told the bytes that are written.
        objects: Anything with `state_dict` and `load_state_dict`, by name: `scheduler=...`.

    Raises:
        CheckpointError: Something cannot be stored, or the file cannot be written.

    Ranks:
        Collective. No rank holds more than two buckets besides its own part; the first writes.
    """
    run = Run(model, optimizers, objects)
    mesh = _mesh(run)
    run_on_all(lambda: refuse_remote(path), mesh, CheckpointError)
    run_on_all(lambda: [refuse_stage(each) for each in run.models.values()], mesh, CheckpointError)
    tree, tensors = run_on_all(lambda: _as_tree(run.collect(extra=extra)), mesh, CheckpointError)
    stream_gathered(FullWriter(Path(path), tree, overwrite=overwrite), tensors, mesh, progress)


def load_full(
    path: str | Path,
    *,
    model: nn.Module | Mapping[str, nn.Module],
    optimizers: Optimizers = (),
    strict: bool = True,
    verify: Verify = "while",
    broadcast: bool = False,
    progress: Progress | None = None,
    **objects: Stateful,
) -> Any:
    """Load what `save_full` wrote, or any checkpoint with a model and optimizers, into a sharded run or a plain one.

    Args:
        path: The file; any format that holds what is asked for will do.
        model: As when it was saved; on meta or not, on any number of ranks.
        optimizers: Stepped or not.
        strict: Everything stored of each object must find its place, and every place its value.
        verify: When checksums are compared, as in `load_weights`.
        broadcast: Only the first rank opens the file, and sends the others what they need.
        progress: Is told the bytes that this rank reads.
        objects: Anything with `load_state_dict`, by name.

    Returns:
        What was given as `extra`.

    Raises:
        CheckpointError: The same on every rank; nothing was changed unless the data turned out corrupt.

    Ranks:
        Collective over all ranks.
    """
    run = Run(model, optimizers, objects)
    mesh = _mesh(run)

    def open_file() -> Contents:
        only = next(iter(run.models.values())) if len(run.models) == 1 else None
        contents = open_checkpoint(path, model=only)
        require_names(contents)
        return with_our_names(contents)

    channel = Channel(CheckpointError)
    try:
        contents = open_on_ranks(open_file, mesh, broadcast=broadcast)
        reader = RequestReader(broadcast, mesh)
        loaded = load_run(
            run, contents, channel, strict=strict, verify=verify, rng=False, progress=progress, reader=reader
        )
    finally:
        channel.close()
    return loaded.extra


def _as_tree(found: FlatState) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The nested dictionary with infos in place of tensors, and the tensors by name."""
    infos = {
        name: StoredTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape))
        for name, tensor in found.tensors.items()
    }
    parts: dict[KeyPath, Any] = {found.paths[name]: info for name, info in infos.items()}
    parts |= {found.paths[alias]: infos[name] for alias, name in found.aliases.items()}
    parts |= {found.paths[name]: value for name, value in plain_values(found.values).items()}
    return {**put_together(parts), NOTES: make_notes(found.values, found.paths)}, found.tensors


def _mesh(run: Run) -> DeviceMesh | None:
    return widest_mesh((), *(mesh_of(model, take_inventory(model)) for model in run.models.values()))
