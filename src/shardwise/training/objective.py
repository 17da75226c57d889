"""What is minimised: the loss of a batch as a sum over its tokens, and how many tokens that are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ConfigError
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
