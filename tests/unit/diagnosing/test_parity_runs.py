"""The numbers and words of parity(): exact distances, limits, causes and the text of a verdict."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shardwise.diagnosing.parity import average
from shardwise.diagnosing.parity_criteria import (
    Deviation,
    Difference,
    Parity,
    likely_cause,
    measure,
    step_slack,
    tolerance_for,
)
from shardwise.planning.plan import Group, Plan, PlannedParameter

INF, NAN = math.inf, math.nan


def gap(ours: Any, theirs: Any, allowed: float = 0.1, **options: Any) -> tuple[Any, ...]:
    sharded, reference = (None if side is None else torch.tensor(side) for side in (ours, theirs))
    found = measure(sharded, reference, allowed, **options)
    return tuple(
        None if value is None else pytest.approx(value, rel=1e-6)
        for value in (found.relative, found.excess, found.sharded, found.reference, found.furthest)
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "options", "expected"),
    [
        ([1.0, 8.5], [1.0, 8.0], {}, (0.5 / 8, 0.5 / 0.8, 8.5, 8.0, 0.5)),
        ([-1.0, 8.0], [1.0, 8.0], {}, (2 / 8, 2 / 0.8, -1.0, 1.0, 2.0)),
        ([1.0], [2.0], {"floor": 20.0}, (1 / 20, 1 / 2, 1.0, 2.0, 1.0)),
        ([1.0], [2.0], {"floor": 1.0}, (1 / 2, 1 / 0.2, 1.0, 2.0, 1.0)),
        ([3.0, 1.5], [2.0, 1.0], {"slack": torch.tensor([0.8, 0.0])}, (1 / 2, 0.5 / 0.2, 1.5, 1.0, 1.0)),
        ([3], [2], {}, (1 / 2, INF, 3.0, 2.0, 1.0)),
        ([2], [2], {}, (0.0, 0.0, 2.0, 2.0, 0.0)),
        ([True], [False], {}, (INF, INF, 1.0, 0.0, 1.0)),
        ([0.0], [0.0], {}, (0.0, 0.0, 0.0, 0.0, 0.0)),
        ([1.0], [0.0], {}, (INF, INF, 1.0, 0.0, 1.0)),
        ([INF, 4.0], [INF, 4.0], {}, (0.0, 0.0, INF, INF, 0.0)),
        ([-INF, 4.0], [INF, 4.0], {}, (INF, INF, -INF, INF, INF)),
        ([1 + 2j], [1 + 4j], {}, (2 / 4, 2 / 0.4, 2.0, 4.0, 2.0)),
        (None, None, {}, (0.0, 0.0, None, None, 0.0)),
        (None, [1.0, -3.0, 2.0], {}, (INF, INF, None, -3.0, INF)),
        ([1.0, -3.0, 2.0], None, {}, (INF, INF, -3.0, None, INF)),
        ([5.0], [[1.0], [-2.0]], {}, (INF, INF, 5.0, -2.0, INF)),
        ([], [1.0], {}, (INF, INF, 0.0, 1.0, INF)),
    ],
    ids=range(18),
)
def test_distances(ours: Any, theirs: Any, options: dict[str, Any], expected: tuple[Any, ...]):
    assert gap(ours, theirs, **options) == expected


def test_an_entry_at_the_limit_is_within_and_one_beyond_is_not():
    assert measure(torch.tensor([2.5]), torch.tensor([2.0]), 0.25).within
    assert not measure(torch.tensor([2.5001]), torch.tensor([2.0]), 0.25).within
    assert measure(torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), 0.0).within


def test_slack_is_what_a_step_can_do():
    ours, theirs = torch.tensor([1.1, 2.0, 0.0, 1.0, -3.0]), torch.tensor([1.0, 2.0, 0.0, 0.0, 1.0])
    assert step_slack(ours, theirs, 0.5).tolist() == pytest.approx([0.2, 0.0, 0.0, 2.0, 2.0], rel=1e-6)


def test_average_is_over_all_ranks_in_wide_numbers():
    assert average([]) is None
    ones = [torch.tensor([1.0]), None, torch.tensor([2.0]), None]
    assert average(ones) == 0.75  # pyrefly: ignore
    short = average([torch.tensor([1 + 1j]), torch.tensor([3 + 1j])])
    assert short is not None
    assert (short.dtype, short.tolist()) == (torch.complex64, [2 + 1j])


def plan_of(*dtypes: tuple[str, str | None]) -> Plan:
    groups = tuple(
        Group(
            modules=(f"m{index}",), kind="block", param_dtype=compute,
            parameters=(PlannedParameter(fqn=f"m{index}.weight", shape=(4, 4), dtype=storage),),
        )
        for index, (storage, compute) in enumerate(dtypes)
    )  # fmt: skip
    return Plan(model="M", device="cpu", axes=(("shard", 2),), groups=groups)


@pytest.mark.parametrize(
    ("dtypes", "relative", "growth", "low", "word"),
    [
        ([("float32", None)], 1e-5, 10.0, False, "float32; ranks add up"),
        ([("float32", None), ("float64", None)], 1e-5, 10.0, False, "float32; ranks add up"),
        ([("float64", None), ("complex128", None)], 1e-10, 10.0, False, "float64; ranks add up"),
        ([("float32", None), ("bfloat16", None)], 0.02, 1.0, False, "bfloat16 storage"),
        ([("float16", None)], 0.005, 1.0, False, "float16 storage"),
        ([("float16", None), ("bfloat16", None)], 0.02, 1.0, False, "bfloat16 storage"),
        ([("float32", "bfloat16")], 0.1, 1.0, True, "bfloat16 compute"),
        ([("float32", "float16")], 0.02, 1.0, True, "float16 compute"),
        ([("bfloat16", "float16"), ("float32", "bfloat16")], 0.1, 1.0, True, "bfloat16 compute"),
        ([("float16", "float32")], 0.005, 1.0, False, "float16 storage"),
        ([], 1e-5, 10.0, False, "float32"),
    ],
    ids=range(11),
)
def test_tolerances(dtypes: list[tuple[str, str | None]], relative: float, growth: float, low: bool, word: str):
    found = tolerance_for(plan_of(*dtypes))
    assert (found.relative, found.growth, found.low_precision) == (relative, growth, low)
    assert found.reason.startswith(word)
    assert [found.at(step) for step in (1, 2)] == pytest.approx([relative, relative * growth])
    asked = tolerance_for(plan_of(*dtypes), 0.3)
    assert (asked.relative, asked.growth, asked.low_precision, asked.reason) == (0.3, 1.0, low, "as asked")


def deviation(quantity: Any, sharded: float | None, reference: float | None, **more: Any) -> Deviation:
    given = {"name": "a.weight", "step": 1, "rank": 0, "relative": 1.0, "within": False, **more}
    return Deviation(quantity=quantity, sharded=sharded, reference=reference, **given)


def cause(*deviations: Deviation, **options: Any) -> str:
    given = {"num_compared": 4, "world_size": 4, "tied": frozenset(), "low_precision": False, **options}
    return likely_cause(deviations, **given)


@pytest.mark.parametrize(
    ("deviations", "options", "word"),
    [
        ([("weight", 1.0, 2.0)], {}, "started from different weights"),
        ([("tie", None, None)], {}, "the tie is broken"),
        ([("loss", 1.0, 2.0)], {}, "so the forward itself differs"),
        ([("buffer", 1.0, 2.0)], {}, "a buffer is each rank's own"),
        ([("parameter", 1.0, 2.0)], {}, "saw only this rank's shard"),
        ([("parameter", 1.0, 2.0)], {"usual_mistake": True}, "the optimizer holds other tensors"),
        ([("gradient", 8.1, 2.0)], {}, "4 times too large"),
        ([("gradient", 8.2, 2.0)], {}, "4.1 times those of one process"),
        ([("gradient", 0.505, 2.0)], {}, "4 times too small"),
        ([("gradient", 0.55, 2.0)], {}, "0.275 times those"),
        ([("gradient", 8.0, 2.0)], {"world_size": 1}, "some gradients agree"),
        ([("gradient", 8.0, 2.0)], {"usual_mistake": True}, "this rank's own gradient"),
        ([("gradient", 8.0, 2.0)], {"usual_mistake": True, "world_size": 1}, "some gradients agree"),
        ([("gradient", 2.02, 2.0)], {}, "some gradients agree"),
        ([("gradient", 2.1, 2.0)], {}, "1.05 times those"),
        ([("gradient", -8.0, 2.0)], {}, "some gradients agree"),
        ([("gradient", 8.0, 2.0), ("gradient", 3.0, 1.0)], {}, "some gradients agree"),
        ([("gradient", 8.0, 2.0), ("gradient", 4.04, 1.0)], {}, "4 times too large"),
        ([("gradient", 8.0, 2.0), ("gradient", 1.0, 0.0)], {}, "some gradients agree"),
        ([("gradient", 8.0, 2.0), ("gradient", None, 1.0)], {}, "some gradients agree"),
        ([("gradient", 3.0, 2.0), ("gradient", -3.0, 1.0)], {"num_compared": 2}, "every gradient differs"),
        ([("gradient", 3.0, 2.0), ("gradient", -3.0, 1.0)], {"num_compared": 3}, "some gradients agree"),
        ([("gradient", 3.0, -2.0)], {"tied": frozenset({"a.weight", "b"})}, "missed the shared gradient"),
        ([("gradient", 3.0, -2.0)], {"tied": frozenset({"b"})}, "some gradients agree"),
        ([("gradient", None, 2.0)], {}, "never reached the shard"),
        ([("gradient", 0.0, None)], {}, "one process has no gradient here"),
    ],
    ids=range(26),
)
def test_causes(deviations: list[tuple[Any, Any, Any]], options: dict[str, Any], word: str):
    assert word in cause(*(deviation(*each) for each in deviations), **options)


def test_a_loss_that_differs_later_is_another_matter():
    assert "so the forward itself differs" in cause(deviation("loss", 1.0, 2.0, step=1))
    assert "outlived optimizer.step()" in cause(deviation("loss", 1.0, 2.0, step=2))


@pytest.mark.parametrize(("relative", "suspected"), [(0.49, True), (0.5, False), (INF, False), (NAN, False)])
@pytest.mark.parametrize("low", [False, True])
def test_rounding(relative: float, suspected: bool, low: bool):
    told = cause(deviation("parameter", 1.0, 2.0, relative=relative), low_precision=low)
    assert told.startswith("possibly nothing but rounding") == (suspected and low)
    assert told.endswith("saw only this rank's shard")


def verdict(**changes: Any) -> Parity:
    worst = (deviation("loss", 1.0, 2.0, name="", relative=0.25), deviation("gradient", 3.0, 4.0, relative=1e-7))
    given: dict[str, Any] = {
        "equal": True, "steps": 2, "world_size": 4, "losses": (1.23456789, 2.0), "reference_losses": (1.5, 2.5),
        "tolerance": 1e-5, "tolerance_reason": "float32", "worst": worst, "first_difference": None, "plan": "M",
    }  # fmt: skip
    return Parity(**{**given, **changes})


def test_the_text_of_an_equal_run():
    lines = str(verdict()).splitlines()
    assert lines[:2] == ["parity: equal after 2 steps on 4 ranks", "  loss       1.23457  2"]
    assert [line.split()[:2] for line in lines[2:4]] == [["worst", "loss"], ["worst", "gradient"]]
    assert lines[-2:] == ["  tolerance  1e-05: float32", "  plan       M"]
    assert verdict().worst_of("gradient") == verdict().worst[1]
    assert verdict().worst_of("tie") is None


@pytest.mark.parametrize(
    ("seen", "module", "others", "expected"),
    [
        (
            deviation("gradient", 0.123456789, None, step=3, rank=2), "a (Linear)", 2,
            ["gradient of `a.weight` differs at step 3 on rank 2, and 2 more like it",
             "sharded 0.12345679, one process none", "module a (Linear)", "likely cause: why"],
        ),
        (
            deviation("weight", 1.0, 2.0, step=0), "", 0,
            ["weight of `a.weight` differs before the first step on rank 0", "sharded 1, one process 2",
             "likely cause: why"],
        ),
        (
            deviation("loss", 1.0, 2.0, name=""), "", 0,
            ["loss differs at step 1 on rank 0", "sharded 1, one process 2", "likely cause: why"],
        ),
    ],
    ids=["gradient", "weight", "loss"],
)  # fmt: skip
def test_the_text_of_a_difference(seen: Deviation, module: str, others: int, expected: list[str]):
    first = Difference(deviation=seen, module=module, num_others=others, cause="why")
    assert str(first).splitlines() == expected
    lines = str(verdict(equal=False, first_difference=first)).splitlines()
    assert lines[0] == "parity: DIFFERENT after 2 steps on 4 ranks"
    assert lines[1 : 1 + len(expected)] == ["  " + line for line in expected]
    assert lines[1 + len(expected) :][:2] == ["  loss       1.23457  2", "  one process 1.5  2.5"]


def test_json_of_a_verdict():
    found = verdict(losses=(INF, 1.0)).to_dict()
    assert found["losses"] == [None, 1.0]
    assert found["first_difference"] is None
    assert found["worst"][0] == {
        "quantity": "loss", "name": "", "step": 1, "rank": 0, "sharded": 1.0, "reference": 2.0, "relative": 0.25,
        "within": False,
    }  # fmt: skip
    assert {key: found[key] for key in ("equal", "steps", "world_size", "tolerance", "plan")} == {
        "equal": True, "steps": 2, "world_size": 4, "tolerance": 1e-5, "plan": "M",
    }  # fmt: skip
