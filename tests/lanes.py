"""Which tests stay together on one worker of pytest-xdist, and how long each test may take."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_SLOW_S = 600.0
_RANKS_S = 360.0  # the pool names ranks that do not start (180 s) or hang (120 s) before that
_stderr = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `timeout` of pytest-timeout leaves open."""
    parser.addini(
        "timeout_grace",
        "seconds beyond its limit after which a test that ignores signals ends its worker",
        default="30",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr: tests run with another one."""
    config.stash[_stderr] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give it back."""
    os.close(config.stash[_stderr])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a file of rank tests to one worker, so that its ranks and fixtures are started once; the rest one by one.

    That is what `--dist loadgroup` and its marks are for, but xdist 3.8 writes the group into a field of the test that
    pytest 9.2 does not read.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if starts_ranks(config.rootpath / file) else nodeid

    return Lanes(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Limit every test, unless the command line does."""
    if config.getoption("timeout") is None:
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_limit_s(item)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """pytest-timeout raises in the test; one that never comes back from C ends with its worker, its stack shown."""
    mark = item.get_closest_marker("timeout")
    if mark is not None:
        seconds = mark.args[0] + float(item.config.getini("timeout_grace"))
        faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_enter_pdb() -> None:
    """Who debugs takes the time it takes."""
    faulthandler.cancel_dump_traceback_later()


@cache
def starts_ranks(file: Path) -> bool:
    """Whether tests of this file run on ranks of a pool, or share a long run of ranks."""
    return file.parent.name == "faults" or any(name in file.read_text() for name in ("tests.ranks", "fit_runs"))


def _limit_s(item: pytest.Item) -> float:
    limits = [_SLOW_S if item.get_closest_marker("slow") else float(item.config.getini("timeout"))]
    limits.append(_RANKS_S if starts_ranks(item.path) else 0.0)
    limits.append(getattr(item.function, "limit_s", 0.0))  # pyrefly: ignore[missing-attribute]
    return max(limits)
