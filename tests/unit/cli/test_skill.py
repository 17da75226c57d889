"""`shardwise skill`: what it prints, where it installs, and what it never overwrites."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardwise.skill_copies import AGENTS, SKILL, inspect_copy, skill_files
from tests.contract.command_line import ROOT, run

FILES = skill_files()


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of nobody's."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    return folder


def installed(folder: Path) -> dict[str, bytes]:
    return skill_files(folder / SKILL)


def test_all_agents_find_it_in_a_project_without_any(tmp_path: Path):
    done = run("skill", "install", folder=tmp_path)
    assert done.status == 0, done.errors
    assert [installed(tmp_path / name) for name in AGENTS] == [FILES, FILES]
    assert done.output.splitlines() == [f"installed {tmp_path / name / SKILL}" for name in AGENTS]


def test_only_agents_that_a_project_uses_get_it(tmp_path: Path):
    (tmp_path / ".claude").mkdir()
    assert run("skill", "install", folder=tmp_path).status == 0
    assert installed(tmp_path / ".claude/skills") == FILES
    assert not (tmp_path / ".agents").exists()


def test_home_folder_and_any_folder(tmp_path: Path, home: Path):
    assert run("skill", "install", "--home", folder=tmp_path).status == 0
    assert installed(home / ".agents/skills") == FILES
    assert list(tmp_path.iterdir()) == []
    assert run("skill", "install", "some/skills", folder=tmp_path).status == 0
    assert installed(tmp_path / "some/skills") == FILES


def test_list_shows_every_place_and_installs_nothing(tmp_path: Path, home: Path):
    places = json.loads(run("skill", "install", "--list", "--format", "json", folder=tmp_path).output)["places"]
    assert [place["path"] for place in places] == [str(b / n / SKILL) for b in (tmp_path, home) for n in AGENTS]
    assert {place["state"] for place in places} == {"absent"}
    assert [*tmp_path.iterdir(), *home.iterdir()] == []
    run("skill", "install", "--home", folder=tmp_path)
    lines = run("skill", "install", "--list", folder=tmp_path).output.splitlines()
    assert [line.split()[0] for line in lines] == ["absent", "absent", "current", "current"]
    assert "Claude Code" in lines[1]


def test_changed_copy_is_never_overwritten_without_force(tmp_path: Path):
    run("skill", "install", folder=tmp_path)
    changed = tmp_path / ".agents/skills" / SKILL / "references/dcp.md"
    changed.write_text("mine")
    missing = tmp_path / ".claude/skills" / SKILL / "SKILL.md"
    missing.unlink()
    done = run("skill", "install", folder=tmp_path)
    assert done.status == 2
    assert "references/dcp.md" in done.errors.replace("\n", "").replace(" ", "")
    assert "--force" in done.errors
    assert changed.read_text() == "mine"
    assert not missing.exists(), "nothing is written anywhere"
    done = run("skill", "install", "--force", "--format", "json", folder=tmp_path)
    assert [row["before"] for row in json.loads(done.output)["installed"]] == ["changed", "outdated"]
    assert installed(tmp_path / ".agents/skills") == FILES


def test_copy_without_record_counts_as_changed_where_it_differs(tmp_path: Path):
    """Somebody copied the folder by hand."""
    shutil.copytree(ROOT / "skills" / SKILL, tmp_path / SKILL)
    assert inspect_copy(tmp_path).state == "current"
    (tmp_path / SKILL / "SKILL.md").write_text("older")
    assert inspect_copy(tmp_path).changed == ("SKILL.md",)
    assert run("skill", "install", tmp_path).status == 2


def test_unchanged_copy_of_another_version_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also a page that this version no longer has is removed, and the user's own stay."""
    older = tmp_path / "older"
    (older / "references").mkdir(parents=True)
    (older / "SKILL.md").write_text("an older page")
    (older / "references/gone.md").write_text("no longer there")
    monkeypatch.setattr("shardwise.skill_copies.page_folder", lambda path: older)
    assert run("skill", "install", tmp_path / "skills").status == 0
    monkeypatch.undo()
    own = tmp_path / "skills" / SKILL / "references/own.md"
    own.write_text("the user's")
    assert inspect_copy(tmp_path / "skills").state == "outdated"
    assert run("skill", "install", tmp_path / "skills").status == 0
    assert installed(tmp_path / "skills") == {**FILES, "references/own.md": b"the user's"}
    assert inspect_copy(tmp_path / "skills").state == "current"


def test_show_prints_a_page():
    assert run("skill", "show").output.rstrip() == FILES["SKILL.md"].decode().rstrip()
    assert run("skill", "show", "dcp").output.rstrip() == FILES["references/dcp.md"].decode().rstrip()
    shown = json.loads(run("skill", "show", "dcp", "--format", "json").output)
    assert shown == {"topic": "dcp", "page": FILES["references/dcp.md"].decode()}


def test_unknown_topic_suggests_one():
    done = run("skill", "show", "tensor-paralel")
    assert done.status == 2
    assert "did you mean 'tensor-parallel'?" in done.errors


def test_wheel_carries_it_and_needs_no_torch(tmp_path: Path):
    """The files lie as hatchling lays them out by pyproject.toml; nothing of the clone is beside them."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for package in wheel["packages"]:
        shutil.copytree(ROOT / package, tmp_path / Path(package).name)
    for source, target in wheel["force-include"].items():
        shutil.copytree(ROOT / source, tmp_path / target)
    code = (
        "import sys; from shardwise.cli.main import app; "
        "app(['skill', 'show', 'dcp'], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip() == FILES["references/dcp.md"].decode().rstrip()


def test_help_lists_it():
    assert "skill" in run("--help").output
