"""No rank holds much more than its own part, while weights are loaded or saved."""

import ctypes
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import shard
from shardwise.checkpointing.weights import load_full, load_weights, save_full, save_weights
from tests.ranks import ranks

NUM_LAYERS, WIDTH = 24, 2560  # 25 MiB a layer, 600 MiB in all
MODEL_MIB = NUM_LAYERS * WIDTH * WIDTH * 4 / 2**20


def build() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])


def memory_mib(key: str) -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(key))


class Extra:
    """The most resident memory that a block took besides what it had at the start."""

    def __enter__(self) -> "Extra":
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier tests freed is not resident at the start
        Path("/proc/self/clear_refs").write_text("5")  # start a new high-water mark
        self.start = memory_mib("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.mib = memory_mib("VmHWM") - self.start


@pytest.mark.slow
@ranks(2, timeout_s=300)
def test_memory_besides_the_shard_is_bounded(rank: int, tmp_path: Path):
    model = shard(build())
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    for parameter in model.parameters():
        parameter.detach().to_local().uniform_()
    shard_mib = MODEL_MIB / 2
    for path, save in (
        (tmp_path / "w.safetensors", lambda path: save_weights(model, path)),
        (tmp_path / "w.pt", lambda path: save_weights(model, path, "torch")),
        (tmp_path / "run.pt", lambda path: save_full(path, model=model)),
    ):
        with Extra() as extra:
            save(path)
        assert extra.mib < 300, (path.name, extra.mib)
        dist.barrier()
        for broadcast in (False, True):
            other = shard(build())
            with Extra() as extra:
                if path.name == "run.pt":
                    load_full(path, model=other, broadcast=broadcast)
                else:
                    load_weights(other, path, broadcast=broadcast)
            assert extra.mib < shard_mib + 64, (path.name, broadcast, extra.mib)
            for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
                assert torch.equal(ours.to_local(), theirs.to_local())
            del other
        dist.barrier()
        if rank == 0:
            path.unlink()
