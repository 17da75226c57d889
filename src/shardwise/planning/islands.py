"""Cut groups further where one set of settings or one storage dtype does not fit all of a group."""

from collections import defaultdict

from shardwise.config.schema import GroupOverride
from shardwise.errors import PlanError
from shardwise.planning.assignment import Assignment
from shardwise.planning.calls import Calls
from shardwise.planning.dtypes import majority
from shardwise.planning.groups import Kind, Unit, is_read_outside
from shardwise.planning.tree import Node, Tree

_PER_GROUP = ("param_dtype", "reduce_dtype", "output_dtype", "cast_inputs", "reshard_after_forward", "offload")


def override_islands(tree: Tree, units: list[Unit], overrides: tuple[GroupOverride, ...], calls: Calls) -> list[Unit]:
    """Modules inside a group that an override singles out, as groups of their own, one per enclosing group.

    Raises:
        PlanError: A pattern matches no module.
    """
    islands: list[Unit] = []
    for override in overrides:
        matched = [node for node in tree.matching(override.pattern) if node.keys]
        if not matched:
            raise PlanError(
                f"overrides names {override.pattern!r}, which matches nothing",
                where=f"overrides: {override.pattern}",
                why="the pattern fits no module's name or class",
                fix="print(shardwise.plan(model)) lists the names; `*` stays within one name, `**` spans dots",
            )
        if not any(getattr(override, name) is not None for name in _PER_GROUP):
            continue
        by_home: dict[int, list[Node]] = defaultdict(list)
        taken = units + islands
        for node in _maximal(matched):
            is_unit = any(mine is node for unit in taken for mine in unit.nodes)
            holds_units = any(node.contains(mine) for unit in taken for mine in unit.nodes)
            if not is_unit and not holds_units and node.has_forward and node.fqn:
                home = next((unit for unit in taken if unit.contains(node)), None)
                by_home[id(home)].append(node)
        for nodes in by_home.values():
            islands.append(_unit(nodes, "island", f"set apart by the override for {override.pattern!r}", calls))
    return islands


def storage_splits(
    assignment: Assignment,
    tree: Tree,
    dtype_of: dict[int, str],
    numel: dict[int, int],
    trainable: set[int],
    calls: Calls,
) -> tuple[list[Unit], dict[int, str]]:
    """Units for the minority dtypes of groups that mix trainable dtypes, and parameters to replicate instead.

    FSDP2 reduces a group's gradients in one buffer of one dtype, so trainable parameters of two dtypes cannot share
    a group. Frozen ones may.
    """
    owners = tree.owners()
    units: list[Unit] = []
    replicated: dict[int, str] = {}
    homes: list[tuple[tuple[Node, ...], list[int]]] = [
        *((unit.nodes, keys) for unit, keys in zip(assignment.units, assignment.keys, strict=True)),
        ((tree.root,), assignment.root),
    ]
    for modules, keys in homes:
        mixed = [key for key in keys if key in trainable]
        if len({dtype_of[key] for key in mixed}) < 2:
            continue
        major = majority([(dtype_of[key], numel[key]) for key in mixed])
        minor = [key for key in mixed if dtype_of[key] != major]
        apart: dict[str, dict[Node, None]] = defaultdict(dict)
        for key in minor:
            nodes = [_atom_around(owner) for owner in owners[key]]
            pure = all(_is_pure(node, dtype_of[key], modules, mixed, dtype_of) for node in nodes)
            if pure:
                apart[dtype_of[key]].update(dict.fromkeys(nodes))
            else:
                replicated[key] = f"{dtype_of[key]} among {major} in one module; FSDP2 groups hold one trainable dtype"
        for dtype, nodes in apart.items():
            why = f"{dtype} parameters inside a {major} group: one more all-gather and reduce-scatter per pass"
            units.append(_unit(_maximal(list(nodes)), "storage", why, calls))
    return units, replicated


def _is_pure(node: Node, dtype: str, modules: tuple[Node, ...], mixed: list[int], dtype_of: dict[int, str]) -> bool:
    """Whether a node can leave its group for a group of `dtype` only."""
    inside = [key for key in mixed if key in node.keys]
    alone = not any(node is module for module in modules)
    return alone and node.has_forward and node.is_atom and all(dtype_of[key] == dtype for key in inside)


def _atom_around(node: Node) -> Node:
    """The outermost atom a node belongs to: children of an atom are not called by themselves."""
    return next((up for up in reversed([node, *node.ancestors]) if up.is_atom), node)


def _maximal(nodes: list[Node]) -> list[Node]:
    return [node for node in nodes if not any(other is not node and other.contains(node) for other in nodes)]


def _unit(nodes: list[Node], kind: Kind, reason: str, calls: Calls) -> Unit:
    """A unit that is held when its own hooks cannot be relied on to run on every rank and before every use."""
    held = any(
        node.fqn in calls.conditional
        or is_read_outside(node, node, calls)
        or (calls.is_known(node.fqn) and node.fqn not in calls.called)
        for node in nodes
    )
    return Unit(tuple(nodes), kind, reason, held=held)
