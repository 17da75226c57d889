"""Hybrid shards, tensor parallelism and float8 on real GPUs equal one process; ranks that diverge are named."""

import pytest
import torch

from shardwise.distributed.local_ranks import start_local

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("name", "num_ranks"), [("replicate", 4), ("tensor", 4), ("float8", 2), ("guard", 2)])
def test_several_ranks_equal_one_process(name: str, num_ranks: int):
    if name == "tensor" and torch.cuda.device_count() < num_ranks:
        pytest.skip("gloo's functional collectives on CUDA tensors crash in torch 2.11")
    if name == "float8":
        pytest.importorskip("torchao")
    for found in start_local("tests.gpu.composition_jobs:compose", num_ranks, ([name],)):
        assert found == {name: "equal"}
