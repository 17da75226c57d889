"""Options shared by commands. No torch."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shardwise.findings import Finding
    from shardwise.progress import Progress


class Format(enum.StrEnum):
    """Output format of results."""

    TEXT = "text"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Output format.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Change one setting; may be given several times."),
]
NprocOption = Annotated[
    int | None,
    typer.Option("--nproc", min=1, help="Number of local ranks; default: one per GPU, or two on CPU."),
]
RunArgument = Annotated[
    Path | None, typer.Argument(metavar="RUN.yaml", help="The run file; default: the built-in run.")
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A reference name, a local Hugging Face folder or config, or module:callable."
    ),
]


def show(result: Any, format: Format) -> None:
    """Print a result: `to_dict()` as JSON, or its text."""
    typer.echo(json.dumps(result.to_dict(), default=str) if format is Format.JSON else str(result))


def drawn_progress(*, in_bytes: bool = False, wanted: bool = True) -> AbstractContextManager[Progress | None]:
    """Context manager that draws progress on stderr; yields None without progress, as with JSON output."""
    from rich.console import Console

    from shardwise.report.terminal import progress_on

    return progress_on(Console(stderr=True), in_bytes=in_bytes) if wanted else nullcontext(None)


def status_of(findings: Sequence[Finding]) -> int:
    """Return the exit status: 1 if there are findings other than notes."""
    return 1 if any(finding.severity != "note" for finding in findings) else 0
