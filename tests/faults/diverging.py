"""A script whose last rank does something else in step 3: `python -m tests.faults.diverging CASE [RANKS [MACHINES]]`.

CASE may end in the modules to repair, as in `skipped-tower:vision,left`. Under torchrun each agent is a machine.
Machines are told apart by name only, so that one box can be several: their ranks share no board, and hear of each other
through the store as they would elsewhere.

Prints one JSON line a rank: how its loop ended. FSDP2 by hand, so that nothing of ours repairs the divergence first.
"""

import json
import multiprocessing
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwise.diagnosing.guard import guard
from shardwise.sharding.hooks import watching as watching_of_models

STEPS, BAD_STEP = 6, 3
STEP_SECONDS = 0.3  # where there are several machines: word from the others takes a part of that


class Experts(nn.Module):
    """Two experts in one group; a rank may use one only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.first(x) + (self.second(x) if both else 0)


class Model(nn.Module):
    """Parts that a rank can skip, swap or use in part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.vision = nn.Linear(8, 8), nn.Linear(8, 8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = Experts()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, bad: str = "") -> Tensor:
        x = self.embed(x)
        if bad != "skipped-tower":
            x = x + self.vision(x)
        x = self.right(x) if bad == "branch" else self.left(x)
        x = self.experts(x, both=bad != "expert")
        for block in self.blocks:
            x = block(x).relu()
        return x


def join(rank: int, num_ranks: int, num_machines: int, case: str, port: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun, no rank keeps the store
    }
    run(rank, num_ranks, rank * num_machines // num_ranks, num_machines, case)


def run(rank: int, num_ranks: int, machine: int, num_machines: int, case: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (num_ranks,))
    torch.manual_seed(0)
    model = Model()
    for part in [model.embed, model.vision, model.left, model.right, model.experts, *model.blocks, model]:
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    case, _, towers = case.partition(":")
    repair = towers.split(",") if towers else None
    said: list[str] = []
    watching = guard(model, patience=1.5, repair=repair, machine=f"machine {machine}", report=said.append)
    if case == "killed-loaded" and machine:
        for _, tracer in watching_of_models._TRACERS.values():
            tracer._stopped.set()  # so loaded that the thread does not run again before the process ends
    start = time.monotonic()
    try:
        _loop(model, optimizer, case if rank == num_ranks - 1 else "", STEP_SECONDS if num_machines > 1 else 0)
        outcome = "ended"
    except Exception as error:
        outcome = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    if case == "early-exit" and rank == num_ranks - 1:
        watching.close()
        time.sleep(4)  # does something else, alive
    seconds = time.monotonic() - start
    sys.stdout.write(json.dumps({"rank": rank, "outcome": outcome, "said": said, "seconds": seconds}) + "\n")
    sys.stdout.flush()
    os._exit(0)


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, case: str, pause: float) -> None:
    for step in range(1, STEPS + 1):
        time.sleep(pause)
        bad = case if step == BAD_STEP else ""
        if bad == "early-exit":
            return
        if bad.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if bad == "slow":
            time.sleep(5)
        with torch.no_grad():
            for _ in range(1 if bad == "uneven-evaluation" else 2):
                model(torch.ones(2, 8))
        model(torch.ones(2, 8), bad).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def start(case: str, num_ranks: int, num_machines: int = 1) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fork = multiprocessing.get_context("fork")
    shape = num_ranks, num_machines, case, store.port
    processes = [fork.Process(target=join, args=(rank, *shape)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    env = os.environ
    if "RANK" in env:
        run(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["GROUP_RANK"]), int(env["GROUP_WORLD_SIZE"]), sys.argv[1])
    else:
        start(sys.argv[1], *map(int, sys.argv[2:]))
