"""`fit`: a whole training run. Seeds, profiler, evaluation, samples, saves, export, and the loop that calls them."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerAction, profile

from shardwise.checkpointing.hugging_face import sidecar_names
from shardwise.checkpointing.weights import save_weights
from shardwise.config.run import MetricsConfig, RunConfig
from shardwise.diagnosing.guard import explained, guard
from shardwise.distributed.agreement import gather_objects, on_rank_zero, raise_together, run_on_all
from shardwise.distributed.stop_requests import StopRequest, stop_requests
from shardwise.errors import CheckpointError, ConfigError, TrainingError
from shardwise.models.modes import evaluation_mode
from shardwise.models.random_state import seed_everything
from shardwise.progress import NoProgress, Progress
from shardwise.sharding.full_params import reshard
from shardwise.training.ema import EMA
from shardwise.training.generating import generate
from shardwise.training.objective import Batch, Objective, allows_step
from shardwise.training.run import TrainingRun, open_run
from shardwise.training.run_folder import Training
from shardwise.training.step import accumulate, clip_grad_norm_, lockstep, scale_grads_


@contextmanager
def gc_frozen() -> Iterator[None]:
    """What exists now is not looked at again until the block ends; what is made inside is collected as ever.

    A full collection takes longer than a short step, and each rank makes the others wait for its own.
    """
    gc.collect(1)  # what is young; a look at everything would hold up the first step by a tenth of a second
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def profiled(
    config: MetricsConfig, folder: Path, *, rank: int = 0, steps_done: int = 0
) -> Iterator[Callable[[], None]]:
    """Profile the steps that the config names into `profile/rank0.json`, which Perfetto and Chrome open.

    Args:
        config: Which steps.
        folder: Of the run.
        rank: Of this process; only rank 0 records.
        steps_done: Where the run goes on.

    Yields:
        A function to call after each step.
    """
    first, last = config.profile_step or 0, (config.profile_step or 0) + max(1, config.profile_steps) - 1
    if rank != 0 or config.profile_step is None or last <= steps_done:
        yield lambda: None
        return
    path = folder / "profile" / "rank0.json"

    def write(profiler: profile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))

    def action(number: int) -> ProfilerAction:
        step = steps_done + 1 + number
        if step == last:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.RECORD if first <= step < last else ProfilerAction.NONE

    with profile(schedule=action, on_trace_ready=write) as profiler:
        yield profiler.step


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def seed_for(seed: int, *purpose: object) -> int:
    """A seed below 2**63 for one purpose, as in `seed_for(0, "dropout", rank, step)`; others have nothing in common.

    Ranks:
        Local: ranks that name the same purpose get the same seed.
    """
    text = repr((int(seed), *purpose)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def seed_step(seed: int, rank: int, step: int) -> None:
    """Seed torch's, Python's and NumPy's random numbers for one step on one rank.

    What a step draws (dropout, mostly) depends on the run's seed, the rank and the step alone: a resumed run draws the
    same, from whatever format it was loaded.

    Args:
        seed: The run's.
        rank: Among data-parallel ranks; those that share a layer's matrices must drop the same.
        step: From 0.
    """
    seed_everything(seed_for(seed, "step", rank, step))


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Allow only kernels that give the same bits every time, until the block ends.

    Args:
        wanted: False changes nothing.
    """
    if not wanted:
        yield
        return
    had, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    # CUDA's matrix products need a workspace of fixed size; it must not have made any yet.
    sets_workspace = torch.cuda.is_available() and _WORKSPACE not in os.environ
    if sets_workspace:
        os.environ[_WORKSPACE] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(had, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        if sets_workspace:
            os.environ.pop(_WORKSPACE, None)


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
        max_batches: Number of batches at most; None: all.
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
        for name in sidecar_names(source):
            if name not in ("config.json", "generation_config.json"):  # of the model, which has its own
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
    """Whether something that happens every `every` steps is due after this one."""
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
        deterministic_algorithms(config.deterministic),
        open_run(config, progress) as run,
    ):
        run.metrics.on_record = on_record
        progress.start(config.training.steps - run.step, f"training {config.model}")
        if config.training.on_bad_loss == "rewind":
            save(run)  # so that there is one to go back to
        run_on_all(run.data.fetch_first)
        with guard(run.model), explained(run.model), gc_frozen():
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
    with profiled(run.config.metrics, run.folder, rank=run.mesh.get_rank(), steps_done=run.step) as step_done:
        while run.step < settings.steps and not run.step_metrics.stop_agreed:
            seed_step(run.config.seed, run.rank, run.step)
            batch = run.data.next()  # this rank's rows of the next global batch
            run.step += 1
            part = forward_and_backward(run, batch)
            loss = run.step_metrics.mean(part, stop=stop.asked)
            norm = clip_grad_norm_(model, max_norm)
            if allows_step(optimizer, loss, norm, wait=run.ema is not None):
                optimizer.step()
                if run.ema is not None:
                    run.ema.update()
            optimizer.zero_grad()
            is_last, is_kept = run.step == settings.steps, is_due(run.step, every)
            bad_steps = log_step(run, loss, norm, wait=is_last or is_kept)
            run.schedule.step()
            step_done()

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
        data_wait_s=run.loader.take_wait_s(),
        checkpoint_wait_s=run.checkpoints.take_wait_s(),
    )
    readings = run.step_metrics.add(run.step, loss, norm)
    if wait or run.step_metrics.stop_agreed:
        readings += run.step_metrics.flush()
    run.step_logger.log(readings)
    if run.step_metrics.failed:
        raise_together(run.data.failure)
    return [reading.step for reading in readings if run.bad_losses.is_bad(reading)]
