"""`[tool.shardwise.lint]`: read from the nearest pyproject.toml, all problems at once."""

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.linting.files import LintSettings, read_settings, with_codes


def write(folder: Path, table: str) -> Path:
    (folder / "pyproject.toml").write_text(f"[tool.shardwise.lint]\n{table}\n")
    return folder


def test_settings_are_read_from_a_folder_above(tmp_path: Path):
    write(
        tmp_path,
        'select = ["SW2"]\nignore = ["SW202"]\nexclude = ["old"]\npreview = true\n'
        'per-file-ignores = {"tests/*" = ["SW201"]}',
    )
    inner = tmp_path / "src" / "deep"
    inner.mkdir(parents=True)
    settings = read_settings(inner)
    assert settings.select == ("SW2",)
    assert settings.ignore == ("SW202",)
    assert settings.exclude == ("old",)
    assert settings.preview
    assert settings.per_file_ignores == {"tests/*": ["SW201"]}
    assert settings.root == tmp_path


def test_a_project_file_without_the_table_is_passed_over(tmp_path: Path):
    write(tmp_path, 'ignore = ["SW202"]')
    inner = tmp_path / "package"
    inner.mkdir()
    (inner / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert read_settings(inner).ignore == ("SW202",)


def test_all_problems_are_named_at_once(tmp_path: Path):
    write(tmp_path, 'selct = ["SW2"]\nignore = "SW202"\npreview = 3\nper-file-ignores = ["SW201"]')
    with pytest.raises(ConfigError, match="4 problem") as caught:
        read_settings(tmp_path)
    for part in (
        "did you mean 'select'",
        "ignore: must be a list",
        "preview: must be true",
        "per-file-ignores: must map",
    ):
        assert part in caught.value.where


def test_broken_toml_names_the_file(tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text("[tool.shardwise.lint\n")
    with pytest.raises(ConfigError) as caught:
        read_settings(tmp_path)
    assert "pyproject.toml" in caught.value.where


@pytest.mark.parametrize(
    ("select", "ignore", "code", "expected"),
    [
        (("SW",), (), "SW201", True),
        (("SW",), ("SW2",), "SW201", False),
        (("SW201",), ("SW2",), "SW201", True),
        (("SW2",), ("SW201",), "SW201", False),
        (("SW201",), ("SW201",), "SW201", False),
        (("SW1",), (), "SW201", False),
    ],
)
def test_the_longer_code_wins_and_ignore_wins_a_tie(select, ignore, code, expected):
    assert LintSettings(select=select, ignore=ignore).enables(code) is expected


def test_preview_rules_run_when_named_in_full_or_asked_for():
    assert not LintSettings().enables("SW237", preview=True)
    assert not LintSettings(select=("SW2",)).enables("SW237", preview=True)
    assert LintSettings(select=("SW237",)).enables("SW237", preview=True)
    assert LintSettings(preview=True).enables("SW237", preview=True)


def test_codes_that_no_rule_has_are_refused_with_a_guess():
    with pytest.raises(ConfigError, match="SW999") as caught:
        with_codes(LintSettings(), ["SW201,SW999"], None)
    assert "SW" in caught.value.fix
    assert with_codes(LintSettings(), ["sw201, sw22"], ["SW221"]).select == ("SW201", "SW22")
