"""Stored tensors, read into GPU memory of any kind through pinned buffers."""

from pathlib import Path

import pytest
import torch

from shardwise.checkpointing.contents import ChunkSpec
from shardwise.checkpointing.formats.sharded import read_manifest
from shardwise.checkpointing.reading import Request, read_requests
from tests.sharded_checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("num_threads", [1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_parts_arrive_whole_whatever_their_memory(tmp_path: Path, dtype: torch.dtype, num_threads: int):
    """Larger than all buffers together, so that each is used again and again while copies are under way."""
    stored = torch.randn(9000, 4001, generator=torch.Generator().manual_seed(0))
    write_checkpoint(tmp_path / "step-00000007", {"x": stored}, num_files=3, block_bytes=1 << 20)
    contents = read_manifest(tmp_path / "step-00000007")
    whole, part = ChunkSpec.whole((9000, 4001)), ChunkSpec((1234, 17), (6000, 3000))
    targets = {
        "whole": (torch.zeros(9000, 4001, dtype=dtype, device="cuda"), whole),
        "part": (torch.zeros(6000, 3000, dtype=dtype, device="cuda"), part),
        "turned": (torch.zeros(3000, 6000, dtype=dtype, device="cuda").t(), part),
        "view": (torch.zeros(9000, 8002, dtype=dtype, device="cuda")[:, ::2], whole),
    }
    requests = [Request("x", target, spec) for target, spec in targets.values()]
    read_requests(contents, requests, num_threads=num_threads)
    for name, (target, spec) in targets.items():
        (row, column), (rows, columns) = spec.starts, spec.sizes
        expected = stored[row : row + rows, column : column + columns].to(dtype)
        assert torch.equal(target.cpu(), expected), name


def test_queued_work_of_another_stream_does_not_overtake(tmp_path: Path):
    """The model may still be being initialised when its weights are read."""
    stored = torch.randn(3000, 4000)
    write_checkpoint(tmp_path / "step-00000007", {"x": stored}, num_files=1, block_bytes=1 << 20)
    target = torch.empty(3000, 4000, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(500_000_000)
        target.zero_()
        contents = read_manifest(tmp_path / "step-00000007")
        read_requests(contents, [Request("x", target, ChunkSpec.whole((3000, 4000)))])
        torch.cuda.synchronize()
    assert torch.equal(target.cpu(), stored)
