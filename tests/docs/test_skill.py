"""The agent skill: its code runs on two ranks, its commands run, its links lead somewhere."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
import yaml

from shardwise.cli.main import app
from shardwise.cli.skill import SKILL, skill_files
from tests.contract.command_line import run
from tests.docs.test_snippets import ROOT, run_in, run_on_ranks
from tests.ranks import start_fork_server

FOLDER = ROOT / "skills" / SKILL
PAGES = sorted(FOLDER.rglob("*.md"))
PROJECT = Path(__file__).parent / "skill_project"
_FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
# On Ray, which starts its own workers; and pages with nothing to run.
WITH_CODE = [page for page in PAGES if page.stem != "ray-train" and "```python" in page.read_text()]
QUICK = {"SKILL", "data-and-resume", "tensor-parallel"}
IN_SHARDWISE, IN_TORCH = "Reference blocks in shardwise", "Reference blocks in plain torch"


def blocks_of(text: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [code for _, kind, code in _FENCE.findall(text) if kind == language]


def scripts_of(page: Path) -> dict[str, str]:
    """One script of the Python blocks under each heading of the second level."""
    sections = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    scripts = {section.partition("\n")[0]: "\n".join(blocks_of(section, "python")) for section in sections}
    return {title: code for title, code in scripts.items() if code}


def commands_of(text: str) -> list[str]:
    """Every command of ours on a page: lines of shell blocks, and code in the text that starts like one."""
    lines = [line.strip() for block in blocks_of(text, "sh") for line in block.splitlines()]
    inline = re.findall(r"`(shardwise [a-z][^`]*)`", _FENCE.sub("", text))
    return [line for line in [*lines, *inline] if line.startswith("shardwise ")]


def run_script(path: Path, rank: int, port: int, log: Path) -> None:
    """One rank, as torchrun would start it."""
    multiprocessing.set_start_method("fork", force=True)  # a script's default, not that of who started the rank
    os.chdir(path.parent)
    sys.path.insert(0, str(path.parent))
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        try:
            runpy.run_path(str(path), run_name="__main__")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort an interpreter that shuts down


def on_two_ranks(script: str, folder: Path, timeout_s: float = 60.0) -> str:
    """What two ranks print that run a script beside `my_project`; fails with their output when one fails."""
    shutil.copytree(PROJECT, folder, dirs_exist_ok=True)
    path = folder / "script.py"
    path.write_text(script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_fork_server()
    context = multiprocessing.get_context("forkserver")
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    # Not daemons: a checkpoint is written by a process of its own.
    ranks = [context.Process(target=run_script, args=(path, rank, port, logs[rank])) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(timeout_s)
        output = "\n".join(log.read_text() for log in logs)
        assert [process.exitcode for process in ranks] == [0, 0], output
        return output
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.stem in QUICK else pytest.mark.slow, id=page.stem) for page in WITH_CODE],
)
def test_code_runs_on_two_ranks(page: Path, tmp_path: Path):
    for number, (title, script) in enumerate(scripts_of(page).items()):
        if title != IN_SHARDWISE:  # those make the project, below
            folder = tmp_path / str(number)
            folder.mkdir()
            print(title)  # shown when it fails
            on_two_ranks(script, folder)


def test_every_block_is_run():
    for page in WITH_CODE:
        whole = sum(script.count("\n") for script in scripts_of(page).values())
        assert whole >= page.read_text().count("```python"), page
        assert blocks_of(page.read_text(), "py") == [], "fences are called python"
        kinds = {kind for _, kind, _ in _FENCE.findall(page.read_text())}
        assert kinds <= {"python", "sh", "text", "yaml"}, page


COMMANDS = sorted({command for page in PAGES for command in commands_of(page.read_text())})


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_understood(command: str):
    """By the command line's own parser: names, options, and how many arguments."""
    words = shlex.split(command)[1:]
    found: Any = typer.main.get_command(app)
    while words and (below := getattr(found, "commands", None)):
        assert words[0] in below, f"no command {words[0]}"
        found, words = below[words[0]], words[1:]
    if words:  # else the text only names it
        found.make_context(found.name, words)


# What a command must say, by its first words; the rest must end with 0. Parity and training start ranks of their own.
EXPECTED = {
    "explain run.log": (0, "SW502"),
    "explain dumps": (0, "never came to it"),
    "explain SW": (0, "SW"),
    "ckpt diff": (1, "blocks.0"),
    "ckpt diff checkpoints/step-00000004 export": (0, '"equal": true'),
    "migrate fsdp1_train.py": (0, "fully_shard"),
    "migrate fsdp1_train.py --target shardwise": (0, "sw.shard"),
    "plan": (0, "blocks.0"),
    "doctor": (None, "torch"),  # what it finds depends on the machine
}


def _is_whole(command: str) -> bool:
    """Whether it has arguments, and starts no ranks."""
    words = command.split()[1:]
    return len(words) > (2 if words[0] in ("ckpt", "skill") else 1) and words[0] not in ("parity", "train")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the commands name: scripts, checkpoints of a real run, a log, dumps, an old file."""
    folder = tmp_path_factory.mktemp("project")
    blocks = scripts_of(FOLDER / "SKILL.md")[IN_SHARDWISE]
    on_two_ranks(blocks, folder)
    (folder / "train.py").write_text(blocks)
    shutil.copy(ROOT / "tests/scripts/fsdp1_bf16.py", folder / "fsdp1_train.py")
    (folder / "run.log").write_text("[rank1]: RuntimeError: aten.addmm.default got mixed torch.Tensor and DTensor\n")
    torch.save({"model": {"w": torch.ones(4, 4)}}, folder / "old.pt")
    (folder / "dumps").mkdir()
    first, second = ({"collective_seq_id": n, "profiling_name": "nccl:all_reduce"} for n in (1, 2))
    for rank, entries in enumerate([[first, second], [first]]):
        (folder / "dumps" / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps({"entries": entries}))
    return folder


def test_blocks_train(project: Path):
    losses = [
        float(loss) for loss in re.findall(r"^step \d loss (\S+)", (project / "rank0.log").read_text(), re.MULTILINE)
    ]
    assert len(losses) == 4
    assert sorted(path.name for path in (project / "export").iterdir()) == ["model.safetensors"]


@pytest.mark.parametrize("title", [IN_SHARDWISE, IN_TORCH])
def test_lint_finds_nothing_in_the_blocks(title: str, tmp_path: Path):
    (tmp_path / "train.py").write_text(scripts_of(FOLDER / "SKILL.md")[title])
    done = run("lint", "train.py", "--format", "json", folder=tmp_path)
    assert (done.status, json.loads(done.output)["findings"]) == (0, [])


@pytest.mark.parametrize("command", [c for c in COMMANDS if _is_whole(c)])
def test_command_runs(command: str, project: Path, tmp_path: Path):
    shutil.copytree(project, tmp_path, dirs_exist_ok=True)
    words = shlex.split(command)[1:]
    done = run(*words, folder=tmp_path)
    keys = [key for key in EXPECTED if command.startswith(f"shardwise {key}")]
    status, text = EXPECTED[max(keys, key=len)] if keys else (0, "")
    assert done.status == status or status is None, done.output + done.errors
    assert text in done.output
    if "json" in words:
        json.loads(done.output)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[1] == "parity"])
def test_parity_runs(command: str, project: Path):
    out = run_in(project, [sys.executable, "-m", *shlex.split(command)])
    assert json.loads(out)["equal"]


@pytest.mark.slow
def test_blocks_run_under_torchrun_and_resume(project: Path, tmp_path: Path):
    shutil.copy(project / "my_project.py", tmp_path)
    out = run_on_ranks((project / "train.py").read_text().replace("num_steps=4", "num_steps=2"), tmp_path, 2)
    out += run_on_ranks((project / "train.py").read_text(), tmp_path, 2)
    whole = (project / "rank0.log").read_text()
    assert re.findall(r"^step.*", out, re.MULTILINE) == re.findall(r"^step.*", whole, re.MULTILINE)


@pytest.mark.slow
def test_code_runs_on_ray(tmp_path: Path):
    (script,) = scripts_of(FOLDER / "references/ray-train.md").values()
    shutil.copytree(PROJECT, tmp_path, dirs_exist_ok=True)
    (tmp_path / "script.py").write_text(script)
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{tmp_path}", "RAY_TRAIN_V2_ENABLED": "1"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_argument_that_the_api_does_not_have_is_noticed(tmp_path: Path):
    """The way in which drift shows: a block with a renamed argument fails, with the name in what it prints."""
    script = scripts_of(FOLDER / "SKILL.md")[IN_SHARDWISE]
    assert "keep_last=3" in script
    with pytest.raises(AssertionError, match="keep_newest"):
        on_two_ranks(script.replace("keep_last=3", "keep_newest=3"), tmp_path)


def test_front_matter_is_what_agents_read():
    _, head, body = (FOLDER / "SKILL.md").read_text().split("---\n", 2)
    front = yaml.safe_load(head)
    assert front["name"] == FOLDER.name == SKILL
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", front["name"])
    assert 0 < len(front["description"]) <= 1024
    assert len(front.get("compatibility", "")) <= 500
    assert body.lstrip().startswith("# ")


def test_main_page_is_short():
    assert len((FOLDER / "SKILL.md").read_text().splitlines()) < 500


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert "://" in target or (page.parent / target).is_file(), f"{page.name} links to {target}"


def test_every_reference_is_listed_on_the_main_page():
    main = (FOLDER / "SKILL.md").read_text()
    for page in PAGES:
        assert page.name == "SKILL.md" or f"(references/{page.name})" in main, page.name


def test_all_labelled_blocks_exist_in_torch_and_in_shardwise():
    names = {
        "init_distributed",
        "build_model_meta",
        "build_optimizer",
        "train_step",
        "checkpoint_save",
        "checkpoint_load",
    }
    scripts = scripts_of(FOLDER / "SKILL.md")
    for title in (IN_SHARDWISE, IN_TORCH):
        assert names <= set(re.findall(r"^def (\w+)", scripts[title], re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_rules_that_are_named_exist(page: Path):
    known = {path.stem for kind in ("rules", "errors") for path in (ROOT / "docs" / kind).glob("SW*.md")}
    known |= set(re.findall(r"SW\d{3}", "".join((ROOT / "docs" / name).read_text() for name in _OTHER_CODES)))
    assert set(re.findall(r"SW\d{3}", page.read_text())) <= known


_OTHER_CODES = ("diagnosing.md", "checkpoints.md")


def test_skill_is_found_in_a_clone():
    assert skill_files() == skill_files(FOLDER)
