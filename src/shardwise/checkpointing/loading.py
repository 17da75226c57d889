"""Load a run's state: plan every read, then read and put it in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise.checkpointing.broadcasting import RequestReader
from shardwise.checkpointing.contents import Contents
from shardwise.checkpointing.matching import Matched, match
from shardwise.checkpointing.reading import Request, Verify, requests_for
from shardwise.checkpointing.restoring import RankView, Restoring, new_tensor, plan_object, plan_optimizer, view_for
from shardwise.checkpointing.staging import wait_for_copies
from shardwise.checkpointing.state import run as run_state
from shardwise.checkpointing.state.nested import LAYOUT, derived_state, set_encoded_random_state
from shardwise.checkpointing.state.run import Run, extra_states, mark_unusable, mark_usable, model_path, optimizer_path
from shardwise.checkpointing.state.slices import model_tensors
from shardwise.distributed.agreement import Channel
from shardwise.errors import CheckpointError, listed
from shardwise.progress import Progress
from shardwise.sharding.inventory import take_inventory
from shardwise.sharding.materialize import allocate, materialize


class LoadPlan:
    """A place for everything that is stored, and a value for every place.

    Args:
        run: What is loaded into; it is not changed.
        view: The checkpoint, as this rank sees it.
        rank: This one.
        strict: What does not fit is a problem.
        rng: Also the random numbers.

    Raises:
        CheckpointError: With all that does not fit.
    """

    def __init__(self, run: Run, view: RankView, rank: int, *, strict: bool, rng: bool) -> None:
        self._run, self._view, self._strict = run, view, strict
        self.restoring = Restoring()
        self.matched: dict[str, Matched] = {}
        """By model: which stored tensor goes into which of its own."""
        self.extra: Any = None
        """Once everything is read: what was saved as that."""
        self.random_numbers: dict[str, torch.Tensor] = {}
        """By generator: where the state of this rank, or else of rank 0, is read to."""
        for name, model in run.models.items():
            self._plan_model(name, model)
        self._plan_rest()
        if rng:
            self._plan_random_numbers(rank)
        if problems := self.restoring.problems:
            raise CheckpointError(
                f"the checkpoint does not fit this run: {len(problems)} problems",
                where="\n".join([str(view.contents.path), *listed(problems, _MAX_LINES)]),
                why="everything that is stored of an object must find its place"
                if strict
                else "what is loaded must be there, and of the right shape",
                fix="load the objects that were saved, or leave out of load() what shall start afresh"
                + ("; strict=False loads what fits" if strict else ""),
            )

    def requests(self) -> list[Request]:
        """Everything to be read, models last; asked for anew, because allocating a model makes new tensors."""
        found = list(self.restoring.requests)
        for name, matched in self.matched.items():
            stored = {own: _prefix(name) + stored for own, stored in matched.stored_names.items()}
            found += requests_for(model_tensors(self._run.models[name]), stored)
        return found

    def allocate(self) -> bool:
        """Give memory to what stands on meta and will be read; whether anything did."""
        found = False
        for name, matched in self.matched.items():
            model = self._run.models[name]
            wanted = [entry.tensor for entry in model_tensors(model) if entry.name in matched.stored_names]
            found = found or any(tensor.is_meta for tensor in wanted)
            allocate(model, wanted)
        return found

    def _plan_model(self, name: str, model: nn.Module) -> None:
        view, prefix = self._view, _prefix(name)
        tensors = {
            full.removeprefix(prefix): tensor
            for full, tensor in view.contents.tensors.items()
            if full.startswith(prefix) and run_state.EXTRA_STATE not in full.split(".")
        }
        part = replace(view.contents, tensors=tensors)
        self.matched[name] = match(model, part)
        self.matched[name].refuse(part, self._strict)
        if self._strict and (differing := view.differing_under(prefix)):
            self.restoring.problems.append(
                f"{differing[0]} and {len(differing) - 1} more differed between the {view.contents.world_size} ranks "
                "that saved them; strict=False takes rank 0's"
            )
        for key, module in extra_states(model).items():
            full = prefix + key
            if self._strict or f"{full}.{LAYOUT}" in view.contents.values:
                path = (*model_path(name), key)
                plan_object(self.restoring, view, full, module.get_extra_state(), module.set_extra_state, path=path)

    def _plan_rest(self) -> None:
        run, view, restoring = self._run, self._view, self.restoring
        groups = run.groups(run.tensors())
        for key, optimizer in run.optimizers.items():
            plan_optimizer(restoring, view, optimizer, groups[key], optimizer_path(key), strict=self._strict)
        for key, item in run.objects.items():
            if self._strict or view.names_under(f"{key}."):
                plan_object(restoring, view, key, item.state_dict(), item.load_state_dict)
            else:
                restoring.notes.append(f"{key} is not in the checkpoint and was left as it is")
        if f"extra.{LAYOUT}" in view.contents.values or view.names_under("extra."):
            plan_object(restoring, view, "extra", {}, lambda value: setattr(self, "extra", value))

    def _plan_random_numbers(self, rank: int) -> None:
        own = self._view.names_under(f"rng.{rank}.")
        for name in own or self._view.names_under("rng.0."):
            state = new_tensor(self._view.contents.tensors[name])
            self.random_numbers[name.split(".")[2]] = state
            self.restoring.read_into(name, state)
        if self.random_numbers and not own:
            note = f"rank {rank} had no random numbers in the checkpoint; they follow from rank 0's"
            self.restoring.notes.append(note)


def _prefix(model: str) -> str:
    """What stands before the names of a model's tensors."""
    return ".".join(map(str, model_path(model))) + "."


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
        return LoadPlan(run, view, channel.rank, strict=strict, rng=rng)

    plan = channel.run_on_all(make_plan)  # a reader may communicate: nobody enters it alone

    def allocate_models() -> None:
        nonlocal plan
        if plan.allocate():  # optimizer states were planned where the parameters were: on meta, perhaps
            plan = make_plan()

    load_requests(
        list(run.models.values()),
        view.contents,
        lambda: plan.requests(),
        channel.run_on_all,
        reader or RequestReader(),
        allocate=allocate_models,
        verify=verify,
        progress=progress,
    )

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
        set_encoded_random_state(plan.random_numbers if is_own else derived_state(plan.random_numbers, channel.rank))
    return Loaded(contents.step or 0, plan.extra, tuple(plan.restoring.notes))


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
                where="\n".join([str(contents.path), *listed(problems, _MAX_LINES)]),
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
