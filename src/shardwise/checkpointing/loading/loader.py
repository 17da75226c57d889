"""One load, from a committed checkpoint into a run's objects: all is proven before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpointing.agreeing.channel import Channel
from shardwise.checkpointing.contents import Contents
from shardwise.checkpointing.loading.load_plan import LoadPlan, make_load_plan
from shardwise.checkpointing.loading.rank_view import RankView, view_for
from shardwise.checkpointing.loading.unusable import mark_unusable, mark_usable
from shardwise.checkpointing.reading.readers import OwnReader, Reader
from shardwise.checkpointing.reading.requests import Verify
from shardwise.checkpointing.saving.staging import wait_for_copies
from shardwise.checkpointing.state.random_state import derived_state, set_random_state
from shardwise.checkpointing.state.run import Run
from shardwise.checkpointing.state.slices import model_tensors
from shardwise.errors import CheckpointError
from shardwise.progress import Progress
from shardwise.sharding.inventory import take_inventory
from shardwise.sharding.materialize import allocate, materialize

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
    reader: Reader | None = None,
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
    reader = reader or OwnReader()
    view = view_for(contents, channel.rank, channel.size)
    plan = LoadPlan()

    def make_plan() -> LoadPlan:
        return make_load_plan(run, view, channel.rank, strict=strict, rng=rng)

    error: BaseException | None = None
    try:
        plan = make_plan()
        _refuse(plan.restoring.problems, view, strict)
    except Exception as caught:
        error = caught
    channel.fail_together(error)  # a reader may communicate: nobody enters it alone
    try:
        _prove(plan, view, run, reader, strict=strict, verify=verify, progress=progress)
    except Exception as caught:
        error = caught
    channel.fail_together(error)
    wait_for_copies()  # bytes that arrive are no change that torch counts
    try:
        if _allocate(plan, run):
            plan = make_plan()  # optimizer states were planned where the parameters were: on meta
        reader.read(view.contents, plan.requests(run), verify=verify != "no", progress=progress)
    except Exception as caught:
        error = caught
    _judge(run, channel, error)
    _settle(plan, view, run, channel)
    return Loaded(contents.step or 0, plan.extra.get("extra"), tuple(plan.restoring.notes))


def _prove(
    plan: LoadPlan,
    view: RankView,
    run: Run,
    reader: Reader,
    *,
    strict: bool,
    verify: Verify,
    progress: Progress | None,
) -> None:
    """Raise for whatever can be found wrong before anything is written."""
    requests = plan.requests(run)
    problems = [f"{problem.name}: {problem.text}" for problem in reader.check(view.contents, requests)]
    _refuse(problems, view, strict)
    if verify == "before":
        reader.verify(view.contents, requests, progress=progress)


def _refuse(problems: list[str], view: RankView, strict: bool) -> None:
    if not problems:
        return
    hidden = len(problems) - _MAX_LINES
    lines = problems[:_MAX_LINES] + ([f"... and {hidden} more"] if hidden > 0 else [])
    raise CheckpointError(
        f"the checkpoint does not fit this run: {len(problems)} problems",
        where="\n".join([str(view.contents.path), *lines]),
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


def _judge(run: Run, channel: Channel, error: BaseException | None) -> None:
    """If reading failed on any rank, no rank may use the models."""
    try:
        channel.fail_together(error)
    except Exception as caught:
        for model in run.models.values():
            mark_unusable(model, str(getattr(caught, "where", "") or caught))
        raise
    for model in run.models.values():
        mark_usable(model)


def _settle(plan: LoadPlan, view: RankView, run: Run, channel: Channel) -> None:
    """What is left once the bytes are there."""
    error: BaseException | None = None
    try:
        with torch.no_grad():
            for finish in plan.restoring.finish:
                finish()
    except Exception as caught:
        error = caught
    channel.fail_together(error)
    for model in run.models.values():
        if any(entry.pending for entry in take_inventory(model)):
            materialize(model)  # tables that the model computes itself, and with strict=False what was not stored
    if plan.random_numbers:
        is_own = bool(view.names_under(f"rng.{channel.rank}."))
        set_random_state(plan.random_numbers if is_own else derived_state(plan.random_numbers, channel.rank))
