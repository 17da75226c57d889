"""A script that saves in the background and leaves at once, in the manner its first argument says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch import nn

from shardwise.checkpointing.manager import Checkpointer


def main() -> None:
    manner, folder, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if manner == "destroys the group":
        store = dist.FileStore(str(folder.with_name("store")), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = nn.Linear(64, 64)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    earlier = Checkpointer(folder.with_name("earlier")) if manner == "closes an earlier one" else None
    checkpointer = Checkpointer(folder)
    if earlier is not None:
        earlier.close()
    checkpointer.prepare(model=model)
    writer = checkpointer._saver._writer
    assert writer is not None
    os.kill(writer.pid, signal.SIGSTOP)  # nothing is written before the script is on its way out
    subprocess.Popen(["sh", "-c", f"sleep 0.7; kill -CONT {writer.pid}"])
    checkpointer.save(1, model=model)
    print("saved", flush=True)
    if manner == "destroys the group":
        dist.destroy_process_group()
    elif manner == "raises":
        raise RuntimeError("on purpose")
    elif manner == "exits":
        sys.exit(4)
    elif manner == "is killed":
        checkpointer.wait()
        if (forked := os.fork()) == 0:  # as a data loader does: it holds our end of the writer's socket
            time.sleep(60)
            os._exit(0)
        print(writer.pid, forked, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif manner in ("is terminated", "closes an earlier one"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)


if __name__ == "__main__":
    main()
