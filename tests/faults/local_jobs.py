"""What ranks do in the tests of restarts and stop requests, and the launcher of the latter: python -m ... FOLDER."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from shardwise.distributed.launchers import read_launch
from shardwise.distributed.local_ranks import start_local
from shardwise.distributed.stop_requests import STOP_SIGNALS, stop_requests
from shardwise.errors import ConfigError

_STUCK_S = 120.0


def die_in_life(lives: int, how: str) -> int:
    """Rank 1 dies in its first `lives` lives while rank 0 hangs in C++; then both return the number of restarts."""
    launch = read_launch()
    if launch.restarts >= lives:
        return launch.restarts
    if launch.rank == 1:
        match how:
            case "exit":
                os._exit(7)
            case "exit 0":
                os._exit(0)
            case _:
                os.kill(os.getpid(), signal.Signals[how])
    hang_in_cpp()
    return -1


def hang_in_cpp() -> None:
    """Where Python's signal handlers do not run."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True)
    store.wait(["never"], timedelta(seconds=_STUCK_S))


def lose_a_peer_in(place: str, lives: int) -> int:
    """Rank 1 dies inside, or before, a collective that rank 0 is in."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=180))
    dist.barrier()
    launch = read_launch()
    if launch.restarts < lives and launch.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if place == "all_reduce":
        dist.all_reduce(torch.ones(1000))
    else:
        dist.barrier()
    dist.destroy_process_group()
    return launch.restarts


def refuse(folder: str) -> None:
    """A mistake of the user, on every rank; each life leaves a file."""
    Path(folder, f"{read_launch().rank}-{read_launch().restarts}").touch()
    raise ConfigError("a bad value", fix="a good one")


def refuse_and_abort(folder: str) -> None:
    """Rank 0 refuses; rank 1 is aborted by C++ because rank 0 has gone."""
    launch = read_launch()
    if launch.rank == 0:
        refuse(folder)
    while not Path(folder, f"0-{launch.restarts}").exists():
        time.sleep(0.01)
    os.abort()


def fail_as_torch_does(message: str) -> int:
    """The error of a rank that lost the others, in the first life only."""
    if read_launch().restarts == 0:
        raise RuntimeError(message)
    return read_launch().restarts


def step_until_stopped(folder: str, num_steps: int) -> str:
    """A run whose ranks are asked to stop: says how far it came, and saves when asked."""
    launch = read_launch()
    with stop_requests(STOP_SIGNALS) as stop:
        Path(folder, f"started-{launch.rank}").write_text(str(os.getpid()))
        for _ in range(num_steps):
            time.sleep(0.05)
            if stop.asked:
                time.sleep(0.5)  # saving takes a while
                Path(folder, f"saved-{launch.rank}").write_text(stop.why)
                return stop.why
    return "finished"


def step_and_never_stop(folder: str) -> None:
    """A run that is stuck when it is asked to stop."""
    with stop_requests(STOP_SIGNALS):
        Path(folder, f"started-{read_launch().rank}").write_text(str(os.getpid()))
        hang_in_cpp()


def main() -> None:
    """Launch a job of two ranks; print what they returned."""
    job, folder, *rest = sys.argv[1:]
    args = (folder, *(int(argument) for argument in rest))
    stop_signals = () if job == "step_without_stop_signals" else STOP_SIGNALS
    job = job.replace("step_without_stop_signals", "step_until_stopped")
    print(start_local(f"{__spec__.name}:{job}", 2, args, max_restarts=2, stop_signals=stop_signals), flush=True)


if __name__ == "__main__":
    main()
