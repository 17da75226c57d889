"""Dump torch's flight recorder when ranks seem to hang."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import torch.distributed as dist
from torch import nn

from shardwise import compat


def dump_collectives(folder: str | Path, model: nn.Module | None = None) -> Path | None:
    """Write torch's flight recorder of this rank, for `explain_hang` and `shardwise explain FOLDER`.

    The recorder must be on when the process group starts: TORCH_FR_BUFFER_SIZE=2000 in the environment.

    Args:
        folder: Created if absent; every rank writes into the same folder.
        model: The sharded model; the sizes of its groups are also written, to name the modules of collectives.

    Returns:
        The file; None if the recorder is off.

    Ranks:
        Local: works in any thread, also while other ranks hang.
    """
    record = compat.flight_record()
    if record is None:
        return None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if model is not None and dist.get_rank() == 0:
        (folder / "groups.json").write_text(json.dumps(_sizes(model)))
    path = folder / f"rank_{dist.get_rank()}"
    path.write_bytes(record)
    return path


def _sizes(model: nn.Module) -> dict[str, str]:
    """Module names by the number of elements that their groups all-gather and reduce-scatter."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, group in compat.named_groups(model).items():
        gathered, reduced = compat.collective_numels(group)
        names[f"gather {gathered}"].append(name)
        names[f"reduce {reduced}"].append(name)
    more = {key: [f"{len(owners) - 2} more"] if len(owners) > 2 else [] for key, owners in names.items()}
    return {key: " or ".join([*owners[:2], *more[key]]) for key, owners in names.items()}
