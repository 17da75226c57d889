"""What every model of the zoo must pass: equal to one process, grouped finely, gathered once a pass."""

import re
from collections import Counter
from fnmatch import fnmatch
from functools import cache

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.diagnosing.parity import bind_batch, bind_loss, parity
from shardwise.diagnosing.parity_criteria import Parity
from shardwise.models.random_state import seed_everything
from shardwise.planning.plan import Group, Plan
from shardwise.sharding.apply import shard
from shardwise.sharding.materialize import materialize
from shardwise.sharding.registry import sharded_state
from tests.collectives import Trace, count_collectives
from tests.zoo.case import Case


@cache  # a mesh never gives its groups back, and the ranks outlive the test
def mesh_of(*sizes: int) -> DeviceMesh:
    """A mesh of the world on CPU: `(n,)` shards, `(m, n)` replicates m times."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def check_case(case: Case) -> None:
    """Parity over three steps, then groups and collectives of one more."""
    mesh = mesh_of(dist.get_world_size())
    result = check_parity(case, mesh)
    assert result.world_size == dist.get_world_size()
    model, plan = sharded(case, mesh)
    check_groups(case, plan)
    check_trace(case, plan, *traced_step(case, model))


def check_parity(case: Case, mesh: DeviceMesh) -> Parity:
    result = parity(case.build, case.make_batch, case.loss, case.config, mesh=mesh)
    assert result.equal, f"{case.name}\n{result}"
    return result


def sharded(case: Case, mesh: DeviceMesh) -> tuple[nn.Module, Plan]:
    """The case's model, sharded, with the plan that was carried out."""
    seed_everything(0)
    model = shard(case.build(), case.config, mesh=mesh)
    if any(p.is_meta for p in model.parameters()):
        materialize(model)
    state = sharded_state(model)
    assert state is not None
    return model, state.plan


def check_groups(case: Case, plan: Plan) -> None:
    """No group is larger than one block, one embedding or one head; several groups; blocks are freed."""
    assert len(plan.groups) >= case.min_groups, f"{case.name}: {len(plan.groups)} groups\n{plan}"
    limit = largest_unit(case.build(), case)
    for group in plan.groups:
        assert group.numel <= limit, (
            f"{case.name}: group {group.name} has {group.numel} parameters, the largest unit {limit}\n{plan}"
        )
        # A tied or functionally read embedding is needed again at the end of the forward.
        used_late = group.kind == "tie" or (group.held and group.kind == "leaf")
        excused = group is plan.root or used_late or _matches_group(group, case.runs_again + case.together + case.kept)
        assert _is_freed(group) or excused, f"{case.name}: group {group.name} stays gathered\n{plan}"


def largest_unit(model: nn.Module, case: Case) -> int:
    """Parameters of the largest thing that may be gathered at once.

    That is a leaf (a module's own parameters), or a block: a module with parts whose class repeats in the
    model, or an element of a list, that holds no list of such modules itself unless they are experts.
    Modules that the case wants together count as one.
    """
    leaves = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
    blocks = [_numel(m) for name, m in model.named_modules() if _matches(name, case.blocks)] or [
        _numel(block) for block in _blocks(model)
    ]
    named = {p: None for name, m in model.named_modules() if _matches(name, case.together) for p in m.parameters()}
    return max([*leaves, *blocks, sum(p.numel() for p in named)])


def _blocks(model: nn.Module) -> list[nn.Module]:
    counts = Counter(type(module) for module in model.modules())
    elements = {
        id(child) for m in model.modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict)) for child in m.children()
    }
    return [
        module
        for module in model.modules()
        if _has_parts(module)
        and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        and (counts[type(module)] > 1 or id(module) in elements)
        and not any(_is_run_of_blocks(inner) for inner in module.modules())
    ]


def _is_run_of_blocks(module: nn.Module) -> bool:
    """A list, or attributes told apart by a number, of two or more modules with parts."""
    children = [(name, child) for name, child in module.named_children() if _has_parts(child)]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        kinds = Counter(type(child) for _, child in children)
    else:
        kinds = Counter((type(child), re.sub(r"\d+", "", name)) for name, child in children)
    routed = "Expert" in type(module).__name__ or any("Expert" in str(kind) for kind in kinds)
    return not routed and any(count > 1 for count in kinds.values())


def _has_parts(module: nn.Module) -> bool:
    return any(_numel(child) for child in module.children())


def traced_step(case: Case, model: nn.Module) -> tuple[Trace, set[str]]:
    """The collectives of a forward and backward, and who got a gradient; the second, as the first sets up."""
    make_batch, loss_of = bind_batch(case.make_batch), bind_loss(case.loss)
    rank = dist.get_rank()
    for step in range(2):
        with count_collectives(model) as trace:
            seed_everything(step * 100 + rank)
            loss_of(model, make_batch(rank, step, step * 100 + rank)).backward()
        held = {name for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
    return trace, held


def check_trace(case: Case, plan: Plan, trace: Trace, with_gradient: set[str]) -> None:
    """One all-gather a group in forward, one more in backward if it was freed; one reduce-scatter a group."""
    for group in plan.groups:
        if not group.parameters or _matches_group(group, case.runs_again):
            continue
        served = {name for parameter in group.parameters for name in (parameter.fqn, *parameter.aliases)}
        forward = trace.count("all_gather", served=served, in_backward=False)
        backward = trace.count("all_gather", served=served, in_backward=True)
        reduced = trace.count("reduce_scatter", served=served)
        used, freed = bool(served & with_gradient), _is_freed(group)
        about = f"{case.name}: group {group.name}: gathered {forward} + {backward} times, reduced {reduced} times"
        assert forward == 1 if used else forward <= 1, f"{about}\n{plan}"
        assert backward == 1 if used and freed else backward <= freed, f"{about}\n{plan}"
        assert reduced == 1 if used else reduced <= 1, f"{about}\n{plan}"


def _is_freed(group: Group) -> bool:
    return group.reshard_after_forward not in (None, False)


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _matches_group(group: Group, patterns: tuple[str, ...]) -> bool:
    return any(_matches(module, patterns) for module in group.modules)
