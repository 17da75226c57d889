"""A run that hangs: the last rank skips a module. `python -m tests.faults.hanging FOLDER RANKS` leaves dumps there."""

import multiprocessing
import os
import socket
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwise.diagnosing.recording import dump_collectives
from tests.faults.diverging import Model


def run(rank: int, num_ranks: int, folder: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_FR_BUFFER_SIZE": "2000"}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = Model()
    mesh = init_device_mesh("cpu", (num_ranks,))
    for part in [model.embed, model.vision, model.left, model.right, model.experts, *model.blocks, model]:
        fully_shard(part, mesh=mesh)
    parts = threading.Event()
    threading.Thread(target=_give_up, args=(folder, model, parts), daemon=True).start()
    model(torch.ones(2, 8)).sum().backward()
    parts.set()
    if rank == num_ranks - 1:
        time.sleep(60)  # never comes to the second forward
    model(torch.ones(2, 8))


def _give_up(folder: str, model: torch.nn.Module, parts: threading.Event) -> None:
    parts.wait()
    time.sleep(3)
    dump_collectives(folder, model)
    os._exit(0)


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = int(sys.argv[2])
    processes = [fork.Process(target=run, args=(rank, ranks, sys.argv[1], free_port)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
