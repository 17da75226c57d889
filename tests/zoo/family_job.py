"""One family of transformers on two ranks, for the test and for `benchmarks.families`."""

import json
from pathlib import Path

import pytest

from tests.ranks import ranks
from tests.zoo.checking import mesh_of
from tests.zoo.families import Found, outcome_of


@ranks(2, timeout_s=480.0)
@pytest.mark.filterwarnings("ignore")
def check_family(rank: int, family: str, found: Found | None, answer: Path) -> None:
    row = outcome_of(family, found, mesh_of(2))
    if rank == 0:
        answer.write_text(json.dumps(row))
