"""Mixed precision of shardwise.fsdp1: what is cast where, as FSDP1 does it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from tests.by_hand import assert_same
from tests.fsdp1_pairs import COARSE, EXACT, OURS, both, full_state, quiet, wrapped
from tests.ranks import ranks

BF16 = torch.bfloat16


class Seen(nn.Module):
    """Remembers the dtypes it was called with and its buffer's."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("shift", torch.full((width,), 0.3))
        self.register_buffer("count", torch.tensor([3]))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes += [x.dtype, self.linear.weight.dtype, self.shift.dtype, self.count.dtype]
        return self.linear(x.to(self.linear.weight.dtype)) + self.shift.to(self.linear.weight.dtype)


class Upcast(nn.Module):
    """Hands its inner module float32, whatever it computes in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Seen(), Seen()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).float())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batch(rank: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize(
    "precision",
    [
        MixedPrecision(param_dtype=BF16),
        MixedPrecision(param_dtype=BF16, buffer_dtype=BF16),
        MixedPrecision(param_dtype=BF16, cast_forward_inputs=True),
        MixedPrecision(param_dtype=BF16, cast_root_forward_inputs=False),
        MixedPrecision(buffer_dtype=BF16),
        None,
    ],
    ids=["params", "buffers", "cast everywhere", "cast nowhere", "buffers only", "none"],
)
@ranks(2)
def test_modules_see_the_dtypes_that_fsdp1_shows_them(rank: int, precision: MixedPrecision | None):
    def run(api: Any) -> Any:
        unit = wrapped(api, built(Upcast), auto_wrap_policy=ModuleWrapPolicy({Seen}), mixed_precision=precision)
        unit(batch(rank)).float().sum().backward()
        state = full_state(api, unit)
        return unit.first.module.dtypes, unit.second.module.dtypes, {name: t.dtype for name, t in state.items()}, state

    real, ours = both(run)
    assert ours[:3] == real[:3]
    assert_same(ours[3], real[3])


@pytest.mark.parametrize("by_size", [False, True])
@ranks(2)
def test_batch_norm_keeps_full_precision_under_a_policy(rank: int, by_size: bool):
    policy: Any = ModuleWrapPolicy({nn.Linear})
    if by_size:
        policy = lambda module, recurse, nonwrapped_numel: size_based_auto_wrap_policy(  # noqa: E731
            module, recurse, nonwrapped_numel, min_num_params=30
        )

    def run(api: Any) -> Any:
        unit = wrapped(api, built(Normed), auto_wrap_policy=policy, mixed_precision=MixedPrecision(BF16, BF16, BF16))
        optimizer = torch.optim.SGD(unit.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            output = unit(batch(rank))
            output.float().square().mean().backward()
            optimizer.step()
        names = [name for name, module in unit.named_modules() if isinstance(module, api.FullyShardedDataParallel)]
        return names, output.dtype, full_state(api, unit)

    real, ours = both(run)
    assert ours[:2] == real[:2]
    assert_same(ours[2], real[2], **EXACT)
    assert any(name.endswith("layers.1") for name in ours[0])


@ranks(2)
def test_a_buffer_under_two_names_stays_one(rank: int):
    model = built(Upcast)
    model.second.shift = model.first.shift
    with quiet():
        unit = wrapped(OURS, model, mixed_precision=MixedPrecision(buffer_dtype=BF16))
        unit(batch(rank))
    assert unit.first.shift is unit.second.shift
    assert unit.first.shift.dtype is BF16


@ranks(2)
def test_a_model_in_evaluation_computes_as_in_training(rank: int):
    def run(api: Any) -> Any:
        unit = wrapped(api, built(Upcast), mixed_precision=MixedPrecision(BF16, BF16, BF16)).eval()
        with torch.no_grad():
            return unit(batch(rank))

    real, ours = both(run)
    assert ours.dtype is real.dtype
    torch.testing.assert_close(ours, real)


@ranks(2)
def test_full_precision_in_eval_where_fsdp1s_variable_asks_for_it(rank: int):
    def run(api: Any) -> Any:
        unit = wrapped(api, built(Upcast), mixed_precision=MixedPrecision(BF16, BF16, BF16), use_orig_params=True)
        outputs, dtypes = [], []
        for training in (True, False, True, False):
            unit.train(training)
            outputs.append(unit(batch(rank)))
            outputs[-1].float().square().mean().backward()
            dtypes.append([buffer.dtype for buffer in unit.buffers()])
        with api.FullyShardedDataParallel.summon_full_params(unit, with_grads=True):
            return outputs, dtypes, [parameter.grad.clone() for parameter in unit.parameters()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        real, ours = both(run)
    assert [output.dtype for output in ours[0]] == [BF16, torch.float32] * 2
    assert ours[1] == real[1]
    torch.testing.assert_close(ours[0][1], real[0][1])
    torch.testing.assert_close((ours[0], ours[2]), (real[0], real[2]), **COARSE)
