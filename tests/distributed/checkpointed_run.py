"""A small run with everything in it that a checkpoint must carry, and how to tell that two of them are equal."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.checkpointing.manager import Checkpointer
from shardwise.training.ema import EMA
from tests.by_hand import full, shard_module

WIDTH, NUM_TOKENS = 6, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Model(nn.Module):
    """Rows that no world size divides, a tie, a frozen part, dropout; optionally statistics that ranks do not share."""

    def __init__(self, statistics: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.statistics = nn.BatchNorm1d(WIDTH) if statistics else None
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.empty(1))
        self.register_buffer("table", torch.empty(3), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.gain.fill_(1)
        self.scale.fill_(1.5)
        self.table.copy_(torch.arange(3.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if self.statistics is not None:
            x = self.statistics(x.flatten(0, 1)).view_as(x)
        return self.head(self.frozen(x) * self.gain * self.scale)


class Source:
    """Batches with a state: a position, and a generator of its own. Every rank has its own data."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)
        self.position = 0
        self.seen: dict[int, str] = {}

    def next(self) -> torch.Tensor:
        self.position += 1
        self.seen[self.position] = "used"
        return torch.randint(0, NUM_TOKENS, (4, 3), generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "seen": self.seen, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.seen = state["position"], state["seen"]
        self.generator.set_state(state["generator"])


class Training:
    """A run: model, optimizer with two groups, schedule, average, scaler, data."""

    def __init__(self, rank: int, mesh: DeviceMesh | None, *, statistics: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: Any = Model(statistics)
        if mesh is not None:
            for block in self.model.blocks:
                shard_module(block, mesh)
            shard_module(self.model, mesh)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [{"params": trained[:3], "weight_decay": 0.1}, {"params": trained[3:], "lr": 0.02}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.95))
        self.schedule: Any = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        self.ema = EMA(self.model, 0.9)
        self.data = Source(rank)
        torch.manual_seed(100 + rank)  # dropout differs between ranks
        random.seed(100 + rank)
        numpy.random.seed(100 + rank)
        self.draws: list[float] = []

    def step(self) -> float:
        batch = self.data.next()
        logits = self.model(batch)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.roll(1, 1).flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.ema.update()
        self.draws.append(random.random() + numpy.random.rand())
        return loss.item()

    def train(self, num_steps: int, then: Callable[[], object] = lambda: None) -> list[float]:
        losses = []
        for _ in range(num_steps):
            losses.append(self.step())
            then()
        return losses

    @property
    def parts(self) -> dict[str, Any]:
        """What save and load are given."""
        return {
            "model": self.model,
            "optimizers": self.optimizer,
            "schedule": self.schedule,
            "ema": self.ema,
            "data": self.data,
        }

    @property
    def shared_parts(self) -> dict[str, Any]:
        """Without what every rank has its own of."""
        return {name: part for name, part in self.parts.items() if name != "data"}


def everything(run: Training) -> dict[str, Any]:
    """The whole state, full tensors, as plain as possible. Collective."""
    state: dict[str, Any] = {}
    for name, tensor in run.model.state_dict().items():
        state[f"model.{name}"] = full(tensor).clone()
    names = {id(p): name for name, p in run.model.named_parameters()}
    for index, group in enumerate(run.optimizer.param_groups):
        for parameter in group["params"]:
            for key, value in run.optimizer.state[parameter].items():
                state[f"optim.{names[id(parameter)]}.{key}"] = full(value).clone()
        state[f"group.{index}"] = {key: value for key, value in group.items() if key != "params"}
        state[f"group.{index}.names"] = [names[id(p)] for p in group["params"]]
    for name, tensor in run.ema.state_dict()["shadow"].items():
        state[f"ema.{name}"] = full(tensor).clone()
    state["ema.updates"] = run.ema.num_updates
    state["schedule"] = {
        key: value for key, value in run.schedule.state_dict().items() if key != "_get_lr_called_within_step"
    }
    return state


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert actual[name].dtype == value.dtype, name
            assert torch.equal(actual[name], value), f"{name}: {actual[name]} is not {value}"
        else:
            assert actual[name] == value, name


def local_bytes(run: Training) -> int:
    """What this rank's shards take; used to see that nobody holds a whole model."""
    return sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in run.model.parameters())


__all__ = ["Checkpointer", "Source", "Training", "assert_equal", "everything", "local_bytes"]
