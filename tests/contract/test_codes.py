"""What each code is called and how grave it is."""

from __future__ import annotations

from tests.contract.codes import describe_codes
from tests.contract.drift import check
from tests.contract.record import Subject


def test_codes_are_as_recorded(subject: Subject):
    check("codes", describe_codes(subject.work("codes"), subject.checks()))
