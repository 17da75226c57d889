"""What `torch.save` writes, read as references to bytes."""

from __future__ import annotations

import argparse
import collections
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardwise.checkpointing.contents import ITEM_BYTES, ChunkSpec, Contents, StoredTensor
from shardwise.checkpointing.pickles.machine import TensorRef, read_torch_pickle
from shardwise.checkpointing.pickles.torch_files import flatten_state, read_torch_file
from shardwise.checkpointing.reading import read_chunk
from shardwise.errors import CheckpointError


def pickle_of(value: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def tensor_from(path: Path, name: str) -> torch.Tensor:
    file = read_torch_file(path)
    ref = file.state.tensors[name]
    assert isinstance(ref, TensorRef)
    tensor = StoredTensor(name, ref.dtype, ref.shape, (file.chunk(ref, ChunkSpec.whole(ref.shape)),))
    contents = Contents(path, "full", {name: tensor})
    return read_chunk(contents, tensor, ChunkSpec.whole(ref.shape))


@pytest.mark.parametrize("dtype", sorted(set(ITEM_BYTES) - {"complex32"}))
def test_every_dtype_is_read_as_it_was_saved(dtype: str, tmp_path: Path):
    tensor = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype))
    torch.save({"x": tensor}, tmp_path / "x.pt")
    found = tensor_from(tmp_path / "x.pt", "x")
    assert found.dtype == tensor.dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:, 2],
        lambda x: x.transpose(0, 2),
        lambda x: x[::2, :, 1],
        lambda x: x[0, 0, 0],
        lambda x: x[:0],
        lambda x: x[:1].expand(5, 3, 4),
        lambda x: nn.Parameter(x),
        lambda x: x.flatten()[3:9],
    ],
)
def test_views_are_read_in_their_own_order(view: Any, tmp_path: Path):
    tensor = view(torch.arange(24.0).reshape(2, 3, 4))
    torch.save({"x": tensor}, tmp_path / "x.pt")
    assert torch.equal(tensor_from(tmp_path / "x.pt", "x"), tensor.detach())


def test_training_states_are_read_with_what_stands_beside_the_tensors():
    """Of classes that are no plain data only the name is kept."""
    state = {
        "model": nn.Linear(2, 2).state_dict(),
        "args": argparse.Namespace(lr=0.1, name="run"),
        "rng": np.random.default_rng(0).standard_normal(3),
        "counts": collections.defaultdict(list, a=[1, 2]),
        "blob": b"\x00\xff",
        "nothing": b"",
        "set": {1, 2},
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "size": torch.Size([2, 3]),
        "list": [torch.ones(2), {"lr": 0.5}],
        "betas": (0.9, 0.999),
        3: "a number for a key",
    }
    flat = flatten_state(read_torch_pickle(pickle_of(state)))
    assert set(flat.tensors) == {"model.weight", "model.bias", "list.0"}
    assert flat.left_out == {}
    assert flat.values["args"] == {"lr": 0.1, "name": "run"}
    assert flat.values["counts.a"] == [1, 2]
    assert (flat.values["blob"], flat.values["nothing"], flat.values["set"]) == (b"\x00\xff", b"", {1, 2})
    assert (flat.values["dtype"], flat.values["device"], flat.values["size"]) == ("torch.bfloat16", "cuda:1", (2, 3))
    assert (flat.values["list.1.lr"], flat.values["betas"]) == (0.5, (0.9, 0.999))
    assert flat.structure["list.1.lr"] == ("list", 1, "lr")
    assert flat.values["3"] == "a number for a key"


def test_names_are_those_of_distributed_checkpoint():
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "nested": [[1], [torch.ones(1)], {}]}
    expected, paths = flatten_state_dict(state)
    flat = flatten_state(read_torch_pickle(pickle_of(state)))
    assert list(flat.structure.items()) == list(paths.items())
    assert set(flat.tensors) == {name for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert flat.values == {name: value for name, value in expected.items() if not isinstance(value, torch.Tensor)}


class Custom:
    """A class of the user's own."""


def test_an_object_of_another_class_is_refused_by_name(tmp_path: Path):
    torch.save({"model": {}, "scheduler": Custom()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"test_torch_objects\.Custom") as error:
        read_torch_file(tmp_path / "x.pt")
    assert error.value.where == str(tmp_path / "x.pt")


def test_old_and_foreign_files_are_refused_with_a_way_out(tmp_path: Path):
    torch.save({"x": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text.pt").write_text("hello")
    for name in ("old.pt", "text.pt"):
        with pytest.raises(CheckpointError, match=r"not a file of torch\.save"):
            read_torch_file(tmp_path / name)


def test_values_nested_without_end_are_refused():
    endless: dict[str, Any] = {}
    endless["again"] = endless
    with pytest.raises(CheckpointError, match="not a state dict"):
        flatten_state(read_torch_pickle(pickle_of(endless)))
    wide: list[Any] = [1]
    for _ in range(60):
        wide = [wide, wide]
    flat = flatten_state(read_torch_pickle(pickle_of({"bomb": wide, "x": torch.ones(1)})))
    assert list(flat.left_out) == ["bomb"]
