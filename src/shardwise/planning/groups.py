"""Decide which modules share a `fully_shard` call, for any model, without knowing its classes.

Sizes are compared with each other and never with a constant, so a tiny test model is grouped like its large sibling.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from shardwise.planning.calls import Calls
from shardwise.planning.tree import Node, Tree

BIG_LEAF_SHARE = 0.25
"""A leaf at least this large, compared with the largest block, is gathered on its own."""
TINY_BLOCK_SHARE = 0.02
"""A block smaller than this, compared with the largest one, is not worth a collective."""
DRESSED_LEAF_SHARE = 0.8
"""A module of which one leaf is at least this much counts as that leaf."""

Kind = Literal["block", "leaf", "tie", "island", "storage", "part"]


@dataclass(frozen=True, slots=True)
class Unit:
    """Modules to be sharded together, before settings are known."""

    nodes: tuple[Node, ...]
    kind: Kind
    reason: str
    explicit: bool = False
    """Asked for by the user."""
    held: bool = False
    """Gathered from the root's entry to the end of backward, because code outside reads its parameters."""

    def contains(self, node: Node) -> bool:
        """Whether the node is one of its modules or below one."""
        return any(mine.contains(node) for mine in self.nodes)


class Sizes:
    """How many parameters nodes hold, ties counted once."""

    def __init__(self, numel: dict[int, int]) -> None:
        self._numel = numel

    def of(self, node: Node) -> int:
        """Parameters at or below a node."""
        return sum(self._numel[key] for key in node.keys)

    def of_keys(self, keys: frozenset[int] | set[int]) -> int:
        """Parameters behind these keys."""
        return sum(self._numel[key] for key in keys)


def find_units(tree: Tree, sizes: Sizes, calls: Calls) -> list[Unit]:
    """Groups for a model about which the user said nothing; the root takes what is left.

    Returns:
        Units in tree order: repeated blocks, then leaves as large as a good part of a block, then pieces taken
        out of the root until it is no larger than the largest of the others.
    """
    search = _Search(tree, sizes, calls)
    units = search.blocks()
    units += search.big_leaves(units)
    units += search.relieve_root(units)
    return [around_calls(unit, calls) for unit in units]


class _Search:
    """One pass over a tree; keeps what was seen on the way."""

    def __init__(self, tree: Tree, sizes: Sizes, calls: Calls) -> None:
        self.tree, self.sizes, self.calls = tree, sizes, calls
        self.found: dict[Node, str] = {}
        self.outside: list[Node] = []

    def blocks(self) -> list[Unit]:
        """Elements of lists and sequences, then classes that repeat elsewhere; the outermost of nested ones,
        unless it is a stage that itself holds a run of blocks."""
        self._descend(self.tree.root, frozenset())
        counts = Counter(type(node.module) for node in self.outside if not isinstance(node.module, nn.Sequential))
        repeated = frozenset(kind for kind, count in counts.items() if count > 1)
        self.found, self.outside = {}, []
        self._descend(self.tree.root, repeated)
        largest = max((self.sizes.of(node) for node in self.found), default=0)
        return [
            Unit((node,), "block", reason)
            for node, reason in self.found.items()
            if self.sizes.of(node) >= TINY_BLOCK_SHARE * largest
        ]

    def big_leaves(self, units: list[Unit]) -> list[Unit]:
        """Embeddings, heads and other single modules that weigh as much as a good part of a block."""
        leaves = [node for node in self._free_nodes(units) if node.is_atom and self._may_stand_alone(node)]
        blocks = [self.sizes.of(unit.nodes[0]) for unit in units]
        reference = max(blocks or [self.sizes.of(leaf) for leaf in leaves], default=0)
        return [
            Unit((leaf,), "leaf", f"{leaf.class_name} as large as {self._share(leaf, reference)} of the largest block")
            if blocks
            else Unit((leaf,), "leaf", f"{leaf.class_name}, one of the model's large leaves")
            for leaf in leaves
            if self.sizes.of(leaf) >= BIG_LEAF_SHARE * reference
        ]

    def relieve_root(self, units: list[Unit]) -> list[Unit]:
        """Pieces of the root, largest first, until the root is no larger than the largest other group."""
        taken: list[Unit] = []
        while True:
            everything = units + taken
            grouped = frozenset[int]().union(*(node.keys for unit in everything for node in unit.nodes))
            left = self.tree.root.keys - grouped
            limit = max((self.sizes.of(node) for unit in everything for node in unit.nodes), default=0)
            pieces = [
                (self.sizes.of_keys(node.keys & left), node)
                for node in self._free_nodes(everything)
                if self._may_stand_alone(node) and node.keys & left
            ]
            total = self.sizes.of_keys(left)
            pieces = [(size, node) for size, node in pieces if size < total and (size <= limit or node.is_atom)]
            if total <= max(limit, 1) or not pieces:
                return taken
            _, node = max(pieces, key=lambda piece: piece[0])
            reason = f"{node.class_name} taken out of the root, which would outweigh every other group"
            taken.append(Unit((node,), "leaf" if node.is_atom else "block", reason))

    def _descend(self, parent: Node, repeated: frozenset[type]) -> None:
        in_run = isinstance(parent.module, nn.ModuleList | nn.ModuleDict | nn.Sequential) or not parent.has_forward
        for node in parent.children:
            if not node.keys or node.is_atom:
                continue
            marked = getattr(node.module, "_fsdp_wrap", None)
            if marked:
                self.found[node] = "marked by its `_fsdp_wrap` attribute"
            elif not node.has_forward or marked is False:
                self._descend(node, repeated)
            elif in_run or type(node.module) in repeated:
                self._block_or_stage(node, parent, in_run, repeated)
            else:
                self.outside.append(node)
                self._descend(node, repeated)

    def _block_or_stage(self, node: Node, parent: Node, in_run: bool, repeated: frozenset[type]) -> None:
        if self._holds_a_run(node):
            self._descend(node, repeated)
        elif in_run:
            count = sum(1 for sibling in parent.children if sibling.keys)
            where = parent.fqn or "the root"
            self.found[node] = f"{node.class_name}, one of {count} in {where}"
        else:
            self.found[node] = f"{node.class_name}, a class that repeats in the model"

    def _holds_a_run(self, stage: Node) -> bool:
        """Whether blocks repeat inside it. Experts picked by data do not count: ranks would gather different ones."""
        for node in stage.walk():
            if node.is_atom:
                continue
            listed = isinstance(node.module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
            elements = Counter(
                type(child.module)
                for child in node.children
                if child.is_composite and not self._is_dressed_leaf(child) and child.fqn not in self.calls.conditional
            )
            # Two attentions side by side are one block's parts; three of a class are a run even without a list.
            if max(elements.values(), default=0) >= (2 if listed else 3):
                return True
        return False

    def _is_dressed_leaf(self, node: Node) -> bool:
        """Whether one leaf is nearly all of it: a convolution with its norm is no block yet."""
        largest = max((self.sizes.of(below) for below in node.walk() if below.is_atom), default=0)
        return largest >= DRESSED_LEAF_SHARE * self.sizes.of(node)

    def _free_nodes(self, units: list[Unit]) -> list[Node]:
        """Nodes below the root that no unit contains."""
        free: list[Node] = []

        def collect(node: Node) -> None:
            for child in node.children:
                if any(child is mine for unit in units for mine in unit.nodes):
                    continue
                free.append(child)
                if not child.is_atom:
                    collect(child)

        collect(self.tree.root)
        return free

    def _may_stand_alone(self, node: Node) -> bool:
        """Whether hooks on the node itself would fire, on every rank alike."""
        wanted = getattr(node.module, "_fsdp_wrap", None) is not False
        entered = node.is_atom or node.fqn not in self.calls.bypassed
        return bool(node.keys) and node.has_forward and wanted and entered and node.fqn not in self.calls.conditional

    def _share(self, node: Node, reference: int) -> str:
        return f"{self.sizes.of(node) / max(reference, 1):.0%}"


def around_calls(unit: Unit, calls: Calls) -> Unit:
    """Fit a unit to how its modules are really entered: by their parts, or held because others read them."""
    node = unit.nodes[0]
    if len(unit.nodes) == 1 and not node.is_atom and (inner := calls.bypassed.get(node.fqn)):
        parts = tuple(part for part in _parts(node, inner) if not is_read_outside(part, node, calls))
        if parts:
            why = f"{unit.reason}; its parts are called directly ({_some(inner, node)}), so the hooks sit on them"
            return replace(unit, nodes=parts, kind="part", reason=why)
    if any(part.fqn in calls.conditional for part in unit.nodes):
        why = "held gathered, because the data of a rank decide whether it runs"
        return replace(unit, held=True, reason=f"{unit.reason}; {why}")
    if any(is_read_outside(part, part, calls) for part in unit.nodes):
        return replace(unit, held=True, reason=f"{unit.reason}; held gathered, because code outside reads its weights")
    if node.is_atom and calls.is_known(node.fqn) and node.fqn not in calls.called:
        return replace(unit, held=True, reason=f"{unit.reason}; held gathered, because nothing calls it as a module")
    return unit


def _parts(node: Node, inner: frozenset[str]) -> list[Node]:
    """The largest submodules that are entered through their own call."""
    parts: list[Node] = []
    for child in node.children:
        if not child.keys:
            continue
        below = any(name.startswith(child.fqn + ".") for name in inner)
        if not child.has_forward or (below and not child.is_atom):
            parts += _parts(child, inner)
        else:
            parts.append(child)
    return parts


def is_read_outside(node: Node, unit: Node, calls: Calls) -> bool:
    """Whether a parameter at or below `node` is read by code that runs outside `unit`."""
    prefix = node.fqn + "." if node.fqn else ""
    inside = unit.fqn + "." if unit.fqn else ""
    for parameter, readers in calls.foreign_reads.items():
        if parameter.startswith(prefix):
            for reader in readers:
                if reader != unit.fqn and not reader.startswith(inside):
                    return True
    return False


def _some(names: frozenset[str], node: Node) -> str:
    short = sorted(name.removeprefix(node.fqn + ".") for name in names)
    return ", ".join(short[:3]) + (", …" if len(short) > 3 else "")
