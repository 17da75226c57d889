"""Time per test file, from the XML of a pytest run.

make test ARGS="--junitxml=build/fast.xml"; python -m benchmarks.test_times build/fast.xml --save
"""

import argparse
import os
import platform
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.reporting import RESULTS


def times_by_file(xml: str) -> tuple[dict[str, list[float]], str]:
    """Seconds of each test by file, longest file first; and what was run: tests, outcome, wall time, date."""
    suite = next(ElementTree.fromstring(xml).iter("testsuite"))
    by_file: dict[str, list[float]] = {}
    for case in suite.iter("testcase"):
        by_file.setdefault(_file_of(case.get("classname", "")), []).append(float(case.get("time", 0)))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors")}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    started = suite.get("timestamp", "")[:19]
    spent = sum(map(sum, by_file.values()))
    head = f"{said}; {float(suite.get('time', 0)):.0f} s from start to end, {spent:.0f} s of tests; {started}"
    return dict(sorted(by_file.items(), key=lambda entry: -sum(entry[1]))), head


def _file_of(classname: str) -> str:
    """`tests.unit.test_x.TestY` stands for a class in tests/unit/test_x.py."""
    parts = classname.split(".")
    named = [length for length, part in enumerate(parts, 1) if part.startswith("test_")]
    return "/".join(parts[: named[-1]] if named else parts) + ".py"


def table(by_file: dict[str, list[float]]) -> str:
    """A row a file: seconds, tests, the longest of them."""
    rows = [f"{'seconds':>8} {'tests':>6} {'longest':>8}  file"]
    rows += [f"{sum(t):8.1f} {len(t):6} {max(t):8.1f}  {file}" for file, t in by_file.items()]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("xml", type=Path, help="what --junitxml wrote")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/test_times_<its name>.txt")
    parser.add_argument("--note", default="", help="what else a reader should know, as that the machine was busy")
    options = parser.parse_args()
    by_file, head = times_by_file(options.xml.read_text())
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "pytest", "pytest-xdist"))
    where = f"python {platform.python_version()}, {versions}, {os.cpu_count()} cores; {options.note}".removesuffix("; ")
    text = f"# python -m benchmarks.test_times {options.xml}\n# {head}\n# {where}\n{table(by_file)}\n"
    print(text, end="")
    if options.save:
        (RESULTS / f"test_times_{options.xml.stem}.txt").write_text(text)


if __name__ == "__main__":
    main()
