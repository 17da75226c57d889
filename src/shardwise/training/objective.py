"""The objective: batches on the device, losses, and non-finite losses.

The logits of a long sequence are the largest tensors of a step (8,192 tokens with a vocabulary of 128,256: 4 GiB in
float32, and as much again for their gradient). If the output projection is a plain `nn.Linear`, they are computed for
one chunk of tokens at a time, together with the chunk's gradients. Only the order of additions differs.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F
from torch.optim import Optimizer

from shardwise import compat
from shardwise.config.run import TrainingConfig
from shardwise.distributed.stop_requests import StopRequest
from shardwise.errors import ConfigError, TrainingError
from shardwise.models.load import find_callable
from shardwise.training.data import Loader
from shardwise.training.data.samples import IGNORED, Batch
from shardwise.training.metrics import StepReading
from shardwise.training.microbatching import is_out_of_memory, undo, volatile_state
from shardwise.training.step import lockstep

_CHUNK_NUMEL = 2**28
"""Number of logits in a chunk: 1 GiB in float32."""
_MIN_CHUNK_ROWS = 256


def output_matrix(model: nn.Module) -> nn.Linear | None:
    """Return the output projection of the model, if it is a plain `nn.Linear`."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else getattr(model, "lm_head", None)
    is_plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in vars(head)
    return head if is_plain else None


class ChunkedLoss:
    """The summed cross-entropy of a forward, computed inside the call of the output projection.

    The projection returns a placeholder of the logits' shape that takes no memory. A model that modifies its logits (a
    soft cap, a slice) returns another tensor, and the loss must be computed from that.
    """

    def __init__(self, head: nn.Linear, labels: Tensor) -> None:
        self._head, self._labels = head, labels
        self._placeholder: Tensor | None = None

    @contextmanager
    def computed(self) -> Iterator[None]:
        """Replace the projection's forward inside the block; call the model once."""
        self._head.forward = self._forward  # pyrefly: ignore[bad-assignment]
        try:
            yield
        finally:
            del self._head.forward

    def of(self, logits: Any) -> Tensor | None:
        """Return the loss if the model returned the placeholder, else None."""
        mine = self._placeholder
        is_placeholder = (
            mine is not None
            and isinstance(logits, Tensor)
            and logits.shape == mine.shape
            and logits.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()
        )
        return _FirstElement.apply(logits) if is_placeholder else None

    def _forward(self, hidden: Tensor) -> Tensor:
        weight, bias = self._head.weight, self._head.bias
        if hidden.shape[:-1] != self._labels.shape or self._placeholder is not None:
            self._placeholder = None
            return F.linear(hidden, weight, bias)
        vocabulary = None
        if isinstance(weight, DTensor) and isinstance(hidden, DTensor):
            # Sharded by rows over the tensor axis: each rank has some of the logits, and a partial gradient of the
            # hidden states.
            vocabulary = Vocabulary(weight)
            hidden, weight = hidden.to_local(grad_placements=[Partial()]), weight.to_local()
            bias = bias.to_local() if isinstance(bias, DTensor) else bias
        self._placeholder = _ChunkedCrossEntropy.apply(hidden, weight, bias, self._labels, vocabulary)
        return self._placeholder


class Vocabulary:
    """Rows of the output matrix on this rank.

    Args:
        weight: Sharded evenly by rows over a mesh of one axis.
    """

    def __init__(self, weight: DTensor) -> None:
        self.size, self._group = weight.shape[0], weight.device_mesh.get_group()
        self._first = weight.device_mesh.get_local_rank() * weight.to_local().shape[0]

    def cross_entropy_and_gradient(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss of some rows, and its gradient for this rank's part of the logits.

        Ranks:
            Collective. Two all-reduces, of one and of two numbers per row.
        """
        wide = logits.to(torch.promote_types(torch.float32, logits.dtype))
        is_counted, weights = _weights(targets, self.size)
        is_wanted = torch.arange(logits.shape[-1], device=logits.device) == (targets - self._first)[:, None]
        largest = wide.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        sums = torch.stack([torch.exp(wide - largest).sum(-1), wide.where(is_wanted, 0.0).sum(-1)])
        dist.all_reduce(sums, group=self._group)
        log_sum_exp = sums[0].log()[:, None] + largest
        loss = torch.where(is_counted, (log_sum_exp - sums[1][:, None]) * weights, 0.0).sum()
        gradient = torch.where(is_counted, torch.exp(wide - log_sum_exp) - is_wanted.to(wide.dtype), 0.0)
        return loss, gradient.to(logits.dtype)


class _FirstElement(torch.autograd.Function):
    """Loss of a placeholder whose gradient needs no memory."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor) -> Tensor:
        ctx.shape = placeholder.shape
        return placeholder[(0,) * placeholder.ndim].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return gradient.expand(ctx.shape)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, vocabulary: Vocabulary | None
    ) -> Tensor:
        rows, targets = hidden.detach().flatten(0, -2), labels.flatten().long()
        wide = torch.promote_types(torch.float32, hidden.dtype)
        needs = ctx.needs_input_grad
        grad_hidden = torch.empty_like(rows, dtype=wide) if needs[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        num_rows = max(_MIN_CHUNK_ROWS, _CHUNK_NUMEL // weight.shape[0])
        num_chunks = max(1, -(-rows.shape[0] // num_rows))
        first = 0
        differentiate = vocabulary.cross_entropy_and_gradient if vocabulary else _cross_entropy(hidden.device.type)
        for some, wanted in zip(rows.chunk(num_chunks), targets.chunk(num_chunks), strict=True):
            loss, gradient = differentiate(F.linear(some, weight, bias), wanted)
            total += loss
            if grad_hidden is not None:
                _matmul(gradient, weight, grad_hidden[first : first + len(some)], added=False)
            if grad_weight is not None:
                _matmul(gradient.t(), some, grad_weight, added=True)
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=wide)
            first += len(some)
        ctx.gradients, ctx.dtypes = (grad_hidden, grad_weight, grad_bias), (hidden.dtype, weight.dtype)
        ctx.shape = hidden.shape
        return total.expand(*labels.shape, vocabulary.size if vocabulary else weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        scale = gradient[(0,) * gradient.ndim]
        hidden, weight, bias = (None if each is None else each.mul_(scale) for each in ctx.gradients)
        del ctx.gradients  # scaled in place: they are the largest tensors here
        return (
            None if hidden is None else hidden.to(ctx.dtypes[0]).view(ctx.shape),
            None if weight is None else weight.to(ctx.dtypes[1]),
            None if bias is None else bias.to(ctx.dtypes[1]),
            None,
            None,
        )


def _matmul(left: Tensor, right: Tensor, out: Tensor, *, added: bool) -> None:
    """Compute `out = left @ right` or `out += left @ right`, accumulated in the dtype of `out`."""
    if left.dtype != out.dtype and left.is_cuda:
        torch.addmm(out, left, right, beta=int(added), out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, left.to(out.dtype), right.to(out.dtype), beta=int(added), out=out)


def _cross_entropy_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss of some rows and its gradient, in the dtype of the logits."""
    wide = logits.to(torch.promote_types(torch.float32, logits.dtype))
    is_counted, weights = _weights(targets, logits.shape[-1])
    wanted = targets.clamp(0, logits.shape[-1] - 1)[:, None]
    log_sum_exp = torch.logsumexp(wide, -1, keepdim=True)
    loss = torch.where(is_counted, (log_sum_exp - wide.gather(-1, wanted)) * weights, 0.0).sum()
    is_wanted = torch.arange(logits.shape[-1], device=logits.device) == wanted
    gradient = torch.where(is_counted, torch.exp(wide - log_sum_exp) - is_wanted.to(wide.dtype), 0.0)
    return loss, gradient.to(logits.dtype)


def _weights(targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return which rows count, and a factor for their losses: NaN for a label outside the vocabulary."""
    is_outside = (targets < 0) | (targets >= vocab_size)
    return (targets != IGNORED)[:, None], torch.where(is_outside, torch.nan, 1.0)[:, None]


def _check_labels(labels: Tensor, vocab_size: int) -> None:
    """Raise a ConfigError for labels outside the vocabulary other than -100; synchronizes with the device."""
    if outside := labels[((labels < 0) & (labels != IGNORED)) | (labels >= vocab_size)].tolist():
        raise ConfigError(
            f"the batch has the label {outside[0]}, and the model has logits for 0 to {vocab_size - 1}",
            where="data.source: labels",
            why=f"a label is a token, or {IGNORED} to exclude it from the loss",
            fix=f"replace it in the data: labels.masked_fill(labels == {outside[0]}, {IGNORED})",
        )


@functools.cache
def _cross_entropy(device_type: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Compute cross-entropy in one kernel if the device has a compiler."""
    if compat.can_compile(torch.device(device_type)):
        return torch.compile(_cross_entropy_and_gradient)
    return _cross_entropy_and_gradient


Call = Callable[[nn.Module, Batch], tuple[Tensor, Tensor | int]]

_MODEL_INPUTS = ("input_ids", "position_ids", "document_ids")


class Objective:
    """Computes the summed loss of some rows of a batch: `auto`, or a `module:callable`.

    Create it before sharding, which hides the signature of the model's forward.
    """

    def __init__(self, model: nn.Module, name: str = "auto") -> None:
        self._custom: Call | None = None if name == "auto" else find_callable(name)
        parameters = inspect.signature(model.forward).parameters
        self._accepted = frozenset(parameters)
        self._takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        # With a cache, transformers ignores document boundaries in position_ids.
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
        """Return the loss summed over the tokens, for `backward()`, and the number of tokens."""
        if self._custom is not None:
            loss_sum, num_tokens = self._custom(model, batch)
            return loss_sum, torch.as_tensor(num_tokens)
        if "labels" not in batch:
            return self._loss_of_model(model, batch) * num_rows(batch), self.count(batch)
        inputs = {name: batch[name] for name in _MODEL_INPUTS if name in batch and name in self._accepted}
        tokens = () if "input_ids" in inputs else (batch["input_ids"],)  # reference models use another name
        return self._next_token_loss(model, batch["labels"], tokens, inputs | self._settings), self.count(batch)

    def _next_token_loss(
        self, model: nn.Module, labels: Tensor, args: tuple[Tensor, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        if self._head is not None:
            # On a GPU only the first labels are checked: later bad ones make the loss NaN. Fake tensors have no values.
            if type(labels) is Tensor and (not self._is_tried or labels.device.type == "cpu"):
                _check_labels(labels, self._head.weight.shape[0])  # here, because a trial step drops errors
            is_tried, self._is_tried = self._is_tried, True
            before = None if is_tried else volatile_state(model)
            loss, chunked = None, ChunkedLoss(self._head, labels)
            try:
                with chunked.computed():
                    loss = chunked.of(logits_of(model(*args, **kwargs)))
            except RuntimeError as error:  # a placeholder for logits cannot be written in place
                self._is_tried = is_tried or not is_out_of_memory(error)
                if is_tried or not self._is_tried:
                    raise
            if loss is not None:
                return loss
            self._head = None  # the model modifies its logits
            if before is not None:
                undo(model, before)
        return next_token_loss(logits_of(model(*args, **kwargs)), labels)

    def _loss_of_model(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the model's own loss, the mean over rows."""
        output = model(**{name: value for name, value in batch.items() if self._takes_any or name in self._accepted})
        loss = output if isinstance(output, Tensor) else _get(output, "loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"{type(model).__name__} does not return a loss, and the batch has no labels",
                where="training.objective",
                why="without labels the model's forward returns the loss: a scalar, or an output with `loss`",
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
    """The logits in a model's output; a ConfigError if it has none."""
    logits = output if isinstance(output, Tensor) else _get(output, "logits")
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise ConfigError(
            "the model does not return logits of shape (rows, length, vocabulary)",
            where=where,
            why="the next token is predicted from the model's output, a tensor or an object with `logits`",
            fix="set training.objective = module:callable, and training.sample = null",
        )
    return logits


def _get(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


class StepBatches:
    """One batch per step, except skipped ones."""

    def __init__(self, source: Loader) -> None:
        self.source = source
        self.steps = 0
        """Number of batches returned."""
        self.left_out: frozenset[int] = frozenset()
        """Numbers of the skipped batches, from 0."""
        self._reached = source.state_dict()

    def until(self, num_steps: int, stop: StopRequest) -> Iterator[Batch]:
        """Yield the batches of the steps up to `num_steps`, or until a stop request on any rank. Collective."""
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
        """Skip the batch of this step, counted from 0, when the step is repeated."""
        self.left_out |= {batch_of(step, self.left_out)}

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, and the skipped batches."""
        return {"steps": self.steps, "left_out": sorted(self.left_out), "source": self._reached}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from this position; batches skipped since then stay skipped."""
        self.steps = int(state_dict["steps"])
        self.left_out |= set(state_dict["left_out"])
        self.source.load_state_dict(state_dict["source"])
        self._reached = self.source.state_dict()


def batch_of(step: int, left_out: Iterable[int]) -> int:
    """Return the batch number of a step, both from 0.

    >>> [batch_of(step, {1, 2}) for step in range(3)]
    [0, 3, 4]
    """
    batch = step
    for number in sorted(left_out):
        if number <= batch:
            batch += 1
    return batch


def allows_step(optimizer: Optimizer, loss: Tensor, grad_norm: Tensor, *, wait: bool = False) -> bool:
    """Whether to call `optimizer.step()`: only if loss and norm are finite.

    On an accelerator a fused optimizer skips a bad step by itself, so this returns True without waiting for
    the device, unless `wait` is set: an average of the weights must not move after a bad step.
    """
    is_bad = ~(torch.isfinite(loss.detach()) & torch.isfinite(grad_norm.detach()))
    if is_bad.is_cuda and not wait and compat.set_found_inf(optimizer, is_bad.to(torch.float32)):
        return True
    return not bool(is_bad)


class BadLosses:
    """Counts steps with a non-finite loss or gradient; such a step changes no weights."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.num_bad = 0
        """Bad steps so far."""

    def is_bad(self, reading: StepReading) -> bool:
        """Whether a step was bad; a TrainingError if the policy is `stop`, or there were too many."""
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
            why="a non-finite step would corrupt the weights; it was skipped",
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
