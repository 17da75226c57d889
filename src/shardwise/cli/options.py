"""Options that commands share, spelled once. No torch."""

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
    """How results are printed."""

    TEXT = "text"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="How to print the result.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Change one setting; may be given several times."),
]
NprocOption = Annotated[
    int | None,
    typer.Option("--nproc", min=1, help="Local ranks to start; default: one a GPU, or two on CPU."),
]
RunArgument = Annotated[
    Path | None, typer.Argument(metavar="RUN.yaml", help="The run file; without one, the built-in default.")
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A reference name, a local Hugging Face folder or config, or module:callable."
    ),
]


def show(result: Any, format: Format) -> None:
    """Print a result: its `to_dict()` for machines, else its text."""
    typer.echo(json.dumps(result.to_dict(), default=str) if format is Format.JSON else str(result))


def drawn_progress(*, in_bytes: bool = False, wanted: bool = True) -> AbstractContextManager[Progress | None]:
    """A context that draws progress on stderr; of None where it is not wanted, as when a machine reads the output."""
    from rich.console import Console

    from shardwise.report.terminal import progress_on

    return progress_on(Console(stderr=True), in_bytes=in_bytes) if wanted else nullcontext(None)


def status_of(findings: Sequence[Finding]) -> int:
    """The exit status: 1 where there is more than notes."""
    return 1 if any(finding.severity != "note" for finding in findings) else 0
