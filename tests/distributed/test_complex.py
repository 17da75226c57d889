"""Complex parameters: split as evenly as real ones; scalars are averaged; all train as in one process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwise import compat
from shardwise.config.schema import PrecisionConfig, ShardConfig
from shardwise.diagnosing.parity import parity
from shardwise.sharding.apply import shard
from tests.ranks import ranks
from tests.zoo.case import features
from tests.zoo.checking import mesh_of


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8, dtype=torch.complex64)
        self.phase = nn.Parameter(torch.tensor(1 + 0.5j))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.fft.ifft(self.mix(torch.fft.fft(x)) * self.phase).real


class Filter(nn.Module):
    """Complex and real parameters of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 4)
        self.scale, self.linear = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.ifft(torch.fft.fft(x.float()) @ self.weight).real
        return x + self.linear(mixed.to(x.dtype) * self.scale)


def spectral() -> nn.Module:
    return nn.Sequential(Spectral(), Spectral(), nn.Linear(8, 8))


def filters() -> nn.Module:
    return nn.Sequential(Filter(), Filter(), nn.Linear(8, 8))


@ranks(2)
@pytest.mark.parametrize(("build", "name"), [(spectral, "0.mix.weight"), (filters, "0.weight")])
def test_complex_parameters_train_as_in_one_process(rank: int, build: Callable[[], nn.Module], name: str):
    result = parity(build, features(2, 8), mesh=mesh_of(2))
    assert result.equal, result
    torch.manual_seed(0)
    matrix = shard(build(), mesh=mesh_of(2)).get_parameter(name)
    is_split = build is spectral or compat.SPLITS_GROUPS
    assert matrix.to_local().shape == (4 if is_split else 8, 8)  # pyrefly: ignore[not-callable]


@ranks(2)
def test_complex_gradients_accumulate_beside_real_ones_computed_in_bfloat16(rank: int):
    torch.manual_seed(0)
    whole, model = filters(), filters()
    model.load_state_dict(whole.state_dict())
    shard(model, ShardConfig(precision=PrecisionConfig(param_dtype="bfloat16")), mesh=mesh_of(2))
    for _ in range(2):
        x = torch.randn(3, 8)
        whole(x).square().mean().backward()
        model(x).square().mean().backward()
    for name, parameter in model.named_parameters():
        expected = whole.get_parameter(name)
        torch.testing.assert_close(parameter.full_tensor(), expected)  # pyrefly: ignore[not-callable]
        gradient = parameter.grad.full_tensor()  # pyrefly: ignore[missing-attribute]
        torch.testing.assert_close(gradient, expected.grad, rtol=0.1, atol=0.1)  # computed in bfloat16
        assert gradient.is_complex() == parameter.is_complex()


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.phase = (nn.Parameter(torch.randn(size, dtype=torch.complex64)) for size in ((3, 5), (5,)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft((torch.fft.rfft(x)[..., :3] @ self.weight) * self.phase, n=8)


@ranks(2)
def test_complex_parameters_that_do_not_divide_train_as_in_one_process(rank: int):
    """Of uneven parts DTensor's view_as_real is a copy, and an optimizer's update would be lost."""
    result = parity(lambda: nn.Sequential(Odd(), nn.Linear(8, 8), Odd()), features(2, 8), mesh=mesh_of(2))
    assert result.equal, result
