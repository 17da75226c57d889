"""The loss of a batch: what the model is called with, which tokens count, and who makes the loss."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ConfigError
from shardwise.training.objective import Objective, _cross_entropy_and_gradient

BATCH = {
    "input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]),
    "labels": torch.tensor([[2, 3, -100], [5, -100, -100]]),
    "position_ids": torch.arange(3).expand(2, 3),
    "document_ids": torch.zeros(2, 3, dtype=torch.int32),
}


class Model(nn.Module):
    """Tokens to logits, and a note of what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.called_with: dict[str, Tensor | None] = {}

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        self.called_with = {"tokens": tokens, "position_ids": position_ids}
        return self.table(tokens)


class HuggingFace(nn.Module):
    """Names its argument otherwise, takes whatever comes, returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.called_with: dict[str, Tensor] = {}

    def forward(self, input_ids: Tensor, **anything: Tensor) -> SimpleNamespace:
        self.called_with = {"input_ids": input_ids, **anything}
        return SimpleNamespace(logits=self.table(input_ids))


class OwnLoss(nn.Module):
    """Makes its loss itself, the mean over the rows."""

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        return {"loss": pixels.mean()}


def test_only_labelled_tokens_count_and_only_known_arguments_are_passed():
    model = Model()
    loss, count = Objective(model)(model, BATCH)
    expected = F.cross_entropy(
        model.table(BATCH["input_ids"]).flatten(0, 1), BATCH["labels"].flatten(), reduction="sum"
    )
    torch.testing.assert_close(loss, expected)
    assert count == 3
    assert model.called_with["tokens"] is BATCH["input_ids"]
    assert model.called_with["position_ids"] is BATCH["position_ids"]


def test_arguments_that_are_not_named_are_left_out_of_a_language_model():
    model = HuggingFace()
    loss, _ = Objective(model)(model, BATCH)
    assert loss.isfinite()
    assert model.called_with.keys() == {"input_ids"}


def test_model_without_labels_makes_the_loss_and_rows_count():
    model, batch = OwnLoss(), {"pixels": torch.ones(4, 2)}
    objective = Objective(model)
    loss, count = objective(model, batch)
    assert (float(loss), int(count), int(objective.count(batch))) == (4.0, 4, 4)


def test_model_that_makes_no_loss_is_refused():
    model = Model()
    objective = Objective(model)
    with pytest.raises(ConfigError, match="does not return a loss, and the batch has no labels"):
        objective(model, {"tokens": BATCH["input_ids"]})


def test_model_whose_output_is_not_logits_is_refused():
    class Flat(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return tokens.float()

    model = Flat()
    objective = Objective(model)
    with pytest.raises(ConfigError, match="does not return logits"):
        objective(model, BATCH)


def test_no_token_at_all_is_a_loss_of_nothing():
    model = Model()
    nothing = {**BATCH, "labels": torch.full((2, 3), -100)}
    loss, count = Objective(model)(model, nothing)
    assert (loss.item(), int(count)) == (0.0, 0)


def test_absent_callable_is_refused():
    with pytest.raises(ConfigError, match="there is no module"):
        Objective(Model(), "nowhere.at_all:loss")


class WithHead(Model):
    """Logits by a plain matrix: the loss is computed chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(8, 8)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.lm_head(self.table(tokens))


@pytest.mark.parametrize("label", [-1, -200, 8])
def test_labels_without_a_logit_are_refused(label: int):
    model = WithHead()
    objective = Objective(model)
    batch = {**BATCH, "labels": BATCH["labels"].masked_fill(BATCH["labels"] == 5, label)}
    with pytest.raises(ConfigError, match=f"the label {label}, and the model has logits for 0 to 7"):
        objective(model, batch)
    assert not objective._is_tried, "the step after a trial, which drops errors, must refuse them on a GPU too"


@pytest.mark.parametrize("label", [-1, 8])
def test_labels_without_a_logit_are_never_learnt_as_another_token(label: int):
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    assert _cross_entropy_and_gradient(logits, torch.tensor([3, label]))[0].isnan()
    assert _cross_entropy_and_gradient(logits, torch.tensor([3, -100]))[0].isfinite()
