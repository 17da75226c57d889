"""Groups that the user names: by class, pattern, size, predicate, attribute or direct children."""

import difflib
import inspect
from collections.abc import Callable, Iterable

from shardwise.config.schema import ShardConfig
from shardwise.errors import PlanError
from shardwise.planning.groups import Sizes, Unit
from shardwise.planning.tree import Node, Tree, name_matcher


def is_explicit(config: ShardConfig) -> bool:
    """Whether the user said anything about groups."""
    named = config.block_classes or config.block_patterns or config.min_group_params or config.wrap_if
    return bool(named) or config.group_by != "auto"


def named_units(tree: Tree, sizes: Sizes, config: ShardConfig) -> list[Unit]:
    """The units a config asks for, each once, in tree order.

    Raises:
        PlanError: A name matches nothing, or a container that has no `forward`.
    """
    found: dict[Node, str] = {}
    for name in config.block_classes:
        found |= dict.fromkeys(_instances(tree, name), f"class {name}, named in block_classes")
    for pattern in config.block_patterns:
        found |= dict.fromkeys(_named(tree, pattern), f"matches {pattern!r} in block_patterns")
    if config.min_group_params:
        reason = f"smallest module with at least {config.min_group_params} parameters"
        found |= dict.fromkeys(_by_size(tree.root, sizes, config.min_group_params), reason)
    if config.wrap_if:
        found |= dict.fromkeys(_by_predicate(tree, config.wrap_if), "chosen by wrap_if")
    if config.group_by == "children":
        found |= dict.fromkeys(_children(tree.root), "direct child of the root")
    if config.group_by == "attribute":
        marked = (node for node in tree.root.walk() if getattr(node.module, "_fsdp_wrap", None) and node.fqn)
        found |= dict.fromkeys(_callable(marked, "`_fsdp_wrap`"), "marked by its `_fsdp_wrap` attribute")
    return [
        Unit((node,), "leaf" if node.is_atom else "block", found[node], explicit=True)
        for node in tree.root.walk()
        if node in found and node is not tree.root and node.keys
    ]


def _instances(tree: Tree, name: str) -> list[Node]:
    nodes = [node for node in tree.root.walk() if node.class_name == name]
    if not nodes:
        known = sorted({node.class_name for node in tree.root.walk() if node.keys})
        raise _unknown(name, known, "block_classes", "no module of the model has this class")
    return _callable(nodes, f"block_classes: {name}")


def _named(tree: Tree, pattern: str) -> list[Node]:
    nodes = [node for node in tree.matching(pattern) if node.keys]
    if not nodes:
        known = [node.fqn for node in tree.root.walk() if node.fqn]
        raise _unknown(pattern, known, "block_patterns", "the pattern fits no module's name")
    return _callable(nodes, f"block_patterns: {pattern}")


def _by_size(root: Node, sizes: Sizes, least: int) -> list[Node]:
    """Bottom-up: a module is taken once its parameters, less those of taken ones, reach the size."""
    taken: list[Node] = []

    def visit(node: Node) -> int:
        left = sizes.of_keys(frozenset(node.own)) + sum(visit(child) for child in node.children)
        if left >= least and node.has_forward:
            taken.append(node)
            return 0
        return left

    for child in root.children:
        visit(child)
    return taken


def _by_predicate(tree: Tree, predicate: Callable[..., object]) -> list[Node]:
    takes_name = len(inspect.signature(predicate).parameters) > 1
    chosen = [
        node
        for node in tree.root.walk()
        if node is not tree.root and (predicate(node.fqn, node.module) if takes_name else predicate(node.module))
    ]
    return _callable(chosen, "wrap_if")


def _children(root: Node) -> list[Node]:
    """Direct children; of a list or dictionary, its elements."""
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
                why="FSDP2 gathers parameters when a module is called, and a container is never called",
                fix=f'name its elements: block_patterns=("{node.fqn}.*",)',
            )
    return nodes


def _unknown(name: str, known: list[str], where: str, why: str) -> PlanError:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    fix = f"did you mean {', '.join(map(repr, near))}?" if near else f"choose among {', '.join(known[:6])}"
    return PlanError(f"{where} names {name!r}, which matches nothing", where=f"{where}: {name}", why=why, fix=fix)


def ignored_keys(tree: Tree, names: dict[str, int], patterns: tuple[str, ...]) -> set[int]:
    """Keys of the parameters that `ignored` patterns name, as parameters or through their modules."""
    keys: set[int] = set()
    for pattern in patterns:
        fits = name_matcher(pattern)
        found = {key for name, key in names.items() if fits(name)}
        found |= {key for node in tree.matching(pattern) for key in node.keys}
        if not found:
            raise _unknown(pattern, [*names, *tree.nodes], "ignored", "the pattern fits no parameter or module")
        keys |= found
    return keys
