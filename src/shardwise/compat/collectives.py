"""Collectives beside FSDP2's: private gloo groups, watching, joining, the flight recorder."""

import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.compat.fsdp import sharded_parameters


def all_gather_flat(output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather equal parts into one flat tensor; torch 2.13 renamed it and warns about the old name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, part, group=group)


def reduce_scatter_flat(
    output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM
) -> None:
    """Sum `whole` over the ranks and keep this rank's part of it."""
    if hasattr(dist, "reduce_scatter_single"):  # torch >= 2.13, where the old name warns
        dist.reduce_scatter_single(output, whole, op=op, group=group)
    else:
        dist.reduce_scatter_tensor(output, whole, op=op, group=group)


_private_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def private_gloo_group(purpose: str, timeout: timedelta) -> Any:
    """A gloo group of all ranks that torch does not know of, so that `destroy_process_group` leaves it alone.

    Every rank must make its private groups in the same order: the count of them is the name they meet under.
    """
    store = dist.distributed_c10d._get_default_store()
    count = _private_groups.setdefault(dist.group.WORLD, itertools.count())
    prefixed = dist.PrefixStore(f"{purpose}/{next(count)}", store)
    return dist.ProcessGroupGloo(prefixed, dist.get_rank(), dist.get_world_size(), timeout)


def broadcast_on(group: Any, tensor: torch.Tensor) -> None:
    """Overwrite `tensor` with rank 0's, on a group that torch does not know of."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


def gather_on(group: Any, tensor: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Fill `parts` on rank 0 with every rank's tensor, on a group that torch does not know of."""
    options = dist.GatherOptions()
    options.rootRank = 0
    group.gather([parts] if parts else [], [tensor], options).wait()


def largest_on(group: Any, tensor: torch.Tensor) -> None:
    """Overwrite each element of `tensor` with the largest that any rank has, on a group that torch does not know of."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([tensor], options).wait()


def watch_collectives(
    group: Any,
    *,
    before: Callable[[bool, int, bool], None],
    failed: Callable[[Exception], None],
    waiting: Callable[[], None],
) -> Callable[[], None]:
    """Follow the gathers and reductions of a group.

    Args:
        group: An FSDP2 parameter group.
        before: Gets whether it is a reduction, the elements sent, and whether gradients are recorded. It may raise: the
            collective is then not started.
        failed: Called with what the collective raised; may raise something that says more.
        waiting: Called now and then while the CPU waits for the others; may raise. On GPUs the CPU does not wait here.

    Returns:
        A function that stops it.
    """
    unshard, with_gradient = group.unshard, False

    def note_then_unshard(async_op: bool = False) -> None:
        nonlocal with_gradient
        with_gradient = torch.is_grad_enabled()  # further down FSDP2 switches it off
        unshard(async_op)

    note_then_unshard.watched = unshard  # pyrefly: ignore[missing-attribute]

    def report(comm: Any, is_reduction: bool) -> Callable[[], None]:
        plain = type(comm)
        call = plain.__call__
        may_wait = group.device.type == "cpu"

        def start(self: Any, *args: Any, **kwargs: Any) -> Any:
            sent = kwargs["input_tensor"] if "input_tensor" in kwargs else args[1]
            before(is_reduction, sent.numel(), with_gradient)
            try:
                if may_wait and not args and not kwargs.get("async_op"):
                    return wait_in_slices(call(self, **kwargs | {"async_op": True}), kwargs["group"], waiting)
                return call(self, *args, **kwargs)
            except Exception as error:
                failed(error)
                raise

        # A subclass, since FSDP2 asks for the class when its own settings change it.
        comm.__class__ = type(plain.__name__, (plain,), {"__call__": start})
        return functools.partial(setattr, comm, "__class__", plain)

    group.unshard = note_then_unshard
    undo = [report(group._all_gather_comm, False), report(group._reduce_scatter_comm, True)]
    watched = weakref.ref(group)  # whoever keeps what we return must not keep the model

    def stop() -> None:
        for restore in undo:
            restore()
        if (group := watched()) is not None and hasattr(group.unshard, "watched"):
            group.unshard = group.unshard.watched  # unless something else was put around it since

    return stop


_SLICE = timedelta(seconds=0.25)


def wait_in_slices(work: Any, process_group: Any, waiting: Callable[[], None]) -> None:
    """Wait for a collective, and let `waiting` end the wait by raising."""
    while work is not None:
        try:
            work.wait(_SLICE)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises if it failed; it may also have ended between the two
                return
        try:
            waiting()
        except Exception:
            # Destroying the group would wait for the collective, which may never end: leave it to the process's end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
            raise


def aborter(groups: Iterable[Any]) -> Callable[[], None]:
    """A function, for any thread, that ends the collectives of the groups where the backend can (NCCL)."""
    infos = [group.mesh_info for group in groups if group.device.type != "cpu"]
    names = ("shard_process_group", "reduce_scatter_process_group", "replicate_process_group")
    found = [getattr(info, name, None) for info in infos for name in names]
    process_groups = list({id(each): each for each in found if each is not None}.values())

    def abort() -> None:
        for process_group in process_groups:
            process_group.abort()

    return abort


def store_connector(prefix: str) -> Callable[[], Any]:
    """A function that opens a connection of its own to the store that all ranks met at."""
    store: Any = dist.distributed_c10d._get_default_store()

    def connect() -> Any:
        own = store.clone()  # a connection serves one thread at a time, and others wait in theirs for minutes
        own.set_timeout(timedelta(seconds=30))
        return dist.PrefixStore(prefix, own)

    return connect


def flight_record() -> bytes | None:
    """The pickle of torch's flight recorder on this rank; None where it is off or empty."""
    extension = torch._C._distributed_c10d
    dump = getattr(extension, "_dump_fr_trace", None) or getattr(extension, "_dump_nccl_trace", None)
    return dump() if dump is not None else None


def collective_numels(group: Any) -> tuple[int, int]:
    """Elements that a rank sends when a group is gathered, and when its gradients are reduced."""
    gathered = sum(fsdp_param.padded_sharded_param_size.numel() for fsdp_param in group.fsdp_params)
    return gathered, gathered * group.fsdp_params[0].mesh_info.shard_mesh_size if group.fsdp_params else 0


class CollectiveTap:
    """Calls `before` ahead of each gather and reduction of an FSDP2 group, while it is open; it may raise.

    It stands outside of whatever else watches the group at the time, and must be shut before that is.

    Args:
        group: An FSDP2 parameter group.
        before: Gets whether it is a reduction, what is sent, and the process group.
    """

    def __init__(self, group: Any, before: Callable[[bool, torch.Tensor, Any], None]) -> None:
        self._group, self._before = group, before
        self._tapped: dict[tuple[type, bool], type] = {}
        self._plain: list[tuple[Any, type]] = []

    def open(self) -> None:
        """Begin to listen."""
        for comm, is_reduction in ((self._group._all_gather_comm, False), (self._group._reduce_scatter_comm, True)):
            plain = type(comm)
            tapped = self._tapped.get((plain, is_reduction)) or self._make(plain, is_reduction)
            self._plain.append((comm, plain))
            comm.__class__ = tapped

    def shut(self) -> None:
        """Leave the group as it was."""
        while self._plain:
            comm, plain = self._plain.pop()
            comm.__class__ = plain

    def _make(self, plain: type, is_reduction: bool) -> type:
        before, call = self._before, plain.__call__

        def start(comm: Any, *args: Any, **kwargs: Any) -> Any:
            sent = kwargs["input_tensor"] if "input_tensor" in kwargs else args[1]
            before(is_reduction, sent, kwargs["group"] if "group" in kwargs else args[2])
            return call(comm, *args, **kwargs)

        # A subclass, since FSDP2 asks for the class when its own settings change it.
        tapped = type(plain.__name__, (plain,), {"__call__": start})
        self._tapped[plain, is_reduction] = tapped
        return tapped


def gathers_among_fewer(group: Any, process_group: Any) -> bool:
    """Whether it is the smaller group in which `reshard_after_forward=N` gathers for backward."""
    return process_group is not group.mesh_info.shard_process_group


def num_shards(group: Any) -> int:
    """Among how many ranks a group's parameters are cut; FSDP2 gathers nothing where it is 1."""
    return getattr(group.mesh_info, "shard_mesh_size", 1)


def is_data_parallel(group: Any) -> bool:
    """Whether nothing but FSDP2 cuts a group's parameters: no tensor parallelism, which communicates in between."""
    num_axes = group.mesh_info.mesh.ndim
    return all(isinstance(p, DTensor) and p.device_mesh.ndim == num_axes for p in sharded_parameters(group))


def join_gather(group: Any, num_elements: int, dtype: torch.dtype, *, among_fewer: bool) -> None:
    """Take part in a gather of the others, with zeros, and forget what comes."""
    info = group.post_forward_mesh_info if among_fewer else group.mesh_info
    sent = torch.zeros(num_elements, dtype=dtype, device=group.device)
    process_group = info.shard_process_group
    all_gather_flat(sent.new_empty(num_elements * process_group.size()), sent, process_group)


def join_reduction(group: Any, num_elements: int, dtype: torch.dtype, *, over_replicas: bool) -> None:
    """Take part in a reduction of the others, with zeros, and forget what comes."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    shards, replicas = group._reduce_scatter_process_group, group._all_reduce_process_group if group._is_hsdp else None
    # The same operation as the others: a backend may choose its algorithm by it.
    *_, scatter_op, reduce_op = _get_gradient_divide_factors(
        shards, replicas, dtype, group.device.type, group.gradient_divide_factor, group.force_sum_reduction_for_comms
    )
    sent = torch.zeros(num_elements, dtype=dtype, device=group.device)
    part = sent.new_empty(num_elements // shards.size())
    reduce_scatter_flat(part, sent, shards, scatter_op)
    if over_replicas:
        dist.all_reduce(part, op=reduce_op, group=replicas)
