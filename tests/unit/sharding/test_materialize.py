"""Writes to protected tensors vanish, writes to others arrive, whatever torch call makes them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardwise.sharding.inventory import TensorEntry, take_inventory
from shardwise.sharding.materialize import FullOnDemand

WAYS: dict[str, Callable[[nn.Parameter, nn.Parameter], object]] = {
    "init": lambda a, b: nn.init.normal_(a),
    "truncated init": lambda a, b: nn.init.trunc_normal_(a),
    "method": lambda a, b: a.fill_(1.0),
    "data": lambda a, b: a.data.add_(1.0),
    "new data": lambda a, b: setattr(a, "data", torch.ones_like(a)),
    "item": lambda a, b: a.__setitem__(0, 3.0),
    "augmented": lambda a, b: a.mul_(2.0),
    "copy of another": lambda a, b: a.copy_(b),
    "out": lambda a, b: torch.add(a, b, out=a),
    "list of tensors": lambda a, b: torch._foreach_add_([a, b], 1.0),
    "view held while another is opened": lambda a, b: [a.t(), b.sum()][0].zero_(),
    "result held while another is opened": lambda a, b: [nn.init.ones_(a), b.sum()][0].mul_(5.0),
}


def run(way: str, protected: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor an initialiser wrote under the mode, and what it writes without."""
    torch.manual_seed(0)
    model = nn.Bilinear(2, 3, 4)
    a, b = (nn.Parameter(torch.rand(3, 3)) for _ in range(2))
    model.a, model.b = a, b
    expected_a, expected_b = nn.Parameter(a.detach().clone()), nn.Parameter(b.detach().clone())
    kept: dict[str, torch.Tensor] = {}

    def keep(entry: TensorEntry, full: torch.Tensor) -> None:
        kept[entry.fqn] = full

    # Plain tensors are stood in for only when protected, so protection ends before they are closed.
    shielded = [True]
    mode = FullOnDemand(take_inventory(model), keep, lambda entry: shielded[0], torch.device("cpu"))
    before = a.detach().clone()
    with torch.no_grad():
        torch.manual_seed(1)
        with mode:
            WAYS[way](a, b)
        torch.manual_seed(1)
        WAYS[way](expected_a, expected_b)
    shielded[0] = protected
    mode.close()
    assert torch.equal(a, before), "the tensor itself is never touched"
    return kept.get("a", before), expected_a.detach()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_arrives(way: str):
    found, expected = run(way, protected=False)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_protected_stays(way: str):
    found, expected = run(way, protected=True)
    assert not torch.equal(found, expected)


def test_metadata_opens_nothing():
    model = nn.Linear(3, 3)
    mode = FullOnDemand(take_inventory(model), lambda *_: pytest.fail("opened"), lambda _: True, torch.device("cpu"))
    weight = model.weight
    with mode:
        assert (weight.shape, weight.dim(), weight.dtype, weight.requires_grad) == (
            (3, 3),
            2,
            torch.float32,
            True,
        )
    assert not mode._open
