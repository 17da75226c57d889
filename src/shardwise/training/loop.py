"""`fit`: a whole training run on one page. It owns the loop only; every part of it can be used by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.config.run import RunConfig
from shardwise.diagnosing.explained import explained
from shardwise.diagnosing.guard import guard
from shardwise.distributed.agreement import raise_together
from shardwise.distributed.stop_requests import StopRequest, stop_requests
from shardwise.progress import NoProgress, Progress
from shardwise.training.milestones import evaluate_now, finish, go_back, is_due, save
from shardwise.training.objective import Batch, allows_step
from shardwise.training.run import TrainingRun, open_run
from shardwise.training.run_folder import Training
from shardwise.training.runtime import Profile, frozen_garbage, same_bits, seed_step
from shardwise.training.step import accumulate, clip_grad_norm_, scale_grads_


def fit(
    config: RunConfig,
    *,
    progress: Progress | None = None,
    on_record: Callable[[int, Mapping[str, Any]], None] | None = None,
) -> Training:
    """Build the model on meta, shard it, fill it, and train it; or go on with a run that was stopped.

    Args:
        config: The run.
        progress: Hears of every step; rank 0's is usually the only one shown.
        on_record: Called on every rank with the step and the numbers of each record of the metrics.

    Returns:
        What was done, and where it lies.

    Raises:
        ShardwiseError: The run cannot start, with all that is wrong; or it cannot go on. The same on every rank.

    Ranks:
        Collective. Joins the launcher's process group, or the one that exists.
    """
    progress = progress or NoProgress()
    with (
        stop_requests(config.training.stop_signals) as stop,
        same_bits(config.deterministic),
        open_run(config, progress) as run,
    ):
        run.metrics.on_record = on_record
        progress.start(config.training.steps - run.step, f"training {config.model}")
        if config.training.on_bad_loss == "rewind":
            save(run)  # so that there is one to go back to
        raise_together(run.data.fetch_first())
        with guard(run.model), explained(run.model), frozen_garbage():
            run.step_metrics.restart_clock()
            train(run, stop)
        progress.finish()
        return finish(run, stop)


def train(run: TrainingRun, stop: StopRequest) -> None:
    """The loop: one optimizer step after the other, until the last one or until any rank is asked to stop.

    Ranks:
        Collective.
    """
    model, optimizer, settings, every = run.model, run.optimizer, run.config.training, run.config.checkpoint.every
    max_norm = settings.max_grad_norm or math.inf
    with Profile(run.config.metrics, run.folder, rank=run.mesh.get_rank(), steps_done=run.step) as profile:
        while run.step < settings.steps and not run.step_metrics.stop_agreed:
            seed_step(run.config.seed, run.rank, run.step)
            batch = run.data.next()  # this rank's rows of the next global batch
            run.step += 1
            part = forward_and_backward(run, batch)
            loss = run.step_metrics.mean(part, stop=stop.asked)
            norm = clip_grad_norm_(model, max_norm)
            if allows_step(optimizer, loss, norm):
                optimizer.step()
                if run.ema is not None:
                    run.ema.update()
            optimizer.zero_grad()
            is_last, is_kept = run.step == settings.steps, is_due(run.step, every)
            bad_steps = log_step(run, loss, norm, wait=is_last or is_kept)
            run.schedule.step()
            profile.step()

            if bad_steps and settings.on_bad_loss == "rewind":
                go_back(run, bad_steps[-1])
            elif not is_last and not run.step_metrics.stop_agreed:  # what is due after the last step is done at the end
                metric = evaluate_now(run) if is_due(run.step, settings.evaluate_every) else None
                if is_kept:
                    save(run, metric)


def forward_and_backward(run: TrainingRun, batch: Batch) -> Tensor:
    """Gradients of the mean loss over all tokens of all ranks; return this rank's part of that mean.

    FSDP2 averages gradients over ranks, so each rank's summed loss is divided by the tokens per rank.
    """
    has_none = run.data.failure is not None  # the batch is an old one then, and the step leads to an error on all ranks
    num_tokens = run.step_metrics.count(run.objective.count(batch), failed=has_none)
    scale = run.step_metrics.num_ranks / num_tokens.clamp(min=1)

    def each_part(parts: list[Batch]) -> Tensor:
        sums = torch.zeros(2, device=run.device)
        for number, rows in enumerate(parts):
            with accumulate(run.model, number, len(parts), run.config.training.accumulation):
                loss_sum, num_counted = run.objective(run.model, rows)
                loss = loss_sum * scale.to(loss_sum.dtype)
                loss.backward()
            sums += torch.stack([loss.detach().to(sums), num_counted.to(sums)])
        return sums

    loss, counted = run.microbatches.run(each_part, batch)  # again with smaller parts when memory runs out
    if run.objective.counts_ahead:
        return loss
    true_number = run.step_metrics.count(counted, failed=has_none)  # known only with the loss
    factor = num_tokens / true_number.clamp(min=1)
    scale_grads_(run.model, factor)
    return loss * factor


def log_step(run: TrainingRun, loss: Tensor, norm: Tensor, *, wait: bool) -> list[int]:
    """Log the numbers that have arrived; raise on all ranks if one had no batch.

    Args:
        run: The run.
        loss: Of the step just made.
        norm: Of its gradients.
        wait: Wait for the numbers of the step just made, as must be before it is saved.

    Returns:
        The steps, of those whose numbers have arrived, that were not finite and so not made.
    """
    run.step_logger.expect(
        run.step,
        learning_rate=run.schedule.learning_rate,
        data_wait_s=run.loader.wait_s,
        checkpoint_wait_s=run.checkpoints.take_wait_s(),
    )
    readings = run.step_metrics.add(run.step, loss, norm)
    if wait or run.step_metrics.stop_agreed:
        readings += run.step_metrics.flush()
    run.step_logger.log(readings)
    if run.step_metrics.failed:
        raise_together(run.data.failure)
    return [reading.step for reading in readings if run.bad_losses.is_bad(reading)]
