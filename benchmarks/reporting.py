"""One measured case: print it as a JSON line and as a table row, and keep it in results/ when asked."""

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured, beside what it is compared with and what it should be."""

    case: str
    value: float | None
    unit: str
    baseline: float | None = None
    """The same quantity of the thing compared with, named in `case`."""
    ratio: float | None = None
    """`value / baseline`, by the method the benchmark states; not always the quotient of the two fields."""
    interval: tuple[float, float] | None = None
    """At least 95 % for the median of `ratio`, or of `value` where there is no ratio."""
    goal: str = ""
    met: bool | None = None
    """None where there is no goal."""
    details: dict[str, Any] = field(default_factory=dict)


def parse(description: str, *, toy_help: str, add: Any = None) -> argparse.Namespace:
    """The options every benchmark has, and those that `add(parser)` adds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--toy", action="store_true", help=toy_help)
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/")
    if add is not None:
        add(parser)
    return parser.parse_args()


def report(name: str, results: list[Result], *, save: bool) -> None:
    """Print the results, JSON first, and append them to `results/<name>.jsonl` if they are to be kept."""
    lines = [json.dumps({**asdict(result), **_circumstances()}) for result in results]
    print("\n".join(lines))
    print(_table(results))
    if save:
        RESULTS.mkdir(exist_ok=True)
        with open(RESULTS / f"{name}.jsonl", "a") as file:
            file.writelines(line + "\n" for line in lines)


def _circumstances() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = {"python": platform.python_version(), "torch": torch.__version__, "shardwise": _version()}
    return {
        "versions": versions,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "machine": {"cores": os.cpu_count(), "gpu": gpu, "load_1min": round(os.getloadavg()[0], 2)},
    }


def _version() -> str:
    try:
        return metadata.version("shardwise")
    except metadata.PackageNotFoundError:  # run from a copy of the tree
        return "source"


def _table(results: list[Result]) -> str:
    rows = [("case", "value", "baseline", "ratio", "95 % interval", "goal", "")]
    for result in results:
        low_high = result.interval
        rows.append(
            (
                result.case,
                format_number(result.value, result.unit) + efficiency(result.details),
                format_number(result.baseline, result.unit),
                format_number(result.ratio),
                f"{low_high[0]:.4g} to {low_high[1]:.4g}" if low_high else "",
                result.goal,
                {True: "met", False: "MISSED", None: ""}[result.met],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def efficiency(details: dict[str, Any]) -> str:
    """MFU, also with half of attention's operations as causal attention needs, and relative to the measured ceiling."""
    if "causal_mfu" not in details:
        return ""
    shown = f", MFU {percent(details['mfu'])}, causal {percent(details['causal_mfu'])}"
    return shown + (f", {details['percent_of_ceiling']} % of the ceiling" if "percent_of_ceiling" in details else "")


def percent(fraction: float) -> str:
    """With one decimal; a half, as in 0.7615, is rounded up."""
    return f"{100 * fraction + 1e-9:.1f} %"


def format_number(value: float | None, unit: str = "") -> str:
    """Four digits, or all of a whole number."""
    if value is None:
        return ""
    shown = f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"
    return f"{shown} {unit}".strip()
