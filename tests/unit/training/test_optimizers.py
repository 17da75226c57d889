"""Which parameters are decayed, what Muon changes, and that single-process Muon is torch's."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwise import compat
from shardwise.config.run import OptimizerConfig
from shardwise.errors import ConfigError
from shardwise.models.load import load_model
from shardwise.training import optimizers
from shardwise.training.optimizers import Muon, build_optimizer, orthogonalize, parameter_kinds


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4)
        self.up = nn.Parameter(torch.randn(3, 4, 8))
        self.gate = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(1, 1, 4))


class Odd(nn.Module):
    """Names that mislead on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(7, 4)
        self.norm = nn.Linear(4, 1)
        self.stem = nn.Conv2d(3, 4, 2)
        self.layers = nn.ModuleList([Experts(), nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 3))])
        self.gain = nn.LayerNorm((2, 4))
        self.embedding = nn.Linear(4, 7, bias=False)
        self.embedding.weight = self.bias.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


KINDS = {
    "bias.weight": "embeddings",
    "norm.weight": "matrices",
    "norm.bias": "vectors",
    "stem.weight": "matrices",
    "stem.bias": "vectors",
    "layers.0.up": "blocks",
    "layers.0.scale": "vectors",
    "layers.0.norm.weight": "vectors",
    "layers.0.gate.weight": "blocks",
    "layers.0.gate.bias": "vectors",
    "layers.1.0.weight": "blocks",
    "layers.1.0.bias": "vectors",
    "layers.1.1.weight": "matrices",
    "layers.1.1.bias": "vectors",
    "gain.weight": "vectors",
    "gain.bias": "vectors",
    "frozen.weight": "matrices",
    "frozen.bias": "vectors",
}


def test_kinds_follow_modules_not_names():
    model = Odd()
    kinds = parameter_kinds(model)
    assert {name: kinds[parameter] for name, parameter in model.named_parameters()} == KINDS


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("everything", [False, True])
def test_decay_and_learning_rate_of_each_kind(name: str, everything: bool):
    model = Odd()
    config = OptimizerConfig(name=name, weight_decay=0.3, decay_everything=everything)
    optimizer = build_optimizer(model, config)
    found = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(found) == sum(p.requires_grad for p in model.parameters())
    for parameter_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = KINDS[parameter_name]
        group = found[id(parameter)]
        expected = kind if name == "muon" or kind != "blocks" else "matrices"
        assert group["kind"] == expected
        assert group["weight_decay"] == (0.3 if everything or kind in ("matrices", "blocks") else 0.0)
        assert group["lr"] == (config.muon_learning_rate if expected == "blocks" else config.learning_rate)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_same_groups_on_the_reference_models(name: str):
    """A Llama's blocks are Muon's; its output matrix and embedding are not."""
    model = load_model("llama3-debug")
    optimizer = build_optimizer(model, OptimizerConfig(name=name))
    kinds = {group["kind"]: len(group["params"]) for group in optimizer.param_groups}
    blocks = 4 * 7
    if name == "muon":
        assert kinds == {"embeddings": 1, "blocks": blocks, "vectors": 9, "matrices": 1}
    else:
        assert kinds == {"embeddings": 1, "matrices": blocks + 1, "vectors": 9}


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Sequential(nn.Linear(5, 8, bias=False), nn.Linear(8, 3, bias=False)) for _ in range(2)])


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_muon_gives_torchs_numbers(nesterov: bool, dtype: torch.dtype | None):
    """In bfloat16 to the bit; in float32, the default on CPU, as close as bfloat16 is to float32."""
    ours, theirs = small(), small()
    config = OptimizerConfig(name="muon", nesterov=nesterov, weight_decay=0.1, momentum=0.9)
    optimizer = build_optimizer(ours, config)
    assert isinstance(optimizer, Muon)
    optimizer.dtype = dtype
    reference = torch.optim.Muon(
        theirs.parameters(), lr=config.muon_learning_rate, weight_decay=0.1, momentum=0.9, nesterov=nesterov
    )
    for step in range(3):
        for model, each in ((ours, optimizer), (theirs, reference)):
            set_gradients(model, step)
            each.step()
    tolerance = {"rtol": 0, "atol": 0} if dtype else {"rtol": 0, "atol": 3e-3}
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), parameter, **tolerance)


def test_muon_changes_the_rest_as_adamw_does():
    model = load_model("llama3-debug")
    torch.manual_seed(0)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    twin = copy.deepcopy(model)
    config = OptimizerConfig(name="muon")
    optimizers = build_optimizer(model, config), build_optimizer(twin, replace(config, name="adamw"))
    for step in range(3):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            set_gradients(each, step)
            optimizer.step()
    kinds = parameter_kinds(model)
    for name, parameter in model.named_parameters():
        same = torch.equal(parameter, twin.get_parameter(name))
        assert same == (kinds[parameter] != "blocks"), name


def test_stack_of_matrices_is_orthogonalised_matrix_by_matrix():
    stack = torch.randn(3, 6, 4)
    expected = torch.stack([orthogonalize(matrix) for matrix in stack])
    torch.testing.assert_close(orthogonalize(stack), expected)
    values = torch.linalg.svdvals(orthogonalize(stack))
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert torch.equal(orthogonalize(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_fused_where_possible_and_a_clear_error_where_not():
    assert build_optimizer(Odd(), OptimizerConfig()).param_groups[0]["fused"] is True
    assert build_optimizer(Odd(), OptimizerConfig(fused=False)).param_groups[0]["fused"] is None
    model = nn.Linear(2, 2, device="meta")  # which has no kernels at all
    assert build_optimizer(model, OptimizerConfig()).param_groups[0]["fused"] is None
    with pytest.raises(ConfigError, match=r"AdamW cannot be fused here(.|\n)*optimizer.fused"):
        build_optimizer(model, OptimizerConfig(fused=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": -1.0}, "optimizer.learning_rate: .* got -1.0"),
        ({"learning_rate": float("nan")}, "optimizer.learning_rate: .* got nan"),
        ({"momentum": 1.0, "betas": (0.9, 1.0)}, r"betas.1: .* got 1.0\s+optimizer.momentum: .* got 1.0"),
    ],
)
def test_settings_out_of_range_are_named_together(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        build_optimizer(Odd(), OptimizerConfig(**changes))


def test_nothing_to_train_and_nothing_for_muon():
    with pytest.raises(ConfigError, match="no trainable parameters"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), OptimizerConfig())
    with pytest.raises(ConfigError, match="no matrices for Muon"):
        build_optimizer(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), OptimizerConfig(name="muon"))


def test_sgd_without_momentum():
    model = nn.Linear(2, 1, bias=False)
    optimizer = build_optimizer(model, OptimizerConfig(name="sgd", momentum=0.0, weight_decay=0.0, learning_rate=0.5))
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_held_back_on_the_device_changes_nothing(name: str):
    """As on an accelerator, where nobody waits to see whether a step is bad."""
    model, twin = small(), small()
    config = OptimizerConfig(name=name)
    optimizer, plain = build_optimizer(model, config), build_optimizer(twin, config)
    for step, is_bad in enumerate([0.0, 1.0, 0.0, 1.0]):
        set_gradients(model, step)
        set_gradients(twin, step)
        if is_bad:
            next(model.parameters()).grad[0] = torch.nan
            next(reversed(list(model.parameters()))).grad[0] = torch.inf
        assert compat.set_found_inf(optimizer, torch.tensor(is_bad))
        optimizer.step()
        if not is_bad:
            plain.step()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    for mine, other in zip(optimizer.state.values(), plain.state.values(), strict=True):
        assert all(torch.equal(mine[key], other[key]) for key in other)


def test_clipping_adamw_is_adamw_on_scaled_gradients(monkeypatch: pytest.MonkeyPatch):
    """Large and small parameters, a learning rate that changes, a step that is left out, gradients in bfloat16."""
    monkeypatch.setattr(optimizers, "_compiled_update", lambda: optimizers._update)  # no compiler for CPUs in tests
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(600, 600)), nn.Parameter(torch.randn(30))]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    clipping = optimizers.ClippingAdamW([{"params": ours}], **options)
    plain = torch.optim.AdamW(theirs, **options)
    for step in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad_dtype = None
            mine.grad = torch.randn_like(mine).to(torch.bfloat16 if step % 2 else torch.float32)
            other.grad = mine.grad.float() * 0.3
        clipping.gradient_factor = torch.tensor(0.3)
        clipping.step()
        plain.step()
        for group in (*clipping.param_groups, *plain.param_groups):
            group["lr"] *= 0.9
        clipping.found_inf = torch.ones(())
        for mine in ours:
            mine.grad = torch.full_like(mine, math.nan)
        clipping.step()  # changes nothing
        clipping.found_inf = None
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)  # rounded in another order
    states = clipping.state_dict()["state"], plain.state_dict()["state"]
    assert {key: set(state) for key, state in states[0].items()} == {
        key: set(state) for key, state in states[1].items()
    }
    assert [state["step"].item() for state in states[0].values()] == [5, 5]
