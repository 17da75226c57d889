"""The loss computed chunk by chunk is that of the whole logits, whatever the model does with them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.models.llama import SHAPES, Llama
from shardwise.training import objective as chunked_loss
from shardwise.training.objective import Objective, next_token_loss

SHAPE = SHAPES["llama3-debug"]


class WithBias(Llama):
    """Has a bias in its output matrix."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)  # pyrefly: ignore[bad-assignment]


class Capped(Llama):
    """Does something with its logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 5.0 * torch.tanh(super().forward(*args, **kwargs) / 5.0)


class Scaled(Llama):
    """Writes its logits in place, which a stand-in without memory does not allow."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs).mul_(0.5)


class Replaced(Llama):
    """Its output matrix has a forward of its own, as wrappers of other libraries give it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head.forward = self.doubled

    def doubled(self, input: Tensor) -> Tensor:
        return 2 * nn.functional.linear(input, self.lm_head.weight)


class Sliced(Llama):
    """Returns some of its logits twice."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        logits = super().forward(*args, **kwargs)
        return torch.cat([logits[:, :1], logits[:, 1:]], dim=1)


class Drawing(Capped):
    """Draws random numbers and counts its calls; a first call that is thrown away must not be seen."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return super().forward(*args, **kwargs) * torch.rand(())


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, SHAPE.vocab_size, (3, 17), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[:, -4:] = -100
    return {"input_ids": tokens, "labels": labels}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunked_loss, "_CHUNK_NUMEL", 7 * SHAPE.vocab_size)
    monkeypatch.setattr(chunked_loss, "_MIN_CHUNK_ROWS", 1)


@pytest.mark.parametrize("kind", [Llama, WithBias, Capped, Scaled, Replaced, Sliced, Drawing])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_and_gradients_are_those_of_whole_logits(kind: type[Llama], dtype: torch.dtype):
    torch.manual_seed(0)
    model = kind(SHAPE).to(dtype)
    plain, data = copy.deepcopy(model), batch()
    objective = Objective(model)
    for _ in range(2):
        torch.manual_seed(5)
        loss, _count = objective(model, data)
        (loss * 0.37).backward()
        torch.manual_seed(5)
        expected = next_token_loss(plain(data["input_ids"]), data["labels"])
        (expected * 0.37).backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
        # float32: the order of additions. bfloat16: its 8 bits, of gradients that sum over tokens.
        most = 1e-5 if dtype == torch.float32 else 0.02
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad - theirs.grad).norm() <= most * theirs.grad.norm()
    if kind is Drawing:
        assert model.calls == 2
    with torch.no_grad():
        torch.manual_seed(5)
        again = objective(model, data)[0]
        torch.testing.assert_close(again, expected.detach(), rtol=1e-5, atol=1e-4)


def test_a_first_step_without_memory_is_no_trial():
    torch.manual_seed(0)
    model, data, failures = Scaled(SHAPE), batch(), [torch.OutOfMemoryError("full")]
    model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(failures.pop()) if failures else None)
    objective = Objective(model)
    with pytest.raises(torch.OutOfMemoryError):
        objective(model, data)
    loss, _ = objective(model, data)
    torch.testing.assert_close(loss, next_token_loss(model(data["input_ids"]), data["labels"]))


def test_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch):
    rows: list[int] = []
    compute = chunked_loss._cross_entropy_and_gradient

    def count(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        rows.append(len(logits))
        return compute(logits, targets)

    monkeypatch.setattr(chunked_loss, "_cross_entropy", lambda _: count)
    model = Llama(SHAPE)
    Objective(model)(model, batch())[0].backward()
    assert sum(rows) == 3 * 17
    assert max(rows) <= 7


def test_a_frozen_output_matrix_has_no_gradient():
    model = Llama(SHAPE)
    model.lm_head.weight.requires_grad_(False)
    Objective(model)(model, batch())[0].backward()
    assert model.lm_head.weight.grad is None
    assert model.model.norm.weight.grad is not None
