"""Sharded training on real GPUs equals one process; several ranks share a card where there is only one."""

import pytest
import torch

from shardwise.distributed.local_ranks import start_local

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NUM_RANKS = 2


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        # float32: ranks add gradients up in another order.
        ({"param_dtype": "storage"}, 2e-5),
        ({"param_dtype": "storage", "offload": True}, 2e-5),
        ({"param_dtype": "storage", "reshard_after_forward": False}, 2e-5),
        # The default on a GPU: bfloat16 keeps 8 bits of a loss of 5.5 and of gradients clipped to norm 1.
        ({}, 6e-2),
    ],
    ids=["float32", "offload", "keep", "default"],
)
def test_training_on_gpu_equals_one_process(settings, tolerance):
    for result in start_local("tests.gpu.jobs:train_and_compare", NUM_RANKS, (settings,)):
        assert result["loss"] < tolerance, result
        assert result["norm"] < tolerance, result
        assert result["parameter"] < tolerance, result
        assert result["computes_in_bfloat16"] == float("param_dtype" not in settings)
