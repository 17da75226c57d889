"""Write the newest result of every case into docs/measurements.md.

python -m benchmarks.tabulate
"""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.reporting import RESULTS, format_number

PAGE = Path(__file__).parents[1] / "docs/measurements.md"
START, END = "<!-- from benchmarks/results -->", "<!-- end -->"


def newest(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The last line kept for each case, in the order of the files."""
    by_case: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            result = json.loads(line)
            by_case[result["case"]] = result
    return list(by_case.values())


def table(results: list[dict[str, Any]]) -> str:
    """One table for each command, date and machine."""
    parts: list[str] = []
    said = ""
    for result in results:
        machine, versions = result["machine"], result["versions"]
        where = machine["gpu"] or f"{machine['cores']} cores"
        command = re.sub(r" --save(?= |$)", "", result["command"])
        heading = f"`{command}`, torch {versions['torch']}, {where}, {result['date'][:10]}"
        if heading != said:
            parts += ["", f"{heading} (load average {machine['load_1min']}):", ""]
            parts += ["| case | measured | compared with | ratio | 95 % interval | goal |", "|---|---|---|---|---|---|"]
            said = heading
        parts.append(_row(result))
    return "\n".join(parts[1:])


def _row(result: dict[str, Any]) -> str:
    interval = f"{result['interval'][0]:.3f} to {result['interval'][1]:.3f}" if result["interval"] else ""
    ratio = "" if result["ratio"] is None else f"{result['ratio']:.3f}"
    met = {True: "met", False: "**missed**", None: ""}[result["met"]]
    values = [format_number(result[key], result["unit"]) for key in ("value", "baseline")]
    return f"| {result['case']} | {values[0]} | {values[1]} | {ratio} | {interval} | {result['goal']} {met} |"


def filled(text: str, results: list[dict[str, Any]]) -> str:
    """The page with its tables made anew."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{table(results)}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), newest()))
