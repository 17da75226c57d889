"""shardwise.fsdp1 against torch's FSDP1 on a GPU: above all what FSDP1 cannot do without one."""

import pytest
import torch

from shardwise.distributed.local_ranks import start_local

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({}, 2e-5),
        ({"offload": True}, 2e-5),
        ({"offload": True, "bf16": True}, 2e-2),
        ({"strategy": "SHARD_GRAD_OP"}, 2e-5),
        ({"strategy": "NO_SHARD"}, 2e-5),
        ({"bf16": True}, 2e-2),
        ({"sync": True}, 2e-5),
    ],
    ids=["plain", "offload", "offload bf16", "grad op", "no shard", "bf16", "sync"],
)
def test_training_on_gpu_equals_fsdp1(settings: dict[str, object], tolerance: float, num_ranks: int):
    for result in start_local("tests.gpu.fsdp1_jobs:compare", num_ranks, (settings,)):
        assert result["loss"] < tolerance, result
        assert result["norm"] < tolerance, result
        assert result["parameter"] < tolerance, result
        assert result["optimizer"] < tolerance, result
        assert result["on_cpu"], result
        assert result["saved_on_cpu"], result
