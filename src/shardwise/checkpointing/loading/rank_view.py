"""A checkpoint as one rank sees it: names that ranks share, with this rank's own values where ranks differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.checkpointing.contents import Contents
from shardwise.checkpointing.saving.sharing import PER_RANK
from shardwise.checkpointing.soundness import mixed_order
from shardwise.checkpointing.state.nested import Path


@dataclass(frozen=True, slots=True)
class RankView:
    """What a rank finds in a checkpoint."""

    contents: Contents
    """Without the names of single ranks."""
    differing: frozenset[str]
    """Names that had different values on the ranks that saved, where this run has another number of ranks: only
    rank 0's are here."""
    mixed: Mapping[str, str] = field(default_factory=dict)
    """Optimizers whose stored state is not whole, and why: see `soundness.mixed_order`."""

    def path(self, name: str) -> Path:
        """The keys that lead to a name in the nested state dict."""
        return self.contents.structure.get(name) or tuple(name.split("."))

    def names_under(self, prefix: str) -> list[str]:
        """Tensors and values whose names begin so, in the checkpoint's order."""
        contents = self.contents
        return [name for names in (contents.tensors, contents.values) for name in names if name.startswith(prefix)]

    def differing_under(self, prefix: str) -> list[str]:
        """Of `differing`, those whose names begin so."""
        return sorted(name for name in self.differing if name.startswith(prefix))


def view_for(contents: Contents, rank: int, size: int) -> RankView:
    """The checkpoint as rank `rank` of `size` sees it."""
    tensors = {name: tensor for name, tensor in contents.tensors.items() if not name.startswith(f"{PER_RANK}.")}
    values = {name: value for name, value in contents.values.items() if not name.startswith(f"{PER_RANK}.")}
    structure = dict(contents.structure)
    differing = set()
    for stored in (contents.tensors, contents.values):
        for name in stored:
            if not name.startswith(f"{PER_RANK}."):
                continue
            _, owner, bare = name.split(".", 2)
            if _is_reordered(contents, name, bare):
                continue  # before 0.2.0 names of a group were stored in each rank's own order
            if contents.world_size != size:
                differing.add(bare)
            elif owner == str(rank):
                structure.setdefault(bare, tuple(contents.structure.get(name, ())[2:]) or (bare,))
                if name in contents.tensors:
                    tensors[bare] = dataclasses.replace(contents.tensors[name], name=bare)
                    values.pop(bare, None)
                else:
                    values[bare] = contents.values[name]
                    tensors.pop(bare, None)
    view = dataclasses.replace(contents, tensors=tensors, values=values, structure=structure)
    return RankView(view, frozenset(differing), mixed_order(contents))


def _is_reordered(contents: Contents, name: str, bare: str) -> bool:
    if not bare.endswith(".params") or name not in contents.values or bare not in contents.values:
        return False
    lists = (contents.values[name], contents.values[bare])
    return all(isinstance(names, (list, tuple)) for names in lists) and sorted(map(str, lists[0])) == sorted(
        map(str, lists[1])
    )
