"""FSDP1's flat parameters: where each parameter lies in one, and what cannot be told."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.checkpointing.contents import ChunkSpec, Contents, StoredChunk, StoredTensor, chunks_of_range
from shardwise.checkpointing.formats.fsdp1 import layout_of_model, needs_model, read_layout, unflatten
from shardwise.checkpointing.reading import read_chunk
from shardwise.checkpointing.storage import bytes_of
from shardwise.errors import CheckpointError

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@given(shape=shapes, data=st.data())
def test_a_range_is_cut_into_boxes_of_consecutive_elements(shape: tuple[int, ...], data: st.DataObject):
    """Each chunk holds the elements that follow, none twice, none left out, and there are few of them."""
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    number = {place: index for index, place in enumerate(itertools.product(*map(range, shape)))}
    found: list[int] = []
    specs = list(chunks_of_range(shape, start, end))
    for spec, before in specs:
        assert before == len(found)
        ranges = (range(first, first + size) for first, size in zip(spec.starts, spec.sizes, strict=True))
        found += [number[place] for place in itertools.product(*ranges)]
    assert found == list(range(start, end))
    assert len(specs) <= max(2 * len(shape) - 1, 1)


def flat_contents(flat: dict[str, torch.Tensor], world_size: int) -> Contents:
    """Flat parameters as the ranks of a LOCAL checkpoint hold them."""
    tensors, structure = {}, {}
    for module, tensor in flat.items():
        path = ("model", f"{module}._flat_param" if module else "_flat_param")
        name = ".".join(path)
        size = -(-tensor.numel() // world_size)
        chunks = [
            StoredChunk(ChunkSpec((start,), (len(part),)), data=bytes_of(part.clone()))
            for start, part in zip(range(0, tensor.numel(), size), tensor.split(size), strict=True)
        ]
        tensors[name] = StoredTensor(name, "float32", tuple(tensor.shape), tuple(chunks))
        structure[name] = path
    return Contents(Path("local"), "fsdp1-local", tensors, world_size=world_size, structure=structure)


def flatten_by_hand(parameters: list[torch.Tensor], alignment: int, world_size: int) -> torch.Tensor:
    """As FSDP1 does: padding before a parameter, and after the last."""
    parts: list[torch.Tensor] = []
    for parameter in parameters:
        total = sum(part.numel() for part in parts)
        if alignment:
            parts.append(torch.full((-total % alignment,), 42.0))
        parts.append(parameter.detach().flatten())
    if alignment:
        parts.append(torch.full((-sum(part.numel() for part in parts) % world_size,), 42.0))
    return torch.cat(parts)


@pytest.mark.parametrize("alignment", [0, 4, 8])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_parameters_come_back_out_of_flat_ones(alignment: int, world_size: int):
    model = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7)), nn.Linear(7, 2))
    inner = list(model[1].parameters())
    outer = [*model[0].parameters(), *model[2].parameters()]
    flat = {name: flatten_by_hand(each, alignment, world_size) for name, each in (("1", inner), ("", outer))}
    contents = flat_contents(flat, world_size)
    assert needs_model(contents)
    found = unflatten(contents, layout_of_model(model, contents))
    assert not needs_model(found)
    for name, parameter in model.named_parameters():
        tensor = found.tensors[f"model.{name}"]
        assert torch.equal(read_chunk(found, tensor, ChunkSpec.whole(tensor.shape)), parameter)


def test_a_size_that_fits_two_layouts_is_refused():
    """6 + 6 elements padded to 16: the second may start at element 8, or at 6 with more padding at the end."""
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
    flat = flatten_by_hand([model.a, model.b], 4, 16)  # 6 + 2 + 6 + 2
    contents = flat_contents({"": flat}, 16)
    with pytest.raises(CheckpointError, match="can be cut into parameters in"):
        layout_of_model(model, contents)


def test_a_model_without_the_wrapped_module_is_refused():
    contents = flat_contents({"encoder": torch.ones(4)}, 2)
    with pytest.raises(CheckpointError, match="differ from those of this model") as error:
        layout_of_model(nn.Linear(2, 2), contents)
    assert "'encoder'" in error.value.why


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"units": [], "params": 3}',
        '{"units": [{"module": "", "numel": 2, "params": [{"name": "w", "shape": [3], "start": 0}]}], "params": []}',
        '{"units": [{"module": "", "numel": 2, "params": [{"name": "w", "shape": [-1], "start": 0}]}], "params": []}',
        "[" * 100_000,
    ],
)
def test_a_damaged_layout_is_refused(text: str, tmp_path: Path):
    (tmp_path / "fsdp1_layout.json").write_text(text)
    with pytest.raises(CheckpointError, match="fsdp1_layout") as error:
        read_layout(tmp_path)
    assert "fsdp1_layout.json" in error.value.where
