"""Stacking and joining stored tensors moves chunks; reading the outcome gives what torch would."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise.checkpointing.contents import ChunkSpec, Contents, StoredTensor
from shardwise.checkpointing.formats.safetensors import read_safetensors
from shardwise.checkpointing.hugging_face import concatenate, stack
from shardwise.checkpointing.reading import read_chunk


def stored(tmp_path: Path, tensors: list[torch.Tensor]) -> tuple[Contents, list[StoredTensor]]:
    save_file({str(index): tensor for index, tensor in enumerate(tensors)}, tmp_path / "t.safetensors")
    contents = read_safetensors(tmp_path / "t.safetensors")
    return contents, [contents.tensors[str(index)] for index in range(len(tensors))]


def whole(contents: Contents, tensor: StoredTensor) -> torch.Tensor:
    return read_chunk(contents, tensor, ChunkSpec.whole(tensor.shape))


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_stack(tmp_path: Path, dim: int):
    tensors = [torch.randn(3, 4) for _ in range(3)]
    contents, sources = stored(tmp_path, tensors)
    assert torch.equal(whole(contents, stack(sources, dim)), torch.stack(tensors, dim))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_concatenate(tmp_path: Path, dim: int):
    tensors = [torch.randn(3, 3) for _ in range(3)]
    contents, sources = stored(tmp_path, tensors)
    assert torch.equal(whole(contents, concatenate(sources, dim)), torch.cat(tensors, dim))


def test_experts_one_by_one_become_one_tensor(tmp_path: Path):
    """Gate and up of each expert, stacked and joined, as a mixture of experts keeps them."""
    gates, ups = [torch.randn(6, 4) for _ in range(3)], [torch.randn(6, 4) for _ in range(3)]
    contents, sources = stored(tmp_path, [*gates, *ups])
    fused = concatenate([stack(sources[:3], 0), stack(sources[3:], 0)], 1)
    expected = torch.cat([torch.stack(gates), torch.stack(ups)], 1)
    assert torch.equal(whole(contents, fused), expected)
    part = ChunkSpec((1, 4, 0), (2, 5, 4))  # across experts, and across gate and up
    assert torch.equal(read_chunk(contents, fused, part), expected[1:3, 4:9])


def test_what_does_not_fit_is_refused(tmp_path: Path):
    _, (a, b, c) = stored(tmp_path, [torch.zeros(2, 3), torch.zeros(3, 3), torch.zeros(2, 3).half()])
    for wrong in (lambda: stack([a, b], 0), lambda: concatenate([a, c], 0), lambda: concatenate([a, b], 1)):
        with pytest.raises(ValueError, match="differ in shape"):
            wrong()
