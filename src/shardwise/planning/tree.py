"""A read-only view of a model's modules for planning: names, sizes, and what can carry FSDP2's hooks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from shardwise.config.schema import ROOT_PATTERN

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
    """Keys of the parameters registered on this very module."""
    other_parents: list["Node"] = field(default_factory=list)
    """Further modules that hold this same module object."""

    def walk(self) -> Iterator["Node"]:
        """This node and everything below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def ancestors(self) -> Iterator["Node"]:
        """The nodes above, nearest first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def contains(self, other: "Node") -> bool:
        """Whether `other` is this node or below it."""
        return other is self or any(node is self for node in other.ancestors)

    @cached_property
    def keys(self) -> frozenset[int]:
        """Keys of every parameter at or below this node."""
        return frozenset(self.own).union(*(child.keys for child in self.children))

    @cached_property
    def has_forward(self) -> bool:
        """Whether the module can be called at all."""
        return "forward" in vars(self.module) or type(self.module).forward is not nn.Module.forward

    @cached_property
    def is_atom(self) -> bool:
        """Nothing below it may be sharded apart: a leaf, or a module whose inside is torch's business.

        torch's own modules read their children's weights (`nn.MultiheadAttention` never calls `out_proj`), and a
        parametrised module computes its weight from children on access.
        """
        if not any(child.keys for child in self.children):
            return True
        if "parametrizations" in self.module._modules:
            return True
        # Sharded classes keep the name of the class they came from at the end of their bases.
        origin = type(self.module).__module__
        return origin.startswith("torch.nn.") and self.has_forward and not isinstance(self.module, _TORCH_COMPOSITES)

    @property
    def is_composite(self) -> bool:
        """Whether it can be called and has parts that may be sharded apart."""
        return self.has_forward and not self.is_atom

    @property
    def class_name(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__


class Tree:
    """The module tree of a model, with tied parameters counted once."""

    def __init__(self, model: nn.Module, key_of: dict[int, int]) -> None:
        """`key_of` maps `id(parameter)` to the key of the tensor it stands for; unmapped ones do not count."""
        self.nodes: dict[str, Node] = {}
        self._by_module: dict[int, Node] = {}
        self.root = self._build("", model, None, key_of)

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
            if (seen := self._by_module.get(id(child))) is not None:  # a shared module lives at its first name
                seen.other_parents.append(node)
            else:
                node.children.append(self._build(f"{fqn}.{name}" if fqn else name, child, node, key_of))
        return node

    def owners(self) -> dict[int, list[Node]]:
        """Parameter key to the modules that register it, in tree order."""
        owners: dict[int, list[Node]] = {}
        for node in self.root.walk():
            for key in node.own:
                owners.setdefault(key, []).append(node)
        return owners

    def matching(self, pattern: str) -> list[Node]:
        """Nodes whose name fits the pattern or whose class has that very name; the root for `(root)`."""
        if pattern == ROOT_PATTERN:
            return [self.root]
        fits = name_matcher(pattern)
        return [node for node in self.root.walk() if node.class_name == pattern or (node.fqn and fits(node.fqn))]


def name_matcher(pattern: str):
    """A predicate for FQNs: `*` is part of one name, `**` and a leading `*.` span dots."""
    if pattern.startswith("*."):
        pattern = "*" + pattern
    pieces = []
    for piece in re.split(r"(\*\*\.|\*\*|\*|\?)", pattern):
        pieces.append({"**.": r"(?:.*\.)?", "**": ".*", "*": r"[^.]*", "?": r"[^.]"}.get(piece, re.escape(piece)))
    return re.compile("".join(pieces)).fullmatch
