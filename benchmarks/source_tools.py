"""What reading source code costs: lint and migrate on 100k lines of FSDP code, and on a repository with little of it.

python -m benchmarks.source_tools
python -m benchmarks.source_tools --only lint
"""

import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reporting import Result, parse, report

ROOT = Path(__file__).parents[1]
SCRIPTS = [*sorted((ROOT / "tests/rules/wrong").glob("*.py")), *sorted((ROOT / "tests/scripts").glob("fsdp1_*.py"))]
NUM_LINES, NUM_TOY_LINES = 100_000, 2_000
ORDINARY = """\
def f{i}(values, scale={i}):
    total = sum(value * scale for value in values)
    return total / len(values)


"""


@dataclass(frozen=True)
class Tool:
    """A command that reads a folder."""

    name: str
    command: tuple[str, ...]
    goal_s: float
    """For 100k lines of files that all use FSDP, on two cores."""


TOOLS = (
    Tool("lint", ("lint", "--format", "json"), 60.0),
    Tool("migrate", ("migrate", "--format", "json"), 120.0),
)


def write_fsdp_code(folder: Path, num_lines: int) -> int:
    """Our scripts with planted mistakes and our FSDP1 scripts, again and again under other names; the lines written."""
    texts = [path.read_text() for path in SCRIPTS]
    written = number = 0
    while written < num_lines:
        text = f"RUN = {number}\n" + texts[number % len(texts)]
        (folder / f"script_{number:05}.py").write_text(text)
        written += text.count("\n")
        number += 1
    return written


def write_ordinary_code(folder: Path, num_lines: int) -> int:
    """Code without torch, and in one file of a hundred FSDP; the lines written."""
    text = "".join(ORDINARY.format(i=i) for i in range(60))
    written = number = 0
    while written < num_lines:
        (folder / f"module_{number:05}.py").write_text(text)
        written += text.count("\n")
        number += 1
    for index in range(max(1, number // 100)):
        (folder / f"train_{index}.py").write_text(SCRIPTS[index % len(SCRIPTS)].read_text())
    return written


def time_command(tool: Tool, folder: Path) -> float:
    """Seconds of one run, start of the interpreter included."""
    command = [sys.executable, "-m", "shardwise.cli.main", *tool.command, str(folder)]
    cores = sorted(os.sched_getaffinity(0))[:2]
    start = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    seconds = time.perf_counter() - start
    assert done.returncode in (0, 1), done.stderr
    return seconds


def measure(tool: Tool, num_lines: int, repeats: int) -> list[Result]:
    results = []
    for kind, write in (("FSDP code", write_fsdp_code), ("ordinary code", write_ordinary_code)):
        with tempfile.TemporaryDirectory() as name:
            written = write(Path(name), num_lines)
            seconds = min(time_command(tool, Path(name)) for _ in range(repeats))
        goal = tool.goal_s if kind == "FSDP code" else tool.goal_s / 10
        results.append(
            Result(
                case=f"source_tools/{tool.name} {kind}",
                value=seconds,
                unit="s",
                goal=f"<= {goal:g} s for 100k lines on two cores",
                met=seconds <= goal,
                details={"lines": written, "lines_per_s": round(written / seconds), "best_of": repeats},
            )
        )
    return results


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", choices=[tool.name for tool in TOOLS], help="one of the tools")


def main() -> None:
    options = parse(__doc__ or "", toy_help="2,000 lines, once", add=add_options)
    num_lines, repeats = (NUM_TOY_LINES, 1) if options.toy else (NUM_LINES, 3)
    tools = [tool for tool in TOOLS if options.only in (None, tool.name)]
    report("source_tools", [one for tool in tools for one in measure(tool, num_lines, repeats)], save=options.save)


if __name__ == "__main__":
    main()
