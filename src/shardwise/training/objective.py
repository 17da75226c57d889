"""From a batch to a loss: batches on the device, the objective, and losses that are not finite."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from shardwise import compat
from shardwise.config.run import TrainingConfig
from shardwise.distributed.stop_requests import StopRequest
from shardwise.errors import ConfigError, TrainingError
from shardwise.models.load import find_callable
from shardwise.training.chunked_loss import ChunkedLoss, output_matrix
from shardwise.training.data import Loader
from shardwise.training.data.samples import IGNORED, Batch
from shardwise.training.metrics import StepReading
from shardwise.training.microbatching import is_out_of_memory, undo, volatile_state
from shardwise.training.step import lockstep

Call = Callable[[nn.Module, Batch], tuple[Tensor, Tensor | int]]

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
        # With a cache, transformers does not see from position_ids where documents begin.
        self._settings = {"use_cache": False} if "use_cache" in parameters else {}
        self._head = output_matrix(model) if self._custom is None else None
        self._is_tried = False

    @property
    def counts_ahead(self) -> bool:
        """Whether tokens can be counted before the forward; a callable returns their number with the loss."""
        return self._custom is None

    def count(self, batch: Batch) -> Tensor:
        """Number of tokens in the loss, as a 0-d tensor; number of rows if the model computes the loss itself."""
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
        tokens = () if "input_ids" in inputs else (batch["input_ids"],)  # reference models name it differently
        return self._next_token_loss(model, batch["labels"], tokens, inputs | self._settings), self.count(batch)

    def _next_token_loss(
        self, model: nn.Module, labels: Tensor, args: tuple[Tensor, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        if self._head is not None:
            is_tried, self._is_tried = self._is_tried, True
            before = None if is_tried else volatile_state(model)
            loss, chunked = None, ChunkedLoss(self._head, labels)
            try:
                with chunked.computed():
                    loss = chunked.of(logits_of(model(*args, **kwargs)))
            except RuntimeError as error:  # a stand-in for logits cannot be written in place
                if is_tried or is_out_of_memory(error):
                    raise
            if loss is not None:
                return loss
            self._head = None  # the model does more with its logits than return them
            if before is not None:
                undo(model, before)
        return next_token_loss(logits_of(model(*args, **kwargs)), labels)

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


def logits_of(output: Any, *, where: str = "training.objective") -> Tensor:
    """The logits in a model's output.

    Raises:
        ConfigError: It has none.
    """
    logits = output if isinstance(output, Tensor) else _get(output, "logits")
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise ConfigError(
            "the model does not return logits of shape (rows, length, vocabulary)",
            where=where,
            why="the next token follows from the model's output, a tensor or an object with `logits`",
            fix="set training.objective = module:callable, and training.sample = null",
        )
    return logits


def _get(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


class StepBatches:
    """One batch per step, except skipped ones.

    Args:
        source: The loader.
    """

    def __init__(self, source: Loader) -> None:
        self.source = source
        self.steps = 0
        """Batches handed out."""
        self.left_out: frozenset[int] = frozenset()
        """Numbers of the skipped batches, from 0."""
        self._reached = source.state_dict()

    def until(self, num_steps: int, stop: StopRequest) -> Iterator[Batch]:
        """The batches of the steps from here to `num_steps`; fewer once any rank is asked to stop.

        Ranks:
            Collective: all ranks end after the same batch, and all raise where one cannot make its batch.
        """
        for batch, reached in lockstep(self._fetch(num_steps, stop)):
            self.steps += 1
            self._reached = reached  # the loader itself is a batch ahead
            yield batch

    def _fetch(self, num_steps: int, stop: StopRequest) -> Iterator[tuple[Batch, dict[str, Any]]]:
        for step in range(self.steps, num_steps):
            if stop.asked:
                return
            first = batch_of(step - 1, self.left_out) + 1 if step else 0
            if skipped := batch_of(step, self.left_out) - first:
                self.source.skip(skipped)
            yield next(self.source), self.source.state_dict()

    def leave_out(self, step: int) -> None:
        """Skip the batch that this step, counted from 0, has had; for steps that are repeated."""
        self.left_out |= {batch_of(step, self.left_out)}

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, and the skipped batches."""
        return {"steps": self.steps, "left_out": sorted(self.left_out), "source": self._reached}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there; batches that this run has skipped since stay skipped."""
        self.steps = int(state_dict["steps"])
        self.left_out |= set(state_dict["left_out"])
        self.source.load_state_dict(state_dict["source"])
        self._reached = self.source.state_dict()


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


def allows_step(optimizer: Optimizer, loss: Tensor, grad_norm: Tensor, *, wait: bool = False) -> bool:
    """Whether to call `optimizer.step()`: not where the loss or the norm is not finite.

    On an accelerator nothing waits for the device: a fused optimizer leaves a bad step out by itself, so the answer is
    True. On CPU, or with an optimizer that is not fused, it is given at once.

    Args:
        optimizer: About to step.
        loss: 0-d, the same on every rank.
        grad_norm: 0-d, the same on every rank; NaN or infinite where any gradient is.
        wait: Wait for the device and give the true answer, as an average of the weights must not move after a bad step.
    """
    is_bad = ~(torch.isfinite(loss.detach()) & torch.isfinite(grad_norm.detach()))
    if is_bad.is_cuda and not wait and compat.set_found_inf(optimizer, is_bad.to(torch.float32)):
        return True
    return not bool(is_bad)


class BadLosses:
    """Counts steps whose loss or gradient was not finite; such a step has changed no weight.

    Args:
        config: `on_bad_loss` and `max_bad_steps`.

    Ranks:
        Local. Every rank must bring the same readings, and then comes to the same verdict at the same step.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.num_bad = 0
        """Bad steps so far."""

    def is_bad(self, reading: StepReading) -> bool:
        """Whether a step was bad.

        Raises:
            TrainingError: It was, and the policy is to stop, or there were too many.
        """
        if math.isfinite(reading.loss) and math.isfinite(reading.grad_norm):
            return False
        self.num_bad += 1
        is_stop = self.config.on_bad_loss == "stop"
        if not is_stop and self.num_bad <= self.config.max_bad_steps:
            return True
        what = f"step {reading.step} has loss {reading.loss:.6g} and gradient norm {reading.grad_norm:.6g}"
        raise TrainingError(
            what if is_stop else f"{what}: bad step {self.num_bad} of this run",
            where="training.on_bad_loss" if is_stop else "training.max_bad_steps",
            why="a step that is not finite would ruin the weights; it was not made",
            fix="resume with a lower optimizer.learning_rate, or set training.on_bad_loss = skip or rewind"
            if is_stop
            else "resume from an earlier checkpoint with a lower optimizer.learning_rate, or look at the data",
        )

    def state_dict(self) -> dict[str, Any]:
        """Number of bad steps."""
        return {"num_bad": self.num_bad}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting; after a rewind, bad steps since the checkpoint stay counted."""
        self.num_bad = max(self.num_bad, int(state_dict["num_bad"]))
