"""shardwise.distributed.agreement in one process, without a group."""

import pytest

from shardwise.distributed.agreement import agree_on, on_rank_zero, raise_on_all_ranks


def test_work_runs_here():
    assert on_rank_zero(lambda: 5) == 5


def test_error_is_raised_here():
    with pytest.raises(KeyError):
        on_rank_zero(lambda: {}["missing"])
    with pytest.raises(ValueError, match="mine"):
        raise_on_all_ranks(ValueError("mine"))


def test_one_process_agrees_with_itself():
    agree_on("anything", "the plan")
    raise_on_all_ranks(None)
