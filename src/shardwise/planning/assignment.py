"""Assignment of parameters to groups: tied parameters in one group, groups split by override."""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.compat import SPLITS_GROUPS, storage_id
from shardwise.config.schema import GroupOverride
from shardwise.errors import PlanError
from shardwise.planning.calls import Calls
from shardwise.planning.groups import GroupCandidate, Kind, Node, Tree, by_node, unknown_pattern, why_kept_unsharded
from shardwise.planning.settings import FLOATING, majority


@dataclass(frozen=True, slots=True)
class Tensor:
    """One distinct parameter: its names, and its objects (several only if tied by storage)."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def parameter(self) -> nn.Parameter:
        """The object that replaces the others."""
        return self.parameters[0]


def find_tensors(model: nn.Module) -> list[Tensor]:
    """Every distinct parameter of `model` in registration order, with all its names.

    Two `nn.Parameter` objects over the same memory are one tensor: an optimizer step on either changes both.

    Raises:
        PlanError: Two parameters overlap in memory without being the same view (a transposed tie).
    """
    names: dict[int, list[str]] = defaultdict(list)
    objects: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
        objects[id(parameter)] = parameter
    merged: dict[object, list[int]] = defaultdict(list)
    for identity, parameter in objects.items():
        merged[_view_key(parameter)].append(identity)
    tensors = [
        Tensor(tuple(name for i in same for name in names[i]), tuple(objects[i] for i in same))
        for same in merged.values()
    ]
    _refuse_partial_overlap(model, tensors)
    return tensors


def _view_key(parameter: nn.Parameter) -> object:
    if parameter.numel() == 0 or not _has_storage(parameter):
        return id(parameter)
    return (storage_id(parameter), parameter.storage_offset(), tuple(parameter.shape), parameter.stride())


def _has_storage(parameter: torch.Tensor) -> bool:
    # Subclasses (quantized tensors, DTensors) keep their data in inner tensors.
    return type(parameter) in (nn.Parameter, torch.Tensor)


def _span(tensor: torch.Tensor) -> tuple[object, int, int]:
    """The storage of a tensor, and the range of elements that it covers."""
    start = int(tensor.storage_offset())
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return storage_id(tensor), start, start + int(extent) + 1


def _refuse_partial_overlap(model: nn.Module, tensors: list[Tensor]) -> None:
    """Raise if parameters overlap, or if a buffer is in the memory of a trained one."""
    spans: dict[object, list[tuple[int, int, Tensor]]] = defaultdict(list)
    for tensor in tensors:
        if tensor.parameter.numel() and _has_storage(tensor.parameter):
            storage, start, end = _span(tensor.parameter)
            spans[storage].append((start, end, tensor))
    for same in spans.values():
        same.sort(key=lambda span: span[:2])
        for (_, end, first), (start, _, second) in itertools.pairwise(same):
            if start < end:
                raise PlanError(
                    f"{first.names[0]!r} and {second.names[0]!r} share memory but are different views of it",
                    where=f"{first.names[0]}, {second.names[0]}",
                    why="sharding gives each parameter its own storage, which would silently untie them",
                    fix=f"register one parameter and compute the other in forward (e.g. {first.names[0]}.t())",
                )
    for name, buffer in model.named_buffers():
        if buffer.numel() and _has_storage(buffer):
            storage, start, end = _span(buffer)
            for first, last, tensor in spans.get(storage, ()):
                if start < last and first < end and tensor.parameter.requires_grad:
                    raise PlanError(
                        f"the buffer {name!r} shares memory with the parameter {tensor.names[0]!r}",
                        where=f"{name}, {tensor.names[0]}",
                        why="sharding gives the parameter its own storage, so the buffer would keep the old values",
                        fix=f"use {tensor.names[0]}.detach() in forward; or, for a fixed copy, register its .clone()",
                    )


@dataclass(slots=True)
class Assignment:
    """Candidates with their parameters; parameters without a candidate are replicated."""

    candidates: list[GroupCandidate]
    """Children first, the root last."""
    keys: list[list[int]] = field(default_factory=list)
    """Parameter keys per candidate."""
    replicated: dict[int, str] = field(default_factory=dict)
    """Key to reason."""


def assign(tree: Tree, candidates: list[GroupCandidate], calls: Calls, names: dict[int, tuple[str, ...]]) -> Assignment:
    """Assign each parameter to the innermost candidate that contains all its owners, or else to the root's.

    A tie across candidates becomes a candidate of its own.

    Raises:
        PlanError: A tie crosses two groups that the user named.
    """
    owners = tree.owners()
    replicated: dict[int, str] = {}
    candidates = [candidate for candidate in candidates if not candidate.is_root]
    candidates += _shared_modules(tree, candidates)
    for key, holders in owners.items():
        homes = _homes(holders, candidates) if len(holders) > 1 else []
        if len(homes) <= 1:
            continue
        _refuse_explicit([candidate for candidate in homes if candidate is not None], names[key])
        joined = _tie_candidate(key, owners, candidates, names[key], calls)
        if joined is None:
            replicated[key] = f"tied as {' = '.join(names[key])} across groups that cannot be joined"
        else:
            candidates = [each for each in candidates if not all(map(joined.contains, each.nodes))] + [joined]
    why = "remaining parameters; unsharded from the first forward to the end of backward"
    candidates = [*_children_first(candidates, tree), *(GroupCandidate((root,), "root", why) for root in tree.roots)]
    result = Assignment(candidates, [[] for _ in candidates], replicated)
    index_of = {id(node): index for index, candidate in enumerate(candidates) for node in candidate.nodes}
    for key, holders in owners.items():
        if key not in replicated:
            home = next(index_of[id(node)] for node in holders[0].upwards if id(node) in index_of)
            result.keys[home].append(key)
    return result


def _homes(nodes: list[Node], candidates: list[GroupCandidate]) -> list[GroupCandidate | None]:
    """Return the distinct innermost candidates around the nodes; None is the root."""
    grouped = by_node(candidates)
    homes = [next((grouped[up] for up in node.upwards if up in grouped), None) for node in nodes]
    return list({id(home): home for home in homes}.values())


def _shared_modules(tree: Tree, candidates: list[GroupCandidate]) -> list[GroupCandidate]:
    """Return a candidate for each module object that several groups share; otherwise each group would shard it."""
    shared: list[GroupCandidate] = []
    grouped = by_node(candidates)
    for node in tree.root.walk():
        is_shared = node.keys and node.other_parents and node.has_forward and node not in grouped
        if is_shared and node.parent is not None and len(_homes([node.parent, *node.other_parents], candidates)) > 1:
            reason = f"{node.class_name} shared by {node.parent.fqn or 'the root'} and others, unsharded for all"
            shared.append(GroupCandidate((node,), "tie", reason, kept_unsharded=True))
    return shared


def _refuse_explicit(homes: list[GroupCandidate], names: tuple[str, ...]) -> None:
    explicit = [candidate for candidate in homes if candidate.explicit]
    if len(explicit) > 1:
        paths = [candidate.nodes[0].fqn for candidate in explicit]
        raise PlanError(
            f"{' and '.join(repr(name) for name in names)} are one tensor, but their groups are two",
            where=", ".join(paths),
            why="a tied parameter has one shard, so all its modules belong to one group",
            fix=f"leave one of {', '.join(paths)} out of the groups you name, or let group_by='auto' join them",
        )


def _tie_candidate(
    key: int, owners: dict[int, list[Node]], candidates: list[GroupCandidate], names: tuple[str, ...], calls: Calls
) -> GroupCandidate | None:
    """Return one candidate of all the tensor's modules, or None if they cannot be unsharded in one group."""
    nodes = list(owners[key])
    while True:  # other parameters of an owner may be tied to further modules
        more = [node for mine in nodes for other in mine.keys for node in owners[other]]
        fresh = [node for node in more if not any(mine.contains(node) for mine in nodes)]
        if not fresh:
            break
        nodes += fresh
    nodes = list(dict.fromkeys(_maximal(nodes)))
    holds_others = any(
        node.contains(mine) and mine is not node
        for node in nodes
        for mine, candidate in by_node(candidates).items()
        if candidate.kind != "leaf"  # the tie absorbs leaves inside its modules
    )
    if holds_others or any(not node.fqn or not node.has_forward for node in nodes):
        return None
    if any(not node.is_atom and node.fqn in calls.bypassed for node in nodes):
        return None
    reason = f"tied: {' = '.join(names)}; unsharded once for all of them, from the first use to the end of backward"
    return GroupCandidate(tuple(nodes), "tie", reason, kept_unsharded=True)


def _children_first(candidates: list[GroupCandidate], tree: Tree) -> list[GroupCandidate]:
    """Sort candidates in tree order, but each before the candidate around it."""
    position = {id(node): index for index, node in enumerate(tree.root.walk())}
    ordered = sorted(candidates, key=lambda candidate: min(position[id(node)] for node in candidate.nodes))
    result: list[GroupCandidate] = []

    def place(candidate: GroupCandidate) -> None:
        if any(candidate is placed for placed in result):
            return
        for other in ordered:
            if other is not candidate and any(candidate.contains(node) for node in other.nodes):
                place(other)
        result.append(candidate)

    for candidate in ordered:
        place(candidate)
    return result


_PER_GROUP = ("param_dtype", "reduce_dtype", "output_dtype", "cast_inputs", "reshard_after_forward", "offload")


def split_by_override(
    tree: Tree, candidates: list[GroupCandidate], overrides: tuple[GroupOverride, ...], calls: Calls
) -> list[GroupCandidate]:
    """Return candidates for the modules that overrides split off, one per enclosing group.

    Raises:
        PlanError: A pattern matches no module.
    """
    splits: list[GroupCandidate] = []
    for override in overrides:
        matched = [node for node in tree.matching(override.pattern) if node.keys]
        if not matched:
            raise unknown_pattern(override.pattern, [name for name in tree.nodes if name], "overrides")
        if not any(getattr(override, name) is not None for name in _PER_GROUP):
            continue
        by_home: dict[int, list[Node]] = defaultdict(list)
        taken = candidates + splits
        for node in _maximal(matched):
            if not any(map(node.contains, by_node(taken))) and node.has_forward and node.fqn:
                home = next((candidate for candidate in taken if candidate.contains(node)), None)
                by_home[id(home)].append(node)
        for nodes in by_home.values():
            splits.append(_candidate(nodes, "island", f"set apart by the override for {override.pattern!r}", calls))
    return splits


def storage_splits(
    assignment: Assignment, tree: Tree, dtype_of: dict[int, str], trainable: set[int], calls: Calls
) -> tuple[list[GroupCandidate], dict[int, str]]:
    """Return candidates for the minority dtypes of groups with mixed trainable dtypes, and the parameters to replicate.

    FSDP2 reduces a group's gradients in one buffer of one dtype, so trainable parameters of two dtypes cannot share
    a group. Frozen parameters can, and complex ones if torch can divide the group of a module.
    """
    owners = tree.owners()
    candidates: list[GroupCandidate] = []
    replicated: dict[int, str] = {}
    for candidate, keys in zip(assignment.candidates, assignment.keys, strict=True):
        mixed = [key for key in keys if key in trainable]
        if len({dtype_of[key] for key in mixed}) < 2:
            continue
        beside = {key for key in mixed if dtype_of[key] not in FLOATING} if SPLITS_GROUPS else set()
        real = [key for key in mixed if key not in beside] or mixed
        major = majority([(dtype_of[key], tree.numel[key]) for key in real])
        minor = [key for key in mixed if dtype_of[key] != major]
        apart: dict[str, dict[Node, None]] = defaultdict(dict)
        for key in minor:
            nodes = [_atom_around(owner) for owner in owners[key]]
            pure = all(_is_pure(node, dtype_of[key], candidate.nodes, mixed, dtype_of) for node in nodes)
            if pure:
                apart[dtype_of[key]].update(dict.fromkeys(nodes))
            elif key not in beside:
                replicated[key] = f"{dtype_of[key]} among {major} in one module; FSDP2 groups hold one trainable dtype"
        for dtype, nodes in apart.items():
            why = f"{dtype} parameters inside a {major} group: one more all-gather and reduce-scatter per pass"
            candidates.append(_candidate(_maximal(list(nodes)), "storage", why, calls))
    return candidates, replicated


def _is_pure(node: Node, dtype: str, modules: tuple[Node, ...], mixed: list[int], dtype_of: dict[int, str]) -> bool:
    """Whether a node can leave its group for a group of `dtype` only."""
    inside = [key for key in mixed if key in node.keys]
    alone = not any(node is module for module in modules)
    return alone and node.has_forward and node.is_atom and all(dtype_of[key] == dtype for key in inside)


def _atom_around(node: Node) -> Node:
    """Return the outermost atom around a node: children of an atom are not called on their own."""
    return next((up for up in reversed([*node.upwards]) if up.is_atom), node)


def _maximal(nodes: list[Node]) -> list[Node]:
    return [node for node in nodes if not any(other is not node and other.contains(node) for other in nodes)]


def _candidate(nodes: list[Node], kind: Kind, reason: str, calls: Calls) -> GroupCandidate:
    """Return a candidate, kept unsharded if its hooks are not certain to run."""
    return GroupCandidate(tuple(nodes), kind, reason, kept_unsharded=bool(why_kept_unsharded(tuple(nodes), calls)))
