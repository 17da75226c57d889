"""Other collectives: private gloo groups, observation, trial steps without communication, the flight recorder."""

import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.compat.fsdp import sharded_parameters


def all_gather_flat(output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-gather equal parts into one flat tensor; torch 2.13 renamed the function and warns about the old name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, part, group=group)


def reduce_scatter_flat(output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Reduce-scatter `whole` over the ranks; torch 2.13 renamed this function too."""
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce_scatter(output, whole, group=group)


_num_private_stores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def private_store(purpose: str) -> Any:
    """Return a namespace of the rendezvous store; its timeout is that of `init_process_group`.

    Every rank must open its private stores in the same order, because their number is part of the namespace.
    """
    store = dist.distributed_c10d._get_default_store()
    count = _num_private_stores.setdefault(dist.group.WORLD, itertools.count())
    return dist.PrefixStore(f"{purpose}/{next(count)}", store)


def private_gloo_group(store: Any, timeout: timedelta) -> Any:
    """Return a gloo group of all ranks that torch does not register, so `destroy_process_group` does not affect it."""
    return dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size(), timeout)


def gather_on(group: Any, tensor: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Gather every rank's tensor into `parts` on rank 0, on a group that is not registered in torch."""
    options = dist.GatherOptions()
    options.rootRank = 0
    group.gather([parts] if parts else [], [tensor], options).wait()


def watch_collectives(
    group: Any,
    *,
    before: Callable[[bool, int, bool], None],
    failed: Callable[[Exception], None],
    waiting: Callable[[], None],
) -> Callable[[], None]:
    """Observe the all-gathers and reductions of a group.

    Args:
        group: An FSDP2 parameter group.
        before: Receives whether it is a reduction, the number of elements sent, and whether gradients are recorded.
            If it raises, the collective is not started.
        failed: Called with the error of a collective; may raise a more specific one.
        waiting: Called periodically while the CPU waits for other ranks; may raise. On GPUs the CPU does not wait here.

    Returns:
        A function that stops the observation.
    """
    unshard, with_gradient = group.unshard, False

    def note_then_unshard(async_op: bool = False) -> None:
        nonlocal with_gradient
        with_gradient = torch.is_grad_enabled()  # FSDP2 disables gradients before the all-gather
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

        # A subclass, because FSDP2 checks the type when a setting replaces the object.
        comm.__class__ = type(plain.__name__, (plain,), {"__call__": start})
        return functools.partial(setattr, comm, "__class__", plain)

    group.unshard = note_then_unshard
    undo = [report(group._all_gather_comm, False), report(group._reduce_scatter_comm, True)]
    watched = weakref.ref(group)  # `stop` must not keep the model alive

    def stop() -> None:
        for restore in undo:
            restore()
        if (group := watched()) is not None and hasattr(group.unshard, "watched"):
            group.unshard = group.unshard.watched  # unless it was wrapped again since

    return stop


_SLICE = timedelta(seconds=0.25)


def wait_in_slices(work: Any, process_group: Any, waiting: Callable[[], None]) -> None:
    """Wait for a collective; call `waiting` periodically, which may end the wait by raising."""
    while work is not None:
        try:
            work.wait(_SLICE)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises if it failed; it may also have completed meanwhile
                return
        try:
            waiting()
        except Exception:
            # Destroying the group would wait for the collective, which may never end: keep it until the process ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
            raise


def process_groups_of(group: Any) -> tuple[Any, Any]:
    """The process groups over which a group is sharded and replicated; None for no such axis."""
    info = group.mesh_info
    return getattr(info, "shard_process_group", None), getattr(info, "replicate_process_group", None)


def reduces_over_replicas(group: Any) -> bool:
    """Whether the next reduction of a group also sums over replicas (HSDP)."""
    return group is not None and group.all_reduce_grads


def aborter(groups: Iterable[Any]) -> Callable[[], None]:
    """Return a function, for any thread, that aborts the collectives of the groups, if supported (NCCL)."""
    infos = [group.mesh_info for group in groups if group.device.type != "cpu"]
    names = ("shard_process_group", "reduce_scatter_process_group", "replicate_process_group")
    found = [getattr(info, name, None) for info in infos for name in names]
    process_groups = list({id(each): each for each in found if each is not None}.values())

    def abort() -> None:
        for process_group in process_groups:
            process_group.abort()

    return abort


def store_connector(prefix: str, timeout: timedelta = timedelta(seconds=30)) -> Callable[[], Any]:
    """Return a function that opens a new connection to the rendezvous store."""
    store: Any = dist.distributed_c10d._get_default_store()

    def connect() -> Any:
        own = store.clone()  # a connection serves one thread at a time, which may wait for minutes
        own.set_timeout(timeout)
        return dist.PrefixStore(prefix, own)

    return connect


def flight_record() -> bytes | None:
    """The pickle of torch's flight recorder on this rank; None if it is off or empty."""
    extension = torch._C._distributed_c10d
    dump = getattr(extension, "_dump_fr_trace", None) or getattr(extension, "_dump_nccl_trace", None)
    return dump() if dump is not None else None


def collective_numels(group: Any) -> tuple[int, int]:
    """Return the number of elements that a rank sends to all-gather a group and to reduce its gradients."""
    gathered = sum(fsdp_param.padded_sharded_param_size.numel() for fsdp_param in group.fsdp_params)
    return gathered, gathered * group.fsdp_params[0].mesh_info.shard_mesh_size if group.fsdp_params else 0


def is_data_parallel(group: Any) -> bool:
    """Whether only FSDP2 shards a group's parameters, without tensor parallelism, which communicates inside layers."""
    num_axes = group.mesh_info.mesh.ndim
    return all(isinstance(p, DTensor) and p.device_mesh.ndim == num_axes for p in sharded_parameters(group))


_local_depth = 0


def are_collectives_local() -> bool:
    """Whether `local_collectives` is active."""
    return _local_depth > 0


@contextmanager
def local_collectives() -> Iterator[None]:
    """Replace FSDP2's and shardwise's collectives inside the block by local copies of this rank's data."""

    def all_gather(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        for part in output_tensor.view(-1).split(max(input_tensor.numel(), 1)):
            if part.data_ptr() != input_tensor.data_ptr():  # FSDP2 gathers in place
                part.copy_(input_tensor.view(-1))

    def reduce_scatter(output: torch.Tensor, input: torch.Tensor, *_: Any, **__: Any) -> None:
        output.view(-1).copy_(input.reshape(-1)[: output.numel()])

    def all_reduce(*_: Any, **__: Any) -> None:
        pass

    replaced = {
        "all_gather_into_tensor": all_gather,
        "all_gather_single": all_gather,  # torch >= 2.13
        "reduce_scatter_tensor": reduce_scatter,
        "reduce_scatter_single": reduce_scatter,  # torch >= 2.13
        "all_reduce": all_reduce,
    }
    global _local_depth
    real = {name: getattr(dist, name) for name in replaced if hasattr(dist, name)}
    for name in real:
        setattr(dist, name, replaced[name])
    _local_depth += 1
    try:
        yield
    finally:
        _local_depth -= 1
        for name, function in real.items():
            setattr(dist, name, function)
