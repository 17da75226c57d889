"""Load a run's state: plan every read, then read and put it in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.checkpointing.broadcasting import RequestReader
from shardwise.checkpointing.contents import Contents
from shardwise.checkpointing.matching import Matched, match
from shardwise.checkpointing.reading import Request, Verify
from shardwise.checkpointing.restoring import RankView, Restoring, new_tensor, plan_object, plan_optimizer, view_for
from shardwise.checkpointing.staging import wait_for_copies
from shardwise.checkpointing.state.nested import LAYOUT, derived_state, set_random_state
from shardwise.checkpointing.state.run import (
    EXTRA_STATE,
    Run,
    extra_states,
    mark_unusable,
    mark_usable,
    model_path,
    optimizer_path,
)
from shardwise.checkpointing.state.slices import model_tensors
from shardwise.distributed.agreement import Channel
from shardwise.errors import CheckpointError
from shardwise.progress import Progress
from shardwise.sharding.inventory import take_inventory
from shardwise.sharding.materialize import allocate, materialize


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


_MAX_LINES = 30


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought besides the values in the objects."""

    step: int
    extra: Any
    """What was given as `extra` when it was saved."""
    notes: tuple[str, ...]
    """What the user should know, such as random numbers that had to be made up."""


def load_run(
    run: Run,
    contents: Contents,
    channel: Channel,
    *,
    strict: bool,
    verify: Verify,
    rng: bool,
    progress: Progress | None = None,
    reader: RequestReader | None = None,
) -> Loaded:
    """Read a checkpoint into a run's objects.

    Args:
        run: Gets the stored state.
        contents: The checkpoint.
        channel: The ranks.
        strict: Everything stored of each object must find its place, and every place must find its value.
        verify: When checksums are compared, see `read_requests`.
        rng: Also set the random number generators.
        progress: Is told the bytes that this rank reads.
        reader: Who reads; default: every rank its own part.

    Raises:
        CheckpointError: The same on every rank. Before the first byte is written nothing was changed; afterwards
            the models are marked unusable.

    Ranks:
        Collective.
    """
    view = view_for(contents, channel.rank, channel.size)

    def make_plan() -> LoadPlan:
        plan = make_load_plan(run, view, channel.rank, strict=strict, rng=rng)
        _refuse(plan.restoring.problems, view, strict)
        return plan

    plan = channel.run_on_all(make_plan)  # a reader may communicate: nobody enters it alone

    def allocate() -> None:
        nonlocal plan
        if _allocate(plan, run):  # optimizer states were planned where the parameters were: on meta, perhaps
            plan = make_plan()

    load_requests(
        list(run.models.values()),
        view.contents,
        lambda: plan.requests(run),
        channel.run_on_all,
        reader or RequestReader(),
        allocate=allocate,
        verify=verify,
        progress=progress,
    )
    _settle(plan, view, run, channel)
    return Loaded(contents.step or 0, plan.extra.get("extra"), tuple(plan.restoring.notes))


def load_requests(
    models: Sequence[nn.Module],
    contents: Contents,
    requests: Callable[[], list[Request]],
    run_on_all: Callable[[Callable[[], Any]], Any],
    reader: RequestReader,
    *,
    allocate: Callable[[], None],
    check: Callable[[], None] = lambda: None,
    verify: Verify,
    progress: Progress | None,
) -> None:
    """Prove that everything can be read, give memory to what has none, and read.

    Args:
        models: Marked unusable if the bytes turn out corrupt.
        contents: The checkpoint.
        requests: What this rank reads; asked again after allocating.
        run_on_all: Runs work on every rank, and raises on all if it fails on one.
        reader: Who reads.
        allocate: Gives memory to tensors on the meta device.
        check: Further proof, once all files are known to be there.
        verify: When checksums are compared.
        progress: Is told the bytes.

    Raises:
        CheckpointError: On every rank. Before the first byte is written nothing was changed.

    Ranks:
        Collective.
    """
    planned = run_on_all(requests)

    def prove() -> None:
        if problems := reader.check(contents, planned):
            raise CheckpointError(
                f"the checkpoint cannot be loaded: {len(problems)} problems",
                where="\n".join([str(contents.path), *_shortened(problems)]),
                why="every byte must be there before the first is written into the model",
                fix="copy the checkpoint again, or load another one",
            )

    run_on_all(prove)
    run_on_all(check)
    if verify == "before":
        run_on_all(lambda: reader.verify(contents, planned, progress))
    wait_for_copies()  # a save in the background may still be copying what is about to be overwritten
    try:
        run_on_all(allocate)
        run_on_all(lambda: reader.read(contents, requests(), verify=verify != "no", progress=progress))
    except BaseException as error:  # on any rank: no rank may use the models
        for model in models:
            mark_unusable(model, str(getattr(error, "where", "") or error))
        raise
    for model in models:
        mark_usable(model)


def _shortened(lines: list[str]) -> list[str]:
    hidden = len(lines) - _MAX_LINES
    return lines[:_MAX_LINES] + ([f"... and {hidden} more"] if hidden > 0 else [])


def _refuse(problems: list[str], view: RankView, strict: bool) -> None:
    if not problems:
        return
    raise CheckpointError(
        f"the checkpoint does not fit this run: {len(problems)} problems",
        where="\n".join([str(view.contents.path), *_shortened(problems)]),
        why="everything that is stored of an object must find its place"
        if strict
        else "what is loaded must be there, and of the right shape",
        fix="load the objects that were saved, or leave out of load() what shall start afresh"
        + ("; strict=False loads what fits" if strict else ""),
    )


def _allocate(plan: LoadPlan, run: Run) -> bool:
    """Give memory to what stands on meta and will be read; whether anything did."""
    found = False
    for name, matched in plan.matched.items():
        wanted = [entry.tensor for entry in model_tensors(run.models[name]) if entry.name in matched.stored_names]
        found = found or any(tensor.is_meta for tensor in wanted)
        allocate(run.models[name], wanted)
    return found


def _settle(plan: LoadPlan, view: RankView, run: Run, channel: Channel) -> None:
    """What is left once the bytes are there."""

    @torch.no_grad()
    def finish_all() -> None:
        for finish in plan.restoring.finish:
            finish()

    channel.run_on_all(finish_all)
    for model in run.models.values():
        if any(entry.pending for entry in take_inventory(model)):
            materialize(model)  # tables that the model computes itself, and with strict=False what was not stored
    if plan.random_numbers:
        is_own = bool(view.names_under(f"rng.{channel.rank}."))
        set_random_state(plan.random_numbers if is_own else derived_state(plan.random_numbers, channel.rank))
