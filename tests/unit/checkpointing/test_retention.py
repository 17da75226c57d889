"""Old checkpoints go, good ones stay, and there is always one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpointing.manager import Retention
from shardwise.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "metrics", "kept"),
    [
        ({"keep_last": 2}, {}, [5, 6]),
        ({"keep_last": 1}, {}, [6]),
        ({"keep_last": None}, {}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 1, "keep_every": 2}, {}, [2, 4, 6]),
        ({"keep_last": 1, "keep_best": 2}, {1: 0.1, 2: 0.3, 3: 0.2, 6: 9.0}, [1, 3, 6]),
        ({"keep_last": 1, "keep_best": 1, "best": "max"}, {1: 0.1, 2: 0.3, 3: math.nan}, [2, 6]),
        ({"keep_last": 1, "keep_best": 1}, {1: 0.5, 4: 0.5}, [4, 6]),  # of equals the later
        ({"keep_last": 1, "keep_best": 3}, {99: 0.0}, [6]),  # one that is gone
    ],
)
def test_what_is_kept(settings: dict[str, Any], metrics: dict[int, float], kept: list[int]):
    steps = [1, 2, 3, 4, 5, 6]
    gone = Retention(**settings).removable(steps, 6, metrics)
    assert sorted(set(steps) - set(gone)) == kept


def test_the_newest_stays_though_an_earlier_run_went_further():
    assert Retention(keep_last=2).removable([10, 1000, 2000, 3000], 10) == [1000, 2000]
    assert Retention(keep_last=1).removable([10, 1000], 10) == [1000]


@given(
    st.sets(st.integers(0, 50), min_size=1),
    st.integers(1, 5),
    st.none() | st.integers(1, 7),
    st.none() | st.integers(1, 3),
    st.dictionaries(st.integers(0, 50), st.floats()),
)
def test_never_the_last_one(steps: set[int], last: int, every: int | None, best: int | None, metrics: dict[int, float]):
    newest = max(steps)
    gone = Retention(keep_last=last, keep_every=every, keep_best=best).removable(steps, newest, metrics)
    assert newest not in gone
    assert set(gone) <= steps
    assert len(steps) - len(gone) >= min(last, len(steps))


def test_a_checkpoint_that_is_not_there_removes_nothing():
    assert Retention(keep_last=1).removable([1, 2, 3], 4) == []


@pytest.mark.parametrize("settings", [{"keep_last": 0}, {"keep_every": -1}, {"keep_best": 0}, {"best": "least"}])
def test_wrong_numbers_are_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigError):
        Retention(**settings)
