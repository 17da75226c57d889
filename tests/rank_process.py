"""One rank of the pool: a process that joins a gloo group once, then runs tests by name until it is ended."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import os
import pickle
import random
import reprlib
import signal
import sys
import threading
import tomllib
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, ModuleType, TracebackType

import pytest
import torch
import torch.distributed as dist

from shardwise.distributed import mesh as meshes
from shardwise.sharding.hooks.watching import Watch
from tests.leaks import leaks_since, num_groups, restore, take_snapshot

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
# Longer than any test may take: a hang is the pool's to report, not gloo's.
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
_PR_SET_PDEATHSIG = 1
_num_frozen_modules = 0


@dataclass(frozen=True)
class Job:
    """A test to run, by name; the arguments are pickled apart so that a bad one names itself."""

    module: str
    file: str
    name: str
    arguments: bytes


@dataclass(frozen=True)
class Outcome:
    """What became of a test on one rank: passed, failed, leaked, skipped or xfailed."""

    status: str
    text: str = ""
    """The traceback, the leaks or the reason."""
    kind: str = ""
    """The exception's class, to tell a failure that all ranks share from one that they do not."""
    num_groups: int = 0


def serve(rank: int, num_ranks: int, folder: Path, connection: Connection) -> None:
    """Join the group, then answer each `Job` with an `Outcome` until the other end hangs up."""
    _die_with_parent()
    _redirect_output(folder / f"rank{rank}.log")
    with open(folder / f"rank{rank}.stack", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=_COLLECTIVE_TIMEOUT)
        dist.barrier()
        folder.chmod(0o711)
        (folder / "store").chmod(0o666)  # for tests that give up their rights
        connection.send("ready")
        while (job := _next_job(connection)) is not None:
            connection.send(_run(job, rank))
    os._exit(0)  # no atexit of torch or gloo: the other ranks may already be gone


def _next_job(connection: Connection) -> Job | None:
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        return None


def _run(job: Job, rank: int) -> Outcome:
    _freeze_imports()
    before = take_snapshot()
    random.seed(0)
    torch.manual_seed(0)
    meshes.forget_meshes()  # the mesh of another test would be this one's default
    outcome = _outcome_of(job, rank)
    gc.collect()
    _stop_watching()
    if outcome.status == "passed" and (leaks := leaks_since(before)):
        outcome = Outcome("leaked", "the test leaked:\n  " + "\n  ".join(leaks), "leak")
    restore(before)
    return Outcome(outcome.status, outcome.text, outcome.kind, num_groups())


def _stop_watching() -> None:
    """End the threads of models that live on: FSDP2's nodes refer to the model, which may keep a tensor of its own."""
    if any(thread.name == "shardwise-guard" for thread in threading.enumerate()):
        for watching in [one for one in gc.get_objects() if isinstance(one, Watch)]:
            watching.stop()


def _freeze_imports() -> None:
    """Modules never die; collecting after each test need not look at them."""
    global _num_frozen_modules
    if len(sys.modules) != _num_frozen_modules:
        _num_frozen_modules = len(sys.modules)
        gc.freeze()


def _outcome_of(job: Job, rank: int) -> Outcome:
    try:
        test = _find(job)
        with warnings.catch_warnings():
            _filter_warnings(test)
            test(rank=rank, **pickle.loads(job.arguments))
    except pytest.skip.Exception as skip:
        return Outcome("skipped", str(skip.msg))
    except pytest.xfail.Exception as xfail:
        return Outcome("xfailed", str(xfail.msg))
    except BaseException as error:  # also SystemExit, KeyboardInterrupt and DCP's CheckpointException
        return Outcome("failed", _describe(error), type(error).__qualname__)
    return Outcome("passed")


def _find(job: Job) -> Callable[..., None]:
    try:
        module: ModuleType = sys.modules.get(job.module) or importlib.import_module(job.module)
    except ModuleNotFoundError as error:
        if error.name is None or not job.module.startswith(error.name):
            raise
        module = _import_file(job)  # collected outside the repository
    found: object = module
    for part in job.name.split("."):
        found = getattr(found, part)
    return found.on_each_rank  # pyrefly: ignore[missing-attribute]


def _import_file(job: Job) -> ModuleType:
    spec = importlib.util.spec_from_file_location(job.module, job.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[job.module] = module
    spec.loader.exec_module(module)
    return module


def _filter_warnings(test: Callable[..., None]) -> None:
    """The filters of pyproject.toml, then those the test is marked with, as pytest applies them."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "filterwarnings"]
    warnings.resetwarnings()
    for line in [*_common_filters(), *(line for mark in marks for line in mark.args)]:
        action, message, category, *_ = [*line.split(":"), "", ""]
        warnings.filterwarnings(action, message, _warning_class(category))  # pyrefly: ignore


@functools.cache
def _common_filters() -> list[str]:
    return tomllib.loads(PYPROJECT.read_text())["tool"]["pytest"]["ini_options"]["filterwarnings"]


def _warning_class(name: str) -> type[Warning]:
    if not name:
        return Warning
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module or "builtins"), kind)


def _describe(error: BaseException) -> str:
    """The traceback, and the values the test had in hand (a rank has no rewritten asserts)."""
    lines = traceback.format_exception(error)
    frame = _innermost_test_frame(error.__traceback__)
    if frame is not None:
        lines.append("with:\n")
        lines += [f"  {name} = {_short(value)}\n" for name, value in frame.f_locals.items()]
    return "".join(lines)


def _innermost_test_frame(entry: TracebackType | None) -> FrameType | None:
    found = None
    while entry is not None:
        path = Path(entry.tb_frame.f_code.co_filename)
        if path.name.startswith("test_"):
            found = entry.tb_frame
        entry = entry.tb_next
    return found


def _short(value: object) -> str:
    try:
        text = reprlib.Repr().repr(value) if isinstance(value, (dict, list, tuple, set)) else repr(value)
    except Exception as error:  # a half-built module may not even print
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text if len(text) <= 300 else text[:300] + " ..."


def _redirect_output(path: Path) -> None:
    """Send this process's output, C++ too, to a file the pool shows when the test fails."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _die_with_parent() -> None:
    """Ask Linux to end this rank with the fork server, even when it hangs in a collective."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
