"""Stands in for Slurm's `srun` and `scontrol`: real processes with the environment that Slurm gives, signals passed on.

python slurm_stand_in.py srun [--OPTION...] COMMAND... | scontrol requeue JOB | scontrol show hostnames LIST
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def srun(command: list[str]) -> int:
    """Start the tasks of a step; the status is the highest of theirs, 128 + n for signal n, as Slurm has it."""
    while command[0].startswith("--"):
        command = command[1:]
    num_tasks, num_nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_NNODES"])
    per_node = num_tasks // num_nodes
    tasks = []
    for task in range(num_tasks):
        own = {
            "SLURM_PROCID": task,
            "SLURM_LOCALID": task % per_node,
            "SLURM_NODEID": task // per_node,
            "SLURM_STEP_NUM_TASKS": num_tasks,
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{num_nodes})",
            "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        }
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        tasks.append(subprocess.Popen(command, env=environment))
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: [task.send_signal(number) for task in tasks])
    while any(task.poll() is None for task in tasks):
        time.sleep(0.05)
    return max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks)


def scontrol(arguments: list[str]) -> int:
    """Say which machines a job has, or write down that it is to be queued again."""
    if arguments[:2] == ["show", "hostnames"]:
        print("\n".join([arguments[2]] * int(os.environ["SLURM_NNODES"])))
        return 0
    with open(Path(os.environ["RUN_FILES"], "scontrol"), "a") as file:
        file.write(" ".join(arguments) + "\n")
    return 0


def install(folder: Path) -> str:
    """Put both commands into a folder; return a PATH that finds them."""
    bin = folder / "bin"
    bin.mkdir(exist_ok=True)
    for name in ("srun", "scontrol"):
        file = bin / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" {name} "$@"\n')
        file.chmod(0o755)
    return os.pathsep.join([str(bin), str(Path(sys.executable).parent), os.environ["PATH"]])


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
