"""What every model of the zoo must pass: equal to one process, grouped finely, gathered once a pass."""

from collections import defaultdict
from fnmatch import fnmatch
from functools import cache

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comparing import Parity, parity
from shardwise.comparing.calling import bind_batch, bind_loss, seed_everything
from shardwise.planning.plan import Group, Plan
from shardwise.sharding.apply import shard
from shardwise.sharding.materialize import materialize
from shardwise.sharding.registry import sharded_state
from tests.collectives import Trace, count_collectives
from tests.zoo.case import Case

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


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
    """No group is larger than one block, one embedding or one head; there is more than one."""
    assert len(plan.groups) >= case.min_groups, f"{case.name}: {len(plan.groups)} groups\n{plan}"
    limit = largest_unit(case.build(), case.together)
    for group in plan.groups:
        assert group.numel <= limit, (
            f"{case.name}: group {group.name} holds {group.numel} parameters, the largest unit {limit}\n{plan}"
        )


def largest_unit(model: nn.Module, together: tuple[str, ...] = ()) -> int:
    """Parameters of the largest thing that may be gathered at once.

    That is a leaf (a module's own parameters), or a block: one of several siblings of one class that has no such
    siblings inside itself, unless they are experts. Modules that `together` names count as one.
    """
    leaves = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
    blocks = [_numel(block) for block in _blocks(model)]
    named = {p: None for name, m in model.named_modules() if _matches(name, together) for p in m.parameters()}
    return max([*leaves, *blocks, sum(p.numel() for p in named)])


def _blocks(model: nn.Module) -> list[nn.Module]:
    found = []
    for parent in model.modules():
        siblings = defaultdict(list)
        for child in parent.children():
            if not isinstance(child, (nn.ModuleList, nn.ModuleDict)) and any(True for _ in child.children()):
                siblings[type(child)].append(child)
        for same in siblings.values():
            found += [child for child in same if len(same) > 1 and not _holds_blocks(child)]
    return found


def _holds_blocks(module: nn.Module) -> bool:
    inner = [m for name, m in module.named_modules() if m is not module and not name.split(".")[-1].startswith("expert")]
    return any(
        len(same) > 1
        for parent in [module, *inner]
        if "Expert" not in "".join(type(child).__name__ for child in parent.children())
        for same in _composite_siblings(parent)
    )


def _composite_siblings(parent: nn.Module) -> list[list[nn.Module]]:
    siblings = defaultdict(list)
    for child in parent.children():
        if not isinstance(child, _CONTAINERS) and any(_numel(grandchild) for grandchild in child.children()):
            siblings[type(child)].append(child)
    return list(siblings.values())


def traced_step(case: Case, model: nn.Module) -> tuple[Trace, set[str]]:
    """The collectives of the second forward and backward (the first still sets things up), and who got a gradient."""
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
    """One all-gather a group in forward, one more in backward where it was freed; one reduce-scatter a group."""
    for group in plan.groups:
        if not group.parameters or _matches_group(group, case.runs_again):
            continue
        served = group.parameters[0].fqn
        forward = trace.count("all_gather", served, in_backward=False)
        backward = trace.count("all_gather", served, in_backward=True)
        reduced = trace.count("reduce_scatter", served)
        used = any(parameter.fqn in with_gradient for parameter in group.parameters)
        freed = group.reshard_after_forward not in (None, False)
        about = f"{case.name}: group {group.name}: {forward} gathers forward, {backward} backward, {reduced} reductions"
        assert forward == 1 if used else forward <= 1, f"{about}\n{plan}"
        assert backward == 1 if used and freed else backward <= freed, f"{about}\n{plan}"
        assert reduced == 1 if used else reduced <= 1, f"{about}\n{plan}"


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _matches_group(group: Group, patterns: tuple[str, ...]) -> bool:
    return any(_matches(module, patterns) for module in group.modules)
