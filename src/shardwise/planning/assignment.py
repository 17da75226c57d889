"""Give every parameter to exactly one group, tied ones included."""

from dataclasses import dataclass, field

from shardwise.errors import PlanError
from shardwise.planning.calls import Calls
from shardwise.planning.groups import Unit
from shardwise.planning.tree import Node, Tree


@dataclass(slots=True)
class Assignment:
    """Units with their parameters; what no unit can hold is replicated."""

    units: list[Unit]
    """Children first."""
    keys: list[list[int]] = field(default_factory=list)
    """Parameter keys per unit."""
    root: list[int] = field(default_factory=list)
    replicated: dict[int, str] = field(default_factory=dict)
    """Key to reason."""


def assign(tree: Tree, units: list[Unit], calls: Calls, names: dict[int, tuple[str, ...]]) -> Assignment:
    """Each parameter to the innermost unit that holds all its owners; ties across units get a unit of their own.

    Raises:
        PlanError: A tie crosses two groups that the user named.
    """
    owners = tree.owners()
    replicated: dict[int, str] = {}
    units = units + _shared_modules(tree, units)
    for key, holders in owners.items():
        homes = _homes(holders, units) if len(holders) > 1 else []
        if len(homes) <= 1:
            continue
        _refuse_explicit([unit for unit in homes if unit is not None], names[key])
        joined = _tie_unit(key, owners, units, names[key], calls)
        if joined is None:
            replicated[key] = f"tied as {' = '.join(names[key])} across groups that cannot be joined"
        else:
            units = [unit for unit in units if not all(joined.contains(node) for node in unit.nodes)] + [joined]
    units = _children_first(units, tree)
    result = Assignment(units, [[] for _ in units], [], replicated)
    index_of = {id(node): index for index, unit in enumerate(units) for node in unit.nodes}
    for key, holders in owners.items():
        if key not in replicated:
            home = next((index_of[id(node)] for node in _upwards(holders[0]) if id(node) in index_of), None)
            (result.root if home is None else result.keys[home]).append(key)
    return result


def _homes(nodes: list[Node], units: list[Unit]) -> list[Unit | None]:
    """The innermost unit around each node, each once; None stands for the root."""
    unit_of = {id(node): unit for unit in units for node in unit.nodes}
    homes = [next((unit_of[id(up)] for up in _upwards(node) if id(up) in unit_of), None) for node in nodes]
    return list({id(home): home for home in homes}.values())


def _upwards(node: Node) -> list[Node]:
    return [node, *node.ancestors]


def _shared_modules(tree: Tree, units: list[Unit]) -> list[Unit]:
    """A module object held by several groups is a group itself: each would shard it again otherwise."""
    shared: list[Unit] = []
    for node in tree.root.walk():
        if node.keys and node.other_parents and node.has_forward and node.parent is not None:
            alone = any(mine is node for unit in units for mine in unit.nodes)
            if not alone and len(_homes([node.parent, *node.other_parents], units)) > 1:
                reason = f"{node.class_name} shared by {node.parent.fqn or 'the root'} and others, gathered for all"
                shared.append(Unit((node,), "tie", reason, held=True))
    return shared


def _refuse_explicit(homes: list[Unit], names: tuple[str, ...]) -> None:
    explicit = [unit for unit in homes if unit.explicit]
    if len(explicit) > 1:
        paths = [unit.nodes[0].fqn for unit in explicit]
        raise PlanError(
            f"{' and '.join(repr(name) for name in names)} are one tensor, but their groups are two",
            where=", ".join(paths),
            why="a tied parameter has one shard, so all its modules belong to one group",
            fix=f"leave one of {', '.join(paths)} out of the groups you name, or let group_by='auto' join them",
        )


def _tie_unit(
    key: int, owners: dict[int, list[Node]], units: list[Unit], names: tuple[str, ...], calls: Calls
) -> Unit | None:
    """One unit of all the modules that hold the tensor, or None when they cannot be gathered together."""
    nodes = list(owners[key])
    while True:  # a holder's other parameters may be tied further
        more = [node for mine in nodes for other in mine.keys for node in owners[other]]
        fresh = [node for node in more if not any(mine.contains(node) for mine in nodes)]
        if not fresh:
            break
        nodes += fresh
    nodes = [node for node in nodes if not any(other is not node and other.contains(node) for other in nodes)]
    nodes = list(dict.fromkeys(nodes))
    holds_other_units = any(
        node.contains(mine) and mine is not node
        for node in nodes
        for unit in units
        if unit.kind != "leaf"  # a leaf inside is simply taken over
        for mine in unit.nodes
    )
    if holds_other_units or any(not node.fqn or not node.has_forward for node in nodes):
        return None
    if any(not node.is_atom and node.fqn in calls.bypassed for node in nodes):
        return None
    reason = f"tied: {' = '.join(names)}; gathered once for all of them, from first use to the end of backward"
    return Unit(tuple(nodes), "tie", reason, held=True)


def _children_first(units: list[Unit], tree: Tree) -> list[Unit]:
    """Tree order, except that a unit inside another comes before it."""
    position = {id(node): index for index, node in enumerate(tree.root.walk())}
    ordered = sorted(units, key=lambda unit: min(position[id(node)] for node in unit.nodes))
    result: list[Unit] = []

    def place(unit: Unit) -> None:
        if any(unit is placed for placed in result):
            return
        for other in ordered:
            if other is not unit and any(unit.contains(node) for node in other.nodes):
                place(other)
        result.append(unit)

    for unit in ordered:
        place(unit)
    return result
