"""guard(): ranks that take different branches are named at once, instead of hanging until a time-out."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwise import compat
from shardwise.diagnosing.board import Board, create_board, open_board
from shardwise.diagnosing.events import Kind, encode
from shardwise.diagnosing.witness import Witness
from shardwise.errors import ShardError
from shardwise.sharding.registry import sharded_state

_ATTRIBUTE = "_shardwise_guard"


class Guard:
    """What `guard` returns: watches until it is closed, the model is gone, or the process ends."""

    def __init__(self, model: nn.Module, witness: Witness, stop: Callable[[], None]) -> None:
        self.witness = witness
        self._model, self._stop = weakref.ref(model), stop

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching, and tell the others that this rank will not come any more.

        Ranks:
            Local.
        """
        self._stop()
        if (model := self._model()) is not None:
            model.__dict__.pop(_ATTRIBUTE, None)


def guard(model: nn.Module, *, patience: float = 10.0, report: Callable[[str], None] | None = None) -> Guard:
    """Watch a sharded model, and raise when ranks diverge.

    Before each gather and each reduction a rank writes down what it is about to do, where the other ranks can read it,
    and compares with its neighbours. A rank that took another branch raises before it starts the wrong collective; a
    rank that waits for one that died, left the loop or hangs says so after `patience`.

    Args:
        model: Sharded by shardwise or by hand.
        patience: Seconds without progress after which a waiting rank says whom it waits for, and where that one is.
        report: Gets what is said about a rank that is late; default: print to standard error.

    Returns:
        The guard; `close()` it, or use it as a context, when training ends.

    Raises:
        ShardError: Later, from the model's own calls, on the rank that diverged; ranks that wait for it raise when
            their collective fails.

    Ranks:
        Collective. Afterwards it sends nothing over the network.
    """
    existing = model.__dict__.get(_ATTRIBUTE)
    if existing is not None:
        return existing
    groups = _named_groups(model)
    board, rank = _open_together(_mesh_of(model, list(groups.values())))
    witness = Witness(board, rank, list(groups), patience, report or _print)
    for number, group in enumerate(groups.values()):
        _wire(group, number, witness)
    hook = register_optimizer_step_post_hook(_StepCounter(witness, list(groups.values())))

    def stop() -> None:
        hook.remove()
        witness.close()
        atexit.unregister(stop)

    atexit.register(stop)
    weakref.finalize(model, stop)
    model.__dict__[_ATTRIBUTE] = Guard(model, witness, stop)
    return model.__dict__[_ATTRIBUTE]


def _wire(group: Any, number: int, witness: Witness) -> None:
    def event(what: str, size: int, with_gradient: bool) -> None:
        witness.write(encode(_kind(what, with_gradient), number, size))

    def failed(error: Exception) -> None:
        verdict = witness.explain_failure()
        if verdict is not None:
            raise verdict from error

    compat.before_collectives(group, event, failed)


class _StepCounter:
    """Counts the steps of optimizers that hold this model's parameters."""

    def __init__(self, witness: Witness, groups: list[Any]) -> None:
        self._witness = witness
        self._groups = [weakref.ref(group) for group in groups]
        self._is_ours: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer not in self._is_ours:
            groups = [group for reference in self._groups if (group := reference()) is not None]
            own = {id(parameter) for group in groups for parameter in compat.sharded_parameters(group)}
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self._is_ours[optimizer] = any(id(parameter) in own for parameter in held)
        if self._is_ours[optimizer]:
            self._witness.slot.set_step(self._witness.slot.step + 1)


def _kind(what: str, with_gradient: bool) -> Kind:
    if what == "reduce":
        return Kind.REDUCE
    if compat.in_backward():
        return Kind.GATHER_BACKWARD
    return Kind.GATHER_FORWARD if with_gradient else Kind.GATHER_EVALUATION


def _named_groups(model: nn.Module) -> dict[str, Any]:
    groups = compat.named_groups(model)
    if not groups:
        raise ShardError(
            "the model is not sharded",
            where="guard(model)",
            why="there are no groups whose collectives could be watched",
            fix="call it after shardwise.shard(model), or fully_shard",
        )
    return groups


def _mesh_of(model: nn.Module, groups: list[Any]) -> DeviceMesh:
    state = sharded_state(model)
    if state is not None:
        return state.mesh
    parameter = next(parameter for group in groups for parameter in compat.sharded_parameters(group))
    assert isinstance(parameter, DTensor)
    return parameter.device_mesh


def _open_together(mesh: DeviceMesh) -> tuple[Board, int]:
    """Open one board for all ranks of the mesh."""
    ranks = mesh.mesh.flatten().tolist()
    rank = ranks.index(dist.get_rank())
    path = _from_first(create_board(len(ranks)) if rank == 0 else None, mesh)
    board = open_board(path, len(ranks))
    _from_first(None, mesh)  # all have opened it
    if rank == 0:
        path.unlink()
    return board, rank


def _from_first(value: Any, mesh: DeviceMesh) -> Any:
    """What the first rank of the mesh brings; also waits for everybody."""
    if dist.get_backend() == "fake":
        return value  # rank 0 of a world that is not there: benchmarks and estimates
    for axis in reversed(range(mesh.ndim)):
        values: list[Any] = [None] * mesh.size(axis)
        dist.all_gather_object(values, value, group=mesh.get_group(axis))
        value = values[0]
    return value


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
