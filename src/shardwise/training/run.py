"""Open a training run from a RunConfig; settings and requirements are checked before the model is built."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import compat
from shardwise.checkpointing.names import model_tensors
from shardwise.checkpointing.storage import place
from shardwise.checkpointing.weights import load_weights
from shardwise.config.load import check_ranges, to_yaml
from shardwise.config.run import RunConfig
from shardwise.config.schema import BATCH_AXES, MeshConfig, ShardConfig
from shardwise.diagnosing.check import check, refuse_errors
from shardwise.distributed import mesh as meshes
from shardwise.distributed.agreement import agree_on, gather_objects, on_rank_zero, run_on_all
from shardwise.distributed.launchers import read_launch
from shardwise.errors import ConfigError, EnvironmentProblem, ShardError, ShardwiseError, listed
from shardwise.models.configs import config_size, max_length
from shardwise.models.load import load_model
from shardwise.models.moe import ExpertBias
from shardwise.planning.plan import Plan
from shardwise.planning.planner import plan
from shardwise.planning.stages import refuse_tensor_axis
from shardwise.progress import Progress
from shardwise.sharding.adapters import add_lora
from shardwise.sharding.apply import shard
from shardwise.sharding.blocks import AdaptiveActivations, checkpoint_activations, compile_blocks, refuse_budget
from shardwise.sharding.materialize import materialize
from shardwise.sharding.parallel.context_attention import SequenceLayout, split_sequences
from shardwise.sharding.parallel.pipeline import Pipeline, num_microbatches, pipeline
from shardwise.training import run_folder
from shardwise.training.data import open_data, open_evaluation
from shardwise.training.data.loader import check_batch
from shardwise.training.data.samples import Batch
from shardwise.training.ema import EMA
from shardwise.training.metrics import Metrics, StepLogger, StepMetrics
from shardwise.training.microbatching import Microbatches
from shardwise.training.objective import BadLosses, Objective, StepBatches
from shardwise.training.optimizers import ClippingAdamW, build_optimizer, num_states, parameter_kinds
from shardwise.training.schedules import Schedule
from shardwise.units import format_bytes, format_count

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.bin.index.json")


def weights_of(config: RunConfig) -> Path | None:
    """The file or folder with the initial weights, a ConfigError if it does not exist; None: random initialization."""
    path = Path(config.model if config.weights == "auto" else place(config.weights))
    if config.weights == "auto":
        return path if path.is_dir() and any(next(path.glob(pattern), None) for pattern in _WEIGHTS) else None
    if config.weights != "none" and not path.exists():
        raise ConfigError(
            f"there are no weights at {config.weights}",
            where="weights",
            why="it is auto, none, or a file or folder of weights",
            fix="set weights = none for random initialization, or an existing path",
        )
    return path if config.weights != "none" else None


T = TypeVar("T")


class Problems:
    """Collects the errors of independent checks and raises all of them as one."""

    def __init__(self) -> None:
        self.errors: list[ShardwiseError] = []

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Return the result of `work`; None if it raised, and record the error."""
        try:
            return work()
        except ShardwiseError as error:
            self.errors.append(error)
            return None

    def raise_any(self, *, is_joined: bool) -> None:
        """Raise one error with all problems, if any; with `is_joined`, those of all ranks (collective)."""
        found: dict[str, ShardwiseError] = {}  # one problem per place
        for rank, errors in enumerate(gather_objects(self.errors) if is_joined else [self.errors]):
            for error in errors:
                what = f"rank {rank}: {error.what}" if rank else error.what
                found.setdefault(error.where, type(error)(what, where=error.where, why=error.why, fix=error.fix))
        if len(found) < 2:
            for error in found.values():
                raise error
            return
        kinds = {type(error) for error in found.values()}
        raise (EnvironmentProblem if kinds == {EnvironmentProblem} else ConfigError)(
            f"{len(found)} problems in the settings of this run",
            where="\n".join(f"{where}: {error.what}" for where, error in found.items()),
            why="\n".join(dict.fromkeys(error.why for error in found.values() if error.why)),
            fix="\n".join(dict.fromkeys(error.fix for error in found.values() if error.fix)),
        )


def check_length(model: nn.Module, config: RunConfig) -> None:
    """Raise a ConfigError if sequences are longer than the model's maximum length, where its config has one."""
    longest, length = max_length(model), config.data.sequence_length
    if longest is not None and length > longest:
        raise ConfigError(
            f"sequences of {length} tokens are longer than the maximum of {config.model}: {longest}",
            where="data.sequence_length",
            why="every position needs a row in the model's position embedding",
            fix=f"set data.sequence_length = {longest}, or choose a model with longer sequences",
        )


def plan_run(model: nn.Module, config: ShardConfig, mesh: DeviceMesh | MeshConfig) -> Plan:
    """Plan the sharding of a run's model without float16 compute, because the loop does not scale losses.

    On GPUs without bfloat16, where `auto` is float16, the run computes in the storage dtype.
    """
    made = plan(model, config, mesh=mesh)
    if made.grad_scaler and config.precision.param_dtype == "auto":
        made = plan(model, replace(config, precision=replace(config.precision, param_dtype="storage")), mesh=mesh)
    if made.grad_scaler:
        raise ConfigError(
            "the run would compute in float16",
            where="shard.precision.param_dtype",
            why="float16 gradients underflow without loss scaling, which this loop does not support",
            fix="set shard.precision.param_dtype = bfloat16, or storage if the GPU does not support bfloat16",
        )
    return made


def prepare_blocks(
    model: nn.Module, config: ShardConfig, made: Plan, device: torch.device
) -> AdaptiveActivations | None:
    """Apply activation checkpointing and compilation to the blocks of an unsharded model; `auto`: the fastest.

    Returns:
        The saved activations, if they adapt to memory.
    """
    adaptive, compiles = None, compat.can_compile(device) if config.compile == "auto" else config.compile
    refuse_budget(config.activations, compiles=compiles)
    if config.activations == "auto":
        with suppress(ShardError):  # the model has no blocks
            if device.type == "cuda":
                adaptive = AdaptiveActivations(model, made)
    elif config.activations != "keep":
        checkpoint_activations(model, config.activations, config=made)
    if compiles:
        with suppress(ShardError) if config.compile == "auto" else nullcontext():
            compile_blocks(model, config=made)
    return adaptive


def checkpoint_bytes(model: nn.Module, made: Plan, config: RunConfig) -> int:
    """Size of one checkpoint of a run: weights, buffers, optimizer state and averages of all ranks."""
    kinds = parameter_kinds(model)
    total = sum(each.tensor.nbytes for each in model_tensors(model) if not each.is_parameter)
    for planned in made.parameters:
        total += planned.num_bytes if planned.trainable or config.lora is None else 0
        if planned.trainable:
            total += num_states(kinds[model.get_parameter(planned.fqn)], config.optimizer) * planned.num_bytes
            if config.training.ema_decay is not None:
                total += max(planned.num_bytes, 4 * planned.numel)  # averages of 16-bit parameters are float32
    return total


def check_disk(config: RunConfig, num_bytes: int, found: run_folder.CheckpointRef | None) -> list[str]:
    """Raise if the run's first checkpoint does not fit on its disk; return notes if later ones will not."""
    folder, training, checkpoint = (
        Path(config.folder or "") / run_folder.CHECKPOINTS,
        config.training,
        config.checkpoint,
    )
    if found is not None and found.path.parent == folder and found.step >= training.steps:
        return []  # a finished run saves nothing
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    # Leftovers of interrupted saves are removed by the next save.
    leftovers = [path for end in ("partial", "removing") for path in folder.glob(f"step-*.{end}/**/*")]
    free = shutil.disk_usage(existing).free + sum(path.stat().st_size for path in leftovers if path.is_file())
    if num_bytes > free:
        smaller = ["optimizer.name = muon"] if config.optimizer.name == "adamw" else []
        smaller += ["training.ema_decay = null"] if training.ema_decay is not None else []
        raise EnvironmentProblem(
            f"a checkpoint of this run takes {format_bytes(num_bytes)}, and its disk has {format_bytes(free)} free",
            where=f"folder ({folder})",
            why="a new checkpoint is written before an old one is removed, so the first save would fail",
            fix=f"set folder to a disk with more space, or free {format_bytes(num_bytes - free)} there (old "
            "runs, kept checkpoints)" + (f"; {' or '.join(smaller)} makes checkpoints smaller" if smaller else ""),
        )
    num_saved = -(-training.steps // checkpoint.every) if checkpoint.every else 1
    num_kept = min(num_saved, checkpoint.keep_last + 1 if checkpoint.keep_last else num_saved)
    if found is None and num_kept * num_bytes > free:
        return [
            f"{format_bytes(num_bytes)} each: the disk has {format_bytes(free)} free, and there will be {num_kept} at "
            "a time; lower keep_last, or set folder to another disk"
        ]
    return []


@dataclass(slots=True)
class Examined:
    """Results of `examine`; None for parts that could not be built."""

    config: RunConfig
    """The config of the run, on rank 0 with its folder."""
    model: nn.Module | None = None
    """The model on the meta device."""
    plan: Plan | None = None
    objective: Objective | None = None
    resumed: run_folder.CheckpointRef | None = None
    """The checkpoint to resume from; on rank 0 only."""
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
    """Check everything about a run except its data before expensive work; rank 0 checks the run's folder.

    Without a mesh there is no plan. The folder is created if `starts` is True.
    """
    examined, attempt = Examined(config), problems.attempt
    attempt(lambda: check_ranges(config))
    attempt(lambda: check_batch(config.training.batch_size, num_data_ranks))
    attempt(lambda: weights_of(config))
    attempt(lambda: check_parallel(config, num_data_ranks))
    examined.model = model = attempt(lambda: load_run_model(config))
    if model is not None:
        examined.objective = attempt(lambda: Objective(model, config.training.objective))
        if mesh is not None:
            examined.plan = attempt(lambda: plan_run(model, config.shard, mesh))
        attempt(lambda: check_length(model, config))
    if is_first:
        attempt(lambda: _examine_folder(examined, starts))
    return examined


def load_run_model(config: RunConfig) -> nn.Module:
    """The model of a run on the meta device, with its adapters."""
    model = load_model(config.model, options=config.model_options)
    return model if config.lora is None else add_lora(model, config.lora)


def check_parallel(config: RunConfig, num_data_ranks: int) -> None:
    """Raise unless sequences divide evenly over the context axis, and rows over pipeline stages."""
    mesh, shard_config = config.mesh, config.shard
    if mesh.context > 1:
        SequenceLayout(mesh.context, 0, shard_config.context.balanced).positions(config.data.sequence_length)
    if mesh.pipeline > 1:
        refuse_tensor_axis({"pipeline": mesh.pipeline, "tensor": mesh.tensor})
        num_microbatches(shard_config.pipeline, mesh.pipeline, config.training.batch_size // num_data_ranks)
        for setting, value, other in (
            ("export", config.checkpoint.export, "false"),
            ("format", config.checkpoint.format == "full", "sharded"),
        ):
            if value:
                raise ConfigError(
                    f"checkpoint.{setting} is {getattr(config.checkpoint, setting)}, with a pipeline",
                    where=f"checkpoint.{setting}",
                    why="no rank of a pipeline gathers the weights of all stages",
                    fix=f"set checkpoint.{setting} = {other}, and convert the last checkpoint: shardwise ckpt convert",
                )


def _examine_folder(examined: Examined, starts: bool) -> None:
    config = examined.config = run_folder.with_folder(examined.config, reserve=starts)
    folder, model = Path(config.folder or ""), examined.model
    if starts:
        run_folder.prepare_folder(folder)
    found = examined.resumed = run_folder.find_resumed(folder / run_folder.CHECKPOINTS, config.checkpoint.resume)
    if found is not None:
        run_folder.refuse_other_model(folder, config)
        if model is not None:
            run_folder.refuse_other_weights(found, model)
    if model is not None and examined.plan is not None:
        examined.disk_notes = check_disk(config, checkpoint_bytes(model, examined.plan, config), found)


_MAX_LINES = 40


def resolved_yaml(config: RunConfig, num_ranks: int) -> str:
    """The run as YAML that `shardwise train` reads, with reasons as comments; a ConfigError lists all problems."""
    sizes = config.mesh.sizes(num_ranks)
    problems = Problems()
    num_data_ranks = math.prod(size for axis, size in sizes.items() if axis in BATCH_AXES)
    examined = examine(config, replace(config.mesh, shard=sizes["shard"]), num_data_ranks, problems)
    problems.raise_any(is_joined=False)
    made, found = examined.plan, examined.resumed
    assert made is not None
    notes = _batch_notes(config, num_data_ranks)
    start = f"resumes from step {found.step}: {found.path}" if found is not None else "starts from scratch"
    notes["checkpoint.resume"] = [start]
    notes["checkpoint"] = examined.disk_notes
    if config.folder is None:
        notes["folder"] = ["the next free name in `runs`; chosen for every run"]
    notes["model"] = [f"{format_count(sum(p.numel for p in made.parameters))} parameters"]
    notes["mesh"] = [f"{num_ranks} ranks: " + ", ".join(f"{name} {size}" for name, size in sizes.items())]
    notes["mesh.device"] = [f"auto is {meshes.device_type()} here"] if config.mesh.device == "auto" else []
    notes["shard"] = listed(str(made).splitlines(), _MAX_LINES)
    weights = weights_of(config)
    notes["weights"] = [f"read from {weights}" if weights is not None else "initialised from the seed"]
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
    """All parts of a run, ready for its next step: new, or resumed from a checkpoint.

    All problems found before the model is materialized are raised as one error, on every rank. Collective.
    """

    def __init__(self, config: RunConfig, progress: Progress, stack: ExitStack) -> None:
        self.config = config
        self.pipeline: Pipeline | None = None
        """The pipeline, if the model is split into stages; `model` is then this rank's part."""
        examined = self._validate(stack)
        self.num_params = sum(parameter.numel() for parameter in self.model.parameters())
        self.folder = Path(self.config.folder or "")
        self._build(examined, stack)
        self.step = self.resumed_step = self.schedule.steps_done
        """Optimizer steps done in total, and before this process resumed the run."""
        self.metrics = Metrics(self.folder, config.metrics, dist.get_rank(), steps_done=self.step)
        stack.callback(self.metrics.close)
        self.step_metrics = StepMetrics(self.mesh)
        self.step_logger = StepLogger(self.model, self.metrics, progress, config=config, device=self.device)

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return torch.device(self.mesh.device_type)

    def part_of(self, batch: Batch) -> Batch:
        """Return this rank's part of the sequences, with a context axis."""
        return split_sequences(batch, mesh=self.mesh, balanced=self.config.shard.context.balanced)

    def loss_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch without gradients, and its number of tokens.

        Ranks:
            Collective.
        """
        batch = self.part_of(batch)
        return self.objective(self.model, batch) if self.pipeline is None else self.pipeline.evaluate(batch)

    def averaged(self) -> AbstractContextManager[None]:
        """Replace the weights by the moving average inside the block, if there is one."""
        return self.ema.swap() if self.ema is not None else nullcontext()

    def _validate(self, stack: ExitStack) -> Examined:
        """Join the process group, and check everything before expensive work.

        Ranks:
            Collective.
        """
        config, problems = self.config, Problems()
        mesh = problems.attempt(lambda: meshes.init_distributed(config.mesh))
        self.rank = meshes.data_parallel_rank(mesh) if mesh is not None else 0
        """Data-parallel rank."""
        self.random_stream = meshes.random_stream(mesh) if mesh is not None else 0
        self.num_data_ranks = meshes.data_parallel_mesh(mesh).size() if mesh is not None else 1
        is_first = (dist.get_rank() if dist.is_initialized() else read_launch().rank) == 0
        examined = examine(config, mesh, self.num_data_ranks, problems, starts=True, is_first=is_first)
        model, objective = examined.model, examined.objective
        if model is not None:
            problems.attempt(lambda: self._open_data(model, mesh.device_type if mesh is not None else "cpu", stack))
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
        config = self.config
        where = {
            "batch_size": config.training.batch_size,
            "rank": self.rank,
            "num_ranks": self.num_data_ranks,
            "vocab_size": config_size(model, "vocab_size"),
            "device": device,
        }
        self.loader = open_data(config.data, seed=config.seed, **where)
        stack.callback(self.loader.close)
        self.evaluation = open_evaluation(config.data, training=self.loader, **where)
        """Held-out data, if there is any."""
        self.data = StepBatches(self.loader)
        """The loader's batches, except skipped ones."""

    def _open_pipeline(self) -> Pipeline:
        """Split the model into stages, using the first batch of the data.

        Ranks:
            Collective.
        """
        batch = run_on_all(lambda: self.part_of(next(self.loader)))
        self.loader.skip(-1)
        # `prepare_blocks` has done both.
        config = replace(self.config.shard, activations="keep", compile=False)
        return pipeline(self.model, config, mesh=self.mesh, loss=self.objective, example_inputs=batch)

    def _build(self, examined: Examined, stack: ExitStack) -> None:
        """Shard and materialize the model, build its optimizer, and load the checkpoint to resume from.

        Ranks:
            Collective.
        """
        config, model, training, resumed = self.config, self.model, self.config.training, examined.resumed
        trainable_only = config.lora is not None  # frozen weights are not in a checkpoint
        self.checkpoints = run_folder.Checkpoints(self.folder, config.checkpoint, stack, trainable_only=trainable_only)
        assert examined.plan is not None
        activations = prepare_blocks(model, config.shard, examined.plan, self.device)
        weights = weights_of(config) if resumed is None or trainable_only else None  # a checkpoint contains them
        if config.mesh.pipeline > 1:
            self.pipeline = self._open_pipeline()
            self.model = model = self.pipeline.model
        else:
            prepared = replace(self.config.shard, activations="keep", compile=False)  # done by prepare_blocks
            shard(model, prepared, mesh=self.mesh, plan=examined.plan)
        for stage, part in enumerate([model]) if self.pipeline is None else self.pipeline.models:
            # Initial weights do not depend on the number of data-parallel ranks; each pipeline stage draws its own.
            torch.manual_seed(config.seed + stage)
            materialize(part) if weights is None else load_weights(part, weights)
        self.optimizer = build_optimizer(model, config.optimizer)
        if isinstance(self.optimizer, ClippingAdamW) and self.objective.counts_ahead:
            compat.keep_gradient_dtype(model)
        self.schedule = Schedule(self.optimizer, config.schedule, training.steps)
        self.ema = EMA(model, training.ema_decay) if training.ema_decay is not None else None
        own_tokens = meshes.gradient_mesh(self.mesh)
        self.expert_bias = ExpertBias(model, [own_tokens.get_group(axis) for axis in range(own_tokens.ndim)])
        self.bad_losses = BadLosses(training)
        checked = check(model, self.optimizer)  # on all ranks: it communicates
        run_on_all(lambda: refuse_errors(checked))
        self.state: run_folder.TrainState = {"model": model, "optimizers": self.optimizer, "schedule": self.schedule}
        self.state |= {"data": self.data, "bad_losses": self.bad_losses}
        self.state |= {} if self.ema is None else {"ema": self.ema}
        if resumed is not None:
            self.checkpoints.load(resumed, self.state)
            self.schedule.apply()  # the settings may have changed
        on_rank_zero(lambda: run_folder.write_config(self.folder, config))
        rows, record = training.batch_size // self.num_data_ranks, self.folder / "micro_batch_size"
        self.microbatches = Microbatches(model, rows, training.micro_batch_size, record=record, activations=activations)


@contextmanager
def open_run(config: RunConfig, progress: Progress) -> Iterator[TrainingRun]:
    """Open a new or resumed run inside the block; collective."""
    with ExitStack() as stack:
        yield TrainingRun(config, progress, stack)
