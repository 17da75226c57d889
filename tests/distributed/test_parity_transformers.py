"""The zoo's transformers models train sharded as in one process, with fine groups and few collectives."""

import pytest

from tests.ranks import ranks
from tests.zoo import cases
from tests.zoo.checking import check_case

NAMES = [pytest.param(c.name, marks=[pytest.mark.slow] * c.slow) for c in cases("transformers").values()]
FOUR = [pytest.param(c.name, marks=[pytest.mark.slow] * c.slow) for c in cases("transformers").values() if c.four_ranks]


@pytest.mark.parametrize("name", NAMES)
@ranks(2)
def test_two_ranks_equal_one_process(rank: int, name: str):
    check_case(cases("transformers")[name])


@pytest.mark.parametrize("name", FOUR)
@ranks(4, timeout_s=120)
def test_four_ranks_equal_one_process(rank: int, name: str):
    check_case(cases("transformers")[name])
