"""Small checkpoints of every format, kept in the repository so that each torch reads what the others wrote.

python -m tests.stored_checkpoints FOLDER      adds FOLDER/torch-<version>, written by the torch that runs this
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from shardwise.checkpointing.contents import StoredTensor
from shardwise.checkpointing.formats.full import FullWriter
from shardwise.checkpointing.storage import bytes_of
from tests.sharded_checkpoints import dtype_name, write_checkpoint

STORED = Path(__file__).parent / "stored"


def tensors() -> dict[str, torch.Tensor]:
    """The same for every torch: no random numbers."""
    return {
        "weight": torch.arange(35, dtype=torch.float32).reshape(7, 5) / 3,
        "half": (torch.arange(22) - 9).reshape(11, 2).to(torch.bfloat16) / 7,
        "count": torch.tensor(1 << 40),
        "flags": torch.arange(9) % 2 == 0,
        "small": torch.arange(6, dtype=torch.float32).to(torch.float8_e4m3fn),
    }


VALUES: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "names": ["a", None, 3]}


def write_all(folder: Path) -> None:
    """Write every format into `folder`."""
    folder.mkdir(parents=True)
    named = {f"model.{name}": tensor for name, tensor in tensors().items()}
    values = {f"extra.{name}": value for name, value in VALUES.items()}
    write_checkpoint(folder / "sharded", named, num_files=2, values=values)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({"model": tensors(), "extra": VALUES}, checkpoint_id=folder / "dcp")
    torch.save({"model": tensors(), "extra": VALUES}, folder / "full.pt")
    save_file(tensors(), folder / "weights.safetensors")
    infos = {name: StoredTensor(name, dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors().items()}
    tree = {"model": infos, "extra": VALUES}
    writer = FullWriter(folder / "our-full.pt", tree)
    writer.write((info, bytes_of(tensors()[info.name])) for info in writer.order)


if __name__ == "__main__":
    version = torch.__version__.split("+")[0]
    write_all(Path(sys.argv[1]) / f"torch-{version}")
