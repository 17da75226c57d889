"""The order of samples: a permutation of every epoch, without storing one."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.training.data.loader import samples_at, shuffled

SEEDS = st.integers(-(2**40), 2**40)


@settings(max_examples=60, deadline=None)
@given(num_samples=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 1000))
def test_every_epoch_has_every_sample_once(num_samples: int, seed: int, epoch: int):
    order = shuffled(torch.arange(num_samples), num_samples, seed=seed, epoch=epoch)
    assert order.sort().values.tolist() == list(range(num_samples))


@settings(max_examples=40, deadline=None)
@given(num_samples=st.integers(2, 2**62), first=st.integers(0, 2**62), seed=SEEDS)
def test_any_part_of_a_huge_epoch_is_distinct_samples_within_it(num_samples: int, first: int, seed: int):
    first %= num_samples
    positions = torch.arange(first, min(first + 100, num_samples))
    part = shuffled(positions, num_samples, seed=seed, epoch=0)
    assert part.unique().numel() == part.numel()
    assert int(part.min()) >= 0
    assert int(part.max()) < num_samples


@settings(max_examples=40, deadline=None)
@given(
    num_samples=st.integers(1, 50),
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    seed=SEEDS,
    shuffle=st.booleans(),
)
def test_parts_put_together_are_all_epochs_in_a_row(num_samples: int, cuts: list[int], seed: int, shuffle: bool):
    parts, first = [], 0
    for count in cuts:
        parts += samples_at(torch.arange(first, first + count), num_samples, seed=seed, shuffle=shuffle).tolist()
        first += count
    whole = []
    for epoch in range(first // num_samples + 1):
        numbers = torch.arange(num_samples)
        order = shuffled(numbers, num_samples, seed=seed, epoch=epoch) if shuffle else numbers
        whole += order.tolist()
    assert parts == whole[:first]


def test_seeds_and_epochs_have_orders_of_their_own():
    numbers = torch.arange(100)
    orders = {tuple(shuffled(numbers, 100, seed=s, epoch=e).tolist()) for s in range(10) for e in range(10)}
    assert len(orders) == 100


def test_an_order_is_the_same_on_every_machine_and_version():
    """A run that continues elsewhere must find the same samples: this order may never change."""
    assert shuffled(torch.arange(10), 10, seed=0, epoch=0).tolist() == [5, 7, 9, 4, 1, 2, 8, 0, 6, 3]
    assert shuffled(torch.arange(3), 10**8, seed=7, epoch=3).tolist() == [44576501, 52768921, 91884985]


def test_positions_say_nothing_about_samples():
    """Correlation of position and sample, and of neighbours, is what chance gives (standard deviation 0.01)."""
    num = 10_000
    near = []
    for seed in range(5):
        order = shuffled(torch.arange(num), num, seed=seed, epoch=0).double()
        with_position = torch.corrcoef(torch.stack([torch.arange(num).double(), order]))[0, 1]
        with_next = torch.corrcoef(torch.stack([order[:-1], order[1:]]))[0, 1]
        near += [abs(float(with_position)), abs(float(with_next))]
    assert max(near) < 0.05


def test_all_orders_of_a_few_samples_occur():
    orders = {tuple(shuffled(torch.arange(4), 4, seed=seed, epoch=0).tolist()) for seed in range(400)}
    assert len(orders) == 24
