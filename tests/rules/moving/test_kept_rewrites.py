"""What migrate makes of whole FSDP1 scripts and of small programs, to the letter; findings but for their prose."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from shardwise.migration import Target, migrate
from tests.golden import same_as_kept
from tests.rules.moving import programs, state_programs

SCRIPTS = sorted((Path(__file__).parents[2] / "scripts").glob("fsdp1_*.py"))
TEXTS = {
    **{script.stem: script.read_text() for script in SCRIPTS},
    **{name: programs.source(name) for name in programs.BODIES},
    **{f"states_{name}": state_programs.source(name) for name in state_programs.PROGRAMS},
}


@pytest.mark.parametrize("target", ["torch", "shardwise"])
@pytest.mark.parametrize("name", TEXTS)
def test_rewrites(tmp_path: Path, name: str, target: Target):
    path = tmp_path / "program.py"
    path.write_text(TEXTS[name])
    migration = migrate([path], target=target, num_processes=1)
    (file,) = migration.files
    lines = difflib.unified_diff(TEXTS[name].splitlines(), file.output.splitlines(), lineterm="", n=0)
    kept = {
        "summary": migration.summary,
        "findings": [f"{each.line}:{each.column} {each.code} {each.status.value}" for each in file.findings],
        "change": [line for line in lines if not line.startswith(("---", "+++"))],
    }
    same_as_kept("rewrites", f"{name} to {target}", kept)
