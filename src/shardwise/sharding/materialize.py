"""materialize(): allocate and initialize meta tensors, independently of the number of ranks."""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from shardwise import compat
from shardwise.distributed.agreement import gather_over_mesh
from shardwise.distributed.mesh import default_mesh, latest_mesh, model_mesh, widest_mesh
from shardwise.errors import ShardError
from shardwise.models.nested_tensors import change_tensors, find_tensors
from shardwise.models.random_state import kept_random_state, seed_everything
from shardwise.planning.plan import numbered_alike
from shardwise.sharding import inventory
from shardwise.sharding.inventory import TensorEntry, class_name, is_poisoned, meta_left_in, take_inventory
from shardwise.sharding.registry import sharded_state
from shardwise.sharding.repointing import watch_optimizers

Initializer = Callable[[], object]

_RESETS = ("_reset_parameters", "reset_parameters")
# Names of methods that recompute a module's tables (rotary embeddings, masks).
_BUFFER_METHODS = ("reset_buffers", "init_buffers", "_init_buffers", "rope_init")


def initializers_of(
    module: nn.Module, owner: nn.Module | None, init: Callable[[nn.Module], object] | None
) -> list[Initializer]:
    """Return the initializers of a module; later ones override earlier ones, as when the model is built without meta.

    The constructor runs the module's own `reset_parameters`; then a framework applies the model's `_init_weights`;
    the user's `model.apply(init)` comes last.

    Args:
        module: Module with its own parameters registered in full.
        owner: The nearest module at or above it with `_init_weights(module)`, as in transformers.
        init: The user's function of a module, if any.
    """
    found: list[Initializer] = []
    if hasattr(module, "config"):
        found.append(lambda: _write_configured(module))
    for name in _BUFFER_METHODS:
        found += [getattr(module, name)] if _takes(getattr(module, name, None), 0) else []
    if is_parametrized(module):
        found.append(lambda: _reset_parametrized(module))
    else:
        found += _resets_of(module)
    if _takes(getattr(module, "_init_weights", None), 0):
        found.append(module._init_weights)  # pyrefly: ignore[bad-argument-type]
    if owner is not None:
        found.append(lambda: owner._init_weights(module))  # pyrefly: ignore[not-callable]
    if init is not None:
        found.append(lambda: init(module))
    return found


def _resets_of(module: nn.Module) -> list[Initializer]:
    return [getattr(module, name) for name in _RESETS if _takes(getattr(module, name, None), 0)]


def _write_configured(module: Any) -> None:
    """Write values that transformers computes from the config in `__init__`, but not in `_init_weights`."""
    for name, parameter in module.named_parameters(recurse=False):
        value = getattr(module.config, f"{name}_init_value", None)  # CLIP's logit_scale
        if isinstance(value, int | float):
            nn.init.constant_(parameter, value)
    if callable(getattr(module, "rope_init_fn", None)):  # rotary tables of transformers 4
        table, module.attention_scaling = module.rope_init_fn(module.config, torch.device("cpu"))
        for name in ("inv_freq", "original_inv_freq"):
            if isinstance(getattr(module, name, None), torch.Tensor):
                getattr(module, name).copy_(table)


def _reset_parametrized(module: Any) -> None:
    """Reset the tensors of a parametrization such as weight_norm, then write their original parameters."""
    first = next(iter(module.parametrizations))
    lineage = type(module).__mro__
    made = next(index for index, kind in enumerate(lineage) if isinstance(vars(kind).get(first), property))
    plain: Any = object.__new__(lineage[made + 1])
    plain.__dict__.update(module.__dict__)
    shown = {name: getattr(module, name) for name in module.parametrizations}
    plain.__dict__["_parameters"] = {
        **module._parameters,
        **{name: nn.Parameter(torch.empty_like(tensor), requires_grad=False) for name, tensor in shown.items()},
    }
    for reset in _resets_of(plain):
        reset()
    for name, steps in module.parametrizations.items():
        value = plain._parameters[name]
        for step in reversed(steps):
            value = step.right_inverse(value) if hasattr(step, "right_inverse") else value
        if steps.is_tensor:
            steps.original.copy_(value)
        else:
            for number, part in enumerate(value):
                getattr(steps, f"original{number}").copy_(part)


def _takes(function: object, num_args: int) -> bool:
    """Whether a function can be called with this number of positional arguments only."""
    if not callable(function):
        return False
    try:
        signature = inspect.signature(function)
        signature.bind(*[None] * num_args)
    except (TypeError, ValueError):  # it requires others, or is a builtin without a signature
        return False
    parameters = signature.parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(required) == num_args


# Attributes that return the parameter's values; all others are metadata.
_VALUE_ATTRIBUTES = {"data", "T", "mT", "H", "mH", "real", "imag"}
_METADATA_METHODS = {
    "dim", "ndimension", "size", "stride", "numel", "nelement", "element_size", "is_floating_point",
    "is_complex", "is_contiguous",
    "storage_offset", "get_device", "requires_grad_", "is_pinned", "__hash__", "__len__",
    "__repr__", "__format__", "register_hook",
}  # fmt: skip
# These overwrite all of their first argument, so it is not gathered first. If an initializer fails before on one
# rank, the others then do not wait in a collective.
_OVERWRITING = {
    "normal_", "uniform_", "constant_", "zeros_", "ones_", "eye_", "dirac_", "orthogonal_", "sparse_",
    "zero_", "fill_", "copy_",
    "exponential_", "bernoulli_", "trunc_normal_", "xavier_uniform_", "xavier_normal_",
    "kaiming_uniform_", "kaiming_normal_",
}  # fmt: skip


class FullOnDemand(TorchFunctionMode):
    """Passes full plain tensors to torch functions instead of tensors of `entries`.

    An initializer of a parent (MultiheadAttention's, a model's `_init_weights` on itself) then sees its
    descendants as in a single process, draws the same numbers on any number of ranks, and needs memory for
    one full tensor at a time.

    Args:
        entries: All tensors of the model.
        keep: Called with each full tensor that may have been written, except for protected entries.
        is_protected: Whether writes to an entry are dropped.
        device: Device of full tensors.
    """

    def __init__(
        self,
        entries: Iterable[TensorEntry],
        keep: Callable[[TensorEntry, torch.Tensor], None],
        is_protected: Callable[[TensorEntry], bool],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._entry_of = {id(entry.tensor): entry for entry in entries}
        self._keep, self._is_protected, self._device = keep, is_protected, device
        self._open: dict[TensorEntry, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` with full tensors instead of sharded ones."""
        kwargs = kwargs or {}
        if _is_about_metadata(func):
            return func(*args, **kwargs)
        used = [entry for tensor in find_tensors((args, kwargs)) if (entry := self._entry(tensor)) is not None]
        if used:
            self._close_unused(used)
            overwritten = (args[0] if args else kwargs.get("tensor")) if func.__name__ in _OVERWRITING else None
            args, kwargs = change_tensors((args, kwargs), lambda tensor: self._in_full(tensor, tensor is overwritten))
        return func(*args, **kwargs)

    def close(self) -> None:
        """Keep written values and free the full tensors.

        Ranks:
            Local, unless `keep` communicates.
        """
        for entry in list(self._open):
            self._close(entry)

    def _entry(self, value: Any) -> TensorEntry | None:
        entry = self._entry_of.get(id(value))
        if entry is None or entry.tensor is not value:
            return None
        return entry if isinstance(value, DTensor) or self._is_protected(entry) else None

    def _in_full(self, tensor: torch.Tensor, is_overwritten: bool) -> torch.Tensor:
        entry = self._entry(tensor)
        if entry is None:
            return tensor
        if entry not in self._open:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device) if is_overwritten else None
            self._open[entry] = entry.gather(self._device) if empty is None else empty
        return self._open[entry]

    def _close_unused(self, used: list[TensorEntry]) -> None:
        """Free full tensors without other references, so that only a few exist at a time."""
        for entry in [entry for entry in self._open if entry not in used]:
            # Two references are ours: the dict's and the call's.
            if not compat.is_aliased(self._open[entry]) and sys.getrefcount(self._open[entry]) <= 2:
                self._close(entry)

    def _close(self, entry: TensorEntry) -> None:
        full = self._open.pop(entry)
        if not self._is_protected(entry):
            self._keep(entry, full)


def _is_about_metadata(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(func.__self__, "__name__", "") not in _VALUE_ATTRIBUTES
    return name in _METADATA_METHODS


def refuse_unwritten(model: nn.Module, entries: Sequence[TensorEntry], mesh: DeviceMesh | None) -> None:
    """Raise if any rank finds poison in its part of a tensor, or a tensor still on meta.

    Raises:
        ShardError: Names all such tensors; the same error on every rank.

    Ranks:
        Collective.
    """
    unwritten = [entry.fqn for entry in entries if entry.pending and is_poisoned(entry.local)]
    unwritten += meta_left_in(model)
    unwritten = list(dict.fromkeys(name for names in gather_over_mesh(mesh, unwritten) for name in names))
    if unwritten:
        alike = numbered_alike(unwritten)
        lines = [same[0] if len(same) == 1 else f"{same[0]} … {same[-1]} ({len(same)})" for same in alike]
        names, plural = set(unwritten), "s" if len(unwritten) > 1 else ""
        classes = sorted({class_name(entry.places[0].module) for entry in entries if entry.fqn in names})
        raise ShardError(
            f"{len(unwritten)} tensor{plural} of {class_name(model)} got no values",
            where="\n".join(lines),
            why="a model built on meta has no values; no reset_parameters, _init_weights or init wrote these",
            fix=f"write them in reset_parameters() of {', '.join(classes) or 'a module'}, or in init(module)",
        )


M = TypeVar("M", bound=nn.Module)


def materialize(
    model: M,
    init: Callable[[nn.Module], object] | None = None,
    *,
    device: torch.device | str | None = None,
    sync_from_rank_zero: bool = False,
) -> M:
    """Allocate and initialize every tensor on the meta device; return the model.

    Modules are initialized one by one, children first. Their initializers see full parameters; then each rank
    keeps its shard. All ranks draw the same numbers, from a seed of rank 0, so that the weights do not depend
    on the number of ranks. The initializers of a module, where later ones override earlier ones, are its own
    `reset_parameters` (or `_reset_parameters`, `reset_buffers` and similar), `_init_weights(module)` of the
    nearest module above with this method, and `init(module)`. The result equals building the model without the
    meta device and then calling `model.apply(init)`. Tensors that already have values do not change. All others
    are filled with NaN or another pattern first, to verify that they are written.

    Args:
        model: Sharded or unsharded model, entirely or partly on the meta device.
        init: Called with each module that has tensors without values, in itself or in descendants. It may write
            parameters of descendants: `lambda module: module.init_weights() if module is model else None`
            is for a model that initializes itself from the root. It must use the same tensors on every rank.
        device: Device of buffers and unsharded parameters; by default the compute device of the model.
        sync_from_rank_zero: Broadcast rank 0's values: those written by `init`, and existing values of an
            unsharded model. Existing shards are only broadcast between replicas, because rank 0 has only its
            own shards.

    Raises:
        ShardError: A tensor was not written, is still on meta, or differs between ranks with copies, or an
            initializer failed.

    Ranks:
        Collective. Every rank raises the same error.
    """
    for group in compat.param_groups(model):
        if not compat.is_resharded(group):
            compat.wait_and_reshard(group)
    entries = take_inventory(model)
    mesh = mesh_of(model, entries)
    if any(entry.pending for entry in entries):
        target = _device(entries, device, mesh)
        _allocate(model, [entry for entry in entries if entry.pending], target)
        walk = _Initialization(entries, target, mesh if sync_from_rank_zero else None)
        # Every rank draws a seed, so that equal random states stay equal; all use the first rank's.
        seed = gather_over_mesh(mesh, int(torch.randint(2**62, (), device="cpu")))[0]
        # Tables are computed on the CPU, as when a model is built without meta, even under torch.device("meta").
        with kept_random_state(target), torch.no_grad(), torch.device("cpu"):
            seed_everything(seed)
            walk.visit(model, "", None, init)
        for failure in gather_over_mesh(mesh, walk.failure):
            if failure is not None:
                raise walk.failure or failure
    if sync_from_rank_zero and mesh is not None:
        for entry in entries:
            if entry.fingerprint is None:
                inventory.broadcast_from_first(entry.local, mesh, inventory.replicated_axes(entry, mesh))
    refuse_unwritten(model, entries, mesh)
    if mesh is not None:
        inventory.check_equal(entries, mesh)
    return model


def allocate(model: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Allocate those of the model's `tensors` that are on meta; the caller must write all of them."""
    wanted = {id(tensor) for tensor in tensors}
    entries = take_inventory(model)
    pending = [entry for entry in entries if entry.pending and id(entry.tensor) in wanted]
    if pending:
        _allocate(model, pending, _device(entries, None, mesh_of(model, entries)), poisoned=False)


def _allocate(model: nn.Module, pending: Sequence[TensorEntry], device: torch.device, *, poisoned: bool = True) -> None:
    on_meta = [entry.tensor for entry in pending]
    for entry in pending:
        entry.allocate(device, poisoned=poisoned)
    replaced = [old for old, entry in zip(on_meta, pending, strict=True) if entry.tensor is not old]
    if replaced:
        watch_optimizers(model, dict.fromkeys(replaced))


class _Initialization:
    """One pass over the modules, children first."""

    def __init__(self, entries: Sequence[TensorEntry], device: torch.device, mesh_to_sync: DeviceMesh | None) -> None:
        self.failure: ShardError | None = None
        self._device, self._mesh_to_sync = device, mesh_to_sync
        self._own: dict[nn.Module, list[TensorEntry]] = {}
        for entry in entries:
            for module in {place.module for place in entry.places}:
                self._own.setdefault(module, []).append(entry)
        self._locked: set[TensorEntry] = {entry for entry in entries if not entry.pending}
        self._seen: set[nn.Module] = set()
        self._on_demand = FullOnDemand(entries, self._keep, self._locked.__contains__, device)

    def visit(
        self,
        module: nn.Module,
        path: str,
        owner: nn.Module | None,
        init: Callable[[nn.Module], object] | None,
    ) -> bool:
        """Initialize `module` after its children; return whether its tree had uninitialized tensors."""
        if module in self._seen:
            return False
        self._seen.add(module)
        owner = module if _takes(getattr(module, "_init_weights", None), 1) else owner
        children = [
            self.visit(child, f"{path}.{name}".lstrip("."), owner, init) for name, child in module.named_children()
        ]
        own = [entry for entry in self._own.get(module, []) if entry.pending]
        if not own and not any(children):
            return False
        error = self._initialize(module, own, initializers_of(module, owner, init), is_leaf=not any(children))
        if error is not None and self.failure is None:
            self.failure = ShardError(
                f"an initializer of {class_name(module)} failed: {type(error).__name__}: {error}",
                where=path or "the root module",
                why="it runs with the module's own parameters unsharded and uninitialized",
                fix="correct its reset_parameters() or _init_weights(), or pass an init(module) that writes it",
            )
            self.failure.__cause__ = error
        return True

    def _initialize(
        self, module: nn.Module, own: list[TensorEntry], initializers: list[Initializer], *, is_leaf: bool
    ) -> Exception | None:
        """Run the initializers and keep the values written; return the error if one failed.

        This rank continues with other modules, because other ranks may have no error; all ranks raise at the end.
        """
        error = None
        # The first module that writes a tied tensor owns it; later ones must not draw it again.
        done = {entry for entry in own if entry.written}
        unwritten = {entry: next(p for p in entry.places if p.module is module) for entry in own if entry not in done}
        self._locked |= done
        with ExitStack() as stack:
            for entry in unwritten:
                if isinstance(entry.tensor, DTensor):
                    stack.enter_context(entry.with_full_tensor(self._device))
            try:
                with self._on_demand:
                    # Skip initializers for leaves only: those of a module with children may write the children.
                    _run(initializers, (lambda: all(map(_is_written, unwritten.values()))) if is_leaf else None)
            except Exception as caught:
                error = caught
            self._on_demand.close()
            for entry, place in unwritten.items():
                self._keep(entry, place.get())
        self._locked -= done
        return error

    def _keep(self, entry: TensorEntry, full: torch.Tensor | None) -> None:
        """Store this rank's part of the tensor registered for an entry.

        Ranks:
            Collective if the values come from the first rank.
        """
        if full is None or full.is_meta:
            return
        if self._mesh_to_sync is not None:
            inventory.broadcast_from_first(full, self._mesh_to_sync, range(self._mesh_to_sync.ndim))
        is_sharded = isinstance(entry.tensor, DTensor)
        if not is_sharded and full.shape != entry.tensor.shape:
            entry.set_tensor(full.to(self._device))  # a table recomputed with another size
        elif full is not entry.tensor:
            entry.store(full)
        entry.written = not is_poisoned(full)
        entry.fingerprint = inventory.fingerprint(full) if is_sharded else None


def _run(initializers: list[Initializer], is_done: Callable[[], bool] | None) -> None:
    """Run initializers in order; with `is_done`, skip earlier ones that would be overwritten."""
    first = 0
    if is_done is not None:
        for first in reversed(range(len(initializers))):
            initializers[first]()
            if is_done():
                break
        first += 1
    for initializer in initializers[first:]:
        initializer()


def _is_written(place: inventory.Place) -> bool:
    standing = place.get()
    return standing is None or not (standing.is_meta or is_poisoned(standing))


def mesh_of(model: nn.Module, entries: Sequence[TensorEntry]) -> DeviceMesh | None:
    """Return the mesh of this model; None in a single process without a process group."""
    state = sharded_state(model)
    mesh = widest_mesh((entry.tensor for entry in entries), None if state is None else state.mesh)
    if mesh is None:
        return default_mesh() if dist.is_initialized() else None
    # Ranks of a tensor axis have the same plain tensors and must draw the same numbers, unlike pipeline stages.
    latest = latest_mesh()
    if latest is None or not set(mesh.mesh_dim_names or "?") < set(latest.mesh_dim_names or ()):
        return mesh
    return model_mesh(latest)


def _device(entries: Sequence[TensorEntry], device: torch.device | str | None, mesh: DeviceMesh | None) -> torch.device:
    """Return the compute device of the model, which is also the device of full tensors."""
    if device is not None:
        return torch.device(device)
    for entry in entries:
        if entry.fsdp_param is not None:
            return compat.devices_of(entry.fsdp_param)[1]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or (mesh is not None and mesh.device_type != accelerator.type):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
