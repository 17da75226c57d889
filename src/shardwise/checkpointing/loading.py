"""Load a run's state: plan every read, then read and put it in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import compat
from shardwise.checkpointing.broadcasting import RequestReader
from shardwise.checkpointing.contents import ChunkSpec, Contents, KeyPath, StoredTensor
from shardwise.checkpointing.matching import Matched, match
from shardwise.checkpointing.reading import Request, Verify, requests_for
from shardwise.checkpointing.staging import wait_for_copies
from shardwise.checkpointing.state import nested
from shardwise.checkpointing.state import optimizer_state as optim
from shardwise.checkpointing.state.names import canonical_name
from shardwise.checkpointing.state.run import EXTRA_STATE, Run, extra_states, mark_unusable, mark_usable, section_path
from shardwise.checkpointing.state.slices import local_chunks, model_tensors
from shardwise.checkpointing.verifying import USE_THE_MODEL, mixed_order, unsure_order
from shardwise.distributed.agreement import Channel
from shardwise.errors import CheckpointError, ConfigError, listed
from shardwise.planning.settings import dtype_name
from shardwise.progress import Progress
from shardwise.sharding.inventory import local_tensor, take_inventory
from shardwise.sharding.materialize import allocate, materialize
from shardwise.sharding.repointing import follow_names


@dataclass(frozen=True, slots=True)
class RankView:
    """What a rank finds in a checkpoint."""

    contents: Contents
    """Without the names of single ranks."""
    differing: frozenset[str]
    """Names that had different values on the ranks that saved, where this run has another number of ranks: only
    rank 0's are here."""
    mixed: Mapping[str, str] = field(default_factory=dict)
    """Optimizers whose stored state is not whole, and why: see `verifying.mixed_order`."""

    def path(self, name: str) -> KeyPath:
        """The keys that lead to a name in the nested state dict."""
        return self.contents.structure.get(name) or tuple(name.split("."))

    def names_under(self, prefix: str) -> list[str]:
        """Tensors and values whose names begin so, in the checkpoint's order."""
        contents = self.contents
        return [name for names in (contents.tensors, contents.values) for name in names if name.startswith(prefix)]

    def differing_under(self, prefix: str) -> list[str]:
        """Of `differing`, those whose names begin so."""
        return sorted(name for name in self.differing if name.startswith(prefix))


def view_for(contents: Contents, rank: int, size: int) -> RankView:
    """The checkpoint as rank `rank` of `size` sees it."""
    common: list[dict[str, Any]] = []
    own: dict[str, str] = {}  # what this rank has of its own, to the name under which it is stored
    differing = set()
    for stored in (contents.tensors, contents.values):
        common.append({name: item for name, item in stored.items() if not name.startswith(f"{nested.PER_RANK}.")})
        for name in stored:
            if name in common[-1]:
                continue
            _, owner, bare = name.split(".", 2)
            if _is_reordered(contents, name, bare):
                continue  # before 0.2.0 names of a group were stored in each rank's own order
            if contents.world_size != size:
                differing.add(bare)
            elif owner == str(rank):
                own[bare] = name
    tensors, values = common
    structure = dict(contents.structure)
    for bare, name in own.items():
        structure.setdefault(bare, tuple(contents.structure.get(name, ())[2:]) or (bare,))
        tensors.pop(bare, None)
        values.pop(bare, None)
        if name in contents.tensors:
            tensors[bare] = replace(contents.tensors[name], name=bare)
        else:
            values[bare] = contents.values[name]
    view = replace(contents, tensors=tensors, values=values, structure=structure)
    return RankView(view, frozenset(differing), mixed_order(contents))


def _is_reordered(contents: Contents, name: str, bare: str) -> bool:
    lists = [contents.values.get(each) for each in (name, bare)]
    if not bare.endswith(".params") or not all(isinstance(each, (list, tuple)) for each in lists):
        return False
    return sorted(map(str, lists[0])) == sorted(map(str, lists[1]))  # pyrefly: ignore[bad-argument-type]


@dataclass(slots=True)
class Restoring:
    """A load in the making."""

    view: RankView
    requests: list[Request] = field(default_factory=list)
    finish: list[Callable[[], None]] = field(default_factory=list)
    """To be called in order, once everything is read."""
    problems: list[str] = field(default_factory=list)
    """Why it cannot be loaded, a line each."""
    notes: list[str] = field(default_factory=list)
    """What the user should know."""

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Ask for this rank's part of a tensor."""
        if isinstance(tensor, DTensor):
            self.requests += [Request(name, memory, spec) for spec, memory in local_chunks(tensor)]
        else:
            self.requests.append(Request(name, tensor.detach(), ChunkSpec.whole(tuple(tensor.shape))))


def plan_object(
    restoring: Restoring, key: str, live: Any, put: Callable[[Any], object], *, path: KeyPath | None = None
) -> None:
    """Plan to restore one object from what is stored under `key`.

    Args:
        restoring: Is added to.
        key: The flat name under which it stands.
        live: Its state now: tensors in it are read into where they have the stored shape, as DCP does; that is
            how sharded ones keep their layout.
        put: Takes the restored state.
        path: The keys that lead to it, where a key has a dot.
    """
    view, path = restoring.view, path or (key,)
    tensors, values = view.contents.tensors, view.contents.values
    layout = values.get(f"{key}.{nested.LAYOUT}")
    names = [key] if key in tensors or key in values else []
    names += [name for name in view.names_under(f"{key}.") if not name.endswith(f".{nested.LAYOUT}")]
    if layout is None and not names:
        restoring.problems.append(f"{key}: not in the checkpoint")
        return
    if differing := view.differing_under(f"{key}."):
        restoring.problems.append(
            f"{key}: its state differed between the {view.contents.world_size} ranks that saved it ({differing[0]}); "
            "leave it out of load() to go on without it"
        )
        return
    try:
        current = nested.flatten(live, path)[0].tensors
    except CheckpointError:  # what is there now could not be stored; that is no reason not to load
        current = {}
    targets: dict[str, torch.Tensor] = {}
    for name in names:
        if name in tensors:
            target = current.get(name)
            takes = target is not None and _takes(target, tensors[name])
            targets[name] = target if target is not None and takes else new_tensor(tensors[name])
            restoring.read_into(name, targets[name])

    def find(name: str, is_tensor: bool) -> Any:
        return targets[name] if is_tensor else values[name]

    def finish() -> None:
        if layout is not None:
            put(nested.unflatten(layout, find))
        else:
            put(nested.put_together({view.path(name)[len(path) :]: find(name, name in targets) for name in names}))

    restoring.finish.append(finish)


def new_tensor(stored: StoredTensor) -> torch.Tensor:
    """CPU memory for all of a stored tensor."""
    return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="cpu")


def _takes(tensor: torch.Tensor, stored: StoredTensor) -> bool:
    """Whether a stored tensor can be read into this one."""
    if tuple(tensor.shape) != stored.shape or tensor.is_meta:
        return False
    return isinstance(tensor, DTensor) or dtype_name(tensor.dtype) == stored.dtype


@dataclass(slots=True)
class _StoredGroup:
    """A parameter group in a checkpoint."""

    options: dict[KeyPath, str]
    """The keys in the group, and the flat name."""
    names: list[str]
    """Of its parameters."""


def plan_optimizer(
    restoring: Restoring, optimizer: Optimizer, groups: list[optim.NamedGroup], path: KeyPath, *, strict: bool
) -> None:
    """Plan to restore one optimizer.

    Args:
        restoring: Is added to.
        optimizer: Stepped or not; it is never stepped here.
        groups: Its groups by name.
        path: Where its state stands.
        strict: Every parameter must be in the same group as it was.
    """
    follow_names(optimizer)
    view, prefix, problems = restoring.view, nested.dotted(path), restoring.problems
    states, stored_groups = _read_index(view, path)
    if prefix in view.mixed:
        problems.append(f"{prefix} (SW337): {view.mixed[prefix]}; {USE_THE_MODEL}")
        return
    if prefix in (unsure := unsure_order(view.contents)):
        warnings.warn(f"{prefix} (SW338): {unsure[prefix]}. If that was so, {USE_THE_MODEL}", stacklevel=2)
    if not stored_groups and not states:
        problems.append(f"{prefix}: the checkpoint has no state of this optimizer")
        return
    if strict and (differing := view.differing_under(f"{prefix}.")):
        problems.append(
            f"{prefix}: {len(differing)} states differed between the {view.contents.world_size} ranks that saved them, "
            f"as {differing[0]}"
        )
    live = {name for group in groups for name in group.names}
    known = {name for group in stored_groups for name in group.names} | set(states)
    if strict:
        problems += [f"{prefix}: {name} has no place in the stored groups" for name in sorted(live - known)]
        problems += [f"{prefix}: {name} was optimized, and is not now" for name in sorted(known - live)]
    kinds: Mapping[str, optim.Kind] = view.contents.values.get(f"{prefix}.{optim.KINDS}", {})
    for place, group in enumerate(groups):
        stored = _find_group(group, place, stored_groups)
        options: dict[str, Any] = {}
        if stored is not None and not (strict and set(stored.names) != set(group.names)):
            options = _plan_options(restoring, group, stored)
        else:
            what = f"the group with {group.names[0]}" if group.names else f"the empty group {place}"
            if strict:
                problems.append(f"{prefix}: no stored group has the same parameters as {what}")
            else:
                restoring.notes.append(f"{prefix}: {what} keeps its options, no stored group has its parameters")
        options |= {key: group.options[key] for key in optim.LIVE_OPTIONS - {"params"} if key in group.options}
        for name, parameter in zip(group.names, group.parameters, strict=True):
            found = {
                keys: (kinds.get(f"{name}.{nested.dotted(keys)}"), full) for keys, full in states.get(name, {}).items()
            }
            _plan_state(restoring, optimizer, parameter, found, options)


def _plan_state(
    restoring: Restoring,
    optimizer: Optimizer,
    parameter: torch.Tensor,
    stored: Mapping[KeyPath, tuple[optim.Kind | None, str]],
    options: Mapping[str, Any],
) -> None:
    """Plan to restore one parameter's state.

    Args:
        restoring: Is added to.
        optimizer: Keeps the state.
        parameter: Whose state it is.
        stored: By the keys in the state: its layout, where the checkpoint says it, and the flat name.
        options: Of the parameter's group.
    """
    contents = restoring.view.contents
    parts: dict[KeyPath, Any] = {}
    kinds: dict[KeyPath, optim.Kind] = {}
    for keys, (known_kind, name) in stored.items():
        tensor = contents.tensors.get(name)
        if tensor is None:
            parts[keys] = contents.values[name]
            continue
        key = nested.dotted(keys)
        kinds[keys] = kind = known_kind or optim.default_kind(key, tensor.shape, parameter)
        target = _live_state(optimizer, parameter, keys, kind, tensor)
        if target is None:
            target = optim.make_state(kind, key, getattr(torch, tensor.dtype), tensor.shape, parameter, options)
        restoring.read_into(name, target)
        parts[keys] = target

    def finish() -> None:
        if not parts:  # it had none when it was saved
            optimizer.state.pop(parameter, None)
            return
        optimizer.state[parameter] = nested.put_together({
            keys: local_tensor(part) if kinds.get(keys) == "local" else part for keys, part in parts.items()
        })  # fmt: skip

    restoring.finish.append(finish)


def _live_state(
    optimizer: Optimizer, parameter: torch.Tensor, keys: KeyPath, kind: optim.Kind, stored: StoredTensor
) -> torch.Tensor | None:
    """The optimizer's own tensor, where it is just what the stored one needs."""
    tensor = (optimizer.state.get(parameter) or {}).get(keys[0]) if len(keys) == 1 else None
    if not isinstance(tensor, torch.Tensor) or dtype_name(tensor.dtype) != stored.dtype:
        return None
    if optim.kind_of(str(keys[0]), tensor, parameter) != kind:
        return None
    if kind == "local" and isinstance(parameter, DTensor):
        return compat.dtensor_like(tensor, parameter)
    return tensor if tuple(tensor.shape) == stored.shape else None


def _plan_options(restoring: Restoring, group: optim.NamedGroup, stored: _StoredGroup) -> dict[str, Any]:
    """Plan to set a group's options; return what they will be."""
    contents, values = restoring.view.contents, {}
    for keys, name in stored.options.items():
        tensor = contents.tensors.get(name)
        values[keys] = contents.values[name] if tensor is None else new_tensor(tensor)
        if tensor is not None:
            restoring.read_into(name, values[keys])
    options = nested.put_together(values) if values else {}
    options = {key: value for key, value in options.items() if key not in optim.LIVE_OPTIONS}

    def finish() -> None:
        for key, value in options.items():
            current = group.options.get(key)
            if isinstance(current, torch.Tensor):  # a learning rate that a captured graph reads
                current.copy_(torch.as_tensor(value))
            elif isinstance(value, torch.Tensor) and key in group.options and value.ndim == 0:
                group.options[key] = value.item()
            else:
                group.options[key] = value

    restoring.finish.append(finish)
    return options


def _find_group(group: optim.NamedGroup, place: int, stored: list[_StoredGroup]) -> _StoredGroup | None:
    """The stored group with this group's parameters, or most of them; groups may have changed places."""
    wanted = set(group.names)
    same = [each for each in stored if set(each.names) == wanted]
    if same:  # several only when they are empty
        return stored[place] if place < len(stored) and stored[place] in same else same[0]
    best = max(stored, key=lambda each: len(wanted.intersection(each.names)), default=None)
    return best if best is not None and wanted.intersection(best.names) else None


def _read_index(view: RankView, path: KeyPath) -> tuple[dict[str, dict[KeyPath, str]], list[_StoredGroup]]:
    """What is stored of an optimizer: by parameter, the keys in its state and the flat name; and the groups."""
    states: dict[str, dict[KeyPath, str]] = {}
    groups: dict[int, dict[KeyPath, str]] = {}
    for name in view.names_under(nested.dotted(path) + "."):
        keys = view.path(name)[len(path) :]
        if len(keys) >= 3 and keys[0] == "state":
            states.setdefault(canonical_name(str(keys[1])), {})[keys[2:]] = name
        elif len(keys) >= 3 and keys[0] == "param_groups" and str(keys[1]).isdecimal():
            groups.setdefault(int(keys[1]), {})[keys[2:]] = name
    values = view.contents.values
    return states, [
        _StoredGroup(options, [canonical_name(str(name)) for name in values.get(options.get(("params",), ""), [])])
        for _, options in sorted(groups.items())
    ]


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
        self.restoring = Restoring(view)
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
            if full.startswith(prefix) and EXTRA_STATE not in full.split(".")
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
            if self._strict or f"{full}.{nested.LAYOUT}" in view.contents.values:
                path = (*section_path("model", name), key)
                plan_object(self.restoring, full, module.get_extra_state(), module.set_extra_state, path=path)

    def _plan_rest(self) -> None:
        run, view, restoring = self._run, self._view, self.restoring
        groups = run.groups(run.tensors())
        for key, optimizer in run.optimizers.items():
            plan_optimizer(restoring, optimizer, groups[key], section_path("optim", key), strict=self._strict)
        for key, item in run.objects.items():
            if self._strict or view.names_under(f"{key}."):
                plan_object(restoring, key, item.state_dict(), item.load_state_dict)
            else:
                restoring.notes.append(f"{key} is not in the checkpoint and was left as it is")
        if f"extra.{nested.LAYOUT}" in view.contents.values or view.names_under("extra."):
            plan_object(restoring, "extra", {}, lambda value: setattr(self, "extra", value))

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
    return nested.dotted(section_path("model", model)) + "."


_MAX_LINES = 30


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
) -> LoadPlan:
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

    Returns:
        What was done, with the `extra` that was saved.

    Raises:
        CheckpointError: The same on every rank. Before the first byte is written nothing was changed; afterwards
            the models are marked unusable.

    Ranks:
        Collective.
    """
    check_verify(verify)
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
        nested.set_encoded_random_state(
            plan.random_numbers if is_own else nested.derived_state(plan.random_numbers, channel.rank)
        )
    return plan


def check_verify(verify: str) -> None:
    """Raise unless it says when checksums are compared."""
    if verify not in get_args(Verify):
        raise ConfigError(f"verify is {verify!r}", where="verify=...", fix='pass "while", "before" or "no"')


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
