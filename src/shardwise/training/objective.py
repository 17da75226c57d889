"""From a batch to a loss: batches on the device, the objective, and losses that are not finite."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from shardwise import compat
from shardwise.config.run import TrainingConfig
from shardwise.errors import ConfigError, TrainingError
from shardwise.models.load import find_callable

Batch = dict[str, Tensor]
Call = Callable[[nn.Module, Batch], tuple[Tensor, Tensor | int]]

IGNORED = -100
"""The label of a position where nothing is learnt."""
_MODEL_INPUTS = ("input_ids", "position_ids", "document_ids")


class Objective:
    """Computes the summed loss of some rows of a batch.

    Args:
        model: As it was built; what its forward accepts is read before sharding wraps it.
        name: `auto`, or `module:callable`, called with model and batch, which returns the loss summed over the tokens
            and their number.

    Raises:
        ConfigError: There is no such callable.

    Ranks:
        Local; calling it runs the model, which communicates.
    """

    def __init__(self, model: nn.Module, name: str = "auto") -> None:
        self._custom: Call | None = None if name == "auto" else find_callable(name)
        parameters = inspect.signature(model.forward).parameters
        self._accepted = frozenset(parameters)
        self._takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        # A cache is of no use here, and with one transformers does not see from position_ids where documents begin.
        self._settings = {"use_cache": False} if "use_cache" in parameters else {}

    @property
    def counts_ahead(self) -> bool:
        """Whether tokens can be counted before the model runs; a callable says their number only with the loss."""
        return self._custom is None

    def count(self, batch: Batch) -> Tensor:
        """The tokens of a batch that are learnt, as a 0-d tensor; its rows where the model makes the loss itself."""
        labels = batch.get("labels")
        if labels is not None and self.counts_ahead:
            return (labels != IGNORED).sum()
        return torch.full((), num_rows(batch), device=next(iter(batch.values())).device)

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss summed over the tokens, to call `backward()` on, and their number."""
        if self._custom is not None:
            loss_sum, num_tokens = self._custom(model, batch)
            return loss_sum, torch.as_tensor(num_tokens)
        if "labels" not in batch:
            return self._loss_of_model(model, batch) * num_rows(batch), self.count(batch)
        inputs = {name: batch[name] for name in _MODEL_INPUTS if name in batch and name in self._accepted}
        tokens = () if "input_ids" in inputs else (batch["input_ids"],)  # reference models call it otherwise
        output = model(*tokens, **inputs, **self._settings)
        return next_token_loss(_logits(output), batch["labels"]), self.count(batch)

    def _loss_of_model(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over the rows that the model's own forward returns."""
        output = model(**{name: value for name, value in batch.items() if self._takes_any or name in self._accepted})
        loss = output if isinstance(output, Tensor) else _get(output, "loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"{type(model).__name__} does not return a loss, and the batch has no labels",
                where="training.objective",
                why="without labels the loss is what the model's forward returns: one number, or an output with `loss`",
                fix="put `labels` in the batches, or set training.objective = module:callable",
            )
        return loss.reshape(())


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in float32, summed over all positions whose label is not -100."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten().long(), ignore_index=IGNORED, reduction="sum")


def num_rows(batch: Mapping[str, Tensor]) -> int:
    """Sequences or images in a batch."""
    return next(iter(batch.values())).shape[0]


def _logits(output: Any) -> Tensor:
    logits = output if isinstance(output, Tensor) else _get(output, "logits")
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise ConfigError(
            "the model does not return logits of shape (rows, length, vocabulary)",
            where="training.objective",
            why="the next token is learnt from the model's output, a tensor or an object with `logits`",
            fix="set training.objective = module:callable",
        )
    return logits


def _get(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


class BatchSource(Protocol):
    """What `open_data` returns, as far as it is used here."""

    def __next__(self) -> Batch:
        """This rank's rows of the next global batch."""
        ...

    def skip(self, batches: int) -> None:
        """Leave global batches out."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go there."""
        ...


class StepBatches:
    """Hands out one batch a step.

    Args:
        source: The loader.

    Ranks:
        Local; every rank calls the same.
    """

    def __init__(self, source: BatchSource) -> None:
        self.source = source
        self.steps = 0
        """Batches handed out."""
        self.left_out: frozenset[int] = frozenset()
        """Numbers of batches that no step gets, from 0."""
        self.failure: Exception | None = None
        """Why the last batch could not be made."""
        self._latest: Batch | None = None
        self._is_ahead = False

    def fetch_first(self) -> Exception | None:
        """Make the batch of the next step already; return why it cannot be made, for all ranks to hear."""
        try:
            self._latest = self._fetch()
            self._is_ahead = True
        except Exception as error:
            return error
        return None

    def next(self) -> Batch:
        """The batch of the next step.

        If it cannot be made, `failure` says why, and the batch before is returned instead: this rank must take part in
        one more step, whose result nobody uses, until the others know. The very first failure is raised.
        """
        try:
            if not self._is_ahead:
                self._latest = self._fetch()
        except Exception as error:
            if self._latest is None:
                raise
            self.failure = error
        self._is_ahead = False
        self.steps += 1
        assert self._latest is not None
        return self._latest

    def _fetch(self) -> Batch:
        first = batch_of(self.steps - 1, self.left_out) + 1 if self.steps else 0
        wanted = batch_of(self.steps, self.left_out)
        if wanted > first:
            self.source.skip(wanted - first)
        return next(self.source)

    def leave_out(self, step: int) -> None:
        """Give the batch that this step had to no step any more; for steps that are made again.

        Args:
            step: From 0.
        """
        self.left_out |= {batch_of(step, self.left_out)}

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, and what was left out so far."""
        return {"steps": self.steps, "left_out": sorted(self.left_out), "source": self.source.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go there; what this run has left out since stays out."""
        self._is_ahead = False
        self.steps = int(state_dict["steps"])
        self.left_out |= set(state_dict["left_out"])
        self.source.load_state_dict(state_dict["source"])


def batch_of(step: int, left_out: Iterable[int]) -> int:
    """The number of the batch that a step gets, both from 0.

    >>> [batch_of(step, {1, 2}) for step in range(3)]
    [0, 3, 4]
    """
    batch = step
    for number in sorted(left_out):
        if number <= batch:
            batch += 1
    return batch


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step whose loss or gradient was not finite; it has changed no weight."""

    step: int
    """Its number, from 1."""
    action: Literal["skip", "rewind"]
    """`skip`: nothing is left to do. `rewind`: go back to the last checkpoint and leave this step's batch out."""


class BadLosses:
    """Keeps bad steps away from the weights, and says what to do about them.

    On an accelerator nothing waits for the device: a fused optimizer itself leaves a bad step out, and the verdict on a
    step is given one step later. On CPU, or with an optimizer that is not fused, it is given at once.

    Args:
        config: `on_bad_loss` and `max_bad_steps`.

    Ranks:
        Local. Every rank must bring the same loss and norm, and then comes to the same verdict at the same step.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.num_bad = 0
        """Bad steps so far."""
        self._waiting: list[tuple[int, _Reading]] = []

    def allows(self, optimizer: Optimizer, step: int, loss: Tensor, grad_norm: Tensor) -> bool:
        """Whether to call `optimizer.step()`; where it is fused, always, since it leaves a bad step out by itself.

        Args:
            optimizer: About to step.
            step: Its number, from 1.
            loss: 0-d, the same on every rank.
            grad_norm: 0-d, the same on every rank; NaN or infinite where any gradient is.

        Ranks:
            Local.
        """
        is_bad = (~(torch.isfinite(loss.detach()) & torch.isfinite(grad_norm.detach()))).to(torch.float32)
        reading = _Reading(is_bad, loss, grad_norm)
        self._waiting.append((step, reading))
        if is_bad.is_cuda and compat.hold_back_step(optimizer, is_bad):
            return True
        reading.wait()
        return not reading.is_bad

    def verdict(self, *, wait: bool = False) -> BadStep | None:
        """The newest bad step that has come to light since the last call, if any.

        Args:
            wait: Also judge the step just made, as must be before it is saved; else only those before it, unless
                their numbers are here already.

        Raises:
            TrainingError: The policy is to stop, or there were too many.

        Ranks:
            Local.
        """
        found: BadStep | None = None
        while self._waiting and (wait or len(self._waiting) > 1 or self._waiting[0][1].is_here):
            step, reading = self._waiting.pop(0)
            reading.wait()
            if reading.is_bad:
                found = self._judge(step, reading)
        return found

    def state_dict(self) -> dict[str, Any]:
        """How many bad steps there were."""
        return {"num_bad": self.num_bad}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on; after going back, those since then stay counted."""
        self.num_bad = max(self.num_bad, int(state_dict["num_bad"]))

    def _judge(self, step: int, reading: _Reading) -> BadStep:
        self.num_bad += 1
        policy, most = self.config.on_bad_loss, self.config.max_bad_steps
        if policy != "stop" and self.num_bad <= most:
            return BadStep(step, policy)
        what = f"step {step} has loss {reading.loss:.6g} and gradient norm {reading.grad_norm:.6g}"
        raise TrainingError(
            what if policy == "stop" else f"{what}: bad step {self.num_bad} of this run",
            where="training.on_bad_loss" if policy == "stop" else "training.max_bad_steps",
            why="a step that is not finite would ruin the weights; it was not made",
            fix="resume with a lower optimizer.learning_rate, or set training.on_bad_loss = skip or rewind"
            if policy == "stop"
            else "resume from an earlier checkpoint with a lower optimizer.learning_rate, or look at the data",
        )


class _Reading:
    """Whether a step is bad, and its numbers, perhaps still on their way from the device."""

    def __init__(self, is_bad: Tensor, loss: Tensor, grad_norm: Tensor) -> None:
        values = torch.stack([value.detach().to(is_bad) for value in (is_bad, loss, grad_norm)])
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(3, pin_memory=True).copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_here(self) -> bool:
        """Whether it has been waited for: not whether it happens to have come, which ranks would see differently."""
        return self._event is None

    @property
    def is_bad(self) -> bool:
        return bool(self._values[0])

    @property
    def loss(self) -> float:
        return self._values[1].item()

    @property
    def grad_norm(self) -> float:
        return self._values[2].item()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
