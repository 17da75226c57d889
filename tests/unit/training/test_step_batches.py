"""Which batch each step gets, with some of them left out, and after going back."""

from itertools import islice
from typing import Any

import pytest
import torch

from shardwise.distributed.stop_requests import StopRequest
from shardwise.training.objective import StepBatches, batch_of


class Counting:
    """Batches that hold their own number."""

    def __init__(self, fails_at: int = -1) -> None:
        self.number, self.fails_at = 0, fails_at

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.number == self.fails_at:
            raise OSError("gone")
        self.number += 1
        return {"number": torch.tensor([self.number - 1])}

    def skip(self, batches: int) -> None:
        self.number += batches

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def take(feed: StepBatches, count: int) -> list[int]:
    return [int(batch["number"]) for batch in islice(feed.until(1000, StopRequest()), count)]


def test_without_anything_left_out_steps_get_batches_in_order():
    assert take(StepBatches(Counting()), 4) == [0, 1, 2, 3]


def test_batch_that_is_left_out_after_going_back_is_given_to_no_step():
    feed = StepBatches(Counting())
    take(feed, 2)
    state = feed.state_dict()
    assert take(feed, 3) == [2, 3, 4]
    feed.leave_out(3)
    feed.load_state_dict(state)
    assert take(feed, 3) == [2, 4, 5]


def test_several_are_left_out_and_a_resumed_feed_knows_them():
    feed = StepBatches(Counting())
    begin = feed.state_dict()
    for bad_step in (0, 0, 2):  # batches 0, then 1, then what is the third step's now: 4
        feed.leave_out(bad_step)
    feed.load_state_dict(begin)
    assert take(feed, 2) == [2, 3]
    again = StepBatches(Counting())
    again.load_state_dict(feed.state_dict())
    assert again.left_out == {0, 1, 4}
    assert take(again, 3) == [5, 6, 7]


@pytest.mark.parametrize(("left_out", "expected"), [((), [0, 1, 2]), ((0, 1), [2, 3, 4]), ((1, 3), [0, 2, 4])])
def test_number_of_the_batch_of_a_step(left_out: tuple[int, ...], expected: list[int]):
    assert [batch_of(step, left_out) for step in range(3)] == expected


def test_a_failure_is_raised_and_a_stop_request_ends_the_batches():
    feed = StepBatches(Counting(fails_at=1))
    with pytest.raises(OSError, match="gone"):
        take(feed, 2)
    assert feed.steps == 1
    feed, stop = StepBatches(Counting()), StopRequest()
    for _ in feed.until(3, stop):
        if feed.steps == 2:
            stop.ask("SIGTERM")
    assert feed.state_dict() == {"steps": 2, "left_out": [], "source": {"number": 2}}
    assert [int(batch["number"]) for batch in feed.until(4, StopRequest())] == [2, 3]
