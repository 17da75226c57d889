"""Checks after every test that it left nothing behind, and ends the ranks with the session."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from tests.leaks import leaks_since, restore, take_snapshot
from tests.ranks import shut_down_pools, start_fork_server, stop_idle_pools

pytest_plugins = ["tests.lanes"]


def pytest_configure() -> None:
    """Keep to one core in one of several lanes; hear Ctrl-C, which a shell's background jobs ignore."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    """Fail the test that leaks a process, a thread, an environment variable or a process group."""
    before = take_snapshot()
    yield
    leaks = leaks_since(before)
    restore(before)
    if leaks:
        pytest.fail("the test leaked:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture
def fork_server() -> None:
    """Start the server as `@ranks` does: a process has one, and whoever starts it first decides its environment."""
    start_fork_server()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave the cores to the long tests that start processes of their own; a new pool costs the short ones more."""
    if item.get_closest_marker("slow") and not hasattr(getattr(item, "function", None), "on_each_rank"):
        stop_idle_pools()


def pytest_sessionfinish() -> None:
    """End every rank, also when the session was interrupted."""
    shut_down_pools()
