"""The environment variables of launchers, and errors of the rendezvous."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import EnvironmentProblem

_DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Rank and rendezvous of this process, as its launcher sets them."""

    rank: int = 0
    """Global rank."""
    local_rank: int = 0
    """Rank on this machine, which selects the GPU."""
    world_size: int = 1
    """Number of ranks."""
    local_world_size: int = 1
    """Number of ranks on this machine."""
    master_addr: str = ""
    """Host of rank 0; empty in a single process."""
    master_port: int = 0
    """Port of rank 0's store."""
    restarts: int = 0
    """Number of restarts by the launcher."""
    job: str = ""
    """The launcher's job name, unchanged by restarts; empty without one."""
    source: str = "single"
    """The launcher: torchrun, ray, slurm, mpi or single."""

    @property
    def init_method(self) -> str | None:
        """Argument of `init_process_group`; None for a single process."""
        if self.source == "single":
            return None
        # torchrun's agent already runs a store, which torch finds by these variables only.
        return "env://" if self.source in ("torchrun", "ray") else f"tcp://{self.master_addr}:{self.master_port}"


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Read the launcher's environment variables; a single process without a launcher."""
    env = os.environ if environment is None else environment
    # A batch script without srun also has SLURM_NTASKS, but is a single process: only a step has ranks.
    is_slurm_step = "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env
    if "RANK" in env or "WORLD_SIZE" in env:
        launch = _read_torchrun(env)
    elif is_slurm_step:
        launch = _read_slurm(env)
    elif "OMPI_COMM_WORLD_RANK" in env:
        launch = Launch(
            rank=_number(env, "OMPI_COMM_WORLD_RANK"),
            world_size=_number(env, "OMPI_COMM_WORLD_SIZE"),
            local_rank=_number(env, "OMPI_COMM_WORLD_LOCAL_RANK", default=0),
            local_world_size=_number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", default=1),
            source="mpi",
            **_rendezvous(env),
        )
    else:
        return Launch()
    ranks = [("rank", launch.rank, launch.world_size), ("local rank", launch.local_rank, launch.local_world_size)]
    for name, number, size in ranks:
        if not 0 <= number < size:
            raise EnvironmentProblem(
                f"{name} {number} is not below the number of ranks, {size}",
                where=f"environment of {launch.source}",
                why="ranks are numbered from 0",
                fix="start the script with torchrun, which sets all of them",
            )
    return launch


def _rendezvous(env: Mapping[str, str], host: str = "127.0.0.1", port: int = _DEFAULT_PORT) -> dict[str, Any]:
    return {
        "master_addr": env.get("MASTER_ADDR") or host,
        "master_port": _number(env, "MASTER_PORT", default=port),
    }


def _read_torchrun(env: Mapping[str, str]) -> Launch:
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", default=world_size)
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK", default=rank % max(local_world_size, 1)),
        local_world_size=local_world_size,
        restarts=_number(env, "TORCHELASTIC_RESTART_COUNT", default=0),
        job=env.get("TORCHELASTIC_RUN_ID", "").removeprefix("none"),  # torchrun's value for no name
        source="ray" if "RAY_JOB_ID" in env or "RAY_ADDRESS" in env else "torchrun",
        **_rendezvous(env),
    )


def _read_slurm(env: Mapping[str, str]) -> Launch:
    job = _number(env, "SLURM_JOB_ID", default=0)
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "127.0.0.1")
    # As in "4(x2),3": the number of tasks on each machine, of which this machine's is used.
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    per_node = [int(tasks) for tasks, repeat in counts for _ in range(int(repeat or 1))]
    node = _number(env, "SLURM_NODEID", default=0)
    world_size = _number(env, "SLURM_STEP_NUM_TASKS")
    return Launch(
        rank=_number(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(env, "SLURM_LOCALID", default=0),
        local_world_size=per_node[node] if node < len(per_node) else world_size,
        restarts=_number(env, "SLURM_RESTART_COUNT", default=0),
        job=f"slurm-{job}" if job else "",
        source="slurm",
        **_rendezvous(env, first_host(hosts), 20000 + job % 20000),  # jobs on one machine must not share a port
    )


def first_host(hosts: str) -> str:
    """The first name of a Slurm host list: `node[017-032,040],login` is `node017`."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", hosts)
    return "127.0.0.1" if match is None else match[1] + (match[2] or "")


def _number(env: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    value = env.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.strip().isdigit():
        raise EnvironmentProblem(
            f"{name} is {'not set' if value is None else repr(value)}",
            where="environment of this process",
            why="a launcher sets RANK, WORLD_SIZE and related variables, as numbers",
            fix="start the script with torchrun, or unset all of them for a single process",
        )
    return int(value)


def local_environment(rank: int, num_ranks: int, port: int, num_restarts: int) -> dict[str, str]:
    """Environment variables of a local rank, as torchrun sets them; the launcher hosts the store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(num_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def rendezvous_error(error: BaseException, launch: Launch, timeout_s: float) -> EnvironmentProblem:
    """Return the error of a failed rendezvous, from torch's exception."""
    address, port = f"{launch.master_addr}:{launch.master_port}", launch.master_port
    text = str(error)
    first_line = (text.strip().splitlines() or [""])[0].split(" Exception raised from")[0].rstrip(". ")
    other_port = "choose another port for all ranks: export MASTER_PORT=PORT"
    if launch.source in ("torchrun", "ray"):
        other_port = "choose another port: torchrun --rdzv-endpoint HOST:PORT, or --master-port PORT"
    if re.search(r"EADDRINUSE|address already in use", text, re.IGNORECASE):
        what = f"port {port} of this machine is in use"
        why = "rank 0 listens there for the other ranks; another job, or one that has not ended yet, has it"
        fix = f"{other_port}; `ss -tlnp 'sport = :{port}'` shows who has it"
    elif re.search(r"failed to listen", text, re.IGNORECASE):
        what, why = f"rank 0 cannot listen on port {port}", first_line
        fix = f"{other_port}, above 1024 and open between the machines"
    elif joined := re.search(r"(\d+)/(\d+) clients joined", text):
        what = f"only {joined[1]} of {joined[2]} ranks came to {address} within {timeout_s:.0f} s"
        why = "the others were not started, ended before, or cannot reach this machine"
        fix = "read the output of the other ranks; check that WORLD_SIZE is what was started and the port is open"
    else:
        what = f"no rank 0 answers at {address} ({timeout_s:.0f} s)"
        why = f"every rank meets the others there ({first_line})"
        fix = (
            "check that rank 0 was started and runs, that MASTER_ADDR is its machine as the others reach it, "
            "and that no firewall closes the port"
        )
    where = f"rank {launch.rank} of {launch.world_size} ({launch.source})"
    return EnvironmentProblem(what, where=where, why=why, fix=fix)
