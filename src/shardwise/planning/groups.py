"""Grouping of modules: repeated blocks found in the module tree, or groups of the config."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from torch import nn

from shardwise.config.schema import ROOT_PATTERN, ShardConfig
from shardwise.errors import PlanError, fix_name
from shardwise.planning.calls import Calls, has_forward
from shardwise.planning.plan import Group

_RUNS = nn.ModuleList | nn.ModuleDict | nn.Sequential
_TORCH_COMPOSITES = (
    nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip


@dataclass(eq=False)
class Node:
    """One module, its place in the tree and its distinct parameters."""

    fqn: str
    module: nn.Module
    parent: "Node | None" = None
    children: list["Node"] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    """Keys of the parameters registered on this module itself."""
    other_parents: list["Node"] = field(default_factory=list)
    """Further parents of the same module object."""

    def walk(self) -> Iterator["Node"]:
        """This node and everything below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def upwards(self) -> Iterator["Node"]:
        """This node and those above, nearest first."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def contains(self, other: "Node") -> bool:
        """Whether `other` is this node or below it."""
        return any(node is self for node in other.upwards)

    @cached_property
    def keys(self) -> frozenset[int]:
        """Keys of every parameter at or below this node."""
        return frozenset(self.own).union(*(child.keys for child in self.children))

    @cached_property
    def has_forward(self) -> bool:
        """Whether the module has a forward."""
        return has_forward(self.module)

    @cached_property
    def is_atom(self) -> bool:
        """Whether no descendant can be sharded separately: a leaf, or a module of torch.

        torch's own modules read their children's weights (`nn.MultiheadAttention` never calls `out_proj`), and a
        parametrized module computes its weight from its children on access.
        """
        if not any(child.keys for child in self.children):
            return True
        if "parametrizations" in self.module._modules:
            return True
        # A sharded class has the module name of its original class.
        origin = type(self.module).__module__
        return origin.startswith("torch.nn.") and self.has_forward and not isinstance(self.module, _TORCH_COMPOSITES)

    @property
    def is_composite(self) -> bool:
        """Whether it has a forward and descendants that can be sharded separately."""
        return self.has_forward and not self.is_atom

    @property
    def class_name(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__


class Tree:
    """The module tree of a model, with tied parameters counted once.

    Args:
        model: The root.
        key_of: Maps `id(parameter)` to the key of its tensor; parameters without an entry do not count.
        numel: Number of elements by key, for `size`.
        roots: Names of the modules that scripts call.
    """

    def __init__(
        self,
        model: nn.Module,
        key_of: dict[int, int],
        numel: Mapping[int, int] | None = None,
        roots: Iterable[str] = ("",),
    ) -> None:
        self.numel = numel or {}
        self.nodes: dict[str, Node] = {}
        self._by_module: dict[int, Node] = {}
        self.root = self._build("", model, None, key_of)
        self.roots = [self.nodes[name] for name in roots]

    def _build(self, fqn: str, module: nn.Module, parent: Node | None, key_of: dict[int, int]) -> Node:
        node = Node(fqn, module, parent)
        self.nodes[fqn] = node
        self._by_module[id(module)] = node
        for parameter in module._parameters.values():
            if parameter is not None and (key := key_of.get(id(parameter))) is not None and key not in node.own:
                node.own.append(key)
        for name, child in module._modules.items():
            if child is None:
                continue
            if (seen := self._by_module.get(id(child))) is not None:  # a shared module has one node, at its first name
                seen.other_parents.append(node)
            else:
                node.children.append(self._build(f"{fqn}.{name}" if fqn else name, child, node, key_of))
        return node

    def size(self, of: Node | Iterable[int]) -> int:
        """Number of elements of the parameters at or below a node, or with these keys."""
        return sum(self.numel[key] for key in (of.keys if isinstance(of, Node) else of))

    def owners(self) -> dict[int, list[Node]]:
        """Maps each parameter key to the modules that register it, in tree order."""
        owners: dict[int, list[Node]] = {}
        for node in self.root.walk():
            for key in node.own:
                owners.setdefault(key, []).append(node)
        return owners

    def matching(self, pattern: str) -> list[Node]:
        """Nodes whose FQN matches the pattern or whose class has that name; the roots for `(root)`."""
        if pattern == ROOT_PATTERN:
            return self.roots
        fits = name_matcher(pattern)
        return [node for node in self.root.walk() if node.class_name == pattern or (node.fqn and fits(node.fqn))]


def outermost_blocks(model: nn.Module, groups: Iterable[Group]) -> dict[str, nn.Module]:
    """The outermost composite modules below the root that are groups, by FQN in the model's order."""
    grouped = {name for group in groups for name in group.modules if name}
    tree = Tree(model, {id(parameter): key for key, parameter in enumerate(model.parameters())})
    nodes = [node for node in tree.root.walk() if node.fqn in grouped and node.is_composite]
    inner = {id(node) for node in nodes for other in nodes if other is not node and other.contains(node)}
    return {node.fqn: node.module for node in nodes if id(node) not in inner}


def name_matcher(pattern: str):
    """Return a predicate for FQNs: `*` matches within one name, `**` and a leading `*.` match across dots."""
    if pattern.startswith("*."):
        pattern = "*" + pattern
    pieces = []
    for piece in re.split(r"(\*\*\.|\*\*|\*|\?)", pattern):
        pieces.append({"**.": r"(?:.*\.)?", "**": ".*", "*": r"[^.]*", "?": r"[^.]"}.get(piece, re.escape(piece)))
    return re.compile("".join(pieces)).fullmatch


BIG_LEAF_SHARE = 0.25
"""Minimum size, relative to the largest block, of a leaf that becomes its own group."""
TINY_BLOCK_SHARE = 0.02
"""Minimum size of a block, relative to the largest one; smaller blocks are not worth a collective."""
MOSTLY_ONE_LEAF_SHARE = 0.8
"""Minimum share of one leaf in a module that counts as that leaf."""

Kind = Literal["block", "leaf", "tie", "island", "storage", "part", "experts", "root"]


@dataclass(frozen=True, slots=True)
class GroupCandidate:
    """Modules of one group, before its settings are chosen."""

    nodes: tuple[Node, ...]
    kind: Kind
    reason: str
    explicit: bool = False
    """Requested by the user."""
    kept_unsharded: bool = False
    """Unsharded from the root's forward to the end of backward, because code outside reads its parameters."""

    @property
    def is_root(self) -> bool:
        """Whether it is the group of the model itself."""
        return self.kind == "root"

    def contains(self, node: Node) -> bool:
        """Whether the node is one of its modules or below one."""
        return any(mine.contains(node) for mine in self.nodes)


def by_node(candidates: Iterable[GroupCandidate]) -> dict[Node, GroupCandidate]:
    """Map the modules of the candidates to their candidate."""
    return {node: candidate for candidate in candidates for node in candidate.nodes}


def blocks_around(candidates: Iterable[GroupCandidate]) -> list[str]:
    """FQNs of the repeated blocks at or around groups: elements of lists, and modules of repeated classes."""
    found: dict[str, None] = {}
    for node in (node for candidate in candidates if not candidate.is_root for node in candidate.nodes):
        above = [(each, each.parent) for each in node.upwards if each.is_composite and each.parent is not None]
        runs = {each: parent.children for each, parent in above if isinstance(parent.module, _RUNS)}
        kinds = {each: {type(other.module) for other in others} - {nn.Sequential} for each, others in runs.items()}
        alike = [each for each in runs if len(kinds[each]) == 1]
        block = next(iter((*alike, *runs, node)))
        if block.is_composite:
            found[block.fqn] = None
    return list(found)


def find_candidates(tree: Tree, calls: Calls) -> list[GroupCandidate]:
    """Find groups without user settings; the root gets the remaining parameters.

    Returns:
        Repeated blocks, then leaves that are large compared with a block, then modules moved out of the root
        until it is no larger than the largest other group.
    """
    found: list[GroupCandidate] = []
    for root in tree.roots:
        search = _Search(tree, root, calls)
        candidates = search.blocks()
        candidates += search.big_leaves(candidates)
        candidates += search.relieve_root(candidates)
        found += candidates
    return [around_calls(candidate, calls) for candidate in found]


class _Search:
    """Search for groups below a root."""

    def __init__(self, tree: Tree, root: Node, calls: Calls) -> None:
        self.tree, self.root, self.calls = tree, root, calls
        self.found: dict[Node, str] = {}
        self.outside: list[Node] = []

    def blocks(self) -> list[GroupCandidate]:
        """Return elements of lists and sequences, and other repeated classes: the outermost of nested blocks,
        unless it is a stage that contains a run of blocks."""
        self._descend(self.root, frozenset())
        counts = Counter(type(node.module) for node in self.outside if not isinstance(node.module, nn.Sequential))
        repeated = frozenset(kind for kind, count in counts.items() if count > 1)
        self.found, self.outside = {}, []
        self._descend(self.root, repeated)
        largest = max((self.tree.size(node) for node in self.found), default=0)
        return [
            GroupCandidate((node,), "block", reason)
            for node, reason in self.found.items()
            if self.tree.size(node) >= TINY_BLOCK_SHARE * largest
        ]

    def big_leaves(self, candidates: list[GroupCandidate]) -> list[GroupCandidate]:
        """Return embeddings, heads and other single modules that are large compared with a block."""
        leaves = [node for node in self._free_nodes(candidates) if node.is_atom and self._may_stand_alone(node)]
        blocks = [self.tree.size(candidate.nodes[0]) for candidate in candidates]
        reference = max(blocks or [self.tree.size(leaf) for leaf in leaves], default=0)
        what = "block" if blocks else "leaf"
        return [
            GroupCandidate((leaf,), "leaf", f"{leaf.class_name}, {size / reference:.1f}x the largest {what}: own group")
            for leaf in leaves
            if (size := self.tree.size(leaf)) >= BIG_LEAF_SHARE * reference
        ]

    def relieve_root(self, candidates: list[GroupCandidate]) -> list[GroupCandidate]:
        """Return modules to move out of the root, largest first, until it is no larger than the largest other group."""
        taken: list[GroupCandidate] = []
        while True:
            everything = candidates + taken
            grouped = by_node(everything)
            left = self.root.keys.difference(*(node.keys for node in grouped))
            limit = max(map(self.tree.size, grouped), default=0)
            pieces = [
                (self.tree.size(node.keys & left), node)
                for node in self._free_nodes(everything)
                if self._may_stand_alone(node) and node.keys & left
            ]
            total = self.tree.size(left)
            pieces = [(size, node) for size, node in pieces if size < total and (size <= limit or node.is_atom)]
            if total <= max(limit, 1) or not pieces:
                return taken
            _, node = max(pieces, key=lambda piece: piece[0])
            reason = f"{node.class_name} taken out of the root, which would outweigh every other group"
            taken.append(GroupCandidate((node,), "leaf" if node.is_atom else "block", reason))

    def _descend(self, parent: Node, repeated: frozenset[type]) -> None:
        in_run = isinstance(parent.module, _RUNS) or not parent.has_forward
        for node in parent.children:
            if not node.keys or node.is_atom:
                continue
            marked = getattr(node.module, "_fsdp_wrap", None)
            if marked:
                self.found[node] = "marked by its `_fsdp_wrap` attribute"
                continue
            may_be_block = node.has_forward and marked is not False
            is_block = may_be_block and (in_run or type(node.module) in repeated)
            if is_block and not self._holds_a_run(node):
                count = sum(1 for sibling in parent.children if sibling.keys)
                where = (
                    f"one of {count} in {parent.fqn or 'the root'}" if in_run else "a class that repeats in the model"
                )
                self.found[node] = f"{node.class_name}, {where}"
                continue
            if may_be_block and not is_block:
                self.outside.append(node)
            self._descend(node, repeated)

    def _holds_a_run(self, stage: Node) -> bool:
        """Whether blocks repeat inside it. Experts selected by data are excluded: they differ between ranks."""
        for node in stage.walk():
            if node.is_atom:
                continue
            parts = [child for child in node.children if child.is_composite and not self._is_mostly_one_leaf(child)]
            elements = Counter(type(part.module) for part in parts if part.fqn not in self.calls.conditional)
            # Two attention modules are parts of one block; three modules of a class are a run even without a list.
            if max(elements.values(), default=0) >= (2 if isinstance(node.module, _RUNS) else 3):
                return True
        return False

    def _is_mostly_one_leaf(self, node: Node) -> bool:
        """Whether one leaf has nearly all its parameters: a convolution with its norm is not a block."""
        largest = max((self.tree.size(below) for below in node.walk() if below.is_atom), default=0)
        return largest >= MOSTLY_ONE_LEAF_SHARE * self.tree.size(node)

    def _free_nodes(self, candidates: list[GroupCandidate]) -> list[Node]:
        """Nodes below the root that no candidate contains."""
        free: list[Node] = []
        grouped = by_node(candidates)

        def collect(node: Node) -> None:
            for child in node.children:
                if child not in grouped:
                    free.append(child)
                    if not child.is_atom:
                        collect(child)

        collect(self.root)
        return free

    def _may_stand_alone(self, node: Node) -> bool:
        """Whether hooks on the node itself would run on every rank."""
        wanted = getattr(node.module, "_fsdp_wrap", None) is not False
        entered = node.is_atom or node.fqn not in self.calls.bypassed
        return bool(node.keys) and node.has_forward and wanted and entered and node.fqn not in self.calls.conditional


def around_calls(candidate: GroupCandidate, calls: Calls) -> GroupCandidate:
    """Adapt a candidate to the calls of its modules: put hooks on its parts, or keep it unsharded for outside reads."""
    node = candidate.nodes[0]
    if len(candidate.nodes) == 1 and not node.is_atom and (inner := calls.bypassed.get(node.fqn)):
        parts = tuple(part for part in _parts(node, inner) if not is_read_outside(part, node, calls))
        if parts:
            why = f"{candidate.reason}; its parts are called directly ({_some(inner, node)}), so the hooks sit on them"
            return replace(candidate, nodes=parts, kind="part", reason=why)
    why = why_kept_unsharded(candidate.nodes, calls, only_atoms=True)
    if not why:
        return candidate
    return replace(candidate, kept_unsharded=True, reason=f"{candidate.reason}; kept unsharded, because {why}")


def why_kept_unsharded(nodes: tuple[Node, ...], calls: Calls, *, only_atoms: bool = False) -> str:
    """Return why hooks on these modules may not run on every rank and before every use; empty if they do."""
    if any(node.fqn in calls.conditional for node in nodes):
        return "the data of a rank decide whether it runs"
    if any(is_read_outside(node, node, calls) for node in nodes):
        return "code outside reads its weights"
    asked = [node for node in nodes[:1] if node.is_atom] if only_atoms else nodes
    if any(calls.is_known(node.fqn) and node.fqn not in calls.called for node in asked):
        return "nothing calls it as a module"
    return ""


def _parts(node: Node, inner: frozenset[str]) -> list[Node]:
    """Return the largest submodules that are entered by their own call."""
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


def is_read_outside(node: Node, outer: Node, calls: Calls) -> bool:
    """Whether a parameter at or below `node` is read by code that runs outside `outer`."""
    prefix = node.fqn + "." if node.fqn else ""
    inside = outer.fqn + "." if outer.fqn else ""
    return any(
        reader != outer.fqn and not reader.startswith(inside)
        for parameter, readers in calls.foreign_reads.items()
        if parameter.startswith(prefix)
        for reader in readers
    )


def _some(names: frozenset[str], node: Node) -> str:
    short = sorted(name.removeprefix(node.fqn + ".") for name in names)
    return ", ".join(short[:3]) + (", …" if len(short) > 3 else "")


def is_explicit(config: ShardConfig) -> bool:
    """Whether the user configured groups."""
    named = config.block_classes or config.block_patterns or config.min_group_params or config.wrap_if
    return bool(named) or config.group_by != "auto"


def named_candidates(tree: Tree, config: ShardConfig) -> list[GroupCandidate]:
    """Return the distinct candidates that a config requests, in tree order.

    Raises:
        PlanError: A name matches nothing, or a container that has no `forward`.
    """
    found: dict[Node, str] = {}
    for name in config.block_classes:
        nodes = [node for node in tree.root.walk() if node.class_name == name]
        if not nodes:
            known = sorted({node.class_name for node in tree.root.walk() if node.keys})
            raise unknown_pattern(name, known, "block_classes", "no module of the model has this class")
        found |= dict.fromkeys(_callable(nodes, f"block_classes: {name}"), f"class {name}, named in block_classes")
    for pattern in config.block_patterns:
        found |= dict.fromkeys(_named(tree, pattern), f"matches {pattern!r} in block_patterns")
    if config.min_group_params:
        reason = f"smallest module with at least {config.min_group_params} parameters"
        found |= dict.fromkeys(_by_size(tree, config.min_group_params), reason)
    if config.wrap_if:
        found |= dict.fromkeys(_by_predicate(tree, config.wrap_if), "chosen by wrap_if")
    if config.group_by == "children":
        found |= dict.fromkeys((node for root in tree.roots for node in _children(root)), "direct child of the root")
    if config.group_by == "attribute":
        marked = (node for node in tree.root.walk() if getattr(node.module, "_fsdp_wrap", None) and node.fqn)
        found |= dict.fromkeys(_callable(marked, "`_fsdp_wrap`"), "marked by its `_fsdp_wrap` attribute")
    return [
        GroupCandidate((node,), "leaf" if node.is_atom else "block", found[node], explicit=True)
        for node in tree.root.walk()
        if node in found and node not in tree.roots and node.keys
    ]


def _named(tree: Tree, pattern: str) -> list[Node]:
    nodes = [node for node in tree.matching(pattern) if node.keys]
    if not nodes:
        raise unknown_pattern(pattern, [node.fqn for node in tree.root.walk() if node.fqn], "block_patterns")
    return _callable(nodes, f"block_patterns: {pattern}")


def _by_size(tree: Tree, least: int) -> list[Node]:
    """Select modules bottom-up: those whose parameters outside selected descendants reach the size."""
    taken: list[Node] = []

    def visit(node: Node) -> int:
        left = tree.size(node.own) + sum(visit(child) for child in node.children)
        if left >= least and node.has_forward:
            taken.append(node)
            return 0
        return left

    for root in tree.roots:
        for child in root.children:
            visit(child)
    return taken


def _by_predicate(tree: Tree, predicate: Callable[..., object]) -> list[Node]:
    takes_name = len(inspect.signature(predicate).parameters) > 1
    chosen = [
        node
        for node in tree.root.walk()
        if node not in tree.roots and (predicate(node.fqn, node.module) if takes_name else predicate(node.module))
    ]
    return _callable(chosen, "wrap_if")


def _children(root: Node) -> list[Node]:
    """Return direct children; a list or dictionary is replaced by its elements."""
    nodes: list[Node] = []
    for child in root.children:
        nodes += [child] if child.has_forward else _children(child)
    return nodes


def _callable(nodes: Iterable[Node], where: str) -> list[Node]:
    nodes = list(nodes)
    for node in nodes:
        if not node.has_forward:
            raise PlanError(
                f"{node.fqn or 'the root'} is a {node.class_name}, which has no forward",
                where=where,
                why="FSDP2 unshards parameters when a module is called, and a container is never called",
                fix=f'use its elements: block_patterns=("{node.fqn}.*",)',
            )
    return nodes


def unknown_pattern(
    name: str, known: list[str], where: str, why: str = "the pattern fits no module's name"
) -> PlanError:
    """Return the error for a name or pattern in a setting that matches nothing."""
    fix = fix_name(name, known, f"choose among {', '.join(known[:6])}", cutoff=0.5)
    return PlanError(f"{where} names {name!r}, which matches nothing", where=f"{where}: {name}", why=why, fix=fix)


def ignored_keys(tree: Tree, names: dict[str, int], patterns: tuple[str, ...]) -> set[int]:
    """Return keys of the parameters that `ignored` patterns match, directly or through their modules."""
    keys: set[int] = set()
    for pattern in patterns:
        fits = name_matcher(pattern)
        found = {key for name, key in names.items() if fits(name)}
        found |= {key for node in tree.matching(pattern) for key in node.keys}
        if not found:
            raise unknown_pattern(pattern, [*names, *tree.nodes], "ignored", "the pattern fits no parameter or module")
        keys |= found
    return keys
