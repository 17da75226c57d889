"""What happens between steps: evaluating, saving, going back to a checkpoint, and the end of a run."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist

from shardwise.errors import ConfigError, TrainingError
from shardwise.launching.stopping import StopRequest
from shardwise.training.evaluating import evaluate
from shardwise.training.exporting import export
from shardwise.training.generating import generate
from shardwise.training.outcome import Training
from shardwise.training.run import Run

EXPORT = "export"
"""The folder in a run's folder into which weights are exported."""


def is_due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0


def evaluate_now(run: Run) -> float | None:
    """Take the loss on held-out data and record it; None without such data.

    Ranks:
        Collective.
    """
    if run.evaluation is None:
        return None
    run.teller.tell(run.tally.settle())
    loss = evaluate(
        run.model,
        run.evaluation,
        run.objective,
        mesh=run.mesh,
        max_batches=run.config.training.evaluation_batches,
        ema=run.ema,
    )
    run.tally.clock.restart()  # the time since the last step is no step's
    run.teller.tell_evaluation(run.step, loss)
    return loss


def save(run: Run, metric: float | None = None) -> None:
    """Save the run as it is now.

    Ranks:
        Collective.
    """
    run.checkpoints.save(run.step, run.kept, metric)


def go_back(run: Run, bad_step: int) -> None:
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
    run.tally.settle()  # of steps that are undone
    run.checkpoints.load(found, run.kept)
    run.schedule.apply()
    run.teller.go_back(run.step, run.schedule.steps_done)
    run.step = run.schedule.steps_done
    run.tally.clock.restart()


def finish(run: Run, stop: StopRequest) -> Training:
    """Evaluate, save, sample and export at the end of a run; only save where it was stopped before.

    Ranks:
        Collective.
    """
    run.teller.tell(run.tally.settle())
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
    told, latest = run.teller, run.checkpoints.latest
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


def continue_sample(run: Run) -> str | None:
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
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, stop.why)
    return next((why for why in reasons if why), "stopped")
