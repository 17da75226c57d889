"""Optimizers on sharded parameters: those of the list train as one process does, the others raise before a step."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.config.run import OptimizerConfig
from shardwise.distributed.mesh import make_mesh
from shardwise.errors import CheckpointError, ShardError
from shardwise.training.optimizers import build_optimizer
from tests.by_hand import full
from tests.ranks import ranks

WORKING: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.Adadelta, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
]
REFUSED: list[tuple[type[Optimizer], dict[str, Any], str]] = [
    (torch.optim.LBFGS, {}, r"\(37, 24\) does not divide evenly"),
    (torch.optim.SparseAdam, {}, "sparse gradients"),
    (torch.optim.SGD, {"fused": True}, "fused kernel"),
    (torch.optim.Adagrad, {"fused": True}, "fused kernel"),
]
ELSEWHERE = {"Muon", "Optimizer"}
"""torch's own Muon has a test of its own."""


class Net(nn.Module):
    """Matrices that do not divide over two ranks, a scalar, and a block."""

    def __init__(self, vocabulary: int = 37, width: int = 24, inner: int = 31) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width)) for _ in range(2)
        )
        self.norm, self.scale = nn.LayerNorm(width), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)) * self.scale


def train(model: Net, optimizer: Optimizer, steps: range, rank: int = 0, num_ranks: int = 1) -> None:
    for step in steps:
        tokens = torch.randint(0, 36, (4, 6), generator=torch.Generator().manual_seed(step)).chunk(num_ranks)[rank]

        def closure(tokens: Tensor = tokens) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            return loss.detach() if num_ranks == 1 else sw.mean_over_ranks(loss)

        optimizer.step(closure)  # pyrefly: ignore[no-matching-overload]


def compare(make: Callable[[list[nn.Parameter]], Optimizer], rank: int, build: Callable[[], Net] = Net) -> float:
    """The largest difference of a parameter between two ranks and one process after some steps."""
    alone, model = build(), sw.shard(build(), mesh=make_mesh(sw.MeshConfig(shard=2, device="cpu")))
    train(alone, make(list(alone.parameters())), range(4))
    train(model, make(list(model.parameters())), range(4), rank, 2)
    gaps = (full(p) - alone.get_parameter(name) for name, p in model.named_parameters())
    return max(gap.abs().max().item() for gap in gaps)


def matrices(make: Callable[[list[nn.Parameter]], Optimizer]) -> Callable[[list[nn.Parameter]], Optimizer]:
    return lambda parameters: make([parameter for parameter in parameters if parameter.ndim == 2])


@pytest.mark.slow
@ranks(2)
def test_optimizers_train_as_in_one_process(rank: int):
    for kind, options in WORKING:
        gap = compare(lambda parameters, kind=kind, options=options: kind(parameters, lr=1e-2, **options), rank)
        assert gap < 1e-5, (kind, options)
    few = {"lr": 0.1, "max_iter": 2}
    assert compare(lambda p: torch.optim.LBFGS(p, **few), rank, lambda: Net(36, 24, 32)) < 1e-5
    # It orthogonalises in bfloat16, where another order of sums shows.
    assert compare(matrices(lambda p: torch.optim.Muon(p, lr=1e-2)), rank) < 5e-3
    alone, model = Net(), sw.shard(Net(), mesh=make_mesh(sw.MeshConfig(shard=2, device="cpu")))
    for each, place in ((alone, (0, 1)), (model, (rank, 2))):
        train(each, build_optimizer(each, OptimizerConfig(name="muon", learning_rate=1e-2)), range(4), *place)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter), alone.get_parameter(name), rtol=1e-4, atol=1e-5)


@ranks(2)
def test_others_raise_on_all_ranks_before_a_step(rank: int):
    model = sw.shard(Net(), mesh=make_mesh(sw.MeshConfig(shard=2, device="cpu")))
    before = {name: full(parameter).clone() for name, parameter in model.named_parameters()}
    for kind, options, why in REFUSED:
        optimizer = kind(model.parameters(), lr=1e-2, **options)
        with pytest.raises(ShardError, match=f"{kind.__name__} cannot step sharded parameters") as caught:
            train(model, optimizer, range(1), rank, 2)
        assert caught.match(why)
        assert [finding.code for finding in sw.check(model, optimizer)] == ["SW424"]
    assert all(torch.equal(full(parameter), before[name]) for name, parameter in model.named_parameters())


def test_every_optimizer_of_torch_is_in_a_list():
    known = {kind.__name__ for kind, *_ in (*WORKING, *REFUSED)} | ELSEWHERE
    found = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    assert found == known


def test_the_page_has_a_row_for_each():
    page = (Path(__file__).parents[2] / "docs/composition.md").read_text().partition("\n## Optimizers\n")[2]
    rows = [line.split(" | ") for line in page.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    for known, told in ((WORKING, "as in one process"), (REFUSED, "refused")):
        shown = {name for names, result in rows if told in result for name in re.findall(r"`(\w+)`", names)}
        assert {kind.__name__ for kind, *_ in known} <= shown, told


@pytest.mark.slow
@ranks(2, timeout_s=500)
def test_eight_bits_of_torchao_train_and_the_rest_is_refused(rank: int, tmp_path: Path):
    low_bits: Any = pytest.importorskip("torchao.optim")
    even = lambda: Net(64, 64, 128)  # noqa: E731
    # Not of embeddings: rows without a gradient make 8 bits unstable, in one process too.
    inner = lambda parameters: [parameter for parameter in parameters if 128 in parameter.shape]  # noqa: E731
    assert compare(lambda p: low_bits.AdamW8bit(inner(p), lr=1e-2), rank, even) < 2e-3  # of steps of 1e-2
    model = sw.shard(even(), mesh=make_mesh(sw.MeshConfig(shard=2, device="cpu")))
    optimizer = low_bits.AdamW8bit(model.parameters(), lr=1e-2)
    train(model, optimizer, range(1), rank, 2)
    with (
        sw.Checkpointer(tmp_path, asynchronous=False) as checkpointer,
        pytest.raises(CheckpointError, match="OptimState8bit"),
    ):
        checkpointer.save(1, model=model, optimizers=optimizer)
    uneven = sw.shard(Net(), mesh=make_mesh(sw.MeshConfig(shard=2, device="cpu")))
    others = [(f"Adam{decay}{bits}", model) for decay in ("", "W") for bits in ("4bit", "Fp8")]
    for name, each in (("AdamW8bit", uneven), ("Adam8bit", uneven), *others):
        with pytest.raises(ShardError, match=f"{name} cannot step sharded parameters"):
            train(each, getattr(low_bits, name)(each.parameters(), lr=1e-2), range(1), rank, 2)
    os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)  # inductor leaves it behind


@ranks(2)
def test_a_parameter_beside_the_model_must_have_the_gradient_of_all_ranks(rank: int) -> None:
    model, temperature = sw.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))), nn.Parameter(torch.ones(1))
    x = torch.full((2, 4), 1.0 + rank)

    def optimizer_after_backward() -> torch.optim.Optimizer:
        model.zero_grad()
        temperature.grad = None
        (model(x) / temperature).square().mean().backward()
        return torch.optim.SGD([*model.parameters(), temperature], lr=0.1)

    optimizer = optimizer_after_backward()
    with pytest.raises(ShardError, match=r"shape \[1\] beside those of a sharded model") as caught:
        optimizer.step()
    assert "param_groups[0]['params'][4]" in str(caught.value)
    optimizer = optimizer_after_backward()
    assert temperature.grad is not None
    torch.distributed.all_reduce(temperature.grad)
    optimizer.step()
