"""Which files are read, and that writing replaces a file in one step."""

import os
import stat
from functools import partial
from pathlib import Path

import pytest

from shardwise.errors import SourceError
from shardwise.linting.files import LintSettings, is_excluded
from shardwise.source.files import find_files, read_bytes, write_bytes


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")


def test_folders_are_searched_for_python_files_of_the_project(tmp_path: Path):
    touch(tmp_path, "b.py", "a/c.py", "a/notes.md", "a/n.ipynb", "a/__pycache__/x.py", "skip/x.py")
    touch(tmp_path, ".git/x.py", "venv/x.py", "my-env/pyvenv.cfg", "my-env/x.py", "node_modules/x.py")
    touch(tmp_path, "build/lib/x.py", "dist/wheel.whl", "env/bin/x.py", "a/dist/comm.py", "a/env/__init__.py")
    settings = LintSettings(exclude=("skip",), root=tmp_path)
    files = find_files([tmp_path], {".py"}, partial(is_excluded, settings=settings))
    found = [Path(path).relative_to(tmp_path).as_posix() for path in files]
    assert found == ["a/c.py", "a/dist/comm.py", "a/env/__init__.py", "b.py"]


def test_files_named_by_the_user_are_read_whatever_their_suffix_but_notebooks(tmp_path: Path):
    touch(tmp_path, "script", "n.ipynb")
    paths = [str(tmp_path / "script"), str(tmp_path / "n.ipynb"), str(tmp_path / "script"), "-"]
    assert find_files(paths, {".py"}, partial(is_excluded, settings=LintSettings())) == [str(tmp_path / "script"), "-"]


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path):
    with pytest.raises(SourceError, match="no such file"):
        find_files([tmp_path / "absent.py"], {".py"})


def test_writing_keeps_the_mode_and_the_link(tmp_path: Path):
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_text("old")
    real.chmod(0o755)
    link.symlink_to(real)
    write_bytes(str(link), b"new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o755
    assert sorted(os.listdir(tmp_path)) == ["link.py", "real.py"]


def test_a_file_that_cannot_be_written_stays_and_leaves_nothing_behind(tmp_path: Path):
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(SourceError, match="cannot be written"):
        write_bytes(str(target), b"new")
    assert os.listdir(tmp_path) == ["folder"]


def test_a_file_that_cannot_be_read_is_a_source_error(tmp_path: Path):
    with pytest.raises(SourceError, match="cannot be read"):
        read_bytes(str(tmp_path / "absent.py"))
