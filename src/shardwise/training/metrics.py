"""Metrics of a run as JSON lines and in trackers: loss, time, tokens, FLOPs, memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.config.run import MetricsConfig, RunConfig
from shardwise.distributed.agreement import run_on_all
from shardwise.distributed.mesh import gradient_mesh
from shardwise.errors import ConfigError, EnvironmentProblem, import_optional
from shardwise.models.configs import config_size
from shardwise.progress import Progress
from shardwise.training.optimizers import parameter_kinds
from shardwise.units import format_bytes, format_count, format_seconds


class TensorBoard:
    """Writes event files; events after `steps_done`, from before a resume, are hidden."""

    def __init__(self, folder: Path, steps_done: int) -> None:
        _import("tensorboard")
        self._folder = folder
        self._open(steps_done)

    def _open(self, steps_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=steps_done + 1 if steps_done else None)

    def rewind(self, steps_done: int) -> None:
        """Hide the events of later steps."""
        self._writer.close()
        self._open(steps_done)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add each number as a scalar."""
        for name, value in _numbers(values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """Sends records to a project; the run is named after its folder, so that a resumed run keeps its name."""

    def __init__(self, project: str, folder: Path) -> None:
        wandb = _import("wandb")
        name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        try:
            self._run = wandb.init(project=project, id=name, name=folder.name, dir=str(folder), resume="allow")
        except wandb.Error as error:  # not logged in, or not reachable
            raise EnvironmentProblem(
                f"wandb cannot start: {error}",
                where="metrics.wandb",
                why="rank 0 sends the run's records to it",
                fix="wandb login, or set WANDB_MODE=offline to keep them here",
            ) from None
        # A separate step: wandb's own must not decrease, and drops the steps that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers."""
        self._run.log({"step": step, **_numbers(values)})

    def rewind(self, steps_done: int) -> None:
        """Do nothing: repeated steps are recorded in addition to the earlier ones."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _import(module: str) -> Any:
    setting = f"metrics.{module}"
    return import_optional(
        module,
        where=setting,
        why="the run's config enables it, and it is an optional dependency",
        fix=f"pip install 'shardwise[{module}]', or leave {setting} out: metrics.jsonl is always written",
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    }


FILE_NAME = "metrics.jsonl"


class Metrics:
    """Writes records to `metrics.jsonl` in the run's folder, and to the trackers that the config names; on rank 0.

    NaN and infinity become the strings `nan`, `inf` and `-inf`, which `float()` parses: JSON has no such numbers.
    Records after `steps_done`, written by an earlier process of the run, are dropped. The constructor is
    collective, so that all ranks raise the same error.
    """

    def __init__(self, folder: str | Path, config: MetricsConfig, rank: int, *, steps_done: int = 0) -> None:
        self.path = Path(folder) / FILE_NAME
        self.config = config
        self.on_record: Callable[[int, Mapping[str, Any]], None] | None = None
        """Called with the step and the values of every record, on every rank."""
        self._file: IO[str] | None = None
        self._trackers: list[TensorBoard | WeightsAndBiases] = []
        run_on_all(lambda: self._open(steps_done) if rank == 0 else None)

    def record(self, step: int, **values: Any) -> None:
        """Write a record of numbers, strings, None or 0-d tensors; steps count from 1."""
        if self.on_record is not None:
            self.on_record(step, values)
        if self._file is None:
            return
        plain = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        encoded = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in plain.items()
        }
        # One write per line: a reader never sees half a record, and a killed run leaves at most one.
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **encoded}) + "\n")
        self._file.flush()
        for tracker in self._trackers:
            tracker.write(step, plain)

    def rewind(self, steps_done: int) -> None:
        """Drop records of later steps, as when the run rewinds to a checkpoint."""
        if self._file is None:
            return
        self._file.close()
        keep_records(self.path, steps_done)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        for tracker in self._trackers:
            tracker.rewind(steps_done)

    def close(self) -> None:
        """Close the file and the trackers."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        for tracker in self._trackers:
            tracker.close()

    def _open(self, steps_done: int) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.config.tensorboard:
                self._trackers.append(TensorBoard(self.path.parent / "tensorboard", steps_done))
            if self.config.wandb is not None:
                self._trackers.append(WeightsAndBiases(self.config.wandb, self.path.parent))
            keep_records(self.path, steps_done)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be written: {error}",
                where=str(self.path),
                why="every run writes its metrics to its folder",
                fix="set folder to a writable folder with free space",
            ) from None


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file; an unfinished last line of a killed run is skipped."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def keep_records(path: Path, steps_done: int) -> None:
    """Drop records of steps after `steps_done`, and unfinished lines; the file is replaced atomically."""
    if not path.exists():
        return
    kept = [record for record in read_records(path) if record["step"] <= steps_done]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(partial, path)


@dataclass(frozen=True, slots=True)
class StepReading:
    """The numbers of one step, the same on every rank."""

    step: int
    """From 1."""
    loss: float
    """Mean over the tokens of all ranks."""
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Tokens in the loss of this step, over all ranks."""
    seconds: float
    """Duration on this rank."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Further values for its record, already on the host."""


class StepMetrics:
    """Sums tokens and losses over ranks, in two scalar all-reduces per step (`count` and `mean`).

    The sums stay on the device. On an accelerator they are copied to the host asynchronously and read a step later.
    Ranks that share a layer's matrices share their batch, which counts once.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.num_ranks = gradient_mesh(mesh).size()
        """Number of data-parallel ranks."""
        self._device = torch.device(mesh.device_type)
        self._copies = mesh.size() // self.num_ranks
        self._tokens = torch.zeros((), dtype=torch.float64, device=self._device)
        self._in_flight: tuple[int, Mapping[str, Any], Tensor, torch.Event | None] | None = None
        self._start = time.perf_counter()

    def count(self, num_tokens: Tensor) -> Tensor:
        """Return the number of tokens of this step on all ranks (0-d), from that of this rank; on the device."""
        self._tokens = self._sum(num_tokens)
        return self._tokens

    def mean(self, loss: Tensor) -> Tensor:
        """The mean of all ranks' losses, each 0-d; on the device."""
        return self._sum(loss) / self.num_ranks

    def restart_clock(self) -> None:
        """Exclude the time since the last step from the next one."""
        self._start = time.perf_counter()

    def add(self, step: int, loss: Tensor, grad_norm: Tensor, **others: Any) -> list[StepReading]:
        """Start copying the metrics of a step to the host; return those that have arrived (on the CPU immediately)."""
        readings = self.flush()
        row = torch.stack([number.detach().to(self._tokens) for number in (loss, grad_norm, self._tokens)])
        if row.device.type == "cpu":
            self._in_flight = step, others, row, None
            return readings + self.flush()
        on_host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True).copy_(row, non_blocking=True)
        copied = torch.Event(self._device)
        torch.accelerator.current_stream().record_event(copied)
        self._in_flight = step, others, on_host, copied
        return readings

    def flush(self) -> list[StepReading]:
        """Wait for the remaining metrics and return them."""
        if self._in_flight is None:
            return []
        (step, others, row, copied), self._in_flight = self._in_flight, None
        if copied is not None:
            copied.synchronize()
        now = time.perf_counter()
        seconds, self._start = now - self._start, now  # the host is at most a step ahead of the device
        loss, norm, tokens = row.tolist()
        return [StepReading(step, loss, norm, round(tokens), seconds, others)]

    def _sum(self, number: Tensor) -> Tensor:
        """Return the sum over all ranks; ranks with the same batch count as one. Collective."""
        total = number.detach().to(self._device, torch.float64, copy=True)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total / self._copies if self._copies > 1 else total


# Dense bfloat16 with float32 sums, in TFLOP/s, from the vendors' data sheets. The first key in the device's name wins.
_PEAKS = {
    "GB200": 2500, "B200": 2250, "H200": 989, "GH200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
    "H800": 989, "H20": 148, "A100": 312, "A800": 312, "L40S": 362, "L40": 181, "L4": 121, "A40": 150, "A10G": 70,
    "A10": 125, "V100": 125, "MI300X": 1307, "MI325X": 1307, "MI250X": 383,
}  # fmt: skip
_NUM_LAYERS = ("num_layers", "num_hidden_layers", "n_layer", "n_layers")
_WIDTH = ("hidden_size", "width", "n_embd", "d_model")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("experts_per_token", "num_experts_per_tok", "num_experts_per_token", "top_k")


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """Floating-point operations that one training step needs for one token.

    The formula is `6 N + 12 L W S`, where N is the number of matrix parameters that a token uses, L the number of
    layers, W their width and S the sequence length.

    - A parameter costs 2 operations in forward, 2 for the gradient of its input and 2 for its own; a frozen one 4.
    - Embedding tables are looked up, not multiplied, and count only if they are also the output matrix. Of the
      experts, only those that one token is routed to count.
    - Attention costs `2 * 2 L W S` in forward and twice that in backward. As is usual, causal attention is counted in
      full and recomputed activations are not, so that figures are comparable.

    L, W and experts are read from `model.config`; without them attention is not counted, or all experts are.
    """
    multiplied = sum(
        parameter.numel() * share * (6 if parameter.requires_grad else 4) for parameter, share in _multiplied(model)
    )
    layers, width = config_size(model, *_NUM_LAYERS) or 0, config_size(model, *_WIDTH) or 0
    return multiplied + 12.0 * layers * width * sequence_length


def peak_flops(device: torch.device | str) -> float | None:
    """Peak bfloat16 FLOP/s of a device, if it is a known GPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for known, peak in _PEAKS.items() if re.search(rf"\b{known}\b", name)), None)


def mfu(tokens_per_s: float, flops_of_token: float, num_devices: int, peak: float | None) -> float | None:
    """Model FLOPs utilization of all ranks' devices, each with this peak FLOP/s; None without a peak."""
    return tokens_per_s * flops_of_token / (num_devices * peak) if peak else None


def _multiplied(model: nn.Module) -> Iterator[tuple[nn.Parameter, float]]:
    """Yield the parameters of the matrix products that a token uses, and the used fraction of each."""
    num_experts, chosen = config_size(model, *_NUM_EXPERTS) or 0, config_size(model, *_EXPERTS_PER_TOKEN) or 0
    share = chosen / num_experts if num_experts > 1 and chosen else 1.0
    experts = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_experts > 1
        for parameter in module.parameters()
    }
    as_output = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    for parameter, kind in parameter_kinds(model).items():
        is_stack = parameter.ndim == 3 and parameter.shape[0] == num_experts > 1
        if kind == "vectors" or (kind == "embeddings" and id(parameter) not in as_output):
            continue
        yield parameter, share if is_stack or id(parameter) in experts else 1.0


_SMOOTHING = 0.9
"""Weight of earlier steps in the displayed rate; records hold the rate of each step."""


class StepLogger:
    """Writes the numbers of each step to the metrics and the progress bar."""

    def __init__(
        self, model: nn.Module, metrics: Metrics, progress: Progress, *, config: RunConfig, device: torch.device
    ) -> None:
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.tokens = 0
        """Tokens of this process's steps, over all ranks."""
        self.seconds = 0.0
        """Duration of this process's steps, without evaluations."""
        self._metrics, self._progress, self._device = metrics, progress, device
        self._flops = flops_per_token(model, config.data.sequence_length)
        self._num_ranks, self._num_steps = dist.get_world_size(), config.training.steps
        self._peak = metrics.config.peak_flops or peak_flops(device)
        self._unrecorded_tokens, self._unrecorded_s = 0, 0.0
        self._step_s, self._num_counted = 0.0, 0

    def log(self, readings: list[StepReading]) -> None:
        """Record finished steps and move the bar."""
        for reading in readings:
            self._count(reading)
            rate = self._unrecorded_tokens / self._unrecorded_s if self._unrecorded_s else 0.0
            memory = used_memory(self._device)
            if reading.step % max(1, self._metrics.config.every) == 0 or reading.step == self._num_steps:
                self._metrics.record(
                    reading.step,
                    loss=reading.loss,
                    learning_rate=reading.others.get("learning_rate"),
                    grad_norm=reading.grad_norm,
                    tokens=reading.tokens,
                    tokens_per_s=round(rate, 1),
                    mfu=mfu(rate, self._flops, self._num_ranks, self._peak),
                    memory_bytes=memory,
                    **{name: value for name, value in reading.others.items() if name != "learning_rate"},
                )
                self._unrecorded_tokens, self._unrecorded_s = 0, 0.0
            self._progress.advance(note=self._note(reading, memory))

    def log_evaluation(self, step: int, loss: float) -> None:
        """Record an evaluation."""
        self._metrics.record(step, evaluation_loss=loss)

    def rewind(self, step: int, to_step: int) -> None:
        """Rewind the records and the bar: the run repeats the steps after `to_step`."""
        self._metrics.rewind(to_step)
        self._progress.advance(to_step - step, note=f"back to step {to_step}")

    def _count(self, reading: StepReading) -> None:
        took = reading.seconds
        self.first_loss = reading.loss if self.first_loss is None else self.first_loss
        self.last_loss = reading.loss
        self.tokens, self.seconds = self.tokens + reading.tokens, self.seconds + took
        self._unrecorded_tokens += reading.tokens
        self._unrecorded_s += took
        # The first step allocates caches and buffers, and does not count.
        self._step_s = took if self._num_counted < 2 else _SMOOTHING * self._step_s + (1 - _SMOOTHING) * took
        self._num_counted += 1

    def _note(self, reading: StepReading, memory: int) -> str:
        left_s = round((self._num_steps - reading.step) * self._step_s)
        rate = format_count(reading.tokens / self._step_s) if self._step_s else "?"
        left = format_seconds(left_s) if left_s else "0 s"
        return f"loss {reading.loss:.3f}  {rate} tokens/s  {format_bytes(memory)}  {left} left"


def used_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: device memory, or main memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
