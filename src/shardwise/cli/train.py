"""`shardwise train`: train a model on local ranks or a launcher's, or resume a run. No torch until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import Format, FormatOption, NprocOption, RunArgument, SetOption, drawn_progress, show

if TYPE_CHECKING:
    from shardwise.config.run import RunConfig
    from shardwise.training.run_folder import Training

EXIT_STOPPED = 4


def train(
    run: RunArgument = None,
    settings: SetOption = None,
    nproc: NprocOption = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every setting as YAML with reasons, and exit.")
    ] = False,
    format: FormatOption = Format.TEXT,
) -> None:
    """Shard and train a model; without a run file, a small Llama on Python's standard library."""
    from shardwise.cli.running import add_to_path, number_of_ranks, user_code
    from shardwise.config.load import load
    from shardwise.config.run import RunConfig
    from shardwise.distributed.launchers import read_launch

    config = load(RunConfig, run, settings or ())
    if run is not None:
        add_to_path(Path(run).resolve().parent, first=False)  # a `module:callable` may be beside the run file
    if print_config:
        from shardwise.training.run import resolved_yaml

        with user_code():
            text = resolved_yaml(config, number_of_ranks(nproc))
        typer.echo(text, nl=False)
        return
    training = _train(config, nproc)
    if training is not None and read_launch().rank == 0:
        show(training, format)
    if training is not None and training.stopped is not None:
        raise typer.Exit(EXIT_STOPPED)


def _train(config: RunConfig, nproc: int | None) -> Training | None:
    from shardwise.cli.running import run_on_ranks
    from shardwise.distributed.launchers import read_launch
    from shardwise.training.run_folder import remove_if_empty, with_folder

    if read_launch().source == "single":
        config = with_folder(config)  # before the ranks start, so that they find their checkpoints after a restart
    try:
        return run_on_ranks(
            "shardwise.cli.train:train_on_rank",
            nproc,
            (config,),
            max_restarts=config.training.max_restarts,
            stop_signals=config.training.stop_signals,
            everywhere=True,
        )
    finally:
        remove_if_empty(config)  # only if it is still empty


def train_on_rank(config: RunConfig) -> Training:
    """Train on this rank; rank 0 draws the progress. Collective."""
    from shardwise.distributed.launchers import read_launch
    from shardwise.distributed.mesh import shutdown
    from shardwise.training.loop import fit

    with drawn_progress(wanted=read_launch().rank == 0) as progress:
        training = fit(config, progress=progress)
    shutdown()
    return training
