"""Where ranks come from: read a launcher's environment, or start local ranks with torch's elastic agent.

The only file, with diagnosing/environment.py, that reads environment variables. Imports torch only to start
ranks.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from shardwise.errors import EnvironmentProblem

# What a rank needs before it can do anything; the fork server imports it once for all of them.
_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"]
_DEFAULT_PORT = 29500
_AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Who this process is among the ranks, as its launcher says."""

    rank: int = 0
    """Number among all ranks."""
    local_rank: int = 0
    """Number among the ranks of this machine; picks the GPU."""
    world_size: int = 1
    """All ranks."""
    local_world_size: int = 1
    """Ranks on this machine."""
    master_addr: str = ""
    """Host of rank 0; empty in a single process."""
    master_port: int = 0
    """Port of rank 0's store."""
    source: str = "single"
    """Which launcher was read: torchrun, ray, slurm, mpi or single."""

    @property
    def init_method(self) -> str | None:
        """What `init_process_group` should be given; None where there is nobody to meet."""
        if self.source == "single":
            return None
        # torchrun's agent already runs a store, which torch finds by these variables only.
        return "env://" if self.source in ("torchrun", "ray") else f"tcp://{self.master_addr}:{self.master_port}"


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Read what the launcher left in the environment; a single process when there is none.

    Args:
        environment: Default: this process's.

    Raises:
        EnvironmentProblem: The variables contradict each other or are not numbers.

    Ranks:
        Local.
    """
    env = os.environ if environment is None else environment
    if "RANK" in env or "WORLD_SIZE" in env:
        launch = _read_torchrun(env)
    elif "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        # Without srun a batch script also sees SLURM_NTASKS, but is one process: only a step has ranks.
        launch = _read_slurm(env)
    elif "OMPI_COMM_WORLD_RANK" in env:
        launch = _read_mpi(env)
    else:
        return Launch()
    for name, number, size in (
        ("rank", launch.rank, launch.world_size),
        ("local rank", launch.local_rank, launch.local_world_size),
    ):
        if not 0 <= number < size:
            raise EnvironmentProblem(
                f"{name} {number} is not below the number of ranks, {size}",
                where=f"environment of {launch.source}",
                why="ranks are numbered from 0",
                fix="start the script with torchrun, which sets all of them",
            )
    return launch


def _read_torchrun(env: Mapping[str, str]) -> Launch:
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", default=world_size)
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK", default=rank % max(local_world_size, 1)),
        local_world_size=local_world_size,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", default=_DEFAULT_PORT),
        source="ray" if "RAY_JOB_ID" in env or "RAY_ADDRESS" in env else "torchrun",
    )


def _read_slurm(env: Mapping[str, str]) -> Launch:
    job = _number(env, "SLURM_JOB_ID", default=0)
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "127.0.0.1")
    # As in "4(x2),3": the tasks of this machine's place in the list.
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    per_node = [int(tasks) for tasks, repeat in counts for _ in range(int(repeat or 1))]
    node = _number(env, "SLURM_NODEID", default=0)
    world_size = _number(env, "SLURM_STEP_NUM_TASKS")
    return Launch(
        rank=_number(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(env, "SLURM_LOCALID", default=0),
        local_world_size=per_node[node] if node < len(per_node) else world_size,
        master_addr=env.get("MASTER_ADDR") or first_host(hosts),
        # Jobs that share a machine must not share a port.
        master_port=_number(env, "MASTER_PORT", default=20000 + job % 20000),
        source="slurm",
    )


def _read_mpi(env: Mapping[str, str]) -> Launch:
    return Launch(
        rank=_number(env, "OMPI_COMM_WORLD_RANK"),
        world_size=_number(env, "OMPI_COMM_WORLD_SIZE"),
        local_rank=_number(env, "OMPI_COMM_WORLD_LOCAL_RANK", default=0),
        local_world_size=_number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", default=1),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", default=_DEFAULT_PORT),
        source="mpi",
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
            why="a launcher sets RANK, WORLD_SIZE and their companions together, as numbers",
            fix="start the script with torchrun, or unset all of them to run a single process",
        )
    return int(value)


def start_local(target: str, num_ranks: int, args: Sequence[object] = ()) -> list[Any]:
    """Run a function on `num_ranks` new local ranks and return what each returned.

    Args:
        target: `module:function`, importable in a new process.
        num_ranks: How many processes to start.
        args: Picklable arguments, the same for each rank.

    Returns:
        The results, by rank. They travel by pickle.

    Raises:
        Exception: What the first rank that failed raised, with its rank and traceback as a note.
        EnvironmentProblem: A rank died without raising anything.

    Ranks:
        Call it from a process that is not a rank itself.
    """
    _start_fork_server()  # imports torch while we do
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="shardwise-launch-") as folder, _undisturbed():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=f"shardwise-{os.getpid()}-{time.monotonic_ns()}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            results = elastic_launch(config, run_rank)(target, tuple(args), folder, list(sys.path))
        except ChildFailedError as failure:
            _raise_first_failure(Path(folder), failure.failures)
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + int(stopped.sigval)) from None
        return [results[rank] for rank in range(num_ranks)]


def resolve_target(target: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def run_rank(target: str, args: tuple[object, ...], folder: str, path: list[str]) -> object:
    """Call the target; leave an error where the launcher finds it, and exit so that others are stopped."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        # Ranks share this machine's cores; torch would give all of them to each.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // read_launch().local_world_size))
    sys.path[:] = path  # a target in the caller's own folder must be found here too
    try:
        return resolve_target(target)(*args)
    except BaseException as error:
        report = (time.time(), read_launch().rank, _portable(error), traceback.format_exc())
        temporary = Path(folder, f"{os.getpid()}.writing")
        temporary.write_bytes(pickle.dumps(report))
        temporary.rename(temporary.with_suffix(".error"))
        sys.stdout.flush()
        sys.stderr.flush()
        # Not re-raised: the agent would print it too, and exit handlers may wait for other ranks.
        os._exit(1)


def _portable(error: BaseException) -> BaseException | None:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return None


def _raise_first_failure(folder: Path, failures: Mapping[int, Any]) -> NoReturn:
    """Raise the cause: a rank that was killed, else the earliest error; the other ranks died of it."""
    for rank, failure in failures.items():
        if failure.exitcode < 0 and -failure.exitcode not in _AGENT_SIGNALS:
            _raise_dead(rank, f"was killed by {signal.Signals(-failure.exitcode).name}")
    reports = sorted((pickle.loads(path.read_bytes()) for path in folder.glob("*.error")), key=lambda r: r[0])
    if not reports:
        rank, failure = next(iter(failures.items()))
        _raise_dead(rank, f"ended with status {failure.exitcode}")
    _, rank, error, text = reports[0]
    if error is None:
        error = RuntimeError(text.strip().splitlines()[-1])
    error.add_note(f"(raised on rank {rank})\n{text}")
    raise error from None


def _raise_dead(rank: int, how: str) -> NoReturn:
    raise EnvironmentProblem(
        f"rank {rank} {how}",
        where=f"rank {rank}",
        why="it did not end by a Python error; SIGKILL mostly means that memory ran out",
        fix="read its last output; start fewer ranks or a smaller model to see whether memory is the cause",
    ) from None


def _start_fork_server() -> None:
    multiprocessing.set_forkserver_preload(_PRELOAD)
    multiprocessing.forkserver.ensure_running()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Give back the environment, signal handlers and log levels that the elastic agent takes."""
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in _AGENT_SIGNALS}
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)  # we report the failure ourselves, once
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environment)
