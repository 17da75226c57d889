"""Some ranks run out of memory, anywhere in a step: all halve their micro-batches and the step comes out the same."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.config.schema import PrefetchConfig, ShardConfig
from shardwise.diagnosing.guard import guard
from shardwise.errors import TrainingError
from shardwise.sharding.apply import shard
from shardwise.training.microbatching import Batch, Microbatches
from shardwise.training.step import AccumulationMode, accumulate
from tests.by_hand import Tiny, assert_same, full_gradients, loss_of, mesh_1d, mesh_2d, shard_by_hand, tiny, tokens
from tests.ranks import ranks

ROWS = 4
MODES: list[AccumulationMode] = ["comm", "memory", "hsdp"]


class Fuse(torch.autograd.Function):
    """Passes values on, and runs out of memory in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        raise torch.OutOfMemoryError("in backward")


def run_out(module: nn.Module, where: str, limit: int, skip: int = 0) -> None:
    """Let a module run out of memory when it sees more rows than `limit`, in micro-step `skip` of two or later."""
    calls = 0

    def before(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        nonlocal calls
        calls += 1
        if where == "forward" and args[0].shape[0] > limit and (calls - 1) % 2 >= skip:
            raise torch.OutOfMemoryError("in forward")

    def after(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return (
            Fuse.apply(output)
            if where == "backward" and args[0].shape[0] > limit and (calls - 1) % 2 >= skip
            else output
        )

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def train_step(
    model: nn.Module, mode: AccumulationMode = "comm", loss: Callable[..., torch.Tensor] = loss_of
) -> Callable[[list[Batch]], torch.Tensor]:
    def work(parts: list[Batch]) -> torch.Tensor:
        total = torch.zeros(())
        for number, part in enumerate(parts):
            with accumulate(model, number, len(parts), mode):
                mean = loss(model, part["tokens"]) * len(part["tokens"]) / ROWS
                mean.backward()
            total += mean.detach()
        return total

    return work


def expected_gradients(num_ranks: int, step: int) -> dict[str, torch.Tensor]:
    model = tiny()
    for rank in range(num_ranks):
        (loss_of(model, tokens(rank, step, ROWS)) / num_ranks).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def two_right_steps(micro: Microbatches, model: nn.Module, rank: int, num_ranks: int, mode: AccumulationMode) -> None:
    for step in range(2):
        micro.run(train_step(model, mode), {"tokens": tokens(rank, step, ROWS)})
        assert_same(full_gradients(model), expected_gradients(num_ranks, step))
        model.zero_grad()


def places(model: Tiny) -> list[nn.Module]:
    blocks = [part for block in model.blocks for part in (block, block.up, block.norm, block.down)]
    return [model, model.embedding, *blocks, model.frozen, model.head]


@ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_all_ranks_halve_when_one_runs_out(rank: int, where: str):
    model = shard_by_hand(tiny(), mesh_1d(2))
    said: list[str] = []
    micro = Microbatches(model, ROWS, report=said.append)
    if rank == 1:
        run_out(model.blocks[1].up, where, limit=1)
    two_right_steps(micro, model, rank, 2, "comm")
    assert (micro.size, micro.num_halvings) == (1, 2)
    assert len(said) == (2 if rank == 0 else 0)
    assert all("on rank 1:" in text for text in said)


def anywhere(rank: int, num_ranks: int, seed: int, mesh: Any, **settings: Any) -> None:
    """Random ranks fail at random places, in forward or backward, early or in a later micro-step, some of them slow."""
    same = random.Random(seed)
    model = shard_by_hand(tiny(), mesh, **settings)
    chosen = [same.randrange(len(places(model))) for _ in range(num_ranks)]
    wheres = [same.choice(["forward", "backward"]) for _ in range(num_ranks)]
    skips = [same.choice([0, 0, 1]) for _ in range(num_ranks)]
    failing = same.sample(range(num_ranks), same.randint(1, num_ranks))
    slow, mode = same.randrange(num_ranks), same.choice(MODES)
    micro = Microbatches(model, ROWS, report=lambda _: None)
    micro.size = 2
    if rank == slow:
        sleeps = iter([0.4, 0.4])
        model.blocks[0].register_forward_pre_hook(lambda *_: time.sleep(next(sleeps, 0.0)))
    if rank in failing:
        run_out(places(model)[chosen[rank]], wheres[rank], limit=1, skip=skips[rank])
    two_right_steps(micro, model, rank, num_ranks, mode)
    assert micro.size == 1


@ranks(2)
@pytest.mark.parametrize("seed", [pytest.param(n, marks=[] if n < 1 else pytest.mark.slow) for n in range(15)])
def test_anywhere_on_two_ranks(rank: int, seed: int):
    anywhere(rank, 2, seed, mesh_1d(2))


@ranks(4)
@pytest.mark.parametrize("seed", [pytest.param(n, marks=[] if n < 1 else pytest.mark.slow) for n in range(30)])
def test_anywhere_on_four_ranks(rank: int, seed: int):
    settings = [
        {},
        {"reshard_after_forward": 2},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
        {"reshard_after_forward": False},
    ][seed // 2 % 5]
    anywhere(rank, 4, seed, mesh_2d() if seed % 2 else mesh_1d(4), **settings)


@ranks(4)
@pytest.mark.parametrize("num_failing", [1, 4])
def test_before_any_collective(rank: int, num_failing: int):
    """The step ends before it has begun; the others wait in the first gather."""
    model = shard_by_hand(tiny(), mesh_1d(4))
    is_first = True

    def work(parts: list[Batch]) -> torch.Tensor:
        nonlocal is_first
        if is_first and rank < num_failing:
            is_first = False
            raise torch.OutOfMemoryError("before anything")
        return train_step(model)(parts)

    micro = Microbatches(model, ROWS, report=lambda _: None)
    micro.run(work, {"tokens": tokens(rank, 0, ROWS)})
    assert micro.size == 2
    assert_same(full_gradients(model), expected_gradients(4, 0))


@ranks(2)
def test_after_the_last_collective(rank: int):
    """The other rank has come to the end of the step, and must not take it for done."""
    model = shard_by_hand(tiny(), mesh_1d(2))

    def work(parts: list[Batch]) -> torch.Tensor:
        total = train_step(model)(parts)
        if rank == 0 and len(parts) == 1:
            time.sleep(0.5)
            raise torch.OutOfMemoryError("at the very end")
        return total

    micro = Microbatches(model, ROWS, report=lambda _: None)
    micro.run(work, {"tokens": tokens(rank, 0, ROWS)})
    assert micro.size == 2
    assert_same(full_gradients(model), expected_gradients(2, 0))


@ranks(2)
def test_a_single_row_that_does_not_fit_is_the_same_error_everywhere(rank: int):
    model = shard_by_hand(tiny(), mesh_1d(2))
    micro = Microbatches(model, 2, report=lambda _: None)
    if rank == 1:
        run_out(model.blocks[0].down, "forward", limit=0)
    with pytest.raises(TrainingError, match=r"rank 1 ran out of memory with a single sequence: in forward"):
        micro.run(train_step(model), {"tokens": tokens(rank, 0, 2)})


@ranks(2)
def test_a_given_size_is_kept_and_other_errors_pass(rank: int):
    model = shard_by_hand(tiny(), mesh_1d(2))

    def fail(parts: list[Batch]) -> None:
        assert [len(part["tokens"]) for part in parts] == [3, 1]
        raise torch.OutOfMemoryError("on purpose")

    micro = Microbatches(model, ROWS, 3)
    with pytest.raises(torch.OutOfMemoryError):
        micro.run(fail, {"tokens": tokens(rank, 0, ROWS)})
    micro = Microbatches(model, ROWS)
    with pytest.raises(FloatingPointError):
        micro.run(lambda _: 1 / 0 if False else (_ for _ in ()).throw(FloatingPointError()), {"tokens": tokens(rank)})


@ranks(2)
def test_out_of_memory_after_the_first_steps_ends_the_rank_and_the_next_start_is_smaller(rank: int, tmp_path: Path):
    model, record = shard_by_hand(tiny(), mesh_1d(2)), tmp_path / "size"
    micro = Microbatches(model, ROWS, record=record, report=lambda _: None)
    for step in range(3):
        micro.run(train_step(model), {"tokens": tokens(rank, step, ROWS)})
        model.zero_grad()

    def fail(parts: list[Batch]) -> None:
        raise torch.OutOfMemoryError("a long batch")

    if rank == 1:
        with pytest.raises(TrainingError, match=r"rank 1 ran out of memory in step 4 (.|\n)*micro_batch_size = 2"):
            micro.run(fail, {"tokens": tokens(rank, 3, ROWS)})
    dist.barrier()
    assert Microbatches(model, ROWS, record=record).size == 2
    assert Microbatches(model, ROWS, 3, record=record).size == 3


@ranks(2)
def test_steps_after_the_first_communicate_nothing_more(rank: int):
    model = shard_by_hand(tiny(), mesh_1d(2))
    micro = Microbatches(model, ROWS)
    calls: list[int] = []

    def work(parts: list[Batch]) -> None:
        calls.append(len(parts))

    for _ in range(5):
        micro.run(work, {"tokens": tokens(rank, 0, ROWS)})
    assert len(calls) == 3 * 2 + 2, "the first three steps are tried first"
    given = Microbatches(model, ROWS, ROWS)
    given.run(work, {"tokens": tokens(rank, 0, ROWS)})
    assert len(calls) == 9


class Copies(TorchDispatchMode):
    """Counts the tensors that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


@ranks(2)
def test_steps_after_the_first_copy_no_buffers(rank: int):
    """Several ranks do not repeat such a step, so nothing has to be put back."""
    model = shard_by_hand(tiny(), mesh_1d(2))
    model.register_buffer("seen", torch.zeros(()))
    micro, copied = Microbatches(model, ROWS), []
    for _ in range(5):
        with Copies() as copies:
            micro.run(lambda parts: None, {"tokens": tokens(rank, 0, ROWS)})
        copied.append(copies.num)
    assert all(copied[:3])
    assert copied[3:] == [0, 0]


@ranks(2)
def test_buffers_and_weights_are_untouched_by_trials(rank: int):
    model = shard_by_hand(tiny(), mesh_1d(2))
    model.register_buffer("seen", torch.zeros(()))
    model.register_forward_pre_hook(lambda *_: model.seen.add_(1) and None)
    micro = Microbatches(model, ROWS)
    micro.run(train_step(model), {"tokens": tokens(rank, 0, ROWS)})
    assert model.seen.item() == 1
    assert_same(full_gradients(model), expected_gradients(2, 0))


class WithOutsiders(nn.Module):
    """A parameter in no group, experts that some ranks leave out, dropout: all that is not a plain gather or reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)) for _ in range(3))
        self.outside = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.outside(self.embedding(tokens))
        for index, expert in enumerate(self.experts):
            if (tokens[0, 0] + index) % 2:
                x = x + expert(x)
        return self.head(x) * 1.0


def outsiders(mesh: Any) -> WithOutsiders:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = WithOutsiders()
    config = ShardConfig(
        ignored=("outside.*",), unused_parameters="reduce", prefetch=PrefetchConfig(forward=1, backward=1)
    )
    return shard(model, config, mesh=mesh)


@ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_sums_at_the_end_of_backward_and_random_numbers(rank: int, where: str):
    """With a guard on the model, which must not take a trial for a divergence."""
    mesh = mesh_1d(2)
    results = []
    for fails in (False, True):
        model = outsiders(mesh)
        torch.manual_seed(rank)
        micro = Microbatches(model, ROWS, report=lambda _: None)
        with guard(model):
            micro.size = ROWS if fails else ROWS // 2
            if fails and rank == 0:
                run_out(model.outside if where == "backward" else model.head, where, limit=2)
            for step in range(3):
                micro.run(train_step(model), {"tokens": tokens(rank, step, ROWS)})
            assert micro.size == 2
        results.append(full_gradients(model))
    assert_same(results[1], results[0])


def test_alone():
    model = tiny()
    run_out(model.blocks[1].up, "backward", limit=1)
    said: list[str] = []
    micro = Microbatches(model, ROWS, report=said.append)
    micro.run(train_step(model), {"tokens": tokens(0, 0, ROWS)})
    assert micro.size == 1
    assert len(said) == 2
    assert_same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected_gradients(1, 0))


def test_memory_of_the_machine():
    """A real allocation that fails, not one that is made up."""
    model = tiny()

    def work(parts: list[Batch]) -> int:
        if len(parts) == 1:
            torch.empty(2**60, dtype=torch.uint8)
        return len(parts)

    micro = Microbatches(model, ROWS, report=lambda _: None)
    assert micro.run(work, {"tokens": tokens(0, 0, ROWS)}) == 2
