"""Poison is found wherever it was left, in every dtype, and nowhere else."""

import pytest
import torch

from shardwise.sharding.inventory import fingerprint, is_poisoned, poison

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.int32,
    torch.int16, torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn,
]  # fmt: skip
ONE_BYTE = {torch.uint8, torch.int8, torch.float8_e4m3fn}


def test_fingerprint_sees_rows_that_changed_places():
    tensor = torch.arange(24.0).reshape(4, 6)
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    assert fingerprint(tensor) != fingerprint(tensor[[1, 0, 2, 3]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4)], ids=str)
def test_untouched_tensor_is_found_and_a_written_one_is_not(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = torch.empty(shape, dtype=dtype)
    poison(tensor)
    assert is_poisoned(tensor) == (tensor.numel() > 0)
    tensor.copy_(torch.ones(shape).to(dtype))
    assert not is_poisoned(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_single_element_left_out_is_found(dtype: torch.dtype):
    tensor = torch.empty(3, 5, dtype=dtype)
    poison(tensor)
    tensor.view(-1)[:-1] = torch.zeros(14).to(dtype)
    assert is_poisoned(tensor) == (dtype not in ONE_BYTE)


def test_written_values_that_look_odd_are_no_poison():
    for tensor in (
        torch.tensor([-1, 0, 255]),
        torch.tensor([float("inf")]),
        torch.full((4,), 0xA5, dtype=torch.int64),
    ):
        assert not is_poisoned(tensor)


def test_channels_last_tensor_is_poisoned_too():
    tensor = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    poison(tensor)
    assert tensor.isnan().all()
    assert is_poisoned(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fingerprint_changes_with_any_bit_and_not_with_layout(dtype: torch.dtype):
    numbers = torch.arange(1, 14).to(dtype)
    tensor = numbers.clone()
    assert fingerprint(tensor) == fingerprint(numbers)
    assert fingerprint(numbers.repeat(2, 1).t()[:, 0]) == fingerprint(numbers)
    tensor[-1] = 0
    assert fingerprint(tensor) != fingerprint(numbers)
    assert fingerprint(torch.empty(0, dtype=dtype)) == 0


def test_fingerprint_of_a_view_at_an_odd_offset_is_that_of_its_copy():
    numbers = torch.arange(40, dtype=torch.int16)
    assert fingerprint(numbers[3:]) == fingerprint(numbers[3:].clone())
