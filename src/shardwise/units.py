"""Bytes, counts and seconds: parse and print. No torch, no I/O."""

from __future__ import annotations

import re

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_COUNTS = ("", "k", "M", "B", "T")
_SCALES = {unit.lower(): 1024**power for power, unit in enumerate(_BINARY)}
_SCALES |= {unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL)}
_BYTES = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def format_bytes(num_bytes: float) -> str:
    """`1536` as `1.5 KiB`: three significant digits, binary units."""
    return _scaled(num_bytes, 1024, _BINARY)


def format_count(number: float) -> str:
    """`8030261248` as `8.03B`: three significant digits, as models are named."""
    return _scaled(number, 1000, _COUNTS).replace(" ", "")


def format_seconds(seconds: float) -> str:
    """The two largest units that matter: `3 d 4 h`, `2 min 5 s`, `1.25 s`, `34 ms`."""
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    for name, size in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size:
            return f"{_significant(seconds / size)} {name}"
    if seconds < 59.95:
        return f"{_significant(seconds)} s"
    total = round(seconds)
    for (name, size), (lower_name, lower_size) in (
        (("d", 86400), ("h", 3600)),
        (("h", 3600), ("min", 60)),
        (("min", 60), ("s", 1)),
    ):
        if total >= size:
            rest = total % size // lower_size
            return f"{total // size} {name}" + (f" {rest} {lower_name}" if rest else "")
    return f"{total} s"


def parse_bytes(text: str | int) -> int:
    """`"80 GiB"`, `"1.5MB"` or a plain number of bytes.

    Raises:
        ValueError: It is none of these. The caller knows where the text stood, and says so in a ConfigError.
    """
    if isinstance(text, int):
        return text
    match = _BYTES.fullmatch(text)
    scale = _SCALES.get(match[2].lower() or "b") if match else None
    if match is None or scale is None:
        raise ValueError(f"{text!r} is not an amount of memory, as in 80GiB or 1.5 MB")
    return round(float(match[1]) * scale)


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    if value < 0:
        return "-" + _scaled(-value, base, units)
    power = 0
    # Compare what will be printed: 1023.9 KiB reads as 1 MiB, never as 1024 KiB.
    while power + 1 < len(units) and round(value / base**power, 1 if power else 0) >= base:
        power += 1
    if power == 0:
        number = f"{value:.0f}" if float(value).is_integer() else _significant(value)
    else:
        number = _significant(value / base**power)
    return f"{number} {units[power]}".strip()


def _significant(value: float) -> str:
    """Three significant digits, none behind the point once there are three before it, no trailing zeros."""
    if value >= 100:
        return f"{value:.0f}"
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e" in text else text
