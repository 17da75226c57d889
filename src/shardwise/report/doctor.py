"""What `shardwise doctor` shows: facts, a table of bandwidths, findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shardwise.diagnosing.environment import Environment, Measured


def print_examination(console: Console, environment: Environment, rows: list[Measured], num_ranks: int) -> None:
    """Print everything that was found."""
    for subject, facts in environment.facts.items():
        if facts:
            console.print(Text(subject, style="bold"))
        for name, value in facts.items():
            shown = format_bytes(value) if name.endswith("_bytes") else value
            console.print(Text(f"  {name.removesuffix('_bytes').replace('_', ' ')}: {shown}"), soft_wrap=True)
    if rows:
        console.print(_bandwidths(rows, num_ranks))
    for finding in environment.findings:
        style = {"error": "bold red", "warning": "yellow"}.get(finding.severity.value, "dim")
        console.print(Text(str(finding), style=style), soft_wrap=True)
    if not environment.findings:
        console.print(Text("nothing wrong was found", style="green"))


def _bandwidths(rows: list[Measured], num_ranks: int) -> Table:
    table = Table(title=f"collectives between {num_ranks} local ranks: time, and bytes of the result a second")
    table.add_column("size", justify="right")
    names = list(dict.fromkeys(row.collective for row in rows))
    for name in names:
        table.add_column(name, justify="right")
    for size in dict.fromkeys(row.num_bytes for row in rows):
        cells = {row.collective: row for row in rows if row.num_bytes == size}
        shown = [
            f"{format_seconds(cells[name].seconds)}, {format_bytes(cells[name].bytes_per_second)}/s"
            if name in cells
            else ""
            for name in names
        ]
        table.add_row(format_bytes(size), *shown)
    return table
