"""Numbers as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.units import format_bytes, format_count, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1 MiB"),
        (80 * 1024**3, "80 GiB"),
        (171.4 * 1024**3, "171 GiB"),
        (1023.5 * 1024**3, "1024 GiB"),
        (-1536, "-1.5 KiB"),
        (5000 * 1024**5, "5000 PiB"),
    ],
)
def test_bytes_are_printed_with_three_digits(num_bytes: float, text: str):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (8_030_261_248, "8.03B"), (405.85e9, "406B")]
)
def test_counts_read_like_model_names(number: float, text: str):
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (0.0000346, "34.6 us"),
        (0.0341, "34.1 ms"),
        (1.25, "1.25 s"),
        (59.99, "1 min"),
        (125, "2 min 5 s"),
        (3600, "1 h"),
        (3 * 86400 + 4 * 3600 + 59, "3 d 4 h"),
        (-2, "-2 s"),
    ],
)
def test_seconds_are_printed_in_the_units_that_matter(seconds: float, text: str):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 * 1024**3),
        ("1.5 MB", 1_500_000),
        ("12", 12),
        (" 3 kib ", 3072),
        (".5KiB", 512),
        (7, 7),
    ],
)
def test_bytes_are_parsed(text: str | int, num_bytes: int):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "80 gigs", "-3MB", "1,5 MB"])
def test_what_is_no_amount_is_refused(text: str):
    with pytest.raises(ValueError, match="is not an amount of memory"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=1024**6))
def test_printed_bytes_read_back_within_half_a_percent(num_bytes: int):
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= 0.005 * num_bytes + 0.5
