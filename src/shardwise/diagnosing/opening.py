"""Opening the boards of a run together: one a machine, and the way between machines."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise import compat
from shardwise.diagnosing.board import Board, create_board, open_board
from shardwise.diagnosing.machines import Machines, group_by_machine, machine_name
from shardwise.diagnosing.mirror import Mirror
from shardwise.errors import ShardError


def open_boards(mesh: DeviceMesh, machine: str | None) -> tuple[Board, Machines, Mirror | None, int]:
    """Open the board of this machine, and the way to the boards of others.

    Args:
        mesh: The ranks that take part.
        machine: The name of this machine; ranks of the same name share memory. Default: found out.

    Returns:
        The board, who is where, what copies the slots of other machines, and this rank's place.

    Raises:
        ShardError: A rank cannot open the board that the first rank of its machine made.

    Ranks:
        Collective over the mesh.
    """
    members = mesh.mesh.flatten().tolist()
    rank = members.index(dist.get_rank())
    names = gather_from(mesh, machine or machine_name())
    machines = group_by_machine(names, rank)
    is_first = rank == machines.local[0]
    paths = gather_from(mesh, create_board(len(members)) if is_first else None)
    board, problem = _try_to_open(paths[machines.local[0]], len(members))
    problems = gather_from(mesh, problem)
    if is_first:
        paths[rank].unlink()
    _raise_if_any(problems)
    assert board is not None
    board.slots[rank].open()
    return board, machines, _open_mirror(mesh, board, machines, rank), rank


def _open_mirror(mesh: DeviceMesh, board: Board, machines: Machines, rank: int) -> Mirror | None:
    if len(machines.ranks) == 1:
        return None
    token = gather_from(mesh, uuid.uuid4().hex)[0]
    connect: Callable[[], Any] = compat.store_connector(f"shardwise-guard/{token}")
    mirror = Mirror(board, machines, rank, connect, announces=mesh.device_type == "cpu")
    if rank == machines.local[0]:
        mirror.publish_first()
    gather_from(mesh, None)  # every machine can be read
    return mirror


def _try_to_open(path: Path, num_ranks: int) -> tuple[Board | None, str | None]:
    try:
        return open_board(path, num_ranks), None
    except OSError as error:
        return None, str(error)


def _raise_if_any(problems: Sequence[str | None]) -> None:
    failed = [rank for rank, problem in enumerate(problems) if problem is not None]
    if failed:
        raise ShardError(
            f"rank {failed[0]} cannot open the board of its machine: {problems[failed[0]]}",
            where="guard(model)",
            why="ranks of one machine share a file in memory; containers of one host may have memory of their own",
            fix="guard(model, machine=...) with another name in each container",
        )


def gather_from(mesh: DeviceMesh, value: Any) -> list[Any]:
    """What each rank of the mesh brings, in the mesh's order; also waits for everybody.

    Ranks:
        Collective over the mesh.
    """
    if dist.get_backend() == "fake":
        return [value] * mesh.size()  # rank 0 of a world that is not there: benchmarks and estimates
    gathered: list[Any] = [value]
    for axis in reversed(range(mesh.ndim)):
        parts: list[Any] = [None] * mesh.size(axis)
        dist.all_gather_object(parts, gathered, group=mesh.get_group(axis))
        gathered = [item for part in parts for item in part]
    return gathered
