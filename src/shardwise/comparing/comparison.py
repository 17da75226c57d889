"""Both runs side by side: one step of each, then everything compared in the order in which it happens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardwise.comparing.causes import Evidence, likely_cause
from shardwise.comparing.measuring import GRADIENT_FLOOR, Gap, largest, largest_change, measure, step_slack
from shardwise.comparing.reference import Reference, ReferenceStep, registered_buffers
from shardwise.comparing.tolerances import Tolerance
from shardwise.comparing.verdict import ORDER, Deviation, Difference, Quantity
from shardwise.sharding.layout import local_part, local_tensor

Tensors = Mapping[str, Tensor | None]


@dataclass(slots=True)
class Findings:
    """What this rank saw: the worst of each quantity and the first difference."""

    worst: dict[Quantity, Deviation] = field(default_factory=dict)
    first: Difference | None = None
    losses: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Comparison:
    """The sharded model next to the one process."""

    reference: Reference
    model: nn.Module
    optimizer: Optimizer
    tolerance: Tolerance
    mesh: DeviceMesh
    found: Findings = field(default_factory=Findings)
    reference_losses: list[float] = field(default_factory=list)
    slack: dict[str, Tensor] = field(default_factory=dict)
    """How far optimizer steps may have driven each entry apart, given the gradients so far."""
    drift: float = 0.0
    """How far rounding has driven a parameter apart, through the optimizer."""

    def compare_start(self) -> None:
        """Compare weights and ties before the first step."""
        theirs = dict(self.reference.model.named_parameters())
        self._compare("weight", 0, self._parameters(), theirs)
        tied, ours = ties(self.reference.model), ties(self.model)
        broken = {name: Gap(math.inf, math.inf, None, None) for name in tied if tied[name] != ours.get(name)}
        self._judge("tie", 0, broken, len(tied))

    def step(self, step: int) -> None:
        """One step of both runs.

        Ranks:
            Collective.
        """
        before = {name: p.detach().clone() for name, p in self.reference.model.named_parameters()}
        expected = self.reference.step(step)
        loss = self.reference.task.loss_of(self.model, self.reference.rank, step)
        loss.backward()
        self._compare_loss(float(loss.detach()), expected.losses, step + 1)
        self._compare_gradients(expected, before, step + 1)
        self.optimizer.step()
        theirs = dict(self.reference.model.named_parameters())
        gaps = self._compare("parameter", step + 1, self._parameters(), theirs, mistaken=before)
        self.drift = max([self.drift, *(gap.furthest for gap in gaps.values() if gap.within)])
        buffers = self.reference.buffers[self.reference.rank]
        self._compare("buffer", step + 1, registered_buffers(self.model), buffers)
        self.optimizer.zero_grad(set_to_none=True)

    def _compare_loss(self, ours: float, theirs: list[float], step: int) -> None:
        self.found.losses.append(ours)
        self.reference_losses.append(sum(theirs) / len(theirs))
        mine = torch.tensor(theirs[self.reference.rank], dtype=torch.float64)
        scale = max(abs(loss) for loss in theirs)
        gap = measure(torch.tensor(ours, dtype=torch.float64), mine, self.tolerance.at(step), floor=scale)
        self._judge("loss", step, {"": gap}, 1)

    def _compare_gradients(self, expected: ReferenceStep, before: dict[str, Tensor], step: int) -> None:
        """Compare gradients, and note how far the coming optimizer step may drive parameters apart."""
        ours = {name: parameter.grad for name, parameter in self._parameters().items()}
        floor = GRADIENT_FLOOR * max(map(largest, expected.gradients.values()), default=0.0)
        mistaken = expected.own_gradients
        self._compare("gradient", step, ours, expected.gradients, floor=floor, mistaken=mistaken)
        update = largest_change(before, dict(self.reference.model.named_parameters()))
        for name, theirs in expected.gradients.items():
            mine, part = own_part(ours[name], theirs)
            if mine is not None and part is not None and mine.shape == part.shape:
                self.slack[name] = self.slack.get(name, 0.0) + step_slack(mine, part, update)

    def _compare(
        self,
        quantity: Quantity,
        step: int,
        ours: Tensors,
        theirs: Tensors,
        *,
        floor: float = 0.0,
        mistaken: Tensors | None = None,
    ) -> dict[str, Gap]:
        """Measure this rank's part of every pair, on the scale of the whole.

        `mistaken` is what the sharded run would hold after the usual mistake.
        """
        allowed = self.tolerance.at(step)
        gaps = {}
        for name, value in theirs.items():
            scale = max(floor, largest(value))
            mine, part = own_part(ours.get(name), value)
            gaps[name] = measure(mine, part, allowed, floor=scale, slack=self._slack(quantity, name))
        wrong = [name for name, gap in gaps.items() if not gap.within]
        usual = mistaken is not None and all(
            measure(*own_part(ours[name], mistaken[name]), 1e-6).within for name in wrong
        )
        self._judge(quantity, step, gaps, len(theirs), usual_mistake=usual)
        return gaps

    def _slack(self, quantity: Quantity, name: str) -> Tensor | None:
        if quantity == "buffer":  # running statistics move with the parameters before them
            return torch.tensor(self.drift)
        return self.slack.get(name) if quantity == "parameter" else None

    def _judge(
        self,
        quantity: Quantity,
        step: int,
        gaps: dict[str, Gap],
        num_compared: int,
        *,
        usual_mistake: bool = False,
    ) -> None:
        """Keep the worst, and the first that differs: earliest in time, then by forward order."""
        order = self.reference.parameter_order
        rank = self.reference.rank
        deviations = [
            Deviation(
                quantity=quantity,
                name=name,
                step=step,
                rank=rank,
                sharded=gaps[name].sharded,
                reference=gaps[name].reference,
                relative=gaps[name].relative,
                within=gaps[name].within,
            )
            for name in sorted(gaps, key=lambda name: order.get(name, 0))
        ]
        for deviation in deviations:
            worst = self.found.worst.get(quantity)
            if worst is None or deviation.relative > worst.relative:
                self.found.worst[quantity] = deviation
        wrong = [deviation for deviation in deviations if not deviation.within]
        if wrong and self.found.first is None:
            evidence = Evidence(
                deviations=wrong,
                num_compared=num_compared,
                world_size=self.reference.task.num_ranks,
                tied=frozenset(ties(self.reference.model)),
                low_precision=self.tolerance.low_precision,
                usual_mistake=usual_mistake,
            )
            self.found.first = Difference(
                deviation=wrong[0],
                module=_owner(self.reference.model, wrong[0].name),
                num_others=len(wrong) - 1,
                cause=likely_cause(evidence),
            )

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters(remove_duplicate=False))


def earliest(differences: list[Difference], order: Mapping[str, int]) -> Difference | None:
    """The first of several ranks' first differences: by step, then by what happens first in a step."""

    def moment(difference: Difference) -> tuple[int, int, int]:
        seen = difference.deviation
        return seen.step, ORDER.index(seen.quantity), order.get(seen.name, 0)

    return min(differences, key=moment, default=None)


def own_part(ours: Tensor | None, theirs: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What this rank holds of a tensor, and the same part of one process's.

    Between them the ranks compare everything, replicas too, and none waits for another that has no gradient.
    """
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return ours, theirs
    mine = local_tensor(ours)
    return mine, local_part(theirs.detach(), ours).to(mine.device)


def gather_objects(value: object, mesh: DeviceMesh) -> list:
    """`value` of every rank of the mesh.

    Ranks:
        Collective.
    """
    group = mesh.get_group() if mesh.ndim == 1 else None  # a mesh of several axes covers the world
    values: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def ties(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Parameters with several names: each name with all of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(same) for same in names.values() if len(same) > 1 for name in same}


def _owner(model: nn.Module, name: str) -> str:
    """FQN and class of the module that holds a parameter or buffer."""
    if not name:
        return ""
    prefix = name.rpartition(".")[0]
    return f"{prefix or '(root)'} ({type(model.get_submodule(prefix)).__name__})"
