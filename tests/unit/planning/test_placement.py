"""The dimension a parameter is split along."""

import pytest

from shardwise.planning.planner import choose_shard_dim


@pytest.mark.parametrize(
    ("shape", "num_shards", "dim"),
    [
        ((64, 8), 8, 0),
        ((50257, 768), 64, 0),  # 0.1 % of padding is nothing
        ((8, 14336, 4096), 64, 1),  # a stack of experts
        ((8, 30, 4096), 64, 2),  # only the last dimension divides
        ((3, 5), 2, 0),  # nothing divides: padded
        ((7, 8), 2, 1),
        ((1, 1, 32), 2, 2),
        ((3,), 8, 0),
        ((), 8, 0),
        ((8, 8), 1, 0),
    ],
)
def test_dim_zero_unless_another_divides_better(shape, num_shards, dim):
    chosen, reason = choose_shard_dim(shape, num_shards)
    assert chosen == dim
    assert bool(reason) == (dim != 0)
