"""`shardwise parity`: compare sharded training with a single process. No torch until it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import Format, FormatOption, ModelArgument, NprocOption, SetOption, show

if TYPE_CHECKING:
    from shardwise.config.run import RunConfig
    from shardwise.diagnosing.parity_criteria import Parity


_ROWS, _LENGTH = 2, 16  # sequences per rank, and tokens per sequence: enough to detect differences, and fast everywhere


def parity(
    model: ModelArgument,
    nproc: NprocOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps to compare.")] = 3,
    batch: Annotated[
        str | None,
        typer.Option(metavar="MODULE:CALLABLE", help="Returns a batch for rank, step and seed; default: random."),
    ] = None,
    settings: SetOption = None,
    format: FormatOption = Format.TEXT,
) -> None:
    """Train a model sharded and in one process, and report the first difference.

    The loss is the model's own, or else the mean of squares of its outputs; no training script is run. A
    `module:callable` is built with its own values, reference models and Hugging Face configs on the meta device.
    `training.batch_size` is the number of sequences over all ranks; the default is two per rank.
    """
    from shardwise.cli.running import number_of_ranks, run_on_ranks
    from shardwise.config.load import load
    from shardwise.config.run import RunConfig

    batch_size = _ROWS * number_of_ranks(nproc)
    values = {"model": model, "training": {"batch_size": batch_size}, "data": {"sequence_length": _LENGTH}}
    config = load(RunConfig, values, settings or ())
    verdict = run_on_ranks("shardwise.cli.parity:compare_on_rank", nproc, (config, steps, batch))
    if verdict is not None:
        show(verdict, format)
        raise typer.Exit(0 if verdict.equal else 1)


def compare_on_rank(config: RunConfig, steps: int, batch: str | None) -> Parity:
    """Compare on this rank. Collective."""
    import torch

    from shardwise.diagnosing.parity import parity as compare
    from shardwise.distributed.mesh import data_parallel_mesh, init_distributed, shutdown
    from shardwise.models.configs import make_batch
    from shardwise.models.load import find_callable, is_callable_name, load_model
    from shardwise.training.data.loader import check_batch

    mesh = init_distributed(config.mesh)
    num_ranks = data_parallel_mesh(mesh).size()
    check_batch(config.training.batch_size, num_ranks)
    described = load_model(config.model, options=config.model_options)

    def invent(rank: int, step: int, seed: int) -> Any:
        # Each rank has its own batches; no two ranks or steps share one.
        generator = torch.Generator().manual_seed((seed * 1000 + step) * 10_000 + rank)
        return make_batch(
            described,
            generator=generator,
            batch_size=config.training.batch_size // num_ranks,
            sequence_length=config.data.sequence_length,
        )

    device = "cpu" if is_callable_name(config.model) else "meta"
    verdict = compare(
        lambda: load_model(config.model, device=device, options=config.model_options),
        find_callable(batch) if batch else invent,
        config=config.shard,
        steps=steps,
        mesh=mesh,
        seed=config.seed,
    )
    shutdown()
    return verdict
