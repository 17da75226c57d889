"""Expert modules, and whether the expert axis of the mesh can split them.

A module can be split if it has the interface of transformers' experts (from transformers 5):

- `num_experts`, an int that forward reads;
- its own parameters are stacked over experts on dimension 0;
- `forward(hidden_states, top_k_index, top_k_weights)`, of shapes (tokens, width), (tokens, k) and (tokens, k), which
  processes each (token, expert) pair independently and returns the weighted sum over experts for each token.

Such modules are recognized by the names of these arguments, or listed in `expert.modules`.
"""

import inspect
import math
from collections.abc import Iterable

from torch import nn

from shardwise.errors import PlanError
from shardwise.planning.calls import Calls
from shardwise.planning.groups import GroupCandidate, Node, Tree, is_read_outside, unknown_pattern, why_kept_unsharded
from shardwise.planning.plan import ParallelModule, Plan

_ARGUMENTS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),  # GPT-OSS
)
_PAGE = "docs/composition.md, expert parallelism"


def find_experts(
    tree: Tree, calls: Calls, patterns: tuple[str, ...], num_ranks: int
) -> tuple[list[GroupCandidate], list[ParallelModule]]:
    """Return one group candidate per module to split over `num_ranks` ranks, and entries for split and unsplit modules.

    Raises:
        PlanError: A module in `expert.modules` cannot be split, or `num_ranks` does not divide the number of experts.
    """
    named = _named(tree, patterns)
    candidates, entries = [], []
    for node in named or [node for node in tree.root.walk() if looks_like_experts(node)]:
        problem = why_not_divided(node, tree, calls)
        if problem and named:
            raise PlanError(
                f"{node.fqn!r} ({node.class_name}) is named in expert.modules, but {problem}",
                where=node.fqn,
                why="experts are split on dimension 0 of stacked parameters, and tokens by the arguments of forward",
                fix=f"give it the interface of {_PAGE}, or leave it out of expert.modules",
            )
        if problem:
            entries.append(ParallelModule(fqn=node.fqn, how="", reason=f"{problem}; sharded like dense parameters"))
            continue
        num_experts = num_experts_of(node)
        how = f"{num_experts // num_ranks} of {num_experts} experts on each rank"
        entries.append(ParallelModule(fqn=node.fqn, how=how, reason="tokens go to their experts by all-to-all"))
        # Placed before the group of the experts, which would include it. Ranks may call it a different number of times.
        inside = "inside experts, but not divided"
        parts = [child for child in node.children if child.keys]
        candidates += [GroupCandidate((part,), "part", inside, kept_unsharded=True) for part in parts]
        kept = bool(why_kept_unsharded((node,), calls))
        candidates.append(GroupCandidate((node,), "experts", f"experts of a layer: {how}", kept_unsharded=kept))
    _check_divisible([each.nodes[0] for each in candidates if each.kind == "experts"], num_ranks)
    return candidates, entries


def _named(tree: Tree, patterns: tuple[str, ...]) -> list[Node]:
    nodes: dict[Node, None] = {}
    for pattern in patterns:
        matching = tree.matching(pattern)
        if not matching:
            raise unknown_pattern(pattern, list(tree.nodes), "expert.modules")
        nodes |= dict.fromkeys(matching)
    return list(nodes)


def looks_like_experts(node: Node) -> bool:
    """Whether its forward has these arguments, or it is a list of modules of one class with `expert` in its name."""
    if isinstance(node.module, nn.ModuleList):
        return "expert" in node.fqn.rpartition(".")[2] and len({type(child.module) for child in node.children}) == 1
    return _arguments(node.module)[:3] in _ARGUMENTS


def _arguments(module: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(module.forward).parameters)
    except ValueError:  # written in C
        return ()


def num_experts_of(node: Node) -> int:
    """Number of experts of a module that can be split."""
    return int(getattr(node.module, "num_experts", 0))


def why_not_divided(node: Node, tree: Tree, calls: Calls) -> str:
    """Return why a module cannot be split; empty if it can."""
    module, num_experts = node.module, getattr(node.module, "num_experts", None)
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    odd = [name for name, parameter in own.items() if tuple(parameter.shape[:1]) != (num_experts,)]
    stacked = [
        name for name, buffer in module._buffers.items() if buffer is not None and num_experts in buffer.shape[:1]
    ]
    owners = tree.owners()
    if isinstance(module, nn.ModuleList):
        return f"it is a list of {len(module)} {type(module[0]).__name__} modules, which are called one by one"
    if len(_arguments(module)) < 3:
        return f"its forward takes {', '.join(_arguments(module)) or 'nothing'}"
    if not isinstance(num_experts, int) or isinstance(getattr(type(module), "num_experts", None), property):
        return "it has no attribute `num_experts` that can be set"
    if not own:
        return "it has no parameters of its own"
    if odd:
        return f"{odd[0]} has shape {list(own[odd[0]].shape)}, which is no stack of {num_experts} experts"
    if any(type(parameter) is not nn.Parameter for parameter in own.values()):
        return "its parameters are of a tensor subclass"
    if len(node.own) != len(own):
        return "some of its parameters are not sharded"
    if stacked:
        return f"its buffer {stacked[0]} has an element for each expert, and only parameters are divided"
    if any(child.keys and not child.has_forward for child in node.children):
        return "it holds a container of modules with parameters"
    if any(len(owners[key]) > 1 for key in node.own):
        return "its parameters are tied to others"
    if node.fqn in calls.conditional:
        return "the data of a rank decide whether it runs, and all ranks of the axis exchange tokens"
    if is_read_outside(node, node, calls):
        return "code outside reads its weights, of which a rank has some only"
    return ""


def refuse_without_experts(plan: Plan) -> None:
    """Raise if the mesh has an expert axis but no module is split over it.

    Raises:
        PlanError: With the reason for the first module that looks like experts.
    """
    if (num_ranks := dict(plan.axes).get("expert", 1)) == 1 or any(module.how for module in plan.expert_parallel):
        return
    first = next(iter(plan.expert_parallel), None)
    why = (
        "no module has the interface of experts" if first is None else f"{first.fqn}: {first.reason.partition(';')[0]}"
    )
    raise PlanError(
        f"the mesh axis 'expert' has {num_ranks} ranks, but {plan.model} has no experts to split",
        where="mesh.expert" if first is None else first.fqn,
        why=why,
        fix="set mesh.expert = 1, as in MeshConfig(shard=...), or write the experts of a layer as one module with "
        f"stacked parameters ({_PAGE})",
    )


def _check_divisible(nodes: list[Node], num_ranks: int) -> None:
    numbers = [num_experts_of(node) for node in nodes]
    odd = next((node for node, number in zip(nodes, numbers, strict=True) if number % num_ranks), None)
    if odd is not None:
        nearest, *others = common_divisors(numbers, num_ranks)
        raise PlanError(
            f"{odd.fqn!r} has {num_experts_of(odd)} experts, which {num_ranks} ranks cannot share evenly",
            where=f"mesh.expert, {odd.fqn}",
            why="each rank of the expert axis has the same number of experts",
            fix=f"set mesh.expert = {nearest}; these sizes work: {', '.join(map(str, sorted([nearest, *others])))}",
        )


def common_divisors(numbers: Iterable[int], num_ranks: int) -> list[int]:
    """Sizes of a mesh axis that divide all numbers, those nearest to `num_ranks` first."""
    common = math.gcd(*numbers)
    sizes = [size for size in range(1, common + 1) if common % size == 0]
    return sorted(sizes, key=lambda size: (abs(size - num_ranks), size))
