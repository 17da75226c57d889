"""Models of transformers that nobody here has looked at train sharded as in one process."""

import pytest

from tests.ranks import ranks
from tests.zoo import sweep
from tests.zoo.checking import check_case


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep.names())
@ranks(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_model_nobody_looked_at_equals_one_process(rank: int, name: str):
    case = sweep.case_of(name)
    if case is None:
        pytest.skip(f"more than {sweep.MAX_PARAMETERS:,} parameters")
    check_case(case)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_no_fewer_models_are_trained_than_before():
    trained = [name for name in sweep.names() if sweep.case_of(name) is not None]
    assert len(trained) >= sweep.NUM_MODELS
