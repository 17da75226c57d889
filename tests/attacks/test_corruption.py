"""Thousands of damaged checkpoints: each is refused by name of a file, or reads as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.checkpointing.convert import convert_checkpoint
from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.inspecting import verify_checkpoint
from shardwise.errors import CheckpointError
from shardwise.findings import Finding, Severity
from tests.attacks.corrupting import CHECKSUMMED, CRC, MAKERS, damage, pristine, read_all, same, written

INDEXES = (".metadata", ".index.json")
T = TypeVar("T")


def check(format: str, what: str, files: dict[str, bytes]) -> None:
    path, original, expected = pristine(format)
    if files == original:
        return
    with written(files, path) as place:
        errors = [finding for finding in _verify(place) if finding.severity is Severity.ERROR]
        refusal, found = _outcome(lambda: read_all(place))
        folder = str(place if path == "." else place.parent)
    assert all(folder in finding.where for finding in errors), f"{what}: {errors}"
    if refusal is not None:
        assert folder in refusal.where, f"{what}: {refusal}"
        assert refusal.fix, f"{what}: {refusal}"
        return
    assert found is not None
    untouched = same(found, expected)
    if format == "sharded" and set(files) == set(original):
        assert errors, f"{what}: a changed byte of our own format was not found"
    if format in CHECKSUMMED:
        assert untouched, f"{what}: other values were read without an error"
    if format in CRC and not untouched and not _index_changed(files, original):
        assert errors, f"{what}: other values, and verify did not find out"


def _outcome(doing: Callable[[], T]) -> tuple[CheckpointError | None, T | None]:
    """An error of ours, or a result; any other error is a bug."""
    try:
        return None, doing()
    except CheckpointError as error:
        return error, None


def _verify(place: Path) -> list[Finding]:
    gone, findings = _outcome(lambda: verify_checkpoint(place))
    assert gone is None or "no such file or folder" in gone.what
    return findings or []


def _index_changed(files: dict[str, bytes], original: dict[str, bytes]) -> bool:
    return any(files.get(name) != original[name] for name in original if name.endswith(INDEXES))


@pytest.mark.parametrize("format", MAKERS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_checkpoint_is_refused_or_unharmed(format: str, data: st.DataObject):
    check(format, *data.draw(damage(format)))


@pytest.mark.slow
@pytest.mark.parametrize("format", MAKERS)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_checkpoint_is_refused_or_unharmed_many_times(format: str, data: st.DataObject):
    check(format, *data.draw(damage(format)))


@pytest.mark.parametrize("format", CHECKSUMMED)
def test_every_flipped_byte_of_what_we_write_is_found(format: str):
    """Bytes all over every file, all bits in turn."""
    _, original, _ = pristine(format)
    for name, data in original.items():
        for at in range(0, len(data), 97):
            flipped = bytes([data[at] ^ (1 << at % 8)])
            check(format, f"flip {name} at {at}", {**original, name: data[:at] + flipped + data[at + 1 :]})


@pytest.mark.parametrize("format", [*CHECKSUMMED, *CRC])
def test_a_checkpoint_with_a_flipped_weight_is_not_converted(format: str, tmp_path: Path):
    """Also where torch wrote it: its files carry CRC-32 sums that nobody else looks at."""
    path, original, _ = pristine(format)
    with written(original, path) as place:
        contents = open_checkpoint(place)
        tensor = next(contents.tensors[name] for name in contents.tensors if name.endswith("embed.weight"))
        file = Path(contents.folder) / tensor.chunks[0].file
        data = bytearray(file.read_bytes())
        data[tensor.chunks[0].offset + 5] ^= 1
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="damaged") as error:
            convert_checkpoint(place, tmp_path / "out", "safetensors")
        assert str(file) in error.value.where
    assert not (tmp_path / "out").exists()
