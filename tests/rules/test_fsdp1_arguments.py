"""Arguments of torch's own FSDP1 class are named where `fully_shard` is given them; its own arguments are not."""

from __future__ import annotations

import inspect

import pytest
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from shardwise.linting.files import LintSettings
from shardwise.linting.lint import lint_text

OWN = set(inspect.signature(fully_shard).parameters) - {"module"}
FSDP1 = set(inspect.signature(FullyShardedDataParallel.__init__).parameters) - OWN - {"self", "module"}
OLD = {"ignored_parameters"}  # before torch 2.0 had ignored_states


def codes(argument: str) -> list[tuple[str, str]]:
    text = (
        "from torch.distributed.fsdp import fully_shard\n\n\ndef wrap(model, value):\n"
        f"    fully_shard(model, {argument}=value)\n    return model\n"
    )
    found = lint_text(text, "a.py", LintSettings()).findings
    return [(each.code, each.message) for each in found if each.code in ("SW193", "SW215")]


@pytest.mark.parametrize("argument", sorted(FSDP1 | OLD))
def test_an_argument_of_fsdp1_is_named(argument: str):
    assert codes(argument) == [("SW193", f"{argument} is an argument of FSDP1; fully_shard does not take it")]


@pytest.mark.parametrize("argument", sorted(OWN))
def test_an_argument_of_its_own_is_left_alone(argument: str):
    assert codes(argument) == []


def test_an_argument_of_neither_is_named():
    assert codes("reshard_after_forwards") == [("SW215", "fully_shard has no argument reshard_after_forwards")]
