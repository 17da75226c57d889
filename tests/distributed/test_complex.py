"""Complex parameters: matrices among complex ones are split, scalars are averaged, all train as in one process."""

import torch
from torch import Tensor, nn

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


def build() -> nn.Module:
    return nn.Sequential(Spectral(), Spectral(), nn.Linear(8, 8))


@ranks(2)
def test_complex_parameters_train_as_in_one_process(rank: int):
    result = parity(build, features(2, 8), mesh=mesh_of(2))
    assert result.equal, result
    torch.manual_seed(0)
    matrix = shard(build(), mesh=mesh_of(2)).get_parameter("0.mix.weight")
    assert matrix.to_local().shape == (4, 8)  # pyrefly: ignore[not-callable]
