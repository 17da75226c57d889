"""From a RunConfig to everything that a loop needs; problems are found before anything heavy is made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardwise.config.run import RunConfig
from shardwise.diagnosing.check import check, refuse_errors
from shardwise.distributed.agreement import agree_on, on_rank_zero, raise_together
from shardwise.distributed.launchers import read_launch
from shardwise.distributed.mesh import data_parallel_mesh, init_distributed
from shardwise.errors import ShardwiseError
from shardwise.models.load import load_model
from shardwise.planning.plan import Plan
from shardwise.progress import Progress
from shardwise.sharding.apply import shard
from shardwise.training.data import Evaluation, Loader, open_data, open_evaluation
from shardwise.training.ema import EMA
from shardwise.training.metrics import Metrics
from shardwise.training.microbatching import Microbatches
from shardwise.training.objective import BadLosses, Objective, StepBatches
from shardwise.training.optimizers import build_optimizer
from shardwise.training.requirements import (
    Problems,
    check_disk,
    check_length,
    check_settings,
    check_weights,
    checkpoint_bytes,
    fill,
    plan_run,
    vocab_size,
)
from shardwise.training.run_folder import prepare_folder, refuse_other_model, with_folder, write_config
from shardwise.training.saving import CHECKPOINTS, Checkpoints, Found, Kept, find_resumed, refuse_other_weights
from shardwise.training.schedules import Schedule
from shardwise.training.step_metrics import StepLogger, StepMetrics


@dataclass(kw_only=True, slots=True)
class Run:
    """All parts of a run, ready for its next step."""

    config: RunConfig
    mesh: DeviceMesh
    folder: Path
    rank: int
    """Among ranks that have batches of their own."""
    model: nn.Module
    num_params: int
    objective: Objective
    loader: Loader
    data: StepBatches
    """The loader's batches, less those left out."""
    evaluation: Evaluation | None
    """Held-out data, if there is any."""
    optimizer: Optimizer
    schedule: Schedule
    ema: EMA | None
    microbatches: Microbatches
    bad_losses: BadLosses
    step_metrics: StepMetrics
    checkpoints: Checkpoints
    metrics: Metrics
    step_logger: StepLogger
    kept: Kept
    """What a checkpoint holds."""
    step: int = 0
    """Optimizer steps made."""
    resumed_step: int = 0
    """Of them, those that were made before this process took the run up."""

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return torch.device(self.mesh.device_type)


@dataclass(slots=True)
class _Found:
    """What the look at a run's requirements has brought: everything that is cheap."""

    config: RunConfig
    mesh: DeviceMesh
    model: nn.Module
    plan: Plan
    objective: Objective
    loader: Loader
    evaluation: Evaluation | None


@contextmanager
def open_run(config: RunConfig, progress: Progress) -> Iterator[Run]:
    """Everything of a run, built or resumed, and given back at the end.

    Args:
        config: The run.
        progress: Is moved by the steps.

    Raises:
        ShardwiseError: With all problems that can be found before the model has memory; the same on every rank.

    Ranks:
        Collective.
    """
    with ExitStack() as stack:
        found = _look(config, stack)
        yield _build(found, progress, stack)


def _look(config: RunConfig, stack: ExitStack) -> _Found:
    """Join the ranks, and find all that is wrong before anything heavy is made."""
    problems = Problems()
    mesh = problems.result_of(lambda: init_distributed(config.mesh))
    rank, num_ranks = _data_rank(mesh) if mesh is not None else (0, 1)
    is_first = (dist.get_rank() if dist.is_initialized() else read_launch().rank) == 0
    check_settings(config, num_ranks, problems)
    model = problems.result_of(lambda: load_model(config.model, options=config.model_options))
    made = objective = loader = evaluation = None
    with problems.collecting():
        check_weights(config)
    if model is not None:
        objective = problems.result_of(lambda: Objective(model, config.training.objective))
        if mesh is not None:
            made = problems.result_of(lambda: plan_run(model, config.shard, mesh))
        with problems.collecting():
            check_length(model, config)
        with problems.collecting():
            batch_size = max(config.training.batch_size // num_ranks, 1) * num_ranks  # a wrong one is told above
            where = {"rank": rank, "num_ranks": num_ranks, "vocab_size": vocab_size(model)}
            device = mesh.device_type if mesh is not None else "cpu"
            loader = open_data(config.data, batch_size=batch_size, seed=config.seed, device=device, **where)
            stack.callback(loader.close)
            evaluation = open_evaluation(config.data, batch_size=batch_size, device=device, training=loader, **where)
    if is_first:
        with problems.collecting():
            config = with_folder(config)
            found = _look_at_folder(config, model)
            if model is not None and made is not None:
                check_disk(config, checkpoint_bytes(model, made, config), found)
    problems.raise_any(is_joined=mesh is not None)
    assert mesh is not None
    assert model is not None
    assert made is not None
    assert objective is not None
    assert loader is not None
    same_files = "copy the same files to every machine"
    agree_on(json.dumps(loader.fingerprint, indent=1, default=str), "the data", fix=same_files)
    config = replace(config, folder=on_rank_zero(lambda: config.folder))
    return _Found(config, mesh, model, made, objective, loader, evaluation)


def _look_at_folder(config: RunConfig, model: nn.Module | None) -> Found | None:
    folder = Path(config.folder or "")
    prepare_folder(folder)
    found = find_resumed(folder / CHECKPOINTS, config.checkpoint.resume)
    if found is not None:
        refuse_other_model(folder, config)
        if model is not None:
            refuse_other_weights(found, model)
    return found


def _build(found: _Found, progress: Progress, stack: ExitStack) -> Run:
    """Shard and fill the model, make its optimizer, and go on from a checkpoint if there is one."""
    config, mesh, model = found.config, found.mesh, found.model
    training, folder = config.training, Path(config.folder or "")
    rank, num_data_ranks = _data_rank(mesh)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    checkpoints = stack.enter_context(Checkpoints(folder, config.checkpoint))
    resumed = checkpoints.find()

    torch.manual_seed(config.seed)  # of new weights: the same on every rank, whatever their number
    shard(model, config.shard, mesh=mesh, plan=found.plan)
    fill(model, config, is_resumed=resumed is not None)
    optimizer = build_optimizer(model, config.optimizer)
    schedule = Schedule(optimizer, config.schedule, training.steps)
    ema = EMA(model, training.ema_decay) if training.ema_decay is not None else None
    data, bad_losses = StepBatches(found.loader), BadLosses(training)
    raise_together(_error_of_check(model, optimizer))
    kept = Kept(model, optimizer, {"schedule": schedule, "data": data, "bad_losses": bad_losses})
    kept.objects.update({} if ema is None else {"ema": ema})
    if resumed is not None:
        checkpoints.load(resumed, kept)
        schedule.apply()  # the settings may have changed since

    on_rank_zero(lambda: write_config(folder, config))
    metrics = Metrics(folder, config.metrics, dist.get_rank(), steps_done=schedule.steps_done)
    stack.callback(metrics.close)
    rows = training.batch_size // num_data_ranks
    return Run(
        config=config,
        mesh=mesh,
        folder=folder,
        rank=rank,
        model=model,
        num_params=num_params,
        objective=found.objective,
        loader=found.loader,
        data=data,
        evaluation=found.evaluation,
        optimizer=optimizer,
        schedule=schedule,
        ema=ema,
        microbatches=Microbatches(model, rows, training.micro_batch_size, record=folder / "micro_batch_size"),
        bad_losses=bad_losses,
        step_metrics=StepMetrics(mesh),
        checkpoints=checkpoints,
        metrics=metrics,
        step_logger=StepLogger(model, metrics, progress, config=config, device=torch.device(mesh.device_type)),
        kept=kept,
        step=schedule.steps_done,
        resumed_step=schedule.steps_done,
    )


def _data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """This rank among those that have batches of their own, and how many they are."""
    ranks = data_parallel_mesh(mesh)
    rank = 0
    for axis in range(ranks.ndim):
        rank = rank * ranks.size(axis) + ranks.get_local_rank(axis)
    return rank, ranks.size()


def _error_of_check(model: nn.Module, optimizer: Optimizer) -> ShardwiseError | None:
    try:
        refuse_errors(check(model, optimizer))
    except ShardwiseError as error:
        return error
    return None
