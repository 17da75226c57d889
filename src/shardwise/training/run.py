"""From a RunConfig to everything that a loop needs; problems are found before anything heavy is made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.config.run import RunConfig
from shardwise.diagnosing.check import check, refuse_errors
from shardwise.distributed.agreement import agree_on, on_rank_zero, raise_together
from shardwise.distributed.launchers import read_launch
from shardwise.distributed.mesh import data_parallel_mesh, data_parallel_rank, init_distributed
from shardwise.errors import ShardwiseError
from shardwise.models.load import load_model
from shardwise.planning.plan import Plan
from shardwise.progress import Progress
from shardwise.sharding.apply import shard
from shardwise.training.data import open_data, open_evaluation
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
from shardwise.training.saving import (
    CHECKPOINTS,
    CheckpointRef,
    Checkpoints,
    TrainState,
    find_resumed,
    refuse_other_weights,
)
from shardwise.training.schedules import Schedule
from shardwise.training.step_metrics import StepLogger, StepMetrics


class TrainingRun:
    """All parts of a run, ready for its next step: built anew, or resumed from a checkpoint.

    Args:
        config: The run.
        progress: Is moved by the steps.
        stack: Gives back at its end what the parts hold.

    Raises:
        ShardwiseError: With all problems that can be found before the model has memory; the same on every rank.

    Ranks:
        Collective.
    """

    def __init__(self, config: RunConfig, progress: Progress, stack: ExitStack) -> None:
        self.config = config
        made = self._look(stack)
        self.num_params = sum(parameter.numel() for parameter in self.model.parameters())
        self.folder = Path(self.config.folder or "")
        self._build(made, stack)
        self.step = self.resumed_step = self.schedule.steps_done
        """Optimizer steps made; of them, those that were made before this process took the run up."""
        self.metrics = Metrics(self.folder, config.metrics, dist.get_rank(), steps_done=self.step)
        stack.callback(self.metrics.close)
        self.step_metrics = StepMetrics(self.mesh)
        self.step_logger = StepLogger(self.model, self.metrics, progress, config=config, device=self.device)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return torch.device(self.mesh.device_type)

    def _look(self, stack: ExitStack) -> Plan:
        """Join the ranks, and find all that is wrong before anything heavy is made."""
        config, problems = self.config, Problems()
        mesh = problems.result_of(lambda: init_distributed(config.mesh))
        self.rank = data_parallel_rank(mesh) if mesh is not None else 0
        """Rank among those that have batches of their own."""
        self.num_data_ranks = data_parallel_mesh(mesh).size() if mesh is not None else 1
        is_first = (dist.get_rank() if dist.is_initialized() else read_launch().rank) == 0
        check_settings(config, self.num_data_ranks, problems)
        model = problems.result_of(lambda: load_model(config.model, options=config.model_options))
        made = objective = None
        with problems.collecting():
            check_weights(config)
        if model is not None:
            objective = problems.result_of(lambda: Objective(model, config.training.objective))
            if mesh is not None:
                made = problems.result_of(lambda: plan_run(model, config.shard, mesh))
            with problems.collecting():
                check_length(model, config)
            with problems.collecting():
                self._open_data(model, mesh.device_type if mesh is not None else "cpu", stack)
        if is_first:
            with problems.collecting():
                self.config = with_folder(config)
                found = _look_at_folder(self.config, model)
                if model is not None and made is not None:
                    check_disk(self.config, checkpoint_bytes(model, made, config), found)
        problems.raise_any(is_joined=mesh is not None)
        assert mesh is not None
        assert model is not None
        assert made is not None
        assert objective is not None
        self.mesh, self.model, self.objective = mesh, model, objective
        same_files = "copy the same files to every machine"
        agree_on(json.dumps(self.loader.fingerprint, indent=1, default=str), "the data", fix=same_files)
        self.config = replace(config, folder=on_rank_zero(lambda: self.config.folder))
        return made

    def _open_data(self, model: nn.Module, device: str, stack: ExitStack) -> None:
        config, num_ranks = self.config, self.num_data_ranks
        where = {
            "batch_size": max(config.training.batch_size // num_ranks, 1) * num_ranks,  # a wrong one is told elsewhere
            "rank": self.rank,
            "num_ranks": num_ranks,
            "vocab_size": vocab_size(model),
            "device": device,
        }
        self.loader = open_data(config.data, seed=config.seed, **where)
        stack.callback(self.loader.close)
        self.evaluation = open_evaluation(config.data, training=self.loader, **where)
        """Held-out data, if there is any."""
        self.data = StepBatches(self.loader)
        """The loader's batches, less those left out."""

    def _build(self, made: Plan, stack: ExitStack) -> None:
        """Shard and fill the model, make its optimizer, and go on from a checkpoint if there is one."""
        config, model, training = self.config, self.model, self.config.training
        self.checkpoints = stack.enter_context(Checkpoints(self.folder, config.checkpoint))
        resumed = self.checkpoints.find()
        torch.manual_seed(config.seed)  # of new weights: the same on every rank, whatever their number
        shard(model, config.shard, mesh=self.mesh, plan=made)
        fill(model, config, is_resumed=resumed is not None)
        self.optimizer = build_optimizer(model, config.optimizer)
        self.schedule = Schedule(self.optimizer, config.schedule, training.steps)
        self.ema = EMA(model, training.ema_decay) if training.ema_decay is not None else None
        self.bad_losses = BadLosses(training)
        raise_together(_error_of_check(model, self.optimizer))
        objects = {"schedule": self.schedule, "data": self.data, "bad_losses": self.bad_losses}
        self.state = TrainState(model, self.optimizer, objects | ({} if self.ema is None else {"ema": self.ema}))
        if resumed is not None:
            self.checkpoints.load(resumed, self.state)
            self.schedule.apply()  # the settings may have changed since
        on_rank_zero(lambda: write_config(self.folder, config))
        rows, record = training.batch_size // self.num_data_ranks, self.folder / "micro_batch_size"
        self.microbatches = Microbatches(model, rows, training.micro_batch_size, record=record)


@contextmanager
def open_run(config: RunConfig, progress: Progress) -> Iterator[TrainingRun]:
    """A run, built or resumed; what it holds is given back at the end.

    Ranks:
        Collective.
    """
    with ExitStack() as stack:
        yield TrainingRun(config, progress, stack)


def _look_at_folder(config: RunConfig, model: nn.Module | None) -> CheckpointRef | None:
    folder = Path(config.folder or "")
    prepare_folder(folder)
    found = find_resumed(folder / CHECKPOINTS, config.checkpoint.resume)
    if found is not None:
        refuse_other_model(folder, config)
        if model is not None:
            refuse_other_weights(found, model)
    return found


def _error_of_check(model: nn.Module, optimizer: Optimizer) -> ShardwiseError | None:
    try:
        refuse_errors(check(model, optimizer))
    except ShardwiseError as error:
        return error
    return None
