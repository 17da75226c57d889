"""Folders of torch's own `dcp.save`, read without unpickling; ours, read by torch's own `dcp.load`."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict

from shardwise.checkpointing.contents import ChunkSpec, Contents
from shardwise.checkpointing.formats.dcp import is_dcp, read_dcp
from shardwise.checkpointing.reading import Request, check_requests, read_chunk
from shardwise.errors import CheckpointError
from tests.sharded_checkpoints import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 9), nn.BatchNorm1d(9))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def at_path(tree: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def whole(contents: Contents, name: str) -> torch.Tensor:
    tensor = contents.tensors[name]
    return read_chunk(contents, tensor, ChunkSpec.whole(tensor.shape))


def test_all_that_torch_saves_is_read(tmp_path: Path):
    state = trained_state() | {"extra": {"epoch": 3, "names": ["a", 2.5, None], "pair": (1, True)}}
    dcp.save(state, checkpoint_id=tmp_path)
    assert is_dcp(tmp_path)
    contents = read_dcp(tmp_path)
    assert contents.format == "dcp"
    assert set(contents.structure) == {*contents.tensors, *contents.values}
    for name, path in contents.structure.items():
        expected = at_path(state, path)
        if name in contents.tensors:
            assert torch.equal(whole(contents, name), expected), name
        else:
            assert contents.values[name] == expected, name
    assert len(contents.tensors) == 7 + 4 * 3


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(4, 5).t(), torch.arange(10.0)[3:7], torch.randn(2, 3, 4).permute(1, 2, 0), torch.ones(3).expand(4, 3)],
    ids=["transposed", "view", "permuted", "expanded"],
)
def test_tensors_whose_bytes_are_in_no_usable_order(tmp_path: Path, tensor: torch.Tensor):
    dcp.save({"x": tensor}, checkpoint_id=tmp_path)
    contents = read_dcp(tmp_path)
    assert torch.equal(whole(contents, "x"), tensor)


class Bomb:
    """Whoever unpickles it runs the code of whoever wrote it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_a_value_that_would_run_code_is_left_out_and_named(tmp_path: Path):
    mark = tmp_path / "ran"
    dcp.save({"a": torch.ones(2), "bomb": Bomb(mark), "fine": 1}, checkpoint_id=tmp_path / "c")
    mark.unlink(missing_ok=True)
    contents = read_dcp(tmp_path / "c")
    assert not mark.exists()
    assert contents.values == {"fine": 1}
    assert "bomb" in contents.details["left_out"]
    assert torch.equal(whole(contents, "a"), torch.ones(2))


def test_metadata_that_would_run_code_is_refused(tmp_path: Path):
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    mark = tmp_path / "ran"
    (tmp_path / "c/.metadata").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(CheckpointError, match="which no checkpoint needs") as caught:
        read_dcp(tmp_path / "c")
    assert ".metadata" in caught.value.where
    assert not mark.exists()


def rewrite_metadata(folder: Path, **changes: Any) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        for name, value in changes.items():
            setattr(info, name, value)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "changes",
    [
        {"relative_path": "../outside"},
        {"relative_path": "/etc/passwd"},
        {"relative_path": "missing.distcp"},
        {"offset": 1 << 40},
        {"offset": 7},
        {"length": 3},
        {"length": 1 << 50},
        {"transform_descriptors": ["zstd"]},
    ],
    ids=str,
)
def test_metadata_that_points_elsewhere_is_one_clear_error(tmp_path: Path, changes: dict[str, Any]):
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    (tmp_path / "outside").write_bytes((tmp_path / "c/__0_0.distcp").read_bytes())
    rewrite_metadata(tmp_path / "c", **changes)
    with pytest.raises(CheckpointError) as caught:
        read_dcp(tmp_path / "c")
    assert str(tmp_path / "c") in caught.value.where


def test_a_missing_file_is_named(tmp_path: Path):
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="missing") as caught:
        read_dcp(tmp_path)
    assert "__0_0.distcp" in caught.value.where


def test_a_file_cut_short_is_found(tmp_path: Path):
    dcp.save({"a": torch.ones(2000)}, checkpoint_id=tmp_path)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(CheckpointError, match="damaged") as caught:
        read_dcp(tmp_path)
    assert "__0_0.distcp" in caught.value.where


def test_torch_reads_ours(tmp_path: Path):
    """Several files, cuts along either dimension, every kind of entry."""
    tensors = {
        "model.weight": torch.randn(7, 5),
        "model.wide": torch.randn(3, 9).bfloat16(),
        "model.step": torch.tensor(4),
        "model.empty": torch.empty(0, 2),
        "model.small": torch.tensor([1, 2, 60000], dtype=torch.uint16),
    }
    folder = tmp_path / "step-00000007"
    values = {"extra.lr": 0.1, "extra.list": [1, "x", None], "extra.betas": (0.9, 0.95)}
    write_checkpoint(
        folder, tensors, num_files=3, dims={"model.wide": 1}, values=values, aliases={"model.tied": "model.weight"}
    )
    state: dict[str, Any] = {
        "model": {name.removeprefix("model."): torch.zeros_like(tensor) for name, tensor in tensors.items()},
        "extra": {"lr": 0.0, "list": [], "betas": ()},
    }
    state["model"]["tied"] = torch.zeros(7, 5)
    dcp.load(state, checkpoint_id=folder)
    for name, tensor in tensors.items():
        assert torch.equal(state["model"][name.removeprefix("model.")], tensor), name
    assert torch.equal(state["model"]["tied"], tensors["model.weight"])
    assert state["extra"] == {"lr": 0.1, "list": [1, "x", None], "betas": (0.9, 0.95)}
    dcp_to_torch_save(folder, tmp_path / "full.pt")
    full = torch.load(tmp_path / "full.pt", weights_only=False)
    assert torch.equal(full["model"]["wide"], tensors["model.wide"])
    assert full["extra"]["betas"] == (0.9, 0.95)


def test_ours_without_the_manifest_is_still_a_folder_of_torch(tmp_path: Path):
    """The two indexes of one checkpoint say the same."""
    folder = tmp_path / "step-00000007"
    tensors = {"model.weight": torch.randn(7, 5), "model.b": torch.randn(4)}
    write_checkpoint(folder, tensors, num_files=2, dims={"model.weight": 1}, values={"extra.x": 1})
    ours = read_dcp(folder)
    (folder / "manifest.json").unlink()
    torchs = read_dcp(folder)
    assert (ours.format, torchs.format) == ("sharded", "dcp")
    assert torchs.values == ours.values
    for name, tensor in ours.tensors.items():
        found = {(chunk.spec, chunk.file, chunk.offset) for chunk in torchs.tensors[name].chunks}
        assert found == {(chunk.spec, chunk.file, chunk.offset) for chunk in tensor.chunks}
        assert torch.equal(whole(torchs, name), tensors[name])


def test_items_that_are_not_what_the_metadata_says(tmp_path: Path):
    dcp.save({"a": torch.ones(4, 2)}, checkpoint_id=tmp_path)
    good = (tmp_path / ".metadata").read_bytes()
    for attribute, value in (("sizes", torch.Size([2, 2])), ("dtype", torch.int32)):
        metadata = pickle.loads(good)
        entry = metadata.state_dict_metadata["a"]
        setattr(entry.properties if attribute == "dtype" else entry.chunks[0], attribute, value)
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match="damaged") as caught:
            read_dcp(tmp_path)
        assert "does not hold" in caught.value.why


def test_a_tensor_of_which_a_part_is_not_stored(tmp_path: Path):
    dcp.save({"a": torch.ones(4, 2)}, checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.state_dict_metadata["a"].size = torch.Size([6, 2])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    contents = read_dcp(tmp_path)
    (problem,) = check_requests(contents, [Request("a", torch.empty(6, 2), ChunkSpec.whole((6, 2)))])
    assert "are not stored" in problem
    with pytest.raises(CheckpointError, match="not stored"):
        whole(contents, "a")
