"""Facts about a whole model: entries are read once per class and structure, and hold for all its layers."""

import inspect
from collections import defaultdict
from typing import Any, NamedTuple

from torch import nn

from shardwise.planning.places import Places, has_forward, is_opaque
from shardwise.planning.source.frames import Analysis, Fact, Frame
from shardwise.planning.source.functions import start
from shardwise.planning.source.records import record_escape

_COMPARABLE = (bool, int, float, str, bytes, type(None))


class Entry(NamedTuple):
    """A module's method by which code enters it."""

    module: nn.Module
    name: str


class Reading(NamedTuple):
    """What reading one entry found, relative to the module, to be reused for others of its kind."""

    facts: tuple[tuple[str, tuple[str, ...], str, str, bool], ...]
    entries: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str, Any], ...]
    active: bool


class FactBook:
    """All facts found so far, and what has still to be read."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.facts: dict[tuple[Any, ...], tuple[Fact, Entry]] = {}
        self.active: dict[tuple[int, str], bool] = {}
        self.assumed: set[int] = set()
        self.unreadable: dict[str, None] = {}
        self.notes: list[str] = []
        self._readings: dict[Any, list[Reading]] = defaultdict(list)
        self._failed: set[Any] = set()
        self._kinds: dict[Any, int] = {}
        self._kind_of: dict[int, int] = {}
        self._touched: set[int] = set()

    def follow(self, entry: Entry) -> bool:
        """Read an entry and everything it leads to; say whether the entry itself computes anything."""
        pending = [entry]
        while pending:
            current = pending.pop()
            key = (id(current.module), current.name)
            if key in self.active:
                continue
            self.active[key] = False
            pending += self._read(current)
        return self.active[id(entry.module), entry.name]

    def assume(self, module: nn.Module) -> None:
        """Take it that a script calls this module."""
        self.assumed.add(id(module))
        self._add(Fact("call", (self.places.root,), module), Entry(self.places.root, "?"))
        self.follow(Entry(module, "forward"))

    def is_touched(self, module: nn.Module) -> bool:
        """Whether the module, a part of it or one of its parameters is used by code that was read."""
        return id(module) in self._touched

    def _read(self, entry: Entry) -> list[Entry]:
        module = entry.module
        if is_opaque(module) or (type(module).__module__.startswith("torch.") and not self._has_parts(module)):
            self.active[id(module), entry.name] = True
            return []
        kind = (self._kind(module), entry.name)
        for reading in self._readings[kind]:
            if all(_same(self._setting(module, path, name), value) for path, name, value in reading.settings):
                return self._apply(reading, entry)
        if kind in self._failed:
            return self._give_up(entry)
        try:
            analysis = self._analyse(entry)
            why = "no source" if analysis is None else ""
        except Exception as error:  # whatever odd code does to the reader, the rest of the model is still read
            analysis, why = None, f"{type(error).__name__}: {error}"
        if analysis is not None:
            return self._keep(analysis, entry, kind)
        self._failed.add(kind)
        name = f"{type(entry.module).__qualname__}.{entry.name}"
        if entry.module._modules:
            self.notes.append(f"{name} could not be read ({why}): its parts count as called")
        return self._give_up(entry)

    def _has_parts(self, module: nn.Module) -> bool:
        return any(id(child) not in self.places.internal for child in module.children())

    def _analyse(self, entry: Entry) -> Analysis | None:
        module = entry.module
        analysis = Analysis(self.places, entry.name)
        frame = Frame(analysis, (module,), None, {}, receiver=module)
        own = vars(module).get(entry.name)
        result = start(own if own is not None else inspect.getattr_static(type(module), entry.name), module, frame)
        if result is None:
            return None
        record_escape(result, frame)
        entered = inspect.getattr_static(type(module), "__call__")
        if entry.name == "forward" and entered is not nn.Module.__call__:
            analysis.counts = {}
            start(entered, module, frame)
        return analysis

    def _give_up(self, entry: Entry) -> list[Entry]:
        module = entry.module
        self.active[id(module), entry.name] = True
        if module._modules:
            self.unreadable[type(module).__qualname__] = None
        entries = []
        for child in _callable_children(module):
            if id(child) not in self.places.internal:
                self._add(Fact("call", (module,), child), entry)
                entries.append(Entry(child, "forward"))
        return entries

    def _keep(self, analysis: Analysis, entry: Entry, kind: Any) -> list[Entry]:
        module = entry.module
        self.active[id(module), entry.name] = analysis.activity > 0
        modules = {id(fact.target): fact.target for fact in analysis.facts.values()}
        for identity, count in analysis.counts.items():
            analysis.add(Fact("count", (module,), modules[identity], str(count)))
        entries = [Entry(*deferred) for deferred in analysis.deferred.values()]
        for fact in analysis.facts.values():
            self._add(fact, entry)
            if fact.kind == "call":
                entries.append(Entry(fact.target, "forward"))
        reading = self._relative(analysis, entry, entries)
        if reading is not None:
            self._readings[kind].append(reading)
        return entries

    def _relative(self, analysis: Analysis, entry: Entry, entries: list[Entry]) -> Reading | None:
        """The facts as seen from the module, or None when they reach outside it."""
        inside = {id(inner): path for path, inner in entry.module.named_modules()}
        try:
            facts = tuple(
                (fact.kind, tuple(inside[id(one)] for one in fact.chain), inside[id(fact.target)], *fact[3:])
                for fact in analysis.facts.values()
            )
            onward = tuple((inside[id(one.module)], one.name) for one in entries)
            settings = tuple(
                (inside[identity], name, self._setting(entry.module, inside[identity], name))
                for identity, name in analysis.settings
            )
        except KeyError:
            return None
        return Reading(facts, onward, settings, analysis.activity > 0)

    def _apply(self, reading: Reading, entry: Entry) -> list[Entry]:
        module = entry.module
        self.active[id(module), entry.name] = reading.active
        for kind, chain, target, name, conditional in reading.facts:
            frames = tuple(module.get_submodule(path) for path in chain)
            self._add(Fact(kind, frames, module.get_submodule(target), name, conditional), entry)
        return [Entry(module.get_submodule(path), name) for path, name in reading.entries]

    def _setting(self, module: nn.Module, path: str, name: str) -> Any:
        return vars(module.get_submodule(path)).get(name)

    def _kind(self, module: nn.Module) -> int:
        """A number that modules of one class with the same submodules and parameters share."""
        if id(module) not in self._kind_of:
            children = tuple(
                (name, self._kind(child) if child is not None else -1) for name, child in module._modules.items()
            )
            present = tuple((name, tensor is not None) for name, tensor in module._parameters.items())
            own = vars(module).get("forward")
            key = (type(module), children, present, id(own))
            self._kind_of[id(module)] = self._kinds.setdefault(key, len(self._kinds))
        return self._kind_of[id(module)]

    def _add(self, fact: Fact, entry: Entry) -> None:
        self.facts.setdefault((*fact.key(), id(entry.module), entry.name), (fact, entry))
        if fact.kind in ("call", "method", "read"):
            self._touched |= self.places.covered([fact.target])


def _callable_children(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        found += [child] if has_forward(child) else _callable_children(child)
    return found


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(
            isinstance(a, _COMPARABLE) and a == b for a, b in zip(one, other, strict=True)
        )
    return isinstance(one, _COMPARABLE) and one == other
