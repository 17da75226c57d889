"""The functions that rewritten programs carry along do what FSDP1 did: run beside it, one property at a time."""

from __future__ import annotations

import collections
import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, ShardingStrategy

from shardwise.fsdp1.codemod.program import Program
from shardwise.fsdp1.codemod.rewriting import rewrite
from tests.ranks import ranks
from tests.rules.moving.test_same_dtypes import Reductions
from tests.rules.moving.test_same_numbers import run, train, whole
from tests.rules.moving.toys import Toy

HEADER = """
import functools
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


"""
TARGETS = pytest.mark.parametrize("target", ["torch", "shardwise"])
SHARED = pytest.mark.parametrize("target", ["torch", pytest.param("shardwise", marks=pytest.mark.slow)])
"""For functions that programs of both targets carry along."""


def moved(body: str, target: str) -> dict[str, Any]:
    """What a program defines once it is rewritten; everything in it must have been."""
    program = Program({"toy.py": HEADER + body})
    text, notes = rewrite(program.file("toy.py"), program, target)
    assert {note.status.value for note in notes} <= {"rewritten", "reported"}, notes
    return run(text)


@contextmanager
def fsdp1_warns() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the CPU, BatchNorm and being old
        yield


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


NORMED = """
def wrap(model):
    return FSDP(
        model,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16),
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        device_id=torch.device("cpu"),
    )
"""


@TARGETS
@ranks(2)
def test_batch_norm_reduces_in_full_precision_and_hands_on_what_the_rest_computes_in(rank: int, target: str):
    def step(space: dict[str, Any]) -> tuple[collections.Counter[torch.dtype], torch.dtype, torch.dtype]:
        torch.manual_seed(0)
        model = space["wrap"](Normed())
        norm = next(one for one in model.modules() if isinstance(one, nn.BatchNorm1d))
        met: list[torch.dtype] = []
        norm.register_forward_pre_hook(lambda module, args: met.append(module.weight.dtype))
        last = [one for one in model.modules() if isinstance(one, nn.Linear)][-1]
        last.register_forward_pre_hook(lambda module, args: met.append(args[0].dtype))
        output = model(torch.randn(4, 6))
        with Reductions() as reductions:
            output.float().sum().backward()
        return collections.Counter(reductions.dtypes), met[0], met[1]

    with fsdp1_warns():
        expected = step(run(HEADER + NORMED))
    assert expected[1:] == (torch.float32, torch.bfloat16)
    assert expected[0] == {torch.bfloat16: 2, torch.float32: 1}
    assert step(moved(NORMED, target)) == expected


@TARGETS
@ranks(1)
def test_strategy_that_is_none_of_fsdp1s_is_refused(rank: int, target: str):
    space = moved("def wrap(model, strategy):\n    return FSDP(model, sharding_strategy=strategy)\n", target)
    with pytest.raises(ValueError, match="'FULL_SHARD' is no ShardingStrategy"):
        space["wrap"](nn.Linear(2, 2), "FULL_SHARD")


ACCUMULATED = """
def wrap(model):
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}), device_id=torch.device("cpu"))


def accumulate(model, around, batches):
    with around.no_sync():
        model(batches[0]).pow(2).sum().backward()
    model(batches[1]).pow(2).sum().backward()


def train(model, batches):
    model = wrap(model)
    accumulate(model, model, batches)
    return model
"""


@SHARED
@ranks(2)
def test_no_sync_finds_the_sharded_model_inside_a_compiled_one(rank: int, target: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    batches = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(rank))

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return list(whole(model).values())

    with fsdp1_warns():
        space = run(HEADER + ACCUMULATED)
        wrapped = space["wrap"](model)
        space["accumulate"](wrapped, wrapped, batches)
        expected = gradients(wrapped)
    space = moved(ACCUMULATED, target)
    sharded = space["wrap"](twin)
    compiled = torch.compile(sharded, backend="eager")
    assert not isinstance(compiled, FSDPModule)
    space["accumulate"](sharded, compiled, batches)
    torch.testing.assert_close(gradients(sharded), expected)


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.linear = inner, nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.met: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.get_buffer("scale")
        self.met.append(scale.dtype)
        return self.linear(self.inner(x)) * scale.to(x.dtype)


BY_PARTS = """
def wrap(model, precision):
    model.inner = FSDP(
        model.inner,
        mixed_precision=MixedPrecision(torch.bfloat16, buffer_dtype={inner}),
        device_id=torch.device("cpu"),
    )
    return FSDP(
        model, mixed_precision=MixedPrecision(torch.bfloat16, buffer_dtype={outer}), device_id=torch.device("cpu")
    )
"""


@SHARED
@pytest.mark.parametrize(
    ("inner", "outer"),
    [("torch.bfloat16", "torch.bfloat16"), ("torch.float16", "torch.bfloat16"), ("None", "torch.bfloat16")],
)
@ranks(2)
def test_buffers_of_parts_are_cast_as_their_own_call_said_and_saved_as_they_were(
    rank: int, inner: str, outer: str, target: str
):
    def dtypes(space: dict[str, Any]) -> tuple[list[torch.dtype], dict[str, torch.dtype]]:
        torch.manual_seed(0)
        parts = [Scaled(nn.Identity())]
        parts.append(Scaled(parts[0]))
        model = space["wrap"](parts[1], None)
        model(torch.ones(2, 4)).sum().backward()
        saved = {name: value.dtype for name, value in model.state_dict().items() if "scale" in name}
        return [dtype for part in parts for dtype in part.met], saved

    body = BY_PARTS.format(inner=inner, outer=outer)
    with fsdp1_warns():
        expected = dtypes(run(HEADER + body))
    assert set(expected[1].values()) == {torch.float32}
    assert dtypes(moved(body, target)) == expected


TOLD = """
def wrap(model, **settings):
    return FSDP(model, **settings)
"""
SETTINGS = {"use_orig_params": True, "device_id": torch.device("cpu")}


def updated(space: dict[str, Any], rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), "lr": 0.5}]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model = space["wrap"](model, **SETTINGS)
    for step in range(3):
        optimizer.zero_grad()
        batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        model(batch).pow(2).sum().backward()
        optimizer.step()
        scheduler.step()
    return whole(model)


@SHARED
@ranks(2)
def test_optimizer_built_before_settings_of_run_time_updates_the_model(rank: int, target: str):
    with fsdp1_warns():
        expected = updated(run(HEADER + TOLD), rank)
    found = updated(moved(TOLD, target), rank)
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    assert not torch.equal(found["0.weight"], start[0].weight)  # it did train
    torch.testing.assert_close(found, expected)


@SHARED
@ranks(1)
def test_optimizer_with_state_of_whole_parameters_is_refused(rank: int, target: str):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    model = moved(TOLD, target)["wrap"](model, **SETTINGS)
    with pytest.raises(RuntimeError, match="load it after sharding"):
        optimizer.step()


DRAWN_APART = """
def build(make, rank):
    torch.manual_seed(7 + rank)
    return FSDP(make(), device_id=torch.device("cpu"))
"""


@TARGETS
@ranks(2)
def test_ranks_that_draw_apart_keep_their_parts_as_with_fsdp1(rank: int, target: str):
    def built(space: dict[str, Any]) -> dict[str, torch.Tensor]:
        return whole(space["build"](lambda: nn.Linear(4, 4, bias=False), rank))

    with fsdp1_warns():
        expected = built(run(HEADER + DRAWN_APART))
    torch.testing.assert_close(built(moved(DRAWN_APART, target)), expected)


AROUND = """
def wrap(model):
    return FSDP(model, device_id=torch.device("cpu"))


def save(outer, inner):
    outer.inner = wrap(inner)
    return states(outer.inner, outer)


def states(model, outer):
    model = outer if outer is not None else wrap(model)
    return model.state_dict()
"""


@SHARED
@ranks(2)
def test_state_dict_of_a_module_around_a_sharded_one_is_whole(rank: int, target: str):
    def saved(space: dict[str, Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        outer = nn.Module()
        return space["save"](outer, nn.Linear(4, 4))

    with fsdp1_warns():
        expected = dict(saved(run(HEADER + AROUND)))
    found = saved(moved(AROUND, target))
    torch.testing.assert_close(dict(found), expected)


REPLICATED = {
    "at_run_time": """
def wrap(model, mesh, strategy):
    return FSDP(model, device_mesh=mesh, sharding_strategy=strategy)
""",
    "written": """
from torch.distributed.device_mesh import init_device_mesh


def wrap(model, mesh, strategy):
    own = init_device_mesh("cpu", (2,))
    return FSDP(model, device_mesh=own, sharding_strategy=ShardingStrategy.NO_SHARD)
""",
}


@TARGETS
@pytest.mark.parametrize("kind", REPLICATED)
@ranks(2)
def test_no_shard_over_a_mesh_keeps_a_whole_copy_on_every_rank(rank: int, kind: str, target: str):
    space = moved(REPLICATED[kind], target)
    model = space["wrap"](nn.Linear(4, 4), init_device_mesh("cpu", (2,)), ShardingStrategy.NO_SHARD)
    assert {tuple(p.to_local().shape) for p in model.parameters()} == {(4, 4), (4,)}


EARLY = """
def wrap(model, optimizer, **unused):
    model = FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))
    return model


def decayed(model):
    return [getattr(p, "decays", False) for p in model.parameters()]
"""


@ranks(2)
def test_parameters_taken_or_marked_before_are_those_of_the_sharded_model(rank: int):
    def trained(space: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[bool]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[0].weight.decays = True
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model = space["wrap"](model, optimizer)
        for step in range(3):
            batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            scaler.scale(model(batch).pow(2).sum()).backward()
            scaler.unscale_(optimizer)  # before the first step
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return whole(model), space["decayed"](model)

    with fsdp1_warns():
        expected = trained(run(HEADER + EARLY))
    assert expected[1] == [True, False, False, False]
    torch.testing.assert_close(trained(moved(EARLY, "torch")), expected)


PARTS = """
def wrap(module):
    return FSDP(
        module, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32), device_id=torch.device("cpu")
    )


def build(model, each):
    for index in range(3):
        model.blocks[index] = wrap(model.blocks[index])
    return each(model, wrap)
"""


@ranks(2)
def test_only_the_outermost_of_modules_sharded_by_one_function_casts_its_inputs(rank: int):
    def losses(space: dict[str, Any]) -> tuple[list[torch.dtype], list[float]]:
        torch.manual_seed(0)
        model, met = Toy(), list[torch.dtype]()
        for block in model.blocks:
            block.register_forward_pre_hook(lambda module, args: met.extend(arg.dtype for arg in args))
        model = space["build"](model, lambda model, wrap: wrap(model))
        return met, train(model, rank)

    with fsdp1_warns():
        expected = losses(run(HEADER + PARTS))
    assert set(expected[0]) == {torch.bfloat16, torch.float32}
    found = losses(moved(PARTS, "torch"))
    assert found[0] == expected[0], (found, expected)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=0)


INHERITED = """
class Mine(FSDP):
    def __init__(self, module, scale, **settings):
        self.scale = scale
        super().__init__(module, device_id=torch.device("cpu"), **settings)

    def forward(self, *args):
        return super().forward(*args) * self.scale

    def load_state_dict(self, state, *args):
        return super().load_state_dict({key: value + 1 for key, value in state.items()}, *args)


def wrap(model):
    return Mine(model, 2.0, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Sequential, torch.nn.Linear}))


def kinds(model):
    return isinstance(model, FSDP), isinstance(model, Mine), model.module[0].in_features, model[1].out_features
"""


@ranks(2)
def test_subclass_of_fsdp1_shards_and_keeps_its_methods(rank: int):
    def results(space: dict[str, Any]) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = space["wrap"](nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
        losses = train(model, rank)
        state = dict(model.state_dict())
        model.load_state_dict(state)
        return losses, state, dict(model.state_dict()), space["kinds"](model), whole(model)

    with fsdp1_warns():
        expected = results(run(HEADER + INHERITED))
    found = results(moved(INHERITED, "torch"))
    assert list(found[1]) == list(expected[1])
    torch.testing.assert_close(found, expected)


SCALED = """
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def prepare(model, group):
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    model = FSDP(model, process_group=group, ignored_states=[model[1].weight], device_id=torch.device("cpu"))
    return model, scaler


def clip(model):
    return model.clip_grad_norm_(1.0)
"""


@SHARED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@ranks(2)
def test_scaler_takes_whole_and_float16_gradients_and_ranks_of_other_meshes_skip_with_it(
    rank: int, target: str, dtype: torch.dtype
):
    group = init_device_mesh("cpu", (2, 1)).get_group(1)

    def step(space: dict[str, Any]) -> tuple[float, list[float], float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(dtype)
        model, scaler = space["prepare"](model, group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            scaler.scale(model(torch.ones(2, 4, dtype=dtype)).float().sum() * 400).backward()
            if number == 0 and rank == 1:
                model[1].weight.grad.fill_(float("inf"))
            scaler.unscale_(optimizer)
            norm = float(space["clip"](model))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale(), [float(one.detach().float().sum()) for one in whole(model).values()], norm

    with fsdp1_warns():
        expected = step(run(HEADER + SCALED))
    scale, sums, norm = step(moved(SCALED, target))
    assert scale == expected[0] == 2.0
    assert sums == pytest.approx(expected[1], rel=1e-2)
    assert norm == pytest.approx(expected[2], rel=1e-2)


SAVED = """
from torch.distributed.fsdp import StateDictType


def wrap(model):
    return FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)


def save(model, optimizer, kind=StateDictType.FULL_STATE_DICT):
    with FSDP.state_dict_type(model, kind):
        return FSDP.optim_state_dict(model, optimizer), FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
"""


@SHARED
@ranks(2)
def test_state_taken_of_an_optimizer_before_its_first_step_leaves_it_as_it_is(rank: int, target: str):
    def after(space: dict[str, Any]) -> tuple[list[Any], list[float]]:
        torch.manual_seed(0)
        model = space["wrap"](nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        sizes = []
        for step in range(3):
            sizes += [len(one.get("state", {})) for one in space["save"](model, optimizer)]
            (model(torch.ones(2, 4)) * step).pow(2).sum().backward()
            optimizer.step()
        return sizes, [float(one.sum()) for one in whole(model).values()]

    with fsdp1_warns():
        expected = after(run(HEADER + SAVED))
    assert after(moved(SAVED, target)) == (expected[0], pytest.approx(expected[1]))
