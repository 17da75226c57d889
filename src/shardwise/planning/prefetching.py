"""Turn prefetch depths into names: which groups are gathered ahead of which."""

from dataclasses import replace

from shardwise.config.schema import GroupOverride, PrefetchConfig
from shardwise.planning.plan import Group


def add_prefetch(groups: list[Group], prefetch: PrefetchConfig, overrides: tuple[GroupOverride, ...]) -> list[Group]:
    """Groups with the names of the next and previous groups of their own run, to the depth each asks for.

    Only within a run of blocks (`layers.0`, `layers.1`, …): they are certain to be called one after another, and a
    group gathered ahead of a call that never comes would stay gathered.
    """
    depths = [prefetch.forward, prefetch.backward]
    depths += [depth for o in overrides for depth in (o.forward_prefetch, o.backward_prefetch) if depth]
    if not any(depths):
        return groups
    runs: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        if group.kind in ("block", "part"):
            runs.setdefault(_run_of(group.modules[0]), []).append(index)
    result = [replace(group, forward_prefetch=(), backward_prefetch=()) for group in groups]
    for run in runs.values():
        for position, index in enumerate(run):
            ahead = run[position + 1 : position + 1 + len(groups[index].forward_prefetch)]
            start = max(position - len(groups[index].backward_prefetch), 0)
            behind = reversed(run[start:position])
            result[index] = replace(
                groups[index],
                forward_prefetch=tuple(groups[i].modules[0] for i in ahead),
                backward_prefetch=tuple(groups[i].modules[0] for i in behind),
            )
    return result


def _run_of(fqn: str) -> str:
    """`model.layers.3` → `model.layers`, `model.layers.3.mlp` → `model.layers..mlp`: the same place in each block."""
    return ".".join("" if name.isdigit() else name for name in fqn.split("."))
