"""Write the newest result of every case into docs/measurements.md.

python -m benchmarks.tabulate
"""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.reporting import RESULTS, efficiency, format_number, percent

PAGE = Path(__file__).parents[1] / "docs/measurements.md"
START, END = "<!-- from benchmarks/results -->", "<!-- end -->"
CLASSES_START, CLASSES_END = "<!-- kernel classes from benchmarks/results -->", "<!-- end of kernel classes -->"


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
    values[0] += efficiency(result["details"])
    return f"| {result['case']} | {values[0]} | {values[1]} | {ratio} | {interval} | {result['goal']} {met} |"


def kernel_classes(results: list[dict[str, Any]]) -> str:
    """Milliseconds of a step by class of kernel, for each row of `benchmarks.gpu` that was profiled."""
    classes = ("matrix products", "attention", "compiled", "other", "idle")
    shown = ("matrix products", "attention", "compiled (norms, casts, loss, AdamW)", "other and copies", "idle")
    lines = [f"| row | step | {' | '.join(shown)} | MFU | causal MFU | of the ceiling |", "|---" * 10 + "|"]
    for result in results:
        details = result["details"]
        if "causal_mfu" in details and "kernels_ms" in details:
            spent = dict(details["kernels_ms"])
            spent["other"] += spent["memory copies"]
            times = [f"{milliseconds:,.0f}" for milliseconds in (details["step_ms"], *map(spent.__getitem__, classes))]
            rates = [percent(details["mfu"]), percent(details["causal_mfu"]), f"{details['percent_of_ceiling']} %"]
            name = result["case"].removeprefix("gpu/").partition(":")[0]
            lines.append(f"| `{name}` | {' | '.join(times + rates)} |")
    return "\n".join(lines)


def filled(text: str, results: list[dict[str, Any]]) -> str:
    """The page with its tables made anew."""
    for start, end, made in (
        (START, END, table(results)),
        (CLASSES_START, CLASSES_END, kernel_classes(results)),
    ):
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n\n{made}\n\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), newest()))
