"""Unsharded parameters: full_params(), iter_full_tensors()."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.distributed.agreement import gather_over_mesh, is_first, raise_on_all_ranks
from shardwise.distributed.mesh import widest_mesh
from shardwise.errors import CheckpointError, ConfigError, ShardError, listed
from shardwise.sharding import inventory
from shardwise.sharding.inventory import (
    broadcast_from_first,
    cut_by,
    gather_full,
    local_tensor,
    plain_values,
    sharded_axes,
)


def gather_in_buckets(
    named: Iterable[tuple[str, torch.Tensor]],
    *,
    bucket_bytes: int,
    keep: bool,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield each name with its full tensor, in order, with about two buckets of memory.

    Args:
        named: DTensors and plain tensors, the same names in the same order on every rank.
        bucket_bytes: Size of full tensors gathered by one collective; a larger tensor is gathered alone.
        keep: If False, take part in the collectives but yield None instead of tensors.
        dtype: Cast floating-point tensors to it before communication.

    Ranks:
        Collective, lazily: every rank must consume the same number of items.
    """
    bucket: list[_Item] = []
    cut, num_bytes = None, 0
    for name, tensor in named:
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        own, size = cut_by(tensor), tensor.numel() * target.itemsize
        is_cut_otherwise = cut is not None and own is not None and cut != own
        if bucket and (is_cut_otherwise or num_bytes + size > bucket_bytes):
            yield from _gather(bucket, keep)
            bucket, cut, num_bytes = [], None, 0
        bucket.append((name, tensor, target))
        cut, num_bytes = cut or own, num_bytes + size
    yield from _gather(bucket, keep)


_Item = tuple[str, torch.Tensor, torch.dtype]


def _gather(bucket: list[_Item], keep: bool) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the full tensors of one bucket. Collective."""
    with torch.no_grad():
        cut: list[Any] = [(tensor, dtype) for _, tensor, dtype in bucket if cut_by(tensor) is not None]
        full = gather_full(*zip(*cut, strict=True), keep=keep) if cut else []
        tensors = [
            full.pop(0) if cut_by(tensor) is not None else _whole(tensor).to(dtype) for _, tensor, dtype in bucket
        ]
    del full
    for index, (name, _, _) in enumerate(bucket):
        tensor, tensors[index] = tensors[index], None  # the consumer may free it before the end of the bucket
        yield name, tensor if keep else None


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full value of a tensor. Collective if it is sharded."""
    is_split = isinstance(tensor, DTensor) and sharded_axes(tensor)
    return (tensor.full_tensor() if is_split else plain_values(local_tensor(tensor))).detach()


def in_first_rank_order(
    named: Sequence[tuple[str, torch.Tensor]], mesh: DeviceMesh | None
) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in the order of the mesh's first rank, as `gather_in_buckets` requires.

    Ranks may list the same parameters in different orders, for example if groups come from Python sets. Tensors missing
    on the first rank are left out; a plain tensor missing on this rank is an empty meta tensor, not communicated.

    Args:
        named: This rank's tensors, with unique names.
        mesh: The ranks of the model.

    Raises:
        CheckpointError: Some ranks have no part of a sharded tensor; the same error on every rank.

    Ranks:
        Collective over the mesh.
    """
    listed = tuple((name, isinstance(tensor, DTensor), tensor.shape, tensor.dtype) for name, tensor in named)
    digest = hashlib.blake2b(repr(listed).encode()).digest()
    if all(other == digest for other in gather_over_mesh(mesh, digest)):  # on every rank, or on none
        return list(named)
    lists = gather_over_mesh(mesh, listed)
    holders: dict[str, list[int]] = {}
    for rank, other in enumerate(lists):
        for name, is_sharded, _, _ in other:
            if is_sharded:
                holders.setdefault(name, []).append(rank)
    everyone = set(range(len(lists)))
    refuse_missing({name: everyone - set(ranks) for name, ranks in holders.items() if len(ranks) < len(lists)})
    own = dict(named)
    return [
        (name, own[name] if name in own else torch.empty(shape, dtype=dtype, device="meta"))
        for name, _, shape, dtype in lists[0]
    ]


def refuse_missing(lacking: Mapping[str, set[int]]) -> None:
    """Raise if sharded tensors have no part on some ranks.

    Args:
        lacking: Ranks without a part, by tensor name.

    Ranks:
        Local; call it with the same argument on every rank.
    """
    if not lacking:
        return
    names, ranks = sorted(lacking), sorted(set().union(*lacking.values()))
    have = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
    raise CheckpointError(
        f"{have} no shard of {len(names)} tensor{'s' if len(names) > 1 else ''} that other ranks have a shard of",
        where="\n".join(listed(names)),
        why="each rank has a shard of the tensor, and all are needed",
        fix="keep the same state on every rank: an optimizer that skips a parameter on one rank (no gradient there, "
        "its state deleted) must skip it on all",
    )


_BUCKET_BYTES = 256 * 1024**2

_Slots = dict[nn.Parameter, list[tuple[nn.Module, str]]]  # a tied parameter has several


@contextmanager
def full_params(
    model: nn.Module, *, writeback: bool = False, rank0_only: bool = False, recurse: bool = True
) -> Iterator[None]:
    """Register full, plain parameters instead of the sharded ones in the context.

    They have the storage dtype of the model (not the compute dtype), the same ties, and no gradients.
    `state_dict()` and `load_state_dict()` use them. A forward that would unshard parameters raises.

    Args:
        model: Sharded by shardwise or by hand, or unsharded.
        writeback: Keep changes made in the context. Otherwise, or if the context raises, changes are dropped.
        rank0_only: Only the first rank gets the values; on other ranks parameters are on the meta device, where
            reading fails and writing does nothing. With `writeback`, all ranks get the first rank's values.
        recurse: False excludes modules that are sharded as separate groups.

    Raises:
        ShardError: The model is not materialized, a forward started in the context, or a parameter was replaced
            by one of another shape.

    Ranks:
        Collective, on entering and, with `writeback`, on leaving. Without `rank0_only` every rank writes back
        its shard of its own copy: make the same change on every rank.
    """
    reshard(model)
    _refuse_meta(model)
    slots = find_slots(model, recurse)
    own: dict[nn.Parameter, nn.Parameter] = {}
    groups = compat.param_groups(model) if recurse else compat.groups_of(model)  # inner groups still unshard
    with compat.untouched_by_fsdp(groups, _refuse_gather):
        error: BaseException | None = None
        try:
            own = _gather_parameters(slots, rank0_only)
            _register(slots, own)
            yield
        except Exception as caught:
            error = caught
        finally:
            changed = {parameter: _registered(slots[parameter], own[parameter]) for parameter in own}
            _register(slots, {parameter: parameter for parameter in slots})
    if writeback:
        raise_on_all_ranks(error or _find_reshaped(slots, changed, model))
        _write_back(changed, rank0_only)
    elif error is not None:
        raise error


def iter_full_tensors(
    model: nn.Module,
    *,
    bucket_bytes: int = _BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    rank0_only: bool = False,
    include_buffers: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `(name, full tensor)` for everything in the model's state dict, one bucket at a time.

    Names are those of the unsharded model, without the prefixes of torch.compile and activation
    checkpointing. A tied tensor is yielded once, under its first name. Unsharded tensors share the model's
    memory: copy one before you change it.

    Args:
        model: Sharded by shardwise or by hand, or unsharded.
        bucket_bytes: Size gathered by one collective; the memory in use is at most about twice that.
        dtype: Cast floating-point tensors to it before communication.
        rank0_only: Yield on the first rank only; other ranks take part without results.
        include_buffers: Also yield persistent buffers of this rank.

    Raises:
        ConfigError: `bucket_bytes` is not positive.
        ShardError: The model is not materialized.

    Ranks:
        Collective, lazily: consume it to the end, or stop at the same item, on every rank.
    """
    if bucket_bytes < 1:
        raise ConfigError(
            f"bucket_bytes is {bucket_bytes}",
            where="iter_full_tensors(bucket_bytes=...)",
            why="a bucket has at least one tensor",
            fix="omit it, or pass a positive number of bytes",
        )
    reshard(model)
    _refuse_meta(model)
    return _full_tensors(model, bucket_bytes, dtype, rank0_only, include_buffers)


def reshard(model: nn.Module) -> None:
    """Register the sharded parameters of all groups and free unsharded ones, which may be stale."""
    for group in compat.param_groups(model):
        compat.wait_and_reshard(group)


def _full_tensors(
    model: nn.Module, bucket_bytes: int, dtype: torch.dtype | None, rank0_only: bool, include_buffers: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    named: dict[torch.Tensor, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) or (include_buffers and isinstance(value, torch.Tensor)):
            named.setdefault(value, inventory.canonical_name(name))
    keep = not rank0_only or _is_first_rank(named)
    pairs = ((name, tensor) for tensor, name in named.items())
    for name, full in gather_in_buckets(pairs, bucket_bytes=bucket_bytes, dtype=dtype, keep=keep):
        if full is not None:
            yield name, full


def find_slots(model: nn.Module, recurse: bool) -> _Slots:
    """Return where each parameter is registered; without `recurse` not in modules that are separate groups."""
    groups: set[nn.Module] = {each for each in model.modules() if isinstance(each, FSDPModule) and each is not model}
    slots: _Slots = {}
    for _, module in model.named_modules(memo=set() if recurse else groups):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slots.setdefault(parameter, []).append((module, name))
    return slots


def _gather_parameters(slots: _Slots, rank0_only: bool) -> dict[nn.Parameter, nn.Parameter]:
    keep = not rank0_only or _is_first_rank(slots)
    named = ((str(index), parameter) for index, parameter in enumerate(slots))
    gathered = gather_in_buckets(named, bucket_bytes=_BUCKET_BYTES, keep=keep)
    own: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, (_, full) in zip(slots, gathered, strict=True):
        if full is None:
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        elif compat.storage_id(full) == compat.storage_id(local_tensor(parameter)):
            full = full.clone()  # a plain tensor: changes in the context must not affect the model's own
        own[parameter] = nn.Parameter(full, requires_grad=parameter.requires_grad)
    return own


def _register(slots: _Slots, chosen: dict[nn.Parameter, nn.Parameter]) -> None:
    for parameter, places in slots.items():
        for module, name in places:
            module._parameters[name] = chosen[parameter]


def _registered(places: list[tuple[nn.Module, str]], own: nn.Parameter) -> torch.Tensor:
    """Return the parameter registered at the end of the block: the full one, unless it was replaced."""
    current = [module._parameters.get(name) for module, name in places]
    replaced = [tensor for tensor in current if tensor is not None and tensor is not own]
    return replaced[0] if replaced else own


def _find_reshaped(slots: _Slots, changed: dict[nn.Parameter, torch.Tensor], model: nn.Module) -> ShardError | None:
    for parameter, new in changed.items():
        if new.shape != parameter.shape:
            module, name = slots[parameter][0]
            fqn = next((path for path, other in model.named_modules() if other is module), "")
            return ShardError(
                f"a parameter of shape {tuple(parameter.shape)} was replaced by one of {tuple(new.shape)}",
                where=f"{fqn}.{name}".lstrip("."),
                why="full_params writes values back into the shards, whose shapes are fixed",
                fix="change the shape before the model is sharded",
            )
    return None


@torch.no_grad()
def _write_back(changed: dict[nn.Parameter, torch.Tensor], rank0_only: bool) -> None:
    """Write changed full values back to the shards. Collective with `rank0_only`."""
    mesh = widest_mesh(changed) if rank0_only else None
    for parameter, new in changed.items():
        if mesh is not None:
            is_here = not new.is_meta
            new = new.detach().to(parameter.dtype) if is_here else torch.empty_like(new, device=mesh.device_type)
            broadcast_from_first(new, mesh, range(mesh.ndim))
        local_tensor(parameter).copy_(inventory.local_part(new.detach(), parameter))


def _is_first_rank(tensors: Iterable[torch.Tensor]) -> bool:
    mesh = widest_mesh(tensors)
    return is_first(mesh) if mesh is not None else not dist.is_initialized() or dist.get_rank() == 0


def _refuse_meta(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ShardError(
                "a parameter on the meta device has no data",
                where=name,
                why="the model was built on the meta device and not materialized",
                fix="shardwise.materialize(model)",
            )


def _refuse_gather(*_args: object, **_kwargs: object) -> NoReturn:
    raise ShardError(
        "a sharded module's forward was started inside full_params",
        where="with full_params(model): ...",
        why="its hooks would unshard over the full parameters",
        fix="leave the block first, or call a submodule that is not a separate group",
    )
