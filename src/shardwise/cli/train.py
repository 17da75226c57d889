"""`shardwise train`: shard a model and train it on local ranks or a launcher's. No torch until it runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import Format, FormatOption, NprocOption, RunArgument, SetOption

if TYPE_CHECKING:
    from shardwise.config.run import RunConfig
    from shardwise.training.loop import Training


def train(
    run: RunArgument = None,
    settings: SetOption = None,
    nproc: NprocOption = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print every setting as YAML and stop.")] = False,
    format: FormatOption = Format.TEXT,
) -> None:
    """Shard a model and train it; without a run file, the tutorial's transformer on this machine."""
    from shardwise.cli.running import run_on_ranks
    from shardwise.config.load import load, to_yaml
    from shardwise.config.run import RunConfig

    config = load(RunConfig, run, settings or ())
    if print_config:
        typer.echo(to_yaml(config), nl=False)
        return
    training = run_on_ranks("shardwise.cli.train:train_on_rank", nproc, (config,))
    if training is not None:
        typer.echo(json.dumps(training.to_dict()) if format is Format.JSON else str(training))


def train_on_rank(config: RunConfig) -> Training:
    """Train on this rank; rank 0 draws the progress.

    Ranks:
        Collective.
    """
    from rich.console import Console

    from shardwise.launching import read_launch
    from shardwise.progress import NoProgress
    from shardwise.report.terminal import progress_on
    from shardwise.sharding.mesh import shutdown
    from shardwise.training.loop import fit

    if read_launch().rank == 0:
        with progress_on(Console(stderr=True)) as progress:
            training = fit(config, progress=progress)
    else:
        training = fit(config, progress=NoProgress())
    shutdown()
    return training
