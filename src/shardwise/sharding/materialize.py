"""Give a model on meta its values, holding no more than this rank's part and one module in full."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.sharding.initialisers import Initialiser, initialisers_of, weights_owner
from shardwise.sharding.inventory import Entry, Place, class_name, is_meta, take_inventory
from shardwise.sharding.mesh import default_mesh, latest_mesh
from shardwise.sharding.on_demand import FullOnDemand
from shardwise.sharding.poison import fingerprint, is_poisoned
from shardwise.sharding.registry import sharded_state
from shardwise.sharding.replicas import broadcast_from_first, check_equal, replicated_axes, values_of_ranks
from shardwise.sharding.seeding import same_random_stream
from shardwise.sharding.unwritten import refuse_unwritten
from shardwise.sharding.watching import watch_optimizers

M = TypeVar("M", bound=nn.Module)


def materialize(
    model: M,
    init: Callable[[nn.Module], object] | None = None,
    *,
    device: torch.device | str | None = None,
    sync_from_rank_zero: bool = False,
) -> M:
    """Allocate and initialise every tensor that is still on the meta device; return the model.

    Module by module, children first, a module's own parameters stand in full while its initialisers run;
    then each rank keeps its part. All ranks draw the same numbers, from a seed that rank 0 draws, so the
    weights do not depend on the number of ranks. What runs on a module, the later overriding the earlier:
    its own `reset_parameters` (or `_reset_parameters`, `reset_buffers` and their like),
    `_init_weights(module)` of the nearest module above that has one, and `init(module)`. The outcome is
    that of building the model for real and then `model.apply(init)`. Tensors that have values already are
    never changed. Each of the others is proven written: it is poisoned first.

    Args:
        model: Sharded or not, on meta as a whole or in part.
        init: Called with each module that holds tensors without values, itself or further down. It may write
            parameters of descendants: `lambda module: module.init_weights() if module is model else None`
            serves a model that initialises itself from the top. What it touches must not depend on the rank.
        device: Of buffers and of parameters that are not sharded; default: where the model computes.
        sync_from_rank_zero: Send rank 0's values to all: those that `init` wrote, and those that an unsharded
            model held before. Shards that had values are sent between replicas only: rank 0 holds no more
            than its own part of them.

    Raises:
        ShardError: A tensor was not written, is still on meta, or differs between ranks that hold copies; or
            an initialiser failed.

    Ranks:
        Collective. Every rank raises the same error.
    """
    for group in compat.param_groups(model):
        if not compat.is_settled(group):
            compat.settle(group)
    entries = take_inventory(model)
    mesh = mesh_of(model, entries)
    if any(entry.pending for entry in entries):
        target = _device(entries, device, mesh)
        _allocate(model, [entry for entry in entries if entry.pending], target)
        walk = _Walk(entries, target, mesh if sync_from_rank_zero else None)
        # Tables are computed on the CPU, as when a model is built for real, even under torch.device("meta").
        with same_random_stream(target, mesh), torch.no_grad(), torch.device("cpu"):
            walk.visit(model, "", None, init)
        for failure in values_of_ranks(walk.failure, mesh):
            if failure is not None:
                raise walk.failure or failure
    if sync_from_rank_zero and mesh is not None:
        for entry in entries:
            if entry.fingerprint is None:
                broadcast_from_first(entry.local, mesh, replicated_axes(entry, mesh))
    refuse_unwritten(model, entries, mesh)
    if mesh is not None:
        check_equal(entries, mesh)
    return model


def allocate(model: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Give storage without values to those of the model's `tensors` that stand on meta: the caller writes them all.

    Ranks:
        Local.
    """
    wanted = {id(tensor) for tensor in tensors}
    entries = take_inventory(model)
    pending = [entry for entry in entries if entry.pending and id(entry.tensor) in wanted]
    if pending:
        _allocate(model, pending, _device(entries, None, mesh_of(model, entries)), poisoned=False)


def _allocate(model: nn.Module, pending: Sequence[Entry], device: torch.device, *, poisoned: bool = True) -> None:
    on_meta = [entry.tensor for entry in pending]
    for entry in pending:
        entry.allocate(device, poisoned=poisoned)
    replaced = [old for old, entry in zip(on_meta, pending, strict=True) if entry.tensor is not old]
    if replaced:
        watch_optimizers(model, replaced)


class _Walk:
    """One pass over the modules, children first."""

    def __init__(self, entries: Sequence[Entry], device: torch.device, mesh_to_sync: DeviceMesh | None) -> None:
        self.failure: ShardError | None = None
        self._device, self._mesh_to_sync = device, mesh_to_sync
        self._own: dict[nn.Module, list[Entry]] = {}
        for entry in entries:
            for module in {place.module for place in entry.places}:
                self._own.setdefault(module, []).append(entry)
        self._locked: set[Entry] = {entry for entry in entries if not entry.pending}
        self._seen: set[nn.Module] = set()
        self._on_demand = FullOnDemand(entries, self._keep, self._locked.__contains__, device)

    def visit(
        self,
        module: nn.Module,
        path: str,
        owner: nn.Module | None,
        init: Callable[[nn.Module], object] | None,
    ) -> bool:
        """Initialise `module` after its children; whether anything was owed in its tree."""
        if module in self._seen:
            return False
        self._seen.add(module)
        owner = weights_owner(module, owner)
        children = [
            self.visit(child, f"{path}.{name}".lstrip("."), owner, init) for name, child in module.named_children()
        ]
        own = [entry for entry in self._own.get(module, []) if entry.pending]
        if not own and not any(children):
            return False
        error = self._initialise(module, own, initialisers_of(module, owner, init), is_leaf=not any(children))
        if error is not None and self.failure is None:
            self.failure = _failed(module, path, error)
        return True

    def _initialise(
        self, module: nn.Module, own: list[Entry], initialisers: list[Initialiser], *, is_leaf: bool
    ) -> Exception | None:
        """Run the initialisers and keep what they wrote; return the error where one failed.

        Other ranks may be well, so this one goes on with the walk; all of them raise at its end.
        """
        error = None
        # A tied tensor belongs to the first module that writes it; later ones must not draw it again.
        done = {entry for entry in own if entry.written}
        owed = {entry: entry.place_in(module) for entry in own if entry not in done}
        self._locked |= done
        with ExitStack() as stack:
            for entry in owed:
                if isinstance(entry.tensor, DTensor):
                    stack.enter_context(entry.standing_in_full(self._device))
            try:
                with self._on_demand:
                    # Only a leaf's: a module with children may be there to write those.
                    _run(initialisers, (lambda: all(map(_is_written, owed.values()))) if is_leaf else None)
            except Exception as caught:
                error = caught
            self._on_demand.close()
            for entry, place in owed.items():
                self._keep(entry, place.get())
        self._locked -= done
        return error

    def _keep(self, entry: Entry, full: torch.Tensor | None) -> None:
        """Store this rank's part of what now stands in an entry's place."""
        if full is None or is_meta(full):
            return
        if self._mesh_to_sync is not None:
            broadcast_from_first(full, self._mesh_to_sync, range(self._mesh_to_sync.ndim))
        is_sharded = isinstance(entry.tensor, DTensor)
        if not is_sharded and full.shape != entry.tensor.shape:
            entry.stand(full.to(self._device))  # a table that was rebuilt in another size
        elif full is not entry.tensor:
            entry.store(full)
        entry.written = not is_poisoned(full)
        entry.fingerprint = fingerprint(full) if is_sharded else None


def _run(initialisers: list[Initialiser], is_done: Callable[[], bool] | None) -> None:
    """Run them weakest first; where `is_done` can tell, skip weaker ones that would be overwritten anyhow."""
    first = 0
    if is_done is not None:
        for first in reversed(range(len(initialisers))):
            initialisers[first]()
            if is_done():
                break
        first += 1
    for initialiser in initialisers[first:]:
        initialiser()


def _is_written(place: Place) -> bool:
    standing = place.get()
    return standing is None or not (is_meta(standing) or is_poisoned(standing))


def _failed(module: nn.Module, path: str, error: Exception) -> ShardError:
    failure = ShardError(
        f"an initialiser of {class_name(module)} failed: {type(error).__name__}: {error}",
        where=path or "the root module",
        why="it runs with the module's own parameters in full, on tensors without values yet",
        fix="correct its reset_parameters() or _init_weights(), or pass an init(module) that writes it",
    )
    failure.__cause__ = error
    return failure


def mesh_of(model: nn.Module, entries: Sequence[Entry]) -> DeviceMesh | None:
    """The ranks that hold this model between them; None in a single process without a process group."""
    meshes = [entry.tensor.device_mesh for entry in entries if isinstance(entry.tensor, DTensor)]
    if (state := sharded_state(model)) is not None:
        meshes.append(state.mesh)
    if not meshes:
        return default_mesh() if dist.is_initialized() else None
    mesh = max(meshes, key=lambda mesh: mesh.ndim)
    # Ranks along a tensor axis hold the same plain tensors and must draw the same numbers.
    whole = latest_mesh()
    is_part = whole is not None and set(mesh.mesh_dim_names or "?") < set(whole.mesh_dim_names or ())
    return whole if is_part else mesh


def _device(entries: Sequence[Entry], device: torch.device | str | None, mesh: DeviceMesh | None) -> torch.device:
    """Where the model computes, which is where whole tensors are made."""
    if device is not None:
        return torch.device(device)
    for entry in entries:
        if entry.fsdp_param is not None:
            return entry.fsdp_param.device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or (mesh is not None and mesh.device_type != accelerator.type):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
