"""Checkpoints of 0.1 whose optimizer state was mixed up are recognised, and the model in them is still used.

`tests/stored/mixed-order` was written by shardwise 0.1.0 on two ranks whose AdamW listed the parameters of `net()`
turned by one and by two places: a sharded checkpoint of step 2, and the same state by `save_full`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError
from tests.ranks import ranks
from tests.stored_checkpoints import STORED

MIXED = STORED / "mixed-order"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 4, generator=torch.Generator().manual_seed(step))).pow(2).sum().backward()
        optimizer.step()
    return model, optimizer


def assert_model_is_right(model: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), trained()[0].parameters(), strict=True):
        value = p.full_tensor() if hasattr(p, "full_tensor") else p
        torch.testing.assert_close(value, q, msg=name)


def test_verify_names_what_happened_and_what_is_usable() -> None:
    (finding,) = sw.verify_checkpoint(MIXED / "step-00000002")
    assert (finding.code, finding.severity.name) == ("SW337", "ERROR")
    assert "4 of its entries were stored twice and 4 not at all" in finding.message
    assert finding.where.endswith("step-00000002: optim")
    assert "the model is whole" in finding.fix


def test_verify_is_not_sure_of_a_full_file() -> None:
    (finding,) = sw.verify_checkpoint(MIXED / "full.pt")
    assert (finding.code, finding.severity.name) == ("SW338", "WARNING")
    assert "the model is whole" in finding.fix


def test_inspect_says_it_too() -> None:
    assert [finding.code for finding in sw.inspect_checkpoint(MIXED / "step-00000002").findings] == ["SW337"]


@ranks(2)
def test_load_refuses_the_optimizer_and_loads_the_model(rank: int, tmp_path: Path) -> None:
    model = sw.shard(net(), sw.ShardConfig(precision=sw.PrecisionConfig(param_dtype="storage")))
    before = [p.full_tensor().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with sw.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match="1 problem") as caught:
            checkpointer.load(path=MIXED / "step-00000002", model=model, optimizers=optimizer)
        assert "optim (SW337): ranks listed the optimizer's parameters in different orders" in caught.value.where
        assert "the model is whole" in caught.value.where
        assert all(torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), before, strict=True))
        assert checkpointer.load(path=MIXED / "step-00000002", model=model) == 2
    assert_model_is_right(model)


@ranks(1)
def test_the_weights_alone_load(rank: int) -> None:
    model = net()
    sw.load_weights(model, MIXED / "step-00000002")
    assert_model_is_right(model)


@ranks(1)
def test_a_full_file_loads_with_a_warning(rank: int) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.warns(UserWarning, match="SW338"):
        sw.load_full(MIXED / "full.pt", model=model, optimizers=optimizer)
    assert_model_is_right(model)
    # What the warning is about: this file does hold other parameters' moments.
    wanted, other = trained()
    pairs = zip(model.parameters(), wanted.parameters(), strict=True)
    assert not all(torch.allclose(optimizer.state[p]["exp_avg"], other.state[q]["exp_avg"]) for p, q in pairs)


@ranks(1)
def test_lists_turned_by_their_author_are_fine(rank: int, tmp_path: Path) -> None:
    """What this version writes stands in the model's order, whatever order the optimizer has."""
    model, _ = trained()
    optimizer = torch.optim.AdamW(list(model.parameters())[::-1], lr=0.01)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    sw.save_full(tmp_path / "full.pt", model=model, optimizers=optimizer)
    assert [finding.code for finding in sw.verify_checkpoint(tmp_path / "full.pt")] == []
    names = torch.load(tmp_path / "full.pt")["optim"]["param_groups"][0]["params"]
    assert names == [name for name, _ in model.named_parameters()]
