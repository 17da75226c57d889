"""The parts of parity() that need no second rank: conventions, distances, tolerances, the one process."""

import json
import math
import random
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from shardwise.diagnosing.parity import (
    ReferenceRun,
    Task,
    average,
    bind_batch,
    bind_loss,
    call_model,
    loss_of_output,
    parity,
)
from shardwise.diagnosing.parity_criteria import (
    Deviation,
    Difference,
    Parity,
    likely_cause,
    measure,
    step_slack,
    tolerance_for,
)
from shardwise.distributed.mesh import shutdown
from shardwise.errors import ConfigError
from shardwise.models.random_state import kept_random_state
from shardwise.planning.plan import Group, Plan, PlannedParameter


def deviation(quantity: Any, sharded: float | None, reference: float | None, name: str = "a.weight", step: int = 1):
    return Deviation(
        quantity=quantity,
        name=name,
        step=step,
        rank=0,
        sharded=sharded,
        reference=reference,
        relative=1.0,
        within=False,
    )


def cause(*deviations: Deviation, num_compared: int = 4, tied: frozenset[str] = frozenset(), **options: bool) -> str:
    return likely_cause(
        deviations,
        num_compared=num_compared,
        world_size=4,
        tied=tied,
        **{"low_precision": False, **options},  # pyrefly: ignore[bad-argument-type]
    )


@pytest.mark.parametrize(
    ("make_batch", "expected"),
    [
        (lambda rank, step: ("named", rank, step), ("named", 3, 5)),
        (lambda step: ("named", step), ("named", 5)),
        (lambda *, seed: ("named", seed), ("named", 7)),
        (lambda number: ("seed", number), ("seed", 7)),
        (lambda first, second: ("pair", first, second), ("pair", 3, 5)),
        (lambda: ("nothing",), ("nothing",)),
        (lambda size=4: ("default", size), ("default", 4)),
        (lambda rank, size=4: (rank, size), (3, 4)),
    ],
)
def test_batch_maker_is_called_as_it_is_written(make_batch, expected):
    assert bind_batch(make_batch)(3, 5, 7) == expected


@pytest.mark.parametrize("bad", [lambda a, b, c: a, lambda rank, size: rank, 5])
def test_batch_maker_that_cannot_be_called_is_refused(bad):
    with pytest.raises(ConfigError, match="make_batch") as caught:
        bind_batch(bad)
    assert caught.value.fix


def test_loss_is_called_as_it_is_written():
    model, batch = nn.Identity(), torch.ones(2)
    assert bind_loss(lambda output: output.sum())(model, batch) == 2
    assert bind_loss(lambda output, given: (output + given).sum())(model, batch) == 4
    assert bind_loss(lambda model, given: model(given).sum() + 1)(model, batch) == 3
    assert bind_loss(None)(model, batch) == 1
    with pytest.raises(ConfigError, match="loss has parameters"):
        bind_loss(lambda a, b, c: a)


def test_batch_is_spread_over_arguments():
    class Model(nn.Module):
        def forward(self, first: object, second: object = None) -> tuple[object, object]:
            return first, second

    assert call_model(Model(), (1, 2)) == (1, 2)
    assert call_model(Model(), {"second": 2, "first": 1}) == (1, 2)
    assert call_model(Model(), "one") == ("one", None)


def test_default_loss_prefers_the_models_own():
    own, other = torch.tensor(3.0), torch.ones(4)
    assert loss_of_output({"loss": own, "logits": other}) == 3
    assert loss_of_output(SimpleNamespace(loss=own, logits=other)) == 3
    assert loss_of_output(own) == 3
    assert loss_of_output((other, own)) == 3
    assert loss_of_output([other, {"x": 2 * other}, torch.tensor([1, 2])]) == 5

    @dataclass
    class Output:
        hidden: Tensor

    assert loss_of_output(Output(2 * other)) == 4
    with pytest.raises(ConfigError, match="no floating-point tensor"):
        loss_of_output(torch.tensor([1, 2]))


def test_distance_is_relative_to_the_largest_value():
    reference = torch.tensor([100.0, 1.0])
    assert measure(torch.tensor([100.0, 1.5]), reference, 1e-5).relative == pytest.approx(5e-3)
    assert measure(torch.tensor([100.0, 1.0005]), reference, 1e-5).within
    assert not measure(torch.tensor([100.1, 1.0]), reference, 1e-5).within
    assert measure(torch.tensor([100.1, 1.0]), reference, 1e-5).sharded == pytest.approx(100.1)


def test_distance_of_what_has_no_distance():
    one, nan = torch.ones(2), torch.tensor([math.nan, 1.0])
    assert measure(None, None, 0.1).within
    assert not measure(None, torch.zeros(2), 0.1).within  # AdamW would decay one of them
    assert not measure(torch.zeros(2), None, 0.1).within
    assert not measure(one, torch.ones(3), 0.1).within
    assert not measure(nan, one, 0.1).within
    assert measure(nan, nan.clone(), 0.1).within
    assert measure(torch.zeros(0, 3), torch.zeros(0, 3), 0.0).within
    assert not measure(torch.tensor([2]), torch.tensor([1]), 0.9).within  # counters are equal or not
    assert not measure(torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), 0.1).within


def test_noise_in_a_gradient_excuses_only_its_own_entry():
    reference, sharded = torch.tensor([1e-9, 1.0]), torch.tensor([-1e-9, 1.0])
    slack = step_slack(sharded, reference, largest_update=1e-3)
    assert slack.tolist() == pytest.approx([4e-3, 0.0])
    before = torch.tensor([0.5, 0.5])
    assert measure(before + torch.tensor([1e-3, 0.0]), before, 1e-5, slack=slack).within
    assert not measure(before + torch.tensor([0.0, 1e-3]), before, 1e-5, slack=slack).within


def plan_of(storage: str, compute: str | None = None) -> Plan:
    parameter = PlannedParameter(fqn="weight", shape=(4, 4), dtype=storage)
    group = Group(modules=("",), kind="root", parameters=(parameter,), param_dtype=compute)
    return Plan(model="M", device="cpu", axes=(("shard", 2),), groups=(group,))


def test_tolerance_follows_the_coarsest_dtype():
    assert tolerance_for(plan_of("float32")).relative == 1e-5
    assert tolerance_for(plan_of("float64")).relative == 1e-10
    assert tolerance_for(plan_of("bfloat16")).relative == 0.02
    narrowed = tolerance_for(plan_of("float32", "bfloat16"))
    assert (narrowed.relative, narrowed.low_precision) == (0.1, True)
    assert not tolerance_for(plan_of("bfloat16", "bfloat16")).low_precision
    assert tolerance_for(plan_of("float32"), 0.5).at(1) == 0.5
    assert tolerance_for(plan_of("float32")).at(2) == pytest.approx(1e-4)


def test_average_counts_a_rank_without_gradient_as_zero():
    assert average([None, None]) is None
    assert average([torch.tensor([4.0]), None]) == 2
    # 256 + 1 is 256 in bfloat16: summed there, the ones would be lost.
    mean = average([torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 2.0)])
    assert mean is not None
    assert mean.dtype == torch.bfloat16
    assert mean == 65


def test_one_process_keeps_each_ranks_statistics_apart():
    """Two ranks with constant inputs 1 and 3: each running mean follows its own rank."""
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0), nn.Linear(1, 1))
    task = Task(
        make_batch=lambda rank, step, seed: torch.tensor([[1.0], [1.0]]) + 2 * rank,
        loss=bind_loss(lambda output: output.sum()),
        seed=0,
        num_ranks=2,
        device=torch.device("cpu"),
    )
    reference = ReferenceRun(model, torch.optim.SGD(model.parameters(), lr=0.1), task, rank=0)
    reference.step(0)
    assert [float(buffers["0.running_mean"]) for buffers in reference.buffers] == [1.0, 3.0]  # pyrefly: ignore
    assert [int(buffers["0.num_batches_tracked"]) for buffers in reference.buffers] == [1, 1]  # pyrefly: ignore
    assert list(reference.parameter_order) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_causes_tell_the_usual_mistakes_apart():
    assert "summed over ranks instead of averaged" in cause(deviation("gradient", 8.0, 2.0))
    assert "divided by the number of ranks twice" in cause(deviation("gradient", 0.5, 2.0))
    assert "3 times those of one process" in cause(deviation("gradient", 6.0, 2.0), deviation("gradient", 3.0, 1.0))
    assert "never reached the shard" in cause(deviation("gradient", None, 2.0))
    assert "zeros were reduced" in cause(deviation("gradient", 0.0, None))
    assert "not averaged" in cause(deviation("gradient", 5.0, 2.0), usual_mistake=True)
    tied = frozenset({"a.weight"})
    assert "tied weight" in cause(deviation("gradient", -2.0, 2.0), tied=tied)
    assert "every gradient differs" in cause(deviation("gradient", -2.0, 2.0), num_compared=1)
    assert "tie is broken" in cause(deviation("tie", None, None))
    assert "holds other tensors" in cause(deviation("parameter", 1.0, 2.0), usual_mistake=True)


def test_verdict_is_valid_json_whatever_differs():
    missing = Deviation(
        quantity="gradient",
        name="a.weight",
        step=1,
        rank=0,
        sharded=None,
        reference=2.0,
        relative=math.inf,
        within=False,
    )
    verdict = Parity(
        equal=False,
        steps=1,
        world_size=2,
        losses=(math.nan,),
        reference_losses=(1.0,),
        tolerance=1e-5,
        tolerance_reason="float32",
        worst=(missing,),
        first_difference=Difference(deviation=missing, module="a (Linear)", num_others=0, cause="unknown"),
        plan="M in 1 groups",
    )
    read = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
    assert read["losses"] == [None]
    assert read["worst"][0]["relative"] is None
    assert read["first_difference"]["deviation"]["name"] == "a.weight"
    assert "gradient of `a.weight` differs at step 1 on rank 0\n  sharded none, one process 2" in str(verdict)


def test_rounding_is_suspected_first_in_16_bits():
    slight = Deviation(quantity="loss", name="", step=1, rank=0, sharded=1.0, reference=1.2, relative=0.2, within=False)
    assert cause(slight, low_precision=True).startswith("possibly nothing but rounding")
    assert not cause(slight).startswith("possibly")


def test_random_state_is_kept_also_after_an_error():
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), numpy.random.rand()

    def seed() -> None:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)

    seed()
    with suppress(ZeroDivisionError), kept_random_state():
        draw()
        raise ZeroDivisionError
    after = draw()
    seed()
    assert after == draw()


def test_one_rank_without_a_launcher():
    """World size 1 takes the same path, process group and all."""
    try:
        result = parity(
            lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
            lambda: torch.randn(2, 4),
            steps=2,
        )
        assert result.equal, result
        assert (result.world_size, result.steps, len(result.losses)) == (1, 2, 2)
        assert str(result).startswith("parity: equal after 2 steps on 1 ranks")
        assert result.to_dict()["first_difference"] is None
    finally:
        shutdown()
