"""Whole training programs that do unusual things with a model: each trains sharded as in one process, or is refused.

A program gets `shard`, which shards a module or leaves it as it is, and `rows`, which takes this rank's part of a batch
or all of it. It returns the modules to compare.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

Shard = Callable[[Any], Any]
Rows = Callable[[Tensor], Tensor]
Program = Callable[[Shard, Rows], Any]
PROGRAMS: dict[str, Program] = {}
STEPS, WIDTH = 3, 8


def program(function: Program) -> Program:
    """Keep it under its name."""
    PROGRAMS[function.__name__] = function
    return function


def batch(step: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (8, WIDTH)), generator=torch.Generator().manual_seed(100 + step))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Stack(nn.Module):
    """Three blocks between two layers of the root's."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.inp, self.blocks, self.out = nn.Linear(WIDTH, WIDTH), nn.ModuleList(block() for _ in range(3)), None
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.5} | options)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(
    model: nn.Module,
    rows: Rows,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x).square().mean(),
    after: Callable[[int], None] = lambda step: None,
    optimizer: torch.optim.Optimizer | None = None,
    shape: tuple[int, ...] = (),
) -> nn.Module:
    optimizer = optimizer or sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rows(batch(step, *shape))).backward()
        optimizer.step()
        after(step)
    return model


# Tensors that leave by side doors.


@dataclasses.dataclass(slots=True)
class Slotted:
    hidden: Tensor
    scale: Tensor


@program
def slotted_output(shard: Shard, rows: Rows) -> Any:
    class Slots(Block):
        def forward(self, x: Any) -> Any:
            x = x.hidden * x.scale if isinstance(x, Slotted) else x
            return Slotted(super().forward(x), self.norm.weight.mean())

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.out(x.hidden * x.scale)

    return train(shard(Model(Slots)), rows)


@program
def generator_of_outputs(shard: Shard, rows: Rows) -> Any:
    class Lazy(Stack):
        def forward(self, x: Tensor) -> Any:
            def parts() -> Iterator[Tensor]:
                h = self.inp(x)
                for block in self.blocks:
                    h = block(h)
                    yield self.out(h)

            return parts()

    return train(shard(Lazy()), rows, lambda model, x: sum(part.square().mean() for part in model(x)))


@program
def returned_function(shard: Shard, rows: Rows) -> Any:
    class Returning(Stack):
        def forward(self, x: Tensor) -> Any:
            h = self.blocks[1](self.blocks[0](self.inp(x)))
            return lambda scale: self.out(self.blocks[2](h) * scale)

    return train(shard(Returning()), rows, lambda model, x: model(x)(0.5).square().mean())


@program
def activations_from_hooks(shard: Shard, rows: Rows) -> Any:
    model, kept = shard(Stack()), {}
    for index, block in enumerate(model.blocks):
        block.up.register_forward_hook(lambda m, args, out, index=index: kept.__setitem__(index, out))
    return train(model, rows, lambda m, x: m(x).mean() + sum(kept[i].square().mean() for i in kept))


@program
def hooks_that_replace(shard: Shard, rows: Rows) -> Any:
    model = Stack()
    model.blocks[0].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    model.blocks[1].register_forward_hook(lambda m, args, out: out + args[0].sin())
    model.blocks[2].register_full_backward_hook(lambda m, grad_in, grad_out: (grad_in[0] * 0.5,))
    return train(shard(model), rows)


@program
def hidden_state_between_steps(shard: Shard, rows: Rows) -> Any:
    class Recurrent(Stack):
        state: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            x = x if self.state is None else x + self.state.detach()
            self.state = super().forward(x)
            return self.state

    return train(shard(Recurrent()), rows)


@program
def backward_through_two_calls(shard: Shard, rows: Rows) -> Any:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        state = x
        for _ in range(3):
            state = model(state).tanh()
        return state.square().mean()

    return train(shard(Stack()), rows, loss_of)


@program
def cache_passed_along(shard: Shard, rows: Rows) -> Any:
    class Cache:
        def __init__(self) -> None:
            self.keys: deque[Tensor] = deque(maxlen=2)

    class Caching(Block):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:  # pyrefly: ignore[bad-override]
            cache.keys.append(super().forward(x))
            return x + sum(cache.keys)

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            cache = Cache()
            for block in self.blocks:
                x = block(x, cache)
            return self.out(x) + cache.keys[0]

    return train(shard(Model(Caching)), rows)


@program
def memory_bank(shard: Shard, rows: Rows) -> Any:
    class Bank(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(4, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            similarity = h @ self.queue.clone().T
            with torch.no_grad():
                self.queue[:-1] = self.queue[1:].clone()
                self.queue[-1] = self.out.weight.mean(0)
            return h + similarity.mean(1, keepdim=True)

    return train(shard(Bank()), rows)


# Arguments that are changed.


@program
def filled_containers(shard: Shard, rows: Rows) -> Any:
    class Bag:
        def __init__(self) -> None:
            self.items: dict[str, Any] = {}

    class Filling(Block):
        def forward(self, x: Tensor, found: dict, seen: list, bag: Bag, order: deque) -> Tensor:  # pyrefly: ignore[bad-override]
            h = super().forward(x)
            found[len(found)] = h
            seen.append(self.up(h))
            bag.items.setdefault("sum", []).append(h.sum(-1).mean())
            order.appendleft(h.mean(0))
            return h

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            found, seen, bag, order = {}, [], Bag(), deque()
            for block in self.blocks:
                x = block(x, found, seen, bag, order)
            total = sum(h.mean() for h in found.values()) + sum(h.square().mean() for h in seen)
            return self.out(x), total + sum(bag.items["sum"]) + order[0].mean()

    return train(shard(Model(Filling)), rows, lambda model, x: model(x)[0].square().mean() + model(x)[1])


@program
def in_place_on_inputs(shard: Shard, rows: Rows) -> Any:
    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            x.add_(self.down(self.up(self.norm(x.clone())).tanh()))
            return x

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                block(x)
            return self.out(x)

    return train(shard(Model(InPlace)), rows)


@program
def in_place_on_a_leaf_batch(shard: Shard, rows: Rows) -> Any:
    class Scaling(Block):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(0.5)
            return super().forward(x)

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            h = x
            for block in self.blocks:
                h = block(x)
            return self.out(h + x)

    return train(shard(Model(Scaling)), rows)


@program
def output_buffer_that_is_passed_in(shard: Shard, rows: Rows) -> Any:
    class Filling(Block):
        def forward(self, x: Tensor, out: Tensor, place: int) -> Tensor:  # pyrefly: ignore[bad-override]
            h = super().forward(x)
            out[:, place] = h
            return h

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            out = torch.zeros(len(x), 3, WIDTH)
            for place, block in enumerate(self.blocks):
                x = block(x, out, place)
            return self.out(out.mean(1))

    return train(shard(Model(Filling)), rows)


# Parameters written outside of optimizers.


@program
def ema_teacher(shard: Shard, rows: Rows) -> Any:
    student, teacher = shard(Stack()), shard(Stack())
    with torch.no_grad():
        for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
            ours.copy_(theirs)

    def update(step: int) -> None:
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x + 0.1)
        return (model(x) - wanted).square().mean()

    return train(student, rows, loss_of, update), teacher


@program
def target_network(shard: Shard, rows: Rows) -> Any:
    online = shard(Stack())
    target = shard(Stack())
    target.requires_grad_(False)

    def copy_weights(step: int) -> None:
        for ours, theirs in zip(target.parameters(), online.parameters(), strict=True):
            ours.data.copy_(0.9 * ours.data + 0.1 * theirs.data)

    return train(online, rows, lambda m, x: (m(x) - target(x).detach()).square().mean(), copy_weights), target


@program
def wgan_weight_clipping(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())

    def clip(step: int) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)

    return train(model, rows, after=clip)


@program
def old_weight_norm(shard: Shard, rows: Rows) -> Any:
    model = Stack()
    for block in model.blocks:
        nn.utils.weight_norm(block.up)  # pyrefly: ignore[bad-specialization]
    return train(shard(model), rows)


@program
def parametrized_weights(shard: Shard, rows: Rows) -> Any:
    model = Stack()
    parametrizations.weight_norm(model.blocks[0].up)
    parametrizations.spectral_norm(model.blocks[1].up)
    parametrizations.orthogonal(model.blocks[2].up)
    return train(shard(model), rows)


@program
def old_spectral_norm(shard: Shard, rows: Rows) -> Any:
    model = Stack()
    for block in model.blocks:
        nn.utils.spectral_norm(block.up)  # pyrefly: ignore[bad-specialization]
    return train(shard(model), rows)


@program
def pruned(shard: Shard, rows: Rows) -> Any:
    model = Stack()
    for block in model.blocks:
        prune.l1_unstructured(block.up, "weight", amount=0.3)
    return train(shard(model), rows)


@program
def averaged_model(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    train(model, rows, after=lambda step: averaged.update_parameters(model))
    return model, averaged.module


@program
def codebook_by_averages(shard: Shard, rows: Rows) -> Any:
    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(6, WIDTH))
            self.register_buffer("counts", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            nearest = torch.cdist(x, self.codes).argmin(1)
            if self.training:
                with torch.no_grad():
                    self.counts.mul_(0.9).add_(0.1)
                    self.codes.mul_(0.99)
            chosen = self.codes[nearest]
            return x + (chosen - x).detach() + 0.1 * (x - chosen).square().mean(1, keepdim=True)

    model = Stack()
    model.blocks.insert(1, Quantizer())
    return train(shard(model), rows)


@program
def codebook_parameter_restarted(shard: Shard, rows: Rows) -> Any:
    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Embedding(6, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.codes.weight[0] = self.codes.weight[1:].mean(0)
            chosen = self.codes(torch.cdist(x, self.codes.weight).argmin(1))
            return x + (chosen - x).square().mean(1, keepdim=True) + (chosen - x).detach()

    model = Stack()
    model.blocks.insert(1, Quantizer())
    return train(shard(model), rows)


@program
def sharpness_aware(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    optimizer = sgd(model)
    for step in range(STEPS):
        x = rows(batch(step))
        model(x).square().mean().backward()
        with torch.no_grad():
            moved = [(p, p.grad * 0.1) for p in model.parameters() if p.grad is not None]
            for parameter, change in moved:
                parameter.add_(change)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter, change in moved:
                parameter.sub_(change)
        optimizer.step()
        optimizer.zero_grad()
    return model


@program
def lookahead_weights(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    slow = [p.detach().clone() for p in model.parameters()]

    def pull(step: int) -> None:
        with torch.no_grad():
            for fast, kept in zip(model.parameters(), slow, strict=True):
                kept.lerp_(fast, 0.5)
                fast.copy_(kept)

    return train(model, rows, after=pull)


@program
def frozen_and_thawed(shard: Shard, rows: Rows) -> Any:
    model = shard(Stack())
    model.blocks[0].requires_grad_(False)

    def thaw(step: int) -> None:
        model.blocks[0].requires_grad_(step == 0)
        model.blocks[2].requires_grad_(step != 0)

    return train(model, rows, after=thaw)


@program
def norms_in_evaluation(shard: Shard, rows: Rows) -> Any:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bn = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
            self.instance = nn.InstanceNorm1d(WIDTH, affine=True)

        def forward(self, x: Tensor) -> Tensor:
            self.bn.eval()
            h = self.bn(self.linear(x))
            return x + self.instance(h[None].transpose(1, 2).expand(2, -1, -1)).mean(0).T * 0 + h

    return train(shard(Stack(Normed)), rows)
