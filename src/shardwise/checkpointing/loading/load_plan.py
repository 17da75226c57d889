"""What a load will do: matched names, memory to read into, and what to do with it. Made before anything is changed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.checkpointing.loading.matching import Matched, match
from shardwise.checkpointing.loading.rank_view import RankView
from shardwise.checkpointing.loading.restoring import Restoring, new_tensor, plan_object
from shardwise.checkpointing.loading.restoring_optimizers import plan_optimizer
from shardwise.checkpointing.reading.requests import Request
from shardwise.checkpointing.state.nested import LAYOUT
from shardwise.checkpointing.state.run import EXTRA_STATE, Run, extra_states, model_path, optimizer_path
from shardwise.checkpointing.state.slices import model_tensors


@dataclass(slots=True)
class LoadPlan:
    """A load in the making."""

    restoring: Restoring = field(default_factory=Restoring)
    matched: dict[str, Matched] = field(default_factory=dict)
    """By model: which stored tensor goes into which of its own."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Under `extra`, once everything is read: what was saved as that."""
    random_numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    """By generator: where the state of this rank, or else of rank 0, is read to."""

    def requests(self, run: Run) -> list[Request]:
        """Everything to be read, models last; asked for anew, because allocating a model makes new tensors."""
        models = Restoring()
        for name, matched in self.matched.items():
            prefix = ".".join(map(str, model_path(name))) + "."
            for entry in model_tensors(run.models[name]):
                if entry.name in matched.stored_names:
                    models.read_into(prefix + matched.stored_names[entry.name], entry.tensor)
        return [*self.restoring.requests, *models.requests]


def make_load_plan(run: Run, view: RankView, rank: int, *, strict: bool, rng: bool) -> LoadPlan:
    """Find a place for everything that is stored, and a value for every place.

    Args:
        run: What is loaded into; it is not changed.
        view: The checkpoint, as this rank sees it.
        rank: This one.
        strict: What does not fit is a problem.
        rng: Also the random numbers.

    Returns:
        The plan; its `restoring.problems` say what does not fit.

    Raises:
        CheckpointError: A model does not fit, with all its names.

    Ranks:
        Local.
    """
    plan = LoadPlan()
    plan.matched = _plan_models(plan.restoring, view, run, strict)
    _plan_rest(plan.restoring, view, run, strict=strict, extra=plan.extra)
    if rng:
        plan.random_numbers = _plan_random_numbers(plan.restoring, view, rank)
    return plan


def _plan_models(restoring: Restoring, view: RankView, run: Run, strict: bool) -> dict[str, Matched]:
    found = {}
    for name, model in run.models.items():
        prefix = ".".join(map(str, model_path(name))) + "."
        tensors = {
            full.removeprefix(prefix): tensor
            for full, tensor in view.contents.tensors.items()
            if full.startswith(prefix) and EXTRA_STATE not in full.split(".")
        }
        part = dataclasses.replace(view.contents, tensors=tensors)
        found[name] = match(model, part)
        if (error := found[name].refuse(part, strict)) is not None:
            raise error
        if strict and (differing := view.differing_under(prefix)):
            restoring.problems.append(
                f"{differing[0]} and {len(differing) - 1} more differed between the {view.contents.world_size} ranks "
                "that saved them; strict=False takes rank 0's"
            )
        _plan_extra_states(restoring, view, model, prefix, strict)
    return found


def _plan_extra_states(restoring: Restoring, view: RankView, model: Any, prefix: str, strict: bool) -> None:
    for key, module in extra_states(model).items():
        name = prefix + key
        if strict or f"{name}.{LAYOUT}" in view.contents.values:
            path = (*prefix.removesuffix(".").split("."), key)
            plan_object(restoring, view, name, module.get_extra_state(), module.set_extra_state, path=path)


def _plan_rest(restoring: Restoring, view: RankView, run: Run, *, strict: bool, extra: dict[str, Any]) -> None:
    groups = run.groups(run.tensors())
    for key, optimizer in run.optimizers.items():
        plan_optimizer(restoring, view, optimizer, groups[key], optimizer_path(key), strict=strict)
    for key, item in run.objects.items():
        if not strict and not view.names_under(f"{key}."):
            restoring.notes.append(f"{key} is not in the checkpoint and was left as it is")
            continue
        plan_object(restoring, view, key, item.state_dict(), item.load_state_dict)
    if f"extra.{LAYOUT}" in view.contents.values or view.names_under("extra."):
        plan_object(restoring, view, "extra", {}, lambda value: extra.update(extra=value))


def _plan_random_numbers(restoring: Restoring, view: RankView, rank: int) -> dict[str, torch.Tensor]:
    """Where the random numbers of this rank, or else of rank 0, will be read to."""
    names = view.names_under(f"rng.{rank}.") or view.names_under("rng.0.")
    states = {}
    for name in names:
        _, owner, generator = name.split(".")
        states[generator] = new_tensor(view.contents.tensors[name])
        restoring.read_into(name, states[generator])
        if owner != str(rank):
            note = f"rank {rank} had no random numbers in the checkpoint; they follow from rank 0's"
            restoring.notes += [note] if note not in restoring.notes else []
    return states
