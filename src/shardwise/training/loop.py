"""`fit`: a whole training run. Seeds, profiler, evaluation, samples, saves, export, and the loop that calls them."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerAction, profile

from shardwise.checkpointing.hugging_face import sidecar_names
from shardwise.checkpointing.weights import save_weights
from shardwise.config.run import MetricsConfig, RunConfig
from shardwise.diagnosing.guard import explained, guard
from shardwise.distributed.agreement import gather_objects, on_rank_zero
from shardwise.distributed.stop_requests import StopRequest, stop_requests
from shardwise.errors import CheckpointError, ConfigError, TrainingError
from shardwise.models.modes import evaluation_mode
from shardwise.models.random_state import seed_everything
from shardwise.progress import NoProgress, Progress
from shardwise.sharding.full_params import reshard
from shardwise.training.generating import generate
from shardwise.training.metrics import StepReading
from shardwise.training.objective import Batch, allows_step
from shardwise.training.optimizers import ClippingAdamW
from shardwise.training.run import TrainingRun, open_run
from shardwise.training.run_folder import Training
from shardwise.training.step import accumulate, clip_grad_norm_, clipping_factor, grad_norm, lockstep, scale_grads_


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collection inside the block, because a full collection is slow."""
    gc.collect(1)  # young generations only: a full collection would delay the first step by 0.1 s
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def profiled(
    config: MetricsConfig, folder: Path, *, rank: int = 0, steps_done: int = 0
) -> Iterator[Callable[[], None]]:
    """Profile the configured steps on rank 0 into `profile/rank0.json`; yields a function to call after each step."""
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
    """An independent seed, below 2**63, for each purpose, as in `seed_for(0, "dropout", rank, step)`."""
    text = repr((int(seed), *purpose)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def seed_step(seed: int, rank: int, step: int) -> None:
    """Seed torch's, Python's and NumPy's random numbers for one step, from 0, on one data-parallel rank.

    Random numbers of a step (dropout) depend on the seed, the rank and the step only, so a resumed run draws the same
    ones. Ranks that share a layer's matrices need the same dropout, hence the data-parallel rank.
    """
    seed_everything(seed_for(seed, "step", rank, step))


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Allow only deterministic kernels inside the block; no effect if `wanted` is False."""
    if not wanted:
        yield
        return
    had, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    # cuBLAS needs a workspace of fixed size, set before its first use.
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


def evaluate(run: TrainingRun) -> float | None:
    """Record the mean loss per token of the averaged weights on the held-out data, if any; collective."""
    if run.evaluation is None:
        return None
    sums = torch.zeros(2, dtype=torch.float64, device=run.device)
    with torch.no_grad(), evaluation_mode(run.model), ExitStack() as leaving:
        leaving.callback(reshard, run.model)  # a forward without backward leaves the root unsharded
        leaving.enter_context(run.averaged())
        batches = iter(run.evaluation)
        if isinstance(batches, Generator):
            leaving.callback(batches.close)  # ends its threads, also when not all batches are read
        # If one rank cannot read its batch, all raise.
        for batch in lockstep(islice(batches, run.config.training.evaluation_batches)):
            loss_sum, num_tokens = run.loss_of(batch)
            sums += torch.stack([loss_sum.detach().to(sums), num_tokens.to(sums)])
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)  # ranks that share a batch add it to both sums
    loss, tokens = sums.tolist()
    loss = loss / tokens if tokens else math.nan
    run.step_metrics.restart_clock()  # evaluation time belongs to no step
    run.step_logger.log_evaluation(run.step, loss)
    return loss


def export(run: TrainingRun) -> Path:
    """Write the weights, the model's config and the tokenizer to the run's folder; collective.

    The format is a folder of safetensors, or with `lora` the adapters in peft's format.
    """
    folder, tokenizer = run.folder / "export", run.config.data.tokenizer
    save_weights(run.model, folder, "safetensors" if run.config.lora is None else "peft", overwrite=True)
    if tokenizer != "bytes":
        on_rank_zero(lambda: _copy_tokenizer(Path(tokenizer), folder))
    return folder


def _copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    source = tokenizer if tokenizer.is_dir() else tokenizer.parent
    try:
        for name in sidecar_names(source):
            if name not in ("config.json", "generation_config.json"):  # the model writes its own
                shutil.copyfile(source / name, folder / name)
        if tokenizer.is_file():  # under any name
            shutil.copyfile(tokenizer, folder / "tokenizer.json")
    except OSError as error:
        raise CheckpointError(
            f"cannot copy the tokenizer: {error.strerror or error}",
            where=str(folder),
            why="transformers needs weights, config and tokenizer in the exported folder",
            fix=f"copy {tokenizer} there by hand",
        ) from None


def rewind(run: TrainingRun, bad_step: int) -> None:
    """Load the last checkpoint, and skip the batch of the bad step; collective."""
    found = run.checkpoints.newest()
    if found is None:
        raise TrainingError(
            f"step {bad_step} is not finite, and there is no checkpoint to rewind to",
            where=str(run.checkpoints.folder),
            why="training.on_bad_loss = rewind loads the last checkpoint of the run",
            fix="set training.on_bad_loss = skip, which skips the step",
        )
    run.data.leave_out(bad_step - 1)
    run.step_metrics.flush()  # readings of the undone steps
    run.checkpoints.load(found, run.state)
    run.schedule.apply()
    run.step_logger.rewind(run.step, run.schedule.steps_done)
    run.step = run.schedule.steps_done
    run.step_metrics.restart_clock()


def finish(run: TrainingRun, stop: StopRequest) -> Training:
    """Evaluate, save, sample and export at the end of a run; only save if it was stopped early. Collective."""
    stopped = sample = exported = metric = None
    if run.step < run.config.training.steps:
        stopped = next((why for why in gather_objects(stop.why) if why), "stopped")  # the first rank with a reason
    else:
        metric = evaluate(run)
    run.checkpoints.save(run.step, run.state, metric)
    run.checkpoints.wait()
    if stopped is None:
        with run.averaged():
            sample = generate_sample(run)
            exported = str(export(run)) if run.config.checkpoint.export else None
    logged, latest = run.step_logger, run.checkpoints.latest
    return Training(
        model=run.config.model,
        num_params=run.num_params,
        num_ranks=run.mesh.size(),
        steps=run.step,
        total_steps=run.config.training.steps,
        resumed_step=run.resumed_step,
        first_loss=logged.first_loss,
        last_loss=logged.last_loss,
        evaluation_loss=metric,
        bad_steps=run.bad_losses.num_bad,
        tokens=logged.tokens,
        seconds=logged.seconds,
        folder=str(run.folder),
        metrics=str(run.metrics.path),
        checkpoint=None if latest is None else str(latest),
        sample=sample,
        exported=exported,
        stopped=stopped,
    )


def generate_sample(run: TrainingRun) -> str | None:
    """Continue the prompt `training.sample`, if it is set and the model is a language model; collective."""
    text, tokenizer = run.config.training.sample, run.loader.tokenizer
    if text is None or tokenizer is None:
        return None
    prompt, config = torch.tensor(tokenizer.encode(text), dtype=torch.int64), run.config
    window = config.data.sequence_length  # longer contexts were not seen in training
    try:
        ids = generate(
            run.pipeline or run.model, prompt, config.training.sample_tokens, seed=config.seed, window=window
        )
    except ConfigError:  # not a language model; the run itself is complete
        return None
    return tokenizer.decode(ids.tolist())


def fit(
    config: RunConfig,
    *,
    progress: Progress | None = None,
    on_record: Callable[[int, Mapping[str, Any]], None] | None = None,
) -> Training:
    """Build the model on meta, shard, initialize and train it; or resume a run.

    Args:
        config: The run.
        progress: Receives every step; usually only rank 0 displays it.
        on_record: Called on every rank with the step and the numbers of each record of the metrics.

    Returns:
        Losses, sizes and paths of the run.

    Raises:
        ShardwiseError: The run cannot start (the error lists every problem) or cannot continue. The same on every rank.

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
            run.checkpoints.save(run.step, run.state)  # a checkpoint to rewind to
        with guard(run.model), explained(run.model), gc_frozen():
            run.step_metrics.restart_clock()
            train(run, stop)
        progress.finish()
        return finish(run, stop)


def train(run: TrainingRun, stop: StopRequest) -> None:
    """Run optimizer steps until the last one, or until any rank receives a stop request; collective."""
    with profiled(run.config.metrics, run.folder, rank=run.mesh.get_rank(), steps_done=run.step) as step_done:
        while (bad_step := _train_until_bad(run, stop, step_done)) is not None:
            rewind(run, bad_step)


def _train_until_bad(run: TrainingRun, stop: StopRequest, step_done: Callable[[], None]) -> int | None:
    """Run the loop; return early with the number of a bad step if the run must rewind."""
    optimizer, settings, every = run.optimizer, run.config.training, run.config.checkpoint.every
    max_norm = settings.max_grad_norm or math.inf
    for batch in run.data.until(settings.steps, stop):  # this rank's rows of each global batch
        seed_step(run.config.seed, run.random_stream, run.step)
        run.step += 1
        loss = run.step_metrics.mean(forward_and_backward(run, batch))
        norm = clip(run, max_norm)
        if allows_step(optimizer, loss, norm, wait=run.ema is not None):
            optimizer.step()
            if run.ema is not None:
                run.ema.update()
        optimizer.zero_grad()
        run.expert_bias.update(loss, norm)
        readings = run.step_metrics.add(
            run.step,
            loss,
            norm,
            learning_rate=run.schedule.learning_rate,
            data_wait_s=run.loader.take_wait_s(),
            checkpoint_wait_s=run.checkpoints.take_wait_s(),
        )
        # After the last step, `finish` evaluates and saves.
        is_saved, is_evaluated = (
            run.step < settings.steps and each is not None and run.step % each == 0
            for each in (every, settings.evaluate_every)
        )
        if is_saved or is_evaluated:
            readings += run.step_metrics.flush()
        run.schedule.step()
        step_done()
        if (bad_step := log(run, readings)) is not None:
            return bad_step
        metric = evaluate(run) if is_evaluated else None
        if is_saved:
            run.checkpoints.save(run.step, run.state, metric)
    return log(run, run.step_metrics.flush())


def clip(run: TrainingRun, max_norm: float) -> Tensor:
    """Clip the gradients, in the optimizer's kernel if supported; return the norm before clipping."""
    if not isinstance(run.optimizer, ClippingAdamW):
        return clip_grad_norm_(run.model, max_norm)
    norm = grad_norm(run.model)
    run.optimizer.gradient_factor = clipping_factor(norm, max_norm)
    return norm


def forward_and_backward(run: TrainingRun, batch: Batch) -> Tensor:
    """Compute gradients of the mean loss over all tokens of all ranks; return this rank's part of that mean.

    FSDP2 averages gradients over ranks, so each rank's summed loss is divided by the tokens per rank.
    """
    batch = run.part_of(batch)
    num_tokens = run.step_metrics.count(run.objective.count(batch))
    scale = run.step_metrics.num_ranks / num_tokens.clamp(min=1)

    def run_parts(parts: list[Batch]) -> Tensor:
        sums = torch.zeros(2, device=run.device)
        for number, rows in enumerate(parts):
            with accumulate(run.model, number, len(parts), run.config.training.accumulation):
                loss_sum, num_counted = run.objective(run.model, rows)
                loss = loss_sum * scale.to(loss_sum.dtype)
                loss.backward()
            sums += torch.stack([loss.detach().to(sums), num_counted.to(sums)])
        return sums

    if run.pipeline is not None:
        loss, counted = run.pipeline.forward_and_backward(batch, scale.to(torch.float32))
    else:  # retried with smaller micro-batches after out-of-memory
        loss, counted = run.microbatches.run(run_parts, batch)
    if run.objective.counts_ahead:
        return loss
    factor = num_tokens / run.step_metrics.count(counted).clamp(min=1)  # the true number is known only with the loss
    scale_grads_(run.model, factor)
    return loss * factor


def log(run: TrainingRun, readings: list[StepReading]) -> int | None:
    """Log steps whose metrics have arrived; return the last step that was not finite if the run rewinds."""
    run.step_logger.log(readings)
    bad_steps = [reading.step for reading in readings if run.bad_losses.is_bad(reading)]
    return bad_steps[-1] if bad_steps and run.config.training.on_bad_loss == "rewind" else None
