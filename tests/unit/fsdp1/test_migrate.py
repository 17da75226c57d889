"""migrate(): files in, files out. What the rules do to code is tested in tests/rules/moving."""

from __future__ import annotations

import ast
import difflib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import SourceError
from shardwise.findings import Status
from shardwise.fsdp1.codemod.migrate import migrate
from tests.rules.moving.programs import BODIES, source

SCRIPTS = sorted((Path(__file__).parents[2] / "scripts").glob("fsdp1_*.py"))
SIMPLE = """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def wrap(model, local_rank):  # keep me
    return FSDP(model, device_id=local_rank)
"""


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def untouched(before: str, after: str) -> list[str]:
    """The lines that no rewrite was about, in order."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(True), after.splitlines(True), autojunk=False)
    return [tag for tag, *_ in matcher.get_opcodes() if tag == "equal"]


def test_nothing_is_written_unless_asked(tmp_path: Path):
    path = write(tmp_path, SIMPLE)
    result = migrate([path])
    assert result.files[0].changed
    assert path.read_text() == SIMPLE


def test_write_keeps_the_mode_and_leaves_nothing_behind(tmp_path: Path):
    path = write(tmp_path, SIMPLE)
    path.chmod(0o755)
    result = migrate([path], write=True)
    assert path.read_text() == result.files[0].output
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert os.listdir(tmp_path) == ["train.py"]


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path, SIMPLE)

    def fail(source: object, target: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(SourceError, match="disk full"):
        migrate([path], write=True)
    assert path.read_text() == SIMPLE
    assert os.listdir(tmp_path) == ["train.py"]


def test_link_stays_a_link(tmp_path: Path):
    path = write(tmp_path, SIMPLE, "real.py")
    link = tmp_path / "link.py"
    link.symlink_to(path)
    migrate([link], write=True)
    assert link.is_symlink()
    assert "fully_shard" in path.read_text()


def test_line_ends_and_encoding_survive(tmp_path: Path):
    text = "# -*- coding: latin-1 -*-\n# größe\n" + SIMPLE
    path = tmp_path / "train.py"
    path.write_bytes(text.replace("\n", "\r\n").encode("latin-1"))
    migrate([path], write=True)
    data = path.read_bytes()
    assert "größe".encode("latin-1") in data
    assert data.count(b"\n") == data.count(b"\r\n")


def test_file_that_does_not_parse_is_reported_and_left(tmp_path: Path):
    path = write(tmp_path, "from torch.distributed.fsdp import FSDP\ndef broken(:\n")
    result = migrate([path], write=True)
    (finding,) = result.findings
    assert (finding.code, finding.line, finding.status) == ("SW180", 2, Status.NEEDS_DECISION)
    assert not result.files[0].changed


def test_path_that_does_not_exist_is_an_error(tmp_path: Path):
    with pytest.raises(SourceError, match="no such file"):
        migrate([tmp_path / "nowhere"])


def test_unknown_target_is_an_error(tmp_path: Path):
    with pytest.raises(SourceError, match="target"):
        migrate([tmp_path], target="fsdp3")  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize("target", ["torch", "shardwise"])
@pytest.mark.parametrize("name", [*BODIES, *(path.name for path in SCRIPTS)])
def test_output_parses_is_stable_and_keeps_comments(name: str, target: str, tmp_path: Path):
    text = source(name) if name in BODIES else next(one for one in SCRIPTS if one.name == name).read_text()
    path = write(tmp_path, text)
    output = migrate([path], target=target).files[0].output
    ast.parse(output)
    write(tmp_path, output)
    again = migrate([path], target=target).files
    assert not any(file.changed for file in again), "a second run changes nothing"
    comments = [line.partition("#")[2].strip() for line in text.splitlines() if "#" in line]
    assert all(comment in output for comment in comments)


def test_files_of_a_folder_are_one_program(tmp_path: Path):
    write(tmp_path, "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n", "wrapping.py")
    text = "from wrapping import FSDP\n\n\ndef build(model):\n    return FSDP(model)\n"
    write(tmp_path, text, "train.py")
    calls = [finding for finding in migrate([tmp_path]).findings if finding.code == "SW101"]
    assert [(Path(call.path).name, call.line, call.status) for call in calls] == [("train.py", 5, Status.REWRITTEN)]


def test_several_processes_find_the_same(tmp_path: Path):
    for name in BODIES:
        write(tmp_path, source(name), f"{name}.py")
    assert migrate([tmp_path], num_processes=2) == migrate([tmp_path], num_processes=1)


def test_json_has_the_promised_shape(tmp_path: Path):
    path = write(tmp_path, SIMPLE)
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.cli.main", "migrate", str(path), "--format", "json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    (file,) = printed["files"]
    assert set(file) == {"path", "changed", "output", "findings"}
    assert {"code", "line", "status", "message", "fix"} == set(file["findings"][0])
    assert printed["summary"]["constructors_rewritten"] == 1


def test_torch_is_not_imported(tmp_path: Path):
    path = write(tmp_path, SIMPLE)
    code = (
        "import sys; from shardwise.fsdp1.codemod.migrate import migrate; "
        f"assert migrate([{str(path)!r}]).files; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_lines_without_fsdp_stay_as_they_are(tmp_path: Path):
    path = write(tmp_path, SIMPLE)
    output = migrate([path]).files[0].output
    assert "def wrap(model, local_rank):  # keep me\n" in output
    assert untouched(SIMPLE, output)


def test_settings_of_run_time_tell_about_an_earlier_optimizer(tmp_path: Path):
    """With `use_orig_params=True` FSDP1 kept the optimizer's parameters; whether it is True nobody can read here."""
    path = tmp_path / "train.py"
    path.write_text(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n\n\n"
        "def prepare(model, settings):\n    return FSDP(model, **settings)\n"
    )
    (file,) = migrate([path]).files
    assert file.changed
    assert "SW128" in {finding.code for finding in file.findings}


def test_a_relative_import_in_a_file_given_without_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, "from . import FSDP\n" + SIMPLE.replace("FSDP(", "Wrapper(") + "\nmodel = FSDP(model)\n")
    monkeypatch.chdir(tmp_path)
    assert migrate(["train.py"], num_processes=1).num_read == 1
