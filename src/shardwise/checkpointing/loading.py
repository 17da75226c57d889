"""Load a run's state: plan and check every read, then read and restore the objects."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import compat
from shardwise.checkpointing import state as run_state
from shardwise.checkpointing.contents import ChunkSpec, Contents, KeyPath, StoredTensor
from shardwise.checkpointing.formats.detect import open_checkpoint, require_names
from shardwise.checkpointing.formats.values import nest
from shardwise.checkpointing.names import (
    Matched,
    ModelTensor,
    local_chunks,
    match,
    model_tensors,
    with_our_names,
)
from shardwise.checkpointing.reading import Request, RequestReader, Verify, requests_for, stored_differ
from shardwise.distributed.agreement import Channel, Ranks, gather_objects, run_on_all
from shardwise.errors import CheckpointError, listed, require_choice
from shardwise.planning.settings import dtype_name
from shardwise.progress import Progress
from shardwise.sharding.adapters import adapter_keys
from shardwise.sharding.inventory import canonical_name, local_tensor, take_inventory
from shardwise.sharding.materialize import allocate, materialize
from shardwise.sharding.repointing import follow_names

_MAX_LINES = 30
T = TypeVar("T")


def contents_for(contents: Contents, rank: int, size: int) -> tuple[Contents, frozenset[str]]:
    """Return the contents for rank `rank` of `size`, with the values that this rank saved if they differ from rank 0's.

    Also return the names whose values differed between the saving ranks, if their number was not `size`.
    """
    own, differing, prefix = {}, set(), f"{run_state.PER_RANK}."
    stored_by_ranks = [name for name in (*contents.tensors, *contents.values) if name.startswith(prefix)]
    for name in stored_by_ranks:
        _, owner, bare = name.split(".", 2)
        if contents.world_size != size:
            differing.add(bare)
        elif owner == str(rank):
            own[bare] = name

    def for_rank(items: Mapping[str, Any]) -> dict[str, Any]:
        common = {name: item for name, item in items.items() if not name.startswith(prefix) and name not in own}
        return common | {bare: items[name] for bare, name in own.items() if name in items}

    tensors, values = for_rank(contents.tensors), for_rank(contents.values)
    tensors |= {bare: replace(tensors[bare], name=bare) for bare in own if bare in tensors}
    paths = {bare: tuple(contents.structure.get(name, ())[2:]) or (bare,) for bare, name in own.items()}
    structure = paths | dict(contents.structure)
    return replace(contents, tensors=tensors, values=values, structure=structure), frozenset(differing)


class LoadPlan:
    """Maps stored values to the run's objects; raises a CheckpointError that lists mismatches.

    Planning modifies nothing. `ranks` is the channel of the loading ranks; None: load only weights.
    """

    def __init__(
        self, run: run_state.RunObjects, contents: Contents, ranks: Channel | None, *, strict: bool, rng: bool
    ) -> None:
        self.contents, self._differing, self._rank = contents, frozenset[str](), 0
        if ranks is not None:
            self.contents, self._differing = contents_for(contents, ranks.rank, ranks.size)
            self._rank = ranks.rank
        self._run, self._strict, self._elsewhere, self._weights_only = run, strict, run.elsewhere, ranks is None
        self.extra: Any = None
        """The saved `extra`; set by `finish`."""
        self.notes: list[str] = []
        """Messages for the user."""
        self.matched: dict[str, Matched] = {}
        """Matched names by name of the model."""
        self.rebuilt: list[str] = []
        """Names of meta tensors that were not stored and were initialized; set after reading."""
        self._requests: list[Request] = []
        self._finish: list[Callable[[], object]] = []
        self._problems: list[str] = []
        self._random_numbers: dict[str, torch.Tensor] = {}
        for name, model in run.models.items():
            self._plan_model(name, model)
        groups = run.groups(run.tensors()) if run.optimizers else {}
        for key, optimizer in run.optimizers.items():
            self._plan_optimizer(optimizer, groups[key], run_state.section_path("optim", key))
        for key, item in run.objects.items():
            if strict or self._names_under(f"{key}."):
                self._plan_object((key,), item.state_dict(), item.load_state_dict)
            else:
                self.notes.append(f"{key} is not in the checkpoint and is unchanged")
        if self._names_under("extra."):
            self._plan_object(("extra",), {}, lambda value: setattr(self, "extra", value))
        if rng:
            self._plan_random_numbers()
        if self._problems:
            raise CheckpointError(
                f"the checkpoint does not match this run: {len(self._problems)} problems",
                where="\n".join([str(contents.path), *listed(self._problems, _MAX_LINES)]),
                why="every stored value of an object must be restored"
                if strict
                else "every value to load must be stored, with the right shape",
                fix="load the objects that were saved, or omit objects that should keep their initial state"
                + ("; strict=False loads what fits" if strict else ""),
            )

    def requests(self) -> list[Request]:
        """Return all read requests, models last; computed on each call, because `allocate` replaces tensors."""
        found = list(self._requests)
        for name, matched in self.matched.items():
            stored = {own: _prefix(name) + stored for own, stored in matched.stored_names.items()}
            found += requests_for(model_tensors(self._run.models[name]), stored)
        return found

    def allocate(self) -> bool:
        """Allocate meta tensors that will be read; return whether there were any."""
        found = False
        for name, matched in self.matched.items():
            model = self._run.models[name]
            wanted = [entry.tensor for entry in model_tensors(model) if entry.name in matched.stored_names]
            found = found or any(tensor.is_meta for tensor in wanted)
            allocate(model, wanted)
        return found

    @torch.no_grad()
    def finish(self) -> None:
        """Assign the values that were read to their objects."""
        for finish in self._finish:
            finish()

    def set_random_numbers(self) -> None:
        """Set the random states; done last, because earlier steps may draw random numbers."""
        if self._random_numbers and self._names_under(f"rng.{self._rank}."):
            run_state.set_encoded_random_state(self._random_numbers)
        elif self._random_numbers:
            run_state.seed_from_state(self._random_numbers, self._rank)

    def _names_under(self, prefix: str) -> list[str]:
        """Return names of tensors and values with this prefix, in the checkpoint's order."""
        stored = (self.contents.tensors, self.contents.values)
        return [name for names in stored for name in names if name.startswith(prefix)]

    def _refuse_differing(self, prefix: str, advice: str) -> bool:
        """Report and return whether state under `prefix` differed between the saving ranks, if their number changed."""
        differing = sorted(name for name in self._differing if name.startswith(prefix))
        if differing:
            self._problems.append(
                f"{prefix[:-1]}: its state differed between the {self.contents.world_size} ranks that saved it "
                f"({', '.join(differing[:3])}); {advice}"
            )
        return bool(differing)

    def _path(self, name: str) -> KeyPath:
        return self.contents.structure.get(name) or tuple(name.split("."))

    def _read_into(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Request this rank's shard of a tensor."""
        self._requests += [Request(name, memory, spec) for spec, memory in local_chunks(tensor)]
        return tensor

    def _read_whole(self, name: str) -> torch.Tensor:
        """Request a full tensor, in new CPU memory."""
        stored = self.contents.tensors[name]
        return self._read_into(name, torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="cpu"))

    def _plan_model(self, name: str, model: nn.Module) -> None:
        prefix = _prefix(name)
        tensors = {
            full.removeprefix(prefix): tensor
            for full, tensor in self.contents.tensors.items()
            if full.startswith(prefix) and (self._weights_only or run_state.EXTRA_STATE not in full.split("."))
        }
        part = replace(self.contents, tensors=tensors)
        own = self._expected(model, model_tensors(model), tensors)
        self.matched[name] = match(model, part, own)
        self.matched[name].refuse(part, self._strict)
        if self._strict:
            self._refuse_differing(prefix, "strict=False takes rank 0's")
        for key, module in run_state.extra_states(model).items() if not self._weights_only else ():
            if self._strict or f"{prefix}{key}.{run_state.LAYOUT}" in self.contents.values:
                path = (*run_state.section_path("model", name), key)
                self._plan_object(path, module.get_extra_state(), module.set_extra_state)

    def _expected(self, model: nn.Module, own: list[ModelTensor], stored: Collection[str]) -> list[ModelTensor]:
        """Return the tensors that a partial checkpoint must contain; all others must have values already."""
        details = self.contents.details
        if details.get("trainable_only"):
            expected = [tensor for tensor in own if not tensor.is_frozen or tensor.name in stored]
        elif details.get("adapters"):
            expected = [tensor for tensor in own if tensor.name in adapter_keys(model)]
        else:
            return own
        rest = {tensor.name: tensor for tensor in own if tensor not in expected}
        if empty := [name for name, tensor in rest.items() if tensor.tensor.is_meta]:
            self._problems.append(
                f"{empty[0]} and {len(empty) - 1} more are frozen and have no values: the checkpoint holds what was "
                "trained only; load_weights(model, path) with the whole model's weights first"
            )
        return expected

    def refuse_differing_copies(self, *, whole: bool) -> None:
        """Raise if a tied tensor is stored twice with different values, in this rank's shard or as a whole."""
        for name, matched in self.matched.items():
            for tensor in model_tensors(self._run.models[name]) if matched.copies else ():
                for other in matched.copies.get(tensor.name, ()):
                    first, copy = (
                        self.contents.tensors[_prefix(name) + each]
                        for each in (matched.stored_names[tensor.name], other)
                    )
                    specs = [ChunkSpec.whole(tensor.shape)] if whole else [s for s, _ in local_chunks(tensor.tensor)]
                    # No chunks: this rank reads nothing.
                    if copy.chunks and stored_differ(self.contents, first, copy, specs):
                        raise CheckpointError(
                            f"{first.name!r} and {copy.name!r} are stored with different values",
                            where=str(self.contents.path),
                            why="in this model they are one tensor, so one of the values would be lost",
                            fix="untie them in the model's config, or choose one: rename={" + repr(other) + ": None}",
                        )

    def _plan_random_numbers(self) -> None:
        own = self._names_under(f"rng.{self._rank}.")
        for name in own or self._names_under("rng.0."):
            self._random_numbers[name.split(".")[2]] = self._read_whole(name)
        if self._random_numbers and not own:
            self.notes.append(f"rank {self._rank} has no random state in the checkpoint; it is derived from rank 0's")

    def _plan_object(self, path: KeyPath, live: Any, put: Callable[[Any], object]) -> None:
        """Plan to read the state under `path`, directly into tensors of `live` that match, and to pass it to `put`."""
        key, tensors, values = run_state.dotted(path), self.contents.tensors, self.contents.values
        layout = values.get(f"{key}.{run_state.LAYOUT}")
        names = [key] if key in tensors or key in values else []
        names += [name for name in self._names_under(f"{key}.") if not name.endswith(f".{run_state.LAYOUT}")]
        if layout is None and not names:
            self._problems.append(f"{key}: not in the checkpoint")
            return
        if self._refuse_differing(f"{key}.", "omit it from load() to continue without it"):
            return
        try:
            current = run_state.flatten(live, path)[0].tensors
        except CheckpointError:  # the current state cannot be stored, but can be replaced
            current = {}
        found: dict[str, Any] = {}
        for name in names:
            if name in tensors:
                target = current.get(name)
                takes = target is not None and _takes(target, tensors[name])
                found[name] = self._read_into(name, current[name]) if takes else self._read_whole(name)
            else:
                found[name] = values[name]

        def finish() -> None:
            if layout is not None:
                put(run_state.unflatten(layout, found))
            else:
                put(nest({self._path(name)[len(path) :]: item for name, item in found.items()}))

        self._finish.append(finish)

    def _plan_optimizer(self, optimizer: Optimizer, groups: list[run_state.NamedGroup], path: KeyPath) -> None:
        """Plan to restore one optimizer, which need not have state; it is never stepped here."""
        follow_names(optimizer)
        prefix, problems, strict = run_state.dotted(path), self._problems, self._strict
        states, stored_groups = self._stored_optimizer(path)
        if not stored_groups and not states:
            problems.append(f"{prefix}: the checkpoint has no state of this optimizer")
            return
        if strict:
            self._refuse_differing(f"{prefix}.", "strict=False takes rank 0's")
            live = {name for group in groups for name in group.names}
            known = {name for names, _ in stored_groups for name in names} | set(states)
            problems += [f"{prefix}: {name} is in no stored group" for name in sorted(live - known)]
            problems += [f"{prefix}: {name} was optimized when saved, but is not now" for name in sorted(known - live)]
        kinds: Mapping[str, run_state.Kind] = self.contents.values.get(f"{prefix}.{run_state.KINDS}", {})
        is_flat = self.contents.details.get("has_flat_groups", False)  # groups with equal options are stored as one
        for place, group in enumerate(groups):
            names, stored = _find_group(set(group.names), place, stored_groups)
            options: dict[str, Any] = {}
            fits = set(group.names) == set(names) or (is_flat and set(group.names) <= set(names))
            if stored is not None and (fits or not strict):
                options = self._plan_options(group, stored)
            else:
                what = f"the group with {group.names[0]}" if group.names else f"the empty group {place}"
                if strict:
                    problems.append(f"{prefix}: no stored group has the same parameters as {what}")
                else:
                    self.notes.append(f"{prefix}: {what} keeps its options, no stored group has its parameters")
            options |= {key: group.options[key] for key in run_state.LIVE_OPTIONS - {"params"} if key in group.options}
            for name, parameter in zip(group.names, group.parameters, strict=True):
                found = {
                    keys: (kinds.get(f"{name}.{run_state.dotted(keys)}"), full)
                    for keys, full in states.get(name, {}).items()
                }
                self._plan_state(optimizer, parameter, found, options)

    def _stored_optimizer(
        self, path: KeyPath
    ) -> tuple[dict[str, dict[KeyPath, str]], list[tuple[list[str], dict[KeyPath, str]]]]:
        """Return flat names of each parameter's states, and each group's parameters and flat names of its options."""
        states: dict[str, dict[KeyPath, str]] = {}
        groups: dict[int, dict[KeyPath, str]] = {}
        for name in self._names_under(run_state.dotted(path) + "."):
            keys = self._path(name)[len(path) :]
            if len(keys) >= 3 and keys[0] == "state":
                if canonical_name(str(keys[1])) not in self._elsewhere:
                    states.setdefault(canonical_name(str(keys[1])), {})[keys[2:]] = name
            elif len(keys) >= 3 and keys[0] == "param_groups" and str(keys[1]).isdecimal():
                groups.setdefault(int(keys[1]), {})[keys[2:]] = name
        values, ordered = self.contents.values, [options for _, options in sorted(groups.items())]
        parameters = [values.get(options.get(("params",), ""), []) for options in ordered]
        named = [[canonical_name(str(name)) for name in names] for names in parameters]
        held = [[name for name in names if name not in self._elsewhere] for names in named]
        return states, list(zip(held, ordered, strict=True))

    def _plan_state(
        self,
        optimizer: Optimizer,
        parameter: torch.Tensor,
        stored: Mapping[KeyPath, tuple[run_state.Kind | None, str]],
        options: Mapping[str, Any],
    ) -> None:
        """Plan to restore one parameter's state; `stored` has the layout (None: unknown) and the flat name by keys."""
        parts: dict[KeyPath, Any] = {}
        kinds: dict[KeyPath, run_state.Kind] = {}
        for keys, (known_kind, name) in stored.items():
            tensor = self.contents.tensors.get(name)
            if tensor is None:
                parts[keys] = self.contents.values[name]
                continue
            key = run_state.dotted(keys)
            kinds[keys] = kind = known_kind or run_state.default_kind(key, tensor.shape, parameter)
            target = _live_state(optimizer, parameter, keys, kind, tensor)
            if target is None:
                target = run_state.make_state(kind, key, getattr(torch, tensor.dtype), tensor.shape, parameter, options)
            parts[keys] = self._read_into(name, target)

        def finish() -> None:
            if not parts:  # the saved state was empty
                optimizer.state.pop(parameter, None)
                return
            optimizer.state[parameter] = nest({
                keys: local_tensor(part) if kinds.get(keys) == "local" else part for keys, part in parts.items()
            })  # fmt: skip

        self._finish.append(finish)

    def _plan_options(self, group: run_state.NamedGroup, stored: Mapping[KeyPath, str]) -> dict[str, Any]:
        """Plan to restore a group's options; return the new options."""
        tensors, values = self.contents.tensors, self.contents.values
        parts = {keys: self._read_whole(name) if name in tensors else values[name] for keys, name in stored.items()}
        options = nest(parts) if parts else {}
        options = {key: value for key, value in options.items() if key not in run_state.LIVE_OPTIONS}

        def finish() -> None:
            for key, value in options.items():
                current = group.options.get(key)
                if isinstance(current, torch.Tensor):  # a learning rate that a captured graph reads: update it in place
                    current.copy_(torch.as_tensor(value, device="cpu"))
                elif isinstance(value, torch.Tensor) and key in group.options and value.ndim == 0:
                    group.options[key] = value.item()
                else:
                    group.options[key] = value

        self._finish.append(finish)
        return options


def _prefix(model: str) -> str:
    """Return the prefix of the names of a model's tensors."""
    return run_state.dotted(run_state.section_path("model", model)) + "."


def _takes(tensor: torch.Tensor, stored: StoredTensor) -> bool:
    """Whether a stored tensor can be read directly into this tensor."""
    if tuple(tensor.shape) != stored.shape or tensor.is_meta:
        return False
    return isinstance(tensor, DTensor) or dtype_name(tensor.dtype) == stored.dtype


def _find_group(
    wanted: set[str], place: int, stored: list[tuple[list[str], dict[KeyPath, str]]]
) -> tuple[list[str], dict[KeyPath, str] | None]:
    """Return the stored group with these parameters, or with most of them; groups may be in a different order."""
    same = [each for each in stored if set(each[0]) == wanted]
    if same:  # several only if they are empty
        return stored[place] if place < len(stored) and stored[place] in same else same[0]
    best = max(stored, key=lambda each: len(wanted.intersection(each[0])), default=None)
    return best if best is not None and wanted.intersection(best[0]) else ([], None)


def _live_state(
    optimizer: Optimizer, parameter: torch.Tensor, keys: KeyPath, kind: run_state.Kind, stored: StoredTensor
) -> torch.Tensor | None:
    """Return the optimizer's tensor if it matches the stored one."""
    tensor = (optimizer.state.get(parameter) or {}).get(keys[0]) if len(keys) == 1 else None
    if not isinstance(tensor, torch.Tensor) or dtype_name(tensor.dtype) != stored.dtype:
        return None
    if run_state.kind_of(str(keys[0]), tensor, parameter) != kind:
        return None
    if kind == "local" and isinstance(parameter, DTensor):
        return compat.dtensor_like(tensor, parameter)
    return tensor if tuple(tensor.shape) == stored.shape else None


def open_for(run: run_state.RunObjects, path: str | Path) -> Contents:
    """Open a checkpoint of any format under shardwise's names; the run's model supplies names missing in the files."""
    contents = open_checkpoint(path, model=next(iter(run.models.values())) if len(run.models) == 1 else None)
    require_names(contents, optimizers=bool(run.optimizers))
    return with_our_names(contents)


def load_run(
    run: run_state.RunObjects,
    contents: Contents,
    ranks: Ranks,
    *,
    strict: bool,
    verify: Verify,
    rng: bool = False,
    weights_only: bool = False,
    progress: Progress | None = None,
    reader: RequestReader | None = None,
) -> LoadPlan:
    """Read a checkpoint into a run's objects: plan and check every read, allocate meta tensors, and read.

    With `weights_only` all ranks load the same weights into the same model, and nothing else; otherwise `ranks` is a
    `Channel`. A CheckpointError is raised on every rank: if raised before the first byte is read into an object,
    nothing was modified; if raised later, the models are marked unusable. Collective.
    """
    require_choice(verify, get_args(Verify), where="verify=...")
    reader, channel = reader or RequestReader(), ranks if isinstance(ranks, Channel) and not weights_only else None

    def on_all(work: Callable[[], T]) -> T:
        return run_on_all(work, ranks, CheckpointError)

    def make_plan() -> LoadPlan:
        return LoadPlan(run, contents, channel, strict=strict, rng=rng)

    def prove() -> None:
        if problems := reader.check(plan.contents, planned):
            raise CheckpointError(
                f"the checkpoint cannot be loaded: {len(problems)} problems",
                where="\n".join([str(contents.path), *listed(problems, _MAX_LINES)]),
                why="every byte is validated before the model is modified",
                fix="copy the checkpoint again, or load another one",
            )

    def allocate_models() -> None:
        nonlocal plan
        if plan.allocate():  # optimizer states may have been planned for parameters on the meta device
            plan = make_plan()

    plan = on_all(make_plan)  # the reader may use collectives: all ranks must reach it
    if weights_only:
        _refuse_other_weights(plan, ranks)
    planned = on_all(plan.requests)
    on_all(prove)
    on_all(lambda: plan.refuse_differing_copies(whole=reader.broadcasts) if strict else None)
    if verify == "before":
        on_all(lambda: reader.verify(plan.contents, planned, progress))
    models = run.models.values()
    try:
        on_all(allocate_models)
        on_all(lambda: reader.read(plan.contents, plan.requests(), verify=verify != "no", progress=progress))
        on_all(lambda: plan.finish())
    except BaseException as error:  # on any rank: the models are unusable on all ranks
        for model in models:
            run_state.mark_unusable(model, str(getattr(error, "where", "") or error))
        raise
    for model in models:
        run_state.mark_usable(model)
    for model in models:
        if pending := {canonical_name(entry.fqn) for entry in take_inventory(model) if entry.pending}:
            materialize(model)  # computed tables and, with strict=False, tensors that were not stored
            plan.rebuilt += sorted(pending)
    plan.set_random_numbers()
    return plan


def _refuse_other_weights(plan: LoadPlan, ranks: Ranks) -> None:
    """Raise unless all ranks load the same tensors; a machine may have an outdated copy of the files.

    Ranks:
        Collective.
    """
    stored = [
        (name, plan.contents.tensors[_prefix("") + stored]) for name, stored in plan.matched[""].stored_names.items()
    ]
    described = repr([(name, tensor.name, tensor.dtype, tensor.shape) for name, tensor in stored])
    digests = gather_objects(hashlib.sha256(described.encode()).hexdigest(), group=ranks)
    if differing := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise CheckpointError(
            f"ranks {differing} have other weights or another model than the first rank",
            where=str(plan.contents.path),
            why="all ranks load parts of the same tensors",
            fix="copy the same files to every machine, or pass broadcast=True to use those of the first",
        )
