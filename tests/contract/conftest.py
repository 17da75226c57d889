"""The working tree as the pieces of the contract see it, with samples written once for all tests."""

from __future__ import annotations

import pytest

from tests.contract.record import Subject


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("contract"))
