"""Fields of every JSON output, and names and fields of every file that is written, from real invocations."""

from __future__ import annotations

import pytest

from tests.contract.drift import check
from tests.contract.outputs import describe_files, describe_outputs, describe_training
from tests.contract.record import Subject


def test_json_outputs_are_as_recorded(subject: Subject):
    check("json", describe_outputs(subject.work("outputs")))


def test_files_are_as_recorded(subject: Subject):
    check("files", describe_files(subject.samples()))


@pytest.mark.slow
def test_json_outputs_of_commands_with_ranks_are_as_recorded(subject: Subject):
    check("json of ranks", describe_training(subject.work("training")))
