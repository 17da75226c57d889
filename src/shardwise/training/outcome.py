"""What a training run did, for people and machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.training.folders import CONFIG_NAME
from shardwise.training.metrics import read_records
from shardwise.units import format_count, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What a run did. The same on every rank, but for the time."""

    model: str
    num_params: int
    """Parameters of the whole model, tied ones once."""
    num_ranks: int
    steps: int
    """Made so far, those before a resume among them."""
    total_steps: int
    """That the run shall make."""
    resumed_step: int = 0
    """Where this process took it up."""
    first_loss: float | None = None
    """Of this process's first step: the mean over its tokens, over all ranks."""
    last_loss: float | None = None
    evaluation_loss: float | None = None
    """On held-out data, at the end; None: there is none."""
    bad_steps: int = 0
    """That were left out because a loss or gradient was not finite."""
    tokens: int = 0
    """Learnt since it was taken up, over all ranks."""
    seconds: float = 0.0
    """Of these steps, without building the model and without evaluations."""
    folder: str
    """Holds checkpoints, metrics and settings."""
    metrics: str
    """A line of JSON a step."""
    checkpoint: str | None = None
    """The last one."""
    sample: str | None = None
    """What the model wrote, its beginning given."""
    exported: str | None = None
    """The folder of the exported weights."""
    stopped: str | None = None
    """Why it ended before its last step, as in SIGTERM; None: it is complete."""

    @property
    def resume_command(self) -> str:
        """Goes on with this run, for as many steps again if it is complete."""
        command = f"shardwise train {Path(self.folder) / CONFIG_NAME}"
        return command if self.steps < self.total_steps else f"{command} --set training.steps={2 * self.total_steps}"

    def read_losses(self) -> dict[int, float]:
        """The loss of every recorded step, from the metrics file.

        Ranks:
            Local: rank 0 has written the file.
        """
        records = read_records(Path(self.metrics))
        return {record["step"]: float(record["loss"]) for record in records if "loss" in record}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {**asdict(self), "resume_command": self.resume_command}

    def __str__(self) -> str:
        lines = [self._summary()]
        if self.evaluation_loss is not None:
            lines.append(f"evaluation loss {self.evaluation_loss:.3f}")
        if self.bad_steps:
            lines.append(f"left out {self.bad_steps} steps whose loss or gradient was not finite")
        if self.sample is not None:
            lines += ["", "sample", *(f"    {line}" for line in self.sample.splitlines()), ""]
        if self.checkpoint is not None:
            lines.append(f"checkpoint  {self.checkpoint}")
        if self.exported is not None:
            lines.append(f"weights     {self.exported}")
        lines.append(f"metrics     {self.metrics}")
        lines.append(f"{'go on' if self.stopped else 'train on'}{'':<7}".ljust(12)[:12] + self.resume_command)
        return "\n".join(lines)

    def _summary(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        start = f"{'stopped (' + self.stopped + ')' if self.stopped else 'trained'} {self.model}"
        start += f" ({format_count(self.num_params)} parameters) on {ranks}: "
        if self.first_loss is None or self.last_loss is None:
            return f"{start}{self.steps} steps were done already"
        made = self.steps - self.resumed_step
        since = f" from step {self.resumed_step}" if self.resumed_step else ""
        return (
            f"{start}loss {self.first_loss:.3f} -> {self.last_loss:.3f} in {made} steps{since}, "
            f"{format_seconds(self.seconds)}, {format_count(self.tokens / max(self.seconds, 1e-9))} tokens/s"
        )
