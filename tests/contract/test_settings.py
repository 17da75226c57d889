"""Keys of a run file: names, types and defaults."""

from __future__ import annotations

import shardwise as sw
from shardwise.config.load import load
from tests.contract.command_line import ROOT
from tests.contract.drift import check
from tests.contract.settings import describe_settings


def test_settings_are_as_recorded():
    check("settings", describe_settings())


def test_every_example_is_a_run_file():
    files = sorted((ROOT / "examples" / "training").glob("*.yaml"))
    assert files
    for file in files:
        assert isinstance(load(sw.RunConfig, file), sw.RunConfig), file.name
