"""From a RunConfig to everything that a loop needs; settings and requirements are checked before the model is made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import compat
from shardwise.checkpointing.state.slices import model_tensors
from shardwise.checkpointing.weights import load_weights
from shardwise.config.load import check_ranges, to_yaml
from shardwise.config.run import OptimizerConfig, RunConfig
from shardwise.config.schema import MeshConfig, ShardConfig
from shardwise.diagnosing.check import check, refuse_errors
from shardwise.distributed.agreement import agree_on, gather_objects, on_rank_zero, run_on_all
from shardwise.distributed.launchers import read_launch
from shardwise.distributed.mesh import data_parallel_mesh, data_parallel_rank, device_type, init_distributed
from shardwise.errors import ConfigError, EnvironmentProblem, ShardError, ShardwiseError, listed
from shardwise.models.configs import config_size, max_length
from shardwise.models.load import load_model
from shardwise.planning.plan import Plan
from shardwise.planning.planner import plan
from shardwise.progress import Progress
from shardwise.sharding.apply import shard
from shardwise.sharding.blocks import checkpoint_activations, compile_blocks, recompute_later
from shardwise.sharding.materialize import materialize
from shardwise.training import saving
from shardwise.training.data import open_data, open_evaluation
from shardwise.training.data.loader import check_batch
from shardwise.training.ema import EMA
from shardwise.training.metrics import Metrics, StepLogger, StepMetrics
from shardwise.training.microbatching import Microbatches
from shardwise.training.objective import BadLosses, Objective, StepBatches
from shardwise.training.optimizers import ClippingAdamW, Kind, build_optimizer, can_compile, parameter_kinds
from shardwise.training.run_folder import prepare_folder, refuse_other_model, with_folder, write_config
from shardwise.training.saving import CHECKPOINTS, CheckpointRef, TrainState, find_resumed, refuse_other_weights
from shardwise.training.schedules import Schedule
from shardwise.units import format_bytes, format_count

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.bin.index.json")


def fill(model: nn.Module, config: RunConfig, *, is_resumed: bool = False) -> None:
    """Give a sharded model on meta its values.

    Args:
        model: On meta.
        config: `weights` says where they are.
        is_resumed: A checkpoint follows, which holds the weights: others need not be read.

    Raises:
        CheckpointError: The weights do not fit.

    Ranks:
        Collective.
    """
    path = None if is_resumed else weights_of(config)
    if path is None:
        materialize(model)
    else:
        load_weights(model, path)


def check_weights(config: RunConfig) -> None:
    """Raise if weights are named that do not exist.

    Raises:
        ConfigError: They do not.
    """
    if config.weights not in ("auto", "none") and not Path(config.weights).exists():
        raise ConfigError(
            f"there are no weights at {config.weights}",
            where="weights",
            why="it is auto, none, or a file or folder of weights",
            fix="set weights = none to draw new ones, or name an existing path",
        )


def weights_of(config: RunConfig) -> Path | None:
    """The file or folder that holds the first weights; None: they are drawn."""
    if config.weights == "none":
        return None
    if config.weights != "auto":
        return Path(config.weights)
    folder = Path(config.model)
    holds_weights = folder.is_dir() and any(next(folder.glob(pattern), None) for pattern in _WEIGHTS)
    return folder if holds_weights else None


T = TypeVar("T")


class Problems:
    """Collects errors of steps that do not need each other; raises once, with all of them."""

    def __init__(self) -> None:
        self.errors: list[ShardwiseError] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep an error of the block for later, and go on."""
        try:
            yield
        except ShardwiseError as error:
            self.errors.append(error)

    def result_of(self, work: Callable[[], T]) -> T | None:
        """What `work` returns; None if it failed, which is kept for later."""
        with self.collecting():
            return work()
        return None

    def error(self) -> ShardwiseError | None:
        """One error that says everything; None if there is nothing to say."""
        errors = list({e.where: e for e in reversed(self.errors)}.values())[::-1]  # one place, one problem
        if len(errors) < 2:
            return errors[0] if errors else None
        kind = EnvironmentProblem if all(isinstance(e, EnvironmentProblem) for e in errors) else ConfigError
        return kind(
            f"{len(errors)} problems keep this run from starting",
            where="\n".join(f"{e.where}: {e.what}" for e in errors),
            why="\n".join(dict.fromkeys(e.why for e in errors if e.why)),
            fix="\n".join(dict.fromkeys(e.fix for e in errors if e.fix)),
        )

    def raise_any(self, *, is_joined: bool) -> None:
        """Raise if there is anything to say, here or on another rank: the same on all of them.

        Args:
            is_joined: The ranks have met. Where they could not, each raises what it knows itself.

        Ranks:
            Collective where they have met.
        """
        if is_joined and dist.is_initialized():
            self.errors = _of_all_ranks(self.errors)
        if (error := self.error()) is not None:
            raise error


def _of_all_ranks(errors: list[ShardwiseError]) -> list[ShardwiseError]:
    """What any rank has found, once; what only some have says on which."""
    gathered = gather_objects(errors)
    found = {error.where: error for error in gathered[0]}
    for rank, others in enumerate(gathered):
        for error in others:
            if error.where not in found:
                what = f"rank {rank}: {error.what}"
                found[error.where] = type(error)(what, where=error.where, why=error.why, fix=error.fix)
    return list(found.values())


def check_length(model: nn.Module, config: RunConfig) -> None:
    """Raise if sequences are longer than the model's tables.

    Args:
        model: With a `config`, or the question cannot be asked.
        config: The run.

    Raises:
        ConfigError: They are.
    """
    longest, length = max_length(model), config.data.sequence_length
    if longest is not None and length > longest:
        raise ConfigError(
            f"sequences of {length} tokens are longer than {config.model} takes: {longest}",
            where="data.sequence_length",
            why="every position needs a row in the model's tables",
            fix=f"set data.sequence_length = {longest}, or choose a model with longer sequences",
        )


def plan_run(model: nn.Module, config: ShardConfig, mesh: DeviceMesh | MeshConfig) -> Plan:
    """How the model of a run will be sharded: as `plan` says, but never computing in float16.

    The loop does not scale losses, as float16 would need. Where `auto` means float16, on GPUs that have no bfloat16,
    the run computes in the stored dtype.

    Raises:
        PlanError: The model cannot be sharded as asked.
        ConfigError: float16 is asked for by name.
    """
    made = plan(model, config, mesh=mesh)
    if made.grad_scaler and config.precision.param_dtype == "auto":
        made = plan(model, replace(config, precision=replace(config.precision, param_dtype="storage")), mesh=mesh)
    if made.grad_scaler:
        raise ConfigError(
            "the run would compute in float16",
            where="shard.precision.param_dtype",
            why="gradients of float16 vanish unless the loss is scaled, which this loop does not do",
            fix="set shard.precision.param_dtype = bfloat16, or storage where the GPU has no bfloat16",
        )
    return made


def prepare_blocks(model: nn.Module, config: ShardConfig, made: Plan, device: torch.device) -> None:
    """Compile a model's blocks and let them recompute, as asked; where `auto` stands, what is fastest on the device.

    Args:
        model: Not sharded yet.
        config: Its `activations` and `compile`.
        made: Its plan.
        device: Where the model will compute.
    """
    if config.activations == "auto":
        with suppress(ShardError):  # it has no blocks
            if device.type == "cuda":
                recompute_later(model, made)
    elif config.activations != "keep":
        checkpoint_activations(model, config.activations, config=made)
    if config.compile is True:
        compile_blocks(model, config=made)
    elif config.compile == "auto" and can_compile(device):
        with suppress(ShardError):
            compile_blocks(model, config=made)


def checkpoint_bytes(model: nn.Module, made: Plan, config: RunConfig) -> int:
    """Size of one checkpoint of a run: weights, buffers, optimizer state and averages, of all ranks together.

    The few kB around each tensor and the state of the data are left out.

    Args:
        model: Not sharded yet.
        made: Its plan.
        config: The run.
    """
    kinds = parameter_kinds(model)
    total = sum(each.tensor.nbytes for each in model_tensors(model) if not each.is_parameter)
    for planned in made.parameters:
        total += planned.num_bytes
        if planned.trainable:
            kind = kinds[model.get_parameter(planned.fqn)]
            total += _num_states(kind, config.optimizer) * planned.num_bytes
            if config.training.ema_decay is not None:
                total += max(planned.num_bytes, 4 * planned.numel)  # averages of 16 bits are kept in 32
    return total


def _num_states(kind: Kind, config: OptimizerConfig) -> int:
    """Tensors of a parameter's size that the optimizer keeps for it."""
    if config.name == "sgd":
        return 1 if config.momentum else 0
    return 1 if config.name == "muon" and kind == "blocks" else 2


def check_disk(config: RunConfig, num_bytes: int, found: CheckpointRef | None) -> list[str]:
    """Raise if the first checkpoint that the run writes does not fit on its disk.

    Args:
        config: The run, with its folder.
        num_bytes: Of one checkpoint.
        found: What the run goes on from.

    Returns:
        Notes for the resolved run: that later checkpoints will not fit.

    Raises:
        EnvironmentProblem: It does not fit.

    Ranks:
        Local: call it on rank 0.
    """
    folder, training, checkpoint = Path(config.folder or "") / CHECKPOINTS, config.training, config.checkpoint
    is_done = found is not None and found.path.parent == folder and found.step >= training.steps
    if is_done:  # a finished run saves nothing
        return []
    free = _free_bytes(folder)
    if num_bytes > free:
        smaller = ["optimizer.name = muon"] if config.optimizer.name == "adamw" else []
        smaller += ["training.ema_decay = null"] if training.ema_decay is not None else []
        raise EnvironmentProblem(
            f"a checkpoint of this run takes {format_bytes(num_bytes)}, and its disk has {format_bytes(free)} free",
            where=f"folder ({folder})",
            why="the new one is written before an old one is removed, and the first save would fail",
            fix=f"set folder to a disk with more space, or free {format_bytes(num_bytes - free)} there (old "
            "runs, checkpoints that are kept)"
            + (f"; {' or '.join(smaller)} makes checkpoints smaller" if smaller else ""),
        )
    num_saved = -(-training.steps // checkpoint.every) if checkpoint.every else 1
    num_kept = min(num_saved, checkpoint.keep_last + 1 if checkpoint.keep_last else num_saved)
    if found is None and num_kept * num_bytes > free:
        return [
            f"{format_bytes(num_bytes)} each: the disk has {format_bytes(free)} free, and there will be {num_kept} at "
            "a time; lower keep_last, or set folder to another disk"
        ]
    return []


def _free_bytes(folder: Path) -> int:
    """Free on the disk that a folder is or will be on; what interrupted saves left there is removed by the next."""
    leftovers = [path for end in ("partial", "removing") for path in folder.glob(f"step-*.{end}/**/*")]
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free + sum(path.stat().st_size for path in leftovers if path.is_file())


@dataclass(slots=True)
class Examined:
    """What `examine` found; None where it could not be made."""

    config: RunConfig
    """The run, with its folder on the first rank."""
    model: nn.Module | None = None
    """On meta."""
    plan: Plan | None = None
    objective: Objective | None = None
    resumed: CheckpointRef | None = None
    """The checkpoint that the run starts from; only the first rank looks."""
    disk_notes: list[str] = field(default_factory=list)
    """From `check_disk`."""


def examine(
    config: RunConfig,
    mesh: DeviceMesh | MeshConfig | None,
    num_data_ranks: int,
    problems: Problems,
    *,
    starts: bool = False,
    is_first: bool = True,
) -> Examined:
    """Check all of a run but its data, before anything heavy is made.

    Args:
        config: The run.
        mesh: What the model is planned for; None: there is none, and so no plan.
        num_data_ranks: Ranks that get batches of their own.
        problems: Gets what is wrong.
        starts: Make the run's folder, as the run is about to start.
        is_first: Look at the folder, as only rank 0 does.
    """
    examined = Examined(config)
    for check_part in (
        lambda: check_ranges(config),
        lambda: check_batch(config.training.batch_size, num_data_ranks),
        lambda: check_weights(config),
    ):
        problems.result_of(check_part)
    examined.model = model = problems.result_of(lambda: load_model(config.model, options=config.model_options))
    if model is not None:
        examined.objective = problems.result_of(lambda: Objective(model, config.training.objective))
        if mesh is not None:
            examined.plan = problems.result_of(lambda: plan_run(model, config.shard, mesh))
        with problems.collecting():
            check_length(model, config)
    if is_first:
        with problems.collecting():
            _examine_folder(examined, starts)
    return examined


def _examine_folder(examined: Examined, starts: bool) -> None:
    config = examined.config = with_folder(examined.config, reserve=starts)
    folder, model = Path(config.folder or ""), examined.model
    if starts:
        prepare_folder(folder)
    found = examined.resumed = find_resumed(folder / CHECKPOINTS, config.checkpoint.resume)
    if found is not None:
        refuse_other_model(folder, config)
        if model is not None:
            refuse_other_weights(found, model)
    if model is not None and examined.plan is not None:
        examined.disk_notes = check_disk(config, checkpoint_bytes(model, examined.plan, config), found)


_MAX_LINES = 40


def resolved_yaml(config: RunConfig, num_ranks: int) -> str:
    """The run as YAML that `shardwise train` reads, with reasons as comments.

    Args:
        config: The run.
        num_ranks: That it would have.

    Raises:
        ConfigError: With everything that is wrong and can be seen without reading the data.

    Ranks:
        Local. Nothing is written, no rank is started.
    """
    sizes = config.mesh.sizes(num_ranks)
    problems = Problems()
    examined = examine(config, replace(config.mesh, shard=sizes["shard"]), num_ranks, problems)
    problems.raise_any(is_joined=False)
    made, found = examined.plan, examined.resumed
    assert made is not None
    notes = _batch_notes(config, num_ranks)
    start = f"goes on from step {found.step}: {found.path}" if found is not None else "starts afresh"
    notes["checkpoint.resume"] = [start]
    notes["checkpoint"] = examined.disk_notes
    if config.folder is None:
        notes["folder"] = ["the next free name in `runs`; chosen anew for every run"]
    notes["model"] = [f"{format_count(sum(p.numel for p in made.parameters))} parameters"]
    notes["mesh"] = [f"{num_ranks} ranks: " + ", ".join(f"{name} {size}" for name, size in sizes.items())]
    notes["mesh.device"] = [f"auto is {device_type()} here"] if config.mesh.device == "auto" else []
    notes["shard"] = listed(str(made).splitlines(), _MAX_LINES)
    weights = weights_of(config)
    notes["weights"] = [f"read from {weights}" if weights is not None else "drawn anew, from the seed"]
    used = {path: lines for path, lines in notes.items() if lines}
    return to_yaml(examined.config, used)


def _batch_notes(config: RunConfig, num_ranks: int) -> dict[str, list[str]]:
    training = config.training
    rows = training.batch_size // num_ranks
    tokens = training.batch_size * config.data.sequence_length
    at_once = min(training.micro_batch_size or rows, rows)
    parts = -(-rows // at_once)
    micro = f"{at_once} of a rank's {rows} sequences at once: {parts} micro-step{'s' if parts > 1 else ''} a step"
    if training.micro_batch_size is None:
        micro += "; halved on all ranks when one runs out of memory"
    return {
        "training.steps": [f"{format_count(training.steps * tokens)} tokens in all"],
        "training.batch_size": [f"{rows} sequences on each of {num_ranks} ranks, {format_count(tokens)} tokens a step"],
        "training.micro_batch_size": [micro],
    }


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
        examined = self._validate(stack)
        self.num_params = sum(parameter.numel() for parameter in self.model.parameters())
        self.folder = Path(self.config.folder or "")
        self._build(examined, stack)
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

    def _validate(self, stack: ExitStack) -> Examined:
        """Join the ranks, and find all that is wrong before anything heavy is made."""
        config, problems = self.config, Problems()
        mesh = problems.result_of(lambda: init_distributed(config.mesh))
        self.rank = data_parallel_rank(mesh) if mesh is not None else 0
        """Rank among those that have batches of their own."""
        self.num_data_ranks = data_parallel_mesh(mesh).size() if mesh is not None else 1
        is_first = (dist.get_rank() if dist.is_initialized() else read_launch().rank) == 0
        examined = examine(config, mesh, self.num_data_ranks, problems, starts=True, is_first=is_first)
        model, objective = examined.model, examined.objective
        if model is not None:
            with problems.collecting():
                self._open_data(model, mesh.device_type if mesh is not None else "cpu", stack)
        problems.raise_any(is_joined=mesh is not None)
        assert mesh is not None
        assert model is not None
        assert objective is not None
        self.mesh, self.model, self.objective = mesh, model, objective
        same_files = "copy the same files to every machine"
        agree_on(json.dumps(self.loader.fingerprint, indent=1, default=str), "the data", fix=same_files)
        folder, examined.resumed = on_rank_zero(lambda: (examined.config.folder, examined.resumed))
        self.config = replace(config, folder=folder)
        return examined

    def _open_data(self, model: nn.Module, device: str, stack: ExitStack) -> None:
        config, num_ranks = self.config, self.num_data_ranks
        where = {
            "batch_size": config.training.batch_size,
            "rank": self.rank,
            "num_ranks": num_ranks,
            "vocab_size": config_size(model, "vocab_size"),
            "device": device,
        }
        self.loader = open_data(config.data, seed=config.seed, **where)
        stack.callback(self.loader.close)
        self.evaluation = open_evaluation(config.data, training=self.loader, **where)
        """Held-out data, if there is any."""
        self.data = StepBatches(self.loader)
        """The loader's batches, less those left out."""

    def _build(self, examined: Examined, stack: ExitStack) -> None:
        """Shard and fill the model, make its optimizer, and go on from a checkpoint if there is one."""
        config, model, training, resumed = self.config, self.model, self.config.training, examined.resumed
        self.checkpoints = stack.enter_context(saving.Checkpoints(self.folder, config.checkpoint))
        torch.manual_seed(config.seed)  # of new weights: the same on every rank, whatever their number
        assert examined.plan is not None
        prepare_blocks(model, config.shard, examined.plan, self.device)
        shard(model, mesh=self.mesh, plan=examined.plan)
        fill(model, config, is_resumed=resumed is not None)
        self.optimizer = build_optimizer(model, config.optimizer)
        if isinstance(self.optimizer, ClippingAdamW) and self.objective.counts_ahead:
            compat.keep_gradient_dtype(model)
        self.schedule = Schedule(self.optimizer, config.schedule, training.steps)
        self.ema = EMA(model, training.ema_decay) if training.ema_decay is not None else None
        self.bad_losses = BadLosses(training)
        run_on_all(lambda: refuse_errors(check(model, self.optimizer)))
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
