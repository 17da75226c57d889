"""A plain `shard` whose last rank leaves the others in step 2: `python -m tests.faults.skipping CASE RANKS [MACHINES]`.

`repaired` is `tower` with the fix that the error names; the cases of `train_several` have several models. Prints one
JSON line a rank: how its loop ended, and how often optimizers changed its weights. Machines are told apart by name.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.distributed import collective_trace

STEPS, BAD_STEP = 3, 2


class Tower(nn.Module):
    """Blocks that are groups of their own, of one size in all towers: mixed up, nothing fails by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Model(nn.Module):
    """The tower that a rank may have no images for stands behind the one that always runs."""

    def __init__(self) -> None:
        super().__init__()
        self.language, self.embed, self.head, self.vision = Tower(), nn.Embedding(64, 32), nn.Linear(32, 64), Tower()

    def forward(self, tokens: Tensor, images: Tensor | None, is_swapped: bool) -> Tensor:
        x = self.embed(tokens)
        towers = [self.language, self.vision] if is_swapped else [self.vision, self.language]
        for tower in towers:
            if tower is self.language:
                x = tower(x)
            elif images is not None:
                x = x + tower(images).mean(1, keepdim=True)
        return self.head(x)


def train_one(case: str, rank: int, num_ranks: int, machine: str, mesh: DeviceMesh) -> Iterator[None]:
    """The steps of `Model`; yields after each update."""
    model = sw.shard(Model(), mesh=mesh)
    if case == "repaired":
        sw.guard(model, repair=["vision"], machine=machine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        bad = case if step == BAD_STEP and rank == num_ranks - 1 else ""
        tokens = torch.arange(20).view(2, 10) + rank
        images = None if bad in ("tower", "repaired") else torch.ones(2, 5, 32)
        model(tokens, images, bad == "order").sum().backward()
        if bad != "unstepped":
            optimizer.step()
            yield
        optimizer.zero_grad()


def train_several(case: str, rank: int, num_ranks: int, mesh: DeviceMesh) -> Iterator[None]:
    """The steps of networks that train against, or after, each other; yields after each update.

    `gan`, `gan_dict` (both networks in one ModuleDict) and `three`: the last rank leaves out the generator's step;
    `gan_unstepped`: it leaves out the critic's update; `teacher`: it asks the teacher after the student.
    """
    names = ["critic", "generator", "encoder"][: 3 if case == "three" else 2]
    networks = nn.ModuleDict({name: Tower() for name in names})
    if case in ("gan_dict", "gan_unstepped"):
        networks = sw.shard(networks, mesh=mesh)
    else:
        networks = {name: sw.shard(network, mesh=mesh) for name, network in networks.items()}
    optimizers = {name: torch.optim.SGD(network.parameters(), lr=0.1) for name, network in networks.items()}
    noise = torch.ones(2, 32) + rank
    for step in range(1, STEPS + 1):
        bad = case if step == BAD_STEP and rank == num_ranks - 1 else ""
        if case == "teacher":
            teacher, student = networks.values()
            found = student(noise) if bad else None
            with torch.no_grad():
                wanted = teacher(noise)
            loss = ((student(noise) if found is None else found) - wanted).square().sum()
            losses = {"generator": lambda loss=loss: loss}
        else:
            losses = {
                name: lambda name=name: networks["critic"](networks[name](noise) if name != "critic" else noise).sum()
                for name in names
            }
        if bad in ("gan", "gan_dict", "three"):
            del losses["generator"]
        for name, loss_of in losses.items():
            loss_of().backward()
            if case != "gan_unstepped":
                optimizers[name].step()
                yield
        if case == "gan_unstepped":
            for optimizer in list(optimizers.values())[1 if bad else 0 :]:
                optimizer.step()
                yield
        for optimizer in optimizers.values():
            optimizer.zero_grad()


SEVERAL = ("gan", "gan_dict", "gan_unstepped", "three", "teacher")


def run(rank: int, num_ranks: int, num_machines: int, case: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    name = f"machine {rank * num_machines // num_ranks}"
    collective_trace.machine_name = lambda: name
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("shard",))
    is_one = case not in SEVERAL
    steps = train_one(case, rank, num_ranks, name, mesh) if is_one else train_several(case, rank, num_ranks, mesh)
    updates = 0
    try:
        for _ in steps:
            updates += 1
        outcome = "ended"
    except Exception as error:
        outcome = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    sys.stdout.write(json.dumps({"rank": rank, "outcome": outcome, "updates": updates}) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    case, num_ranks, num_machines = sys.argv[1], int(sys.argv[2]), int((sys.argv[3:] or ["1"])[0])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=run, args=(rank, num_ranks, num_machines, case, store.port)) for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
