"""`shardwise doctor`: check the environment. No torch until it runs."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import Format, FormatOption, status_of

if TYPE_CHECKING:
    from shardwise.diagnosing.environment import Measured


def doctor(
    ranks: Annotated[
        int | None, typer.Option(min=0, help="Number of ranks that test collectives; 0 skips the test.")
    ] = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Check torch, GPUs, launcher, limits and disk, and run real collectives between local ranks.

    Exit status 0: nothing wrong; 1: findings; 3: the collectives failed.
    """
    from shardwise.diagnosing.environment import collect_environment
    from shardwise.distributed.local_ranks import start_local

    environment = collect_environment()
    num_ranks = ranks if ranks is not None else max(len(environment.facts["gpus"].get("devices", [])), 2)
    rows: list[Measured] = []
    if num_ranks:
        rows = start_local("shardwise.diagnosing.environment:measure_collectives", num_ranks)[0]
    if format is Format.JSON:
        measured = [dataclasses.asdict(row) | {"bytes_per_second": row.bytes_per_second} for row in rows]
        findings = [dataclasses.asdict(finding) for finding in environment.findings]
        typer.echo(json.dumps({**environment.facts, "collectives": measured, "findings": findings}))
    else:
        from rich.console import Console

        from shardwise.report.terminal import print_examination

        print_examination(Console(), environment, rows, num_ranks)
    raise typer.Exit(status_of(environment.findings))
