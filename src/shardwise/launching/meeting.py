"""Ranks that cannot meet: what torch says about ports and stores, as one error with a fix."""

from __future__ import annotations

import re

from shardwise.errors import EnvironmentProblem
from shardwise.launching.launchers import Launch

_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_CANNOT_LISTEN = re.compile(r"failed to listen", re.IGNORECASE)
_JOINED = re.compile(r"(\d+)/(\d+) clients joined")


def cannot_meet(error: BaseException, launch: Launch, timeout_s: float) -> EnvironmentProblem:
    """The error of ranks that did not come together.

    Args:
        error: What torch raised while the process group was made.
        launch: Who this process is.
        timeout_s: How long ranks wait for each other.

    Ranks:
        Local: each rank that fails to meet the others says what it saw.
    """
    address = f"{launch.master_addr}:{launch.master_port}"
    where = f"rank {launch.rank} of {launch.world_size} ({launch.source})"
    text = str(error)
    if _IN_USE.search(text):
        return EnvironmentProblem(
            f"port {launch.master_port} of this machine is in use",
            where=where,
            why="rank 0 listens there for the other ranks; another job, or one that has not ended yet, has it",
            fix=f"{_other_port(launch)}; `ss -tlnp 'sport = :{launch.master_port}'` shows who has it",
        )
    if _CANNOT_LISTEN.search(text):
        return EnvironmentProblem(
            f"rank 0 cannot listen on port {launch.master_port}",
            where=where,
            why=_first_line(text),
            fix=f"{_other_port(launch)}, above 1024 and open between the machines",
        )
    joined = _JOINED.search(text)
    if joined is not None:
        return EnvironmentProblem(
            f"only {joined[1]} of {joined[2]} ranks came to {address} within {timeout_s:.0f} s",
            where=where,
            why="the others were not started, ended before, or cannot reach this machine",
            fix="read the output of the other ranks; check that WORLD_SIZE is what was started and the port is open",
        )
    return EnvironmentProblem(
        f"no rank 0 answers at {address} ({timeout_s:.0f} s)",
        where=where,
        why=f"every rank meets the others there ({_first_line(text)})",
        fix="check that rank 0 was started and runs, that MASTER_ADDR is its machine as the others reach it, "
        "and that no firewall closes the port",
    )


def _other_port(launch: Launch) -> str:
    match launch.source:
        case "torchrun" | "ray":
            return "choose another port: torchrun --rdzv-endpoint HOST:PORT, or --master-port PORT"
        case _:
            return "choose another port for all ranks: export MASTER_PORT=PORT"


def _first_line(text: str) -> str:
    line = (text.strip().splitlines() or [""])[0]
    return line.split(" Exception raised from")[0].rstrip(". ")
