"""The `shardwise` command: its subcommands, and the exit status for each kind of failure. No torch."""

from __future__ import annotations

import sys
import traceback
from importlib import metadata
from typing import Annotated

import typer

from shardwise.cli.ckpt import ckpt
from shardwise.cli.doctor import doctor
from shardwise.cli.explain import explain
from shardwise.cli.lint import lint
from shardwise.cli.migrate import migrate
from shardwise.cli.parity import parity
from shardwise.cli.plan import plan
from shardwise.cli.skill import skill
from shardwise.cli.train import train
from shardwise.errors import ShardwiseError

EXIT_BUG = 70

app = typer.Typer(
    name="shardwise",
    help="Shard, train, checkpoint and debug PyTorch models with FSDP2, and migrate from FSDP1.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # `main` prints errors
)
app.command()(train)
app.command()(plan)
app.command()(parity)
app.add_typer(ckpt, name="ckpt")
app.command()(migrate)
app.command()(lint)
app.command()(explain)
app.command()(doctor)
app.add_typer(skill, name="skill")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwise {metadata.version('shardwise')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0 success, 1 findings, 2 wrong input, 3 environment, 70 internal error."""
    try:
        app(arguments)  # exits itself, also for wrong options and Ctrl-C
    except ShardwiseError as error:
        _show(error)
        sys.exit(error.exit_code)
    except Exception as error:
        _show_bug(error)
        sys.exit(EXIT_BUG)


def _show(error: ShardwiseError) -> None:
    from rich.console import Console

    from shardwise.report.terminal import print_error

    print_error(Console(stderr=True), error)
    for note in getattr(error, "__notes__", []):  # names the rank; tracebacks are printed only for internal errors
        typer.echo(f"  {note.splitlines()[0]}", err=True)


def _show_bug(error: Exception) -> None:
    notes = getattr(error, "__notes__", [])
    if notes:
        # The traceback of the failed rank is enough; this process's would only show how ranks are started.
        typer.echo("\n".join(notes).rstrip(), err=True)
    else:
        traceback.print_exception(error)
    torch = next((f"torch {one.version}" for one in metadata.distributions(name="torch")), "no torch")
    versions = f"shardwise {metadata.version('shardwise')}, Python {sys.version.split()[0]}, {torch}"
    text = "shardwise did not expect this. If it does not come from your own code, report the lines above,"
    typer.echo(f"\n{text}\nthe command, and: {versions}", err=True)


if __name__ == "__main__":
    main()
