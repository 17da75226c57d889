"""Models of transformers that nobody here has looked at train sharded as in one process."""

import random
from collections import Counter
from importlib import metadata

import pytest

from benchmarks.families import load, transformers_version
from tests.ranks import ranks
from tests.zoo import families, sweep
from tests.zoo.checking import check_case, mesh_of

RECORD = load()
"""How each family ended when `python -m benchmarks.families` last trained them all."""
COUNTS = {"equal": 472, "cannot run": 46}
SWEPT = {name.partition("-")[2] for name in sweep.names()}
DRAWN = random.Random(14).sample(
    [row["family"] for row in RECORD.values() if row["outcome"] == "equal" and row["found"][0] not in SWEPT], 24
)


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


def test_every_family_is_equal_or_refused_by_name():
    outcomes = Counter(row["outcome"] for row in RECORD.values())
    assert outcomes == COUNTS
    assert outcomes["refused"] <= 0.02 * (outcomes["equal"] + outcomes["refused"])
    assert all(row["reason"] for row in RECORD.values() if row["outcome"] != "equal")


@pytest.mark.skipif(metadata.version("transformers") != transformers_version(), reason="other families")
def test_every_family_is_recorded():
    assert set(RECORD) == set(families.names()), "run python -m benchmarks.families"


@pytest.mark.slow
@pytest.mark.skipif(metadata.version("transformers") != transformers_version(), reason="other families")
@pytest.mark.parametrize("family", DRAWN)
@ranks(2, timeout_s=240.0)
@pytest.mark.filterwarnings("ignore")
def test_a_drawn_family_ends_as_recorded(rank: int, family: str):
    row = families.outcome_of(family, families.Found(*RECORD[family]["found"]), mesh_of(2))
    assert row["outcome"] == "equal", row["reason"]
