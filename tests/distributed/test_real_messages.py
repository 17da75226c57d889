"""Messages that torch really raises are recognised, also with what a log puts around them."""

import traceback
import warnings
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from shardwise.explaining import explain
from tests.distributed.provoked import PROVOKED
from tests.ranks import ranks, shut_down_pools

# Older torch does not notice the tie; a build with CUDA says something else without a driver.
ABSENT = {"SW522"} if Version(torch.__version__) < Version("2.13") else set()
ABSENT |= {"SW545"} if torch.version.cuda else set()


@pytest.fixture(scope="module", autouse=True)
def ranks_with_plain_torch() -> None:
    """Start new ranks: `shard` changes operators of DTensors in the whole process."""
    shut_down_pools()


@pytest.mark.parametrize("code", sorted(PROVOKED.keys() - ABSENT))
@ranks(2)
def test_a_real_failure_is_explained(rank: int, code: str, tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(BaseException) as caught:
            PROVOKED[code](tmp_path)
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    in_log = explain("".join(f"[rank{rank}]: {line}\n" for line in lines))
    failure = explain(caught.value).failure
    assert (failure and failure.code) == code, caught.value
    assert (in_log.failure and in_log.failure.code, in_log.rank) == (code, rank)
