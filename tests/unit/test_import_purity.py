"""What must stay light: importing shardwise, and `shardwise --help`, load no torch."""

import subprocess
import sys

import pytest

REPORT = "; print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "module",
    [
        "shardwise",
        "shardwise.cli.main",
        "shardwise.config.load",
        "shardwise.errors",
        "shardwise.findings",
        "shardwise.distributed.launchers",
        "shardwise.distributed.local_ranks",
        "shardwise.distributed.stop_requests",
        "shardwise.linting.lint",
        "shardwise.fsdp1.codemod.migrate",
        "shardwise.progress",
        "shardwise.report.terminal",
        "shardwise.units",
    ],
)
def test_import_loads_no_torch(module: str):
    assert run(f"import sys, {module}{REPORT}") == "[]"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_command_loads_no_torch(arguments: list[str]):
    code = (
        "import sys\n"
        "from shardwise.cli.main import main\n"
        f"try: main({arguments!r})\n"
        f"except SystemExit as done: assert not done.code, done.code\n"
    )
    assert run(code + REPORT.removeprefix("; ")) == "[]"


def test_the_check_can_fail():
    assert run(f"import sys, torch{REPORT}") != "[]"
