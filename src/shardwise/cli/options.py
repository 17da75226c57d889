"""Options that commands share, spelled once. No torch."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


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
