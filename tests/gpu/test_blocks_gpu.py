"""Recomputed and compiled blocks on real GPUs: the same gradients, less memory."""

import pytest
import torch

from shardwise.distributed.local_ranks import start_local

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# The part of what is kept for backward that may remain; what the root keeps stays in any case.
REMAINS = {"full": 0.25, "selective": 0.75}


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputing_saves_memory_and_changes_no_gradient(policy: str):
    for worst, kept, recomputed in start_local("tests.gpu.block_jobs:recompute", 2, (policy,)):
        assert worst < 1e-5
        assert recomputed < REMAINS[policy] * kept


@pytest.mark.parametrize("recompute", [False, True])
def test_offloading_activations_saves_memory_and_changes_no_gradient(recompute: bool):
    for worst, kept, offloaded in start_local("tests.gpu.block_jobs:offload", 2, (recompute,)):
        assert worst < 1e-5
        assert offloaded < 0.25 * kept


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_inductor_changes_no_gradient(policy: str):
    for worst in start_local("tests.gpu.block_jobs:compile_with_inductor", 2, (policy,)):
        assert worst < 1e-3
