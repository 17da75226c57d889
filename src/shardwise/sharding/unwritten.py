"""Name every tensor that got no values, in one error that all ranks raise."""

import re
from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ShardError
from shardwise.sharding.inventory import Entry, class_name, meta_left_in
from shardwise.sharding.poison import is_poisoned
from shardwise.sharding.replicas import values_of_ranks


def refuse_unwritten(model: nn.Module, entries: Sequence[Entry], mesh: DeviceMesh | None) -> None:
    """Raise if any rank finds poison in its part of a tensor, or a tensor still on meta.

    Raises:
        ShardError: The same on every rank, naming all such tensors.

    Ranks:
        Collective.
    """
    unwritten = [entry.fqn for entry in entries if entry.pending and is_poisoned(entry.local)]
    unwritten += meta_left_in(model)
    unwritten = list(dict.fromkeys(name for names in values_of_ranks(unwritten, mesh) for name in names))
    if unwritten:
        names, plural = set(unwritten), "s" if len(unwritten) > 1 else ""
        classes = sorted({class_name(entry.places[0].module) for entry in entries if entry.fqn in names})
        raise ShardError(
            f"{len(unwritten)} tensor{plural} of {class_name(model)} got no values",
            where="\n".join(_folded(unwritten)),
            why="a model built on meta has no values; no reset_parameters, _init_weights or init wrote these",
            fix=f"write them in reset_parameters() of {', '.join(classes) or 'a module'}, or in init(module)",
        )


def _folded(names: list[str]) -> list[str]:
    """One line for tensors whose names differ in numbers only: 80 layers read as one."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return [same[0] if len(same) == 1 else f"{same[0]} … {same[-1]} ({len(same)})" for same in alike.values()]
