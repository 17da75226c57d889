"""`shardwise explain`: explain a rule, an error code, or an error in a log. No torch."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import Format, FormatOption, show

_RULE = re.compile(r"SW[0-9]{3}", re.IGNORECASE)


def explain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CODE | FILE | FOLDER | -",
            help="A code such as SW201, a log, a folder of flight recorder dumps, or - for standard input.",
        ),
    ] = "-",
    format: FormatOption = Format.TEXT,
) -> None:
    """Explain a rule or an error: cause, fix, and affected torch versions.

    A log may contain lines of many ranks: the first failure is explained, not its consequences.
    """
    from shardwise.explaining import explain as find_explanation
    from shardwise.pages import page_folder

    page_path = page_folder("docs/rules") / f"{target.upper()}.md"
    if _RULE.fullmatch(target) and page_path.is_file():
        page = page_path.read_text(encoding="utf-8")
        typer.echo(json.dumps({"code": target.upper(), "page": page}) if format is Format.JSON else page.rstrip())
        return
    if Path(target).is_dir():
        _explain_dumps(Path(target), format)
        return
    explanation = find_explanation(_text_of(target))
    show(explanation, format)
    raise typer.Exit(0 if "fix" in explanation.to_dict() else 1)


def _explain_dumps(folder: Path, format: Format) -> None:
    """Explain the flight recorder dumps of a run that hung."""
    import dataclasses

    from shardwise.diagnosing.hangs import explain_hang

    hangs = explain_hang(folder)
    if format is Format.JSON:
        typer.echo(json.dumps([dataclasses.asdict(hang) for hang in hangs]))
    else:
        typer.echo("\n".join(map(str, hangs)) or "The dumps show no difference between the ranks.")
    raise typer.Exit(0 if hangs else 1)


def _text_of(target: str) -> str:
    from shardwise.errors import ConfigError
    from shardwise.explaining.answer import catalogue

    if target == "-":
        return sys.stdin.buffer.read().decode("utf-8", errors="replace")  # a log may contain any bytes
    known = {name for failure in catalogue().values() for name in (failure.code, failure.name, failure.alias)} - {""}
    if target in known or target.upper() in known:
        return target
    path = Path(target)
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    raise ConfigError(
        f"{target} is neither a code nor a file",
        where="shardwise explain",
        why="codes look like SW502; anything else is taken for the path of a log",
        fix="check the path, or pipe the text in: `... 2>&1 | shardwise explain -`",
    )
