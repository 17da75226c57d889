"""What a test may not leave behind: processes, threads, environment, process groups, torch's global modes."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import psutil

# Written by pytest, torch or inductor on first use, by nobody's choice.
_ENV_OF_OTHERS = ("PYTEST_", "TORCHINDUCTOR_", "TRITON_", "KINETO_", "TORCH_NCCL_", "TOKENIZERS_PARALLELISM", "KMP_")
_HELPER_PROCESSES = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "compile_worker")
_HELPER_THREADS = (
    "tqdm_monitor",
    "pytest_timeout",
    "QueueFeederThread-forkserver",
    "InductorSubproc",
    "subproc_worker_timer",
)
_GRACE_S = 2.0


@dataclass(frozen=True)
class Snapshot:
    """The process-wide state before a test."""

    environment: dict[str, str]
    threads: frozenset[int]
    children: frozenset[int]
    groups: frozenset[str]
    modes: dict[str, object] = field(default_factory=dict)


def take_snapshot() -> Snapshot:
    """Remember the state that a test must give back."""
    return Snapshot(
        environment=_environment(),
        threads=frozenset(thread.ident or 0 for thread in threading.enumerate()),
        children=frozenset(_children()),
        groups=frozenset(_group_names()),
        modes=_torch_modes(),
    )


def leaks_since(before: Snapshot) -> list[str]:
    """One line for each thing the test left behind; threads and processes get a moment to finish."""
    deadline = time.monotonic() + _GRACE_S
    while (lines := list(_still_running(before))) and time.monotonic() < deadline:
        time.sleep(0.02)
    lines += _changed(before.environment, _environment(), "environment variable")
    lines += [f"process group {name!r} was not destroyed" for name in _group_names() if name not in before.groups]
    if before.modes:  # torch may be imported by the test itself: then there is nothing to compare with
        lines += _changed(before.modes, _torch_modes(), "torch's")
    return lines


def restore(before: Snapshot) -> None:
    """Put back what can be put back, so that one leak fails one test."""
    for name in set(_environment()) - set(before.environment):
        del os.environ[name]
    os.environ.update(before.environment)
    if before.modes:
        import torch

        torch.set_default_dtype(before.modes["default dtype"])  # pyrefly: ignore[bad-argument-type]
        torch.set_grad_enabled(bool(before.modes["grad mode"]))
        torch.use_deterministic_algorithms(bool(before.modes["deterministic mode"]))
        for hooks in _global_hooks():
            hooks.clear()


def _still_running(before: Snapshot) -> Iterator[str]:
    for thread in threading.enumerate():
        # A dummy thread is Python's record of a C++ thread (autograd's); nobody can join it.
        foreign = isinstance(thread, threading._DummyThread) or thread.name.startswith(_HELPER_THREADS)
        if thread.ident not in before.threads and not foreign:
            yield f"thread {thread.name!r} is still running"
    for pid, command in _children().items():
        if pid not in before.children:
            yield f"child process {pid} ({command[:120]}) is still running"


def _children() -> dict[int, str]:
    """Children of this process by their command, less those that nobody starts on purpose."""
    commands = {pid: _command(pid) for pid in _child_pids()}
    return {pid: text for pid, text in commands.items() if not any(part in text for part in _HELPER_PROCESSES)}


def _child_pids() -> list[int]:
    """From Linux's lists where there are any: psutil would look at every process of the machine, twice a test."""
    lists = glob.glob("/proc/self/task/*/children")
    if not lists:
        return [child.pid for child in psutil.Process().children()]
    pids: list[int] = []
    for path in lists:
        with contextlib.suppress(OSError), open(path) as file:  # a thread that has just ended takes its list along
            pids += map(int, file.read().split())
    return pids


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_ENV_OF_OTHERS)}


def _group_names() -> list[str]:
    """Live process groups, less those of device meshes: a DeviceMesh has no way to give its groups back."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return []
    world = c10d._world
    return [str(name) for group, name in world.pg_names.items() if not (group.group_desc or "").startswith("mesh_")]


def num_groups() -> int:
    """How many process groups are alive, those of meshes included."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return 0 if c10d is None else len(c10d._world.pg_names)


def _torch_modes() -> dict[str, object]:
    if "torch.distributed" not in sys.modules:
        return {}
    import torch

    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "number of threads": torch.get_num_threads(),
        "default device": str(torch.get_default_device()),
        "number of global module hooks": sum(len(hooks) for hooks in _global_hooks()),
    }


def _global_hooks() -> list[dict[object, object]]:
    import torch.nn.modules.module as module

    names = [name for name in vars(module) if name.startswith("_global_") and name.endswith("_hooks")]
    return [getattr(module, name) for name in names]


def _changed(before: Mapping[str, object], after: Mapping[str, object], kind: str) -> list[str]:
    names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    return [f"{kind} {name} changed from {before.get(name)!r} to {after.get(name)!r}" for name in names]
