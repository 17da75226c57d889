"""What happens between steps: evaluation, samples, saves, export."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterable
from contextlib import ExitStack, nullcontext
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.checkpointing.weights import save_weights
from shardwise.distributed.agreement import gather_objects, on_rank_zero
from shardwise.distributed.stop_requests import StopRequest
from shardwise.errors import CheckpointError, ConfigError, TrainingError
from shardwise.models.modes import evaluation_mode
from shardwise.sharding.full_params import reshard
from shardwise.training.ema import EMA
from shardwise.training.generating import generate
from shardwise.training.objective import Batch, Objective
from shardwise.training.run import TrainingRun
from shardwise.training.run_folder import Training
from shardwise.training.step import lockstep


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    objective: Objective,
    *,
    mesh: DeviceMesh,
    max_batches: int | None = None,
    ema: EMA | None = None,
) -> float:
    """The mean loss over the tokens of all batches of all ranks.

    Args:
        model: Evaluated in eval mode; each module gets its own mode back.
        batches: Finite, and of the same length on every rank; rows that only fill up have labels of -100.
        objective: Makes losses.
        mesh: Of all ranks.
        max_batches: At most so many.
        ema: Evaluate this average instead of the weights.

    Returns:
        The loss, the same on every rank; NaN where there is no token.

    Ranks:
        Collective.
    """
    device = torch.device(mesh.device_type)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with torch.no_grad(), evaluation_mode(model), ExitStack() as leaving:
        leaving.callback(reshard, model)  # a forward without backward leaves the root gathered
        leaving.enter_context(ema.swap() if ema is not None else nullcontext())
        each = iter(batches)
        if isinstance(each, Generator):
            leaving.callback(each.close)  # its threads end now, also when only some batches are wanted
        for batch in lockstep(islice(each, max_batches)):  # if one rank cannot read its batch, all raise
            loss_sum, num_tokens = objective(model, batch)
            sums += torch.stack([loss_sum.detach().to(sums), num_tokens.to(sums)])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)  # ranks with the same batch count it alike above and below
    loss, tokens = sums.tolist()
    return loss / tokens if tokens else float("nan")


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def export(model: nn.Module, folder: Path, tokenizer: str) -> None:
    """Write a model's weights as safetensors, with its config and its tokenizer beside them.

    Args:
        model: Sharded or not.
        folder: Weights that lie there are replaced.
        tokenizer: `data.tokenizer` of the run; `bytes` has no file.

    Raises:
        CheckpointError: The folder cannot be written; the same on every rank.

    Ranks:
        Collective.
    """
    save_weights(model, folder, overwrite=True)
    if tokenizer != "bytes":
        on_rank_zero(lambda: _copy_tokenizer(Path(tokenizer), folder))


def _copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    source = tokenizer if tokenizer.is_dir() else tokenizer.parent
    try:
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if tokenizer.is_file():  # whatever its name was
            shutil.copyfile(tokenizer, folder / "tokenizer.json")
    except OSError as error:
        raise CheckpointError(
            f"cannot copy the tokenizer: {error.strerror or error}",
            where=str(folder),
            why="the exported folder holds what transformers needs: weights, config and tokenizer",
            fix=f"copy {tokenizer} there by hand",
        ) from None


EXPORT = "export"
"""The folder in a run's folder into which weights are exported."""


def is_due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0


def evaluate_now(run: TrainingRun) -> float | None:
    """Take the loss on held-out data and record it; None without such data.

    Ranks:
        Collective.
    """
    if run.evaluation is None:
        return None
    run.step_logger.log(run.step_metrics.flush())
    loss = evaluate(
        run.model,
        run.evaluation,
        run.objective,
        mesh=run.mesh,
        max_batches=run.config.training.evaluation_batches,
        ema=run.ema,
    )
    run.step_metrics.restart_clock()  # the time since the last step is no step's
    run.step_logger.log_evaluation(run.step, loss)
    return loss


def save(run: TrainingRun, metric: float | None = None) -> None:
    """Save the run as it is now.

    Ranks:
        Collective.
    """
    run.checkpoints.save(run.step, run.state, metric)


def go_back(run: TrainingRun, bad_step: int) -> None:
    """Take up the last checkpoint again, and leave the batch of the bad step out this time.

    Raises:
        TrainingError: There is none.

    Ranks:
        Collective.
    """
    found = run.checkpoints.newest()
    if found is None:
        raise TrainingError(
            f"step {bad_step} is not finite, and there is no checkpoint to go back to",
            where=str(run.checkpoints.folder),
            why="training.on_bad_loss = rewind takes up the last checkpoint of the run",
            fix="set training.on_bad_loss = skip, which leaves the step out",
        )
    run.data.leave_out(bad_step - 1)
    run.step_metrics.flush()  # of steps that are undone
    run.checkpoints.load(found, run.state)
    run.schedule.apply()
    run.step_logger.go_back(run.step, run.schedule.steps_done)
    run.step = run.schedule.steps_done
    run.step_metrics.restart_clock()


def finish(run: TrainingRun, stop: StopRequest) -> Training:
    """Evaluate, save, sample and export at the end of a run; only save where it was stopped before.

    Ranks:
        Collective.
    """
    run.step_logger.log(run.step_metrics.flush())
    stopped = _why(stop) if run.step < run.config.training.steps else None
    metric = evaluate_now(run) if stopped is None else None
    save(run, metric)
    run.checkpoints.wait()
    sample = exported = None
    if stopped is None:
        with run.ema.swap() if run.ema is not None else nullcontext():
            sample = continue_sample(run)
            if run.config.checkpoint.export:
                exported = str(run.folder / EXPORT)
                export(run.model, run.folder / EXPORT, run.config.data.tokenizer)
    told, latest = run.step_logger, run.checkpoints.latest
    return Training(
        model=run.config.model,
        num_params=run.num_params,
        num_ranks=run.mesh.size(),
        steps=run.step,
        total_steps=run.config.training.steps,
        resumed_step=run.resumed_step,
        first_loss=told.first_loss,
        last_loss=told.last_loss,
        evaluation_loss=metric,
        bad_steps=run.bad_losses.num_bad,
        tokens=told.tokens,
        seconds=told.seconds,
        folder=str(run.folder),
        metrics=str(run.metrics.path),
        checkpoint=None if latest is None else str(latest),
        sample=sample,
        exported=exported,
        stopped=stopped,
    )


def continue_sample(run: TrainingRun) -> str | None:
    """What the model makes of `training.sample`; None where nobody asks, or where it does not write text.

    Ranks:
        Collective. The same text on every rank.
    """
    text, tokenizer = run.config.training.sample, run.loader.tokenizer
    if text is None or tokenizer is None:
        return None
    prompt, config = torch.tensor(tokenizer.encode(text), dtype=torch.int64), run.config
    window = config.data.sequence_length  # what lies further back was never seen in training
    try:
        ids = generate(run.model, prompt, config.training.sample_tokens, seed=config.seed, window=window)
    except ConfigError:  # a model of another kind; the run itself is complete
        return None
    return tokenizer.decode(ids.tolist())


def _why(stop: StopRequest) -> str:
    """Why the run stops, as the first rank that was asked knows."""
    return next((why for why in gather_objects(stop.why) if why), "stopped")
