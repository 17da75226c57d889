"""What a model's source says about its modules: calls, entry points, parameter use."""

import inspect
import types
from collections import defaultdict
from typing import Any, NamedTuple

from torch import nn

from shardwise.planning.calls import (
    Calls,
    CallTable,
    Fact,
    Places,
    has_forward,
    has_parameters,
    is_holder,
    is_opaque,
)
from shardwise.planning.source import statements
from shardwise.planning.source.functions import find_node, is_generator, start, underlying
from shardwise.planning.source.values import Analysis, Frame

HANDLERS = statements.HANDLERS
"""Importing `statements` fills the table of the syntax nodes that frames can read."""


class MethodEntry(NamedTuple):
    """A module's method by which code enters it."""

    module: nn.Module
    name: str


class FactBook:
    """All facts found so far, and what has still to be read."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.facts: dict[tuple[Any, ...], tuple[Fact, MethodEntry]] = {}
        self.active: dict[tuple[int, str], bool] = {}
        self.assumed: set[int] = set()
        self.unreadable: dict[str, None] = {}
        self.notes: list[str] = []
        self._failed: set[tuple[type, str]] = set()
        self._touched: set[int] = set()

    def follow(self, entry: MethodEntry) -> bool:
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
        self._add(Fact("call", (self.places.root,), module), MethodEntry(self.places.root, "?"))
        self.follow(MethodEntry(module, "forward"))

    def is_touched(self, module: nn.Module) -> bool:
        """Whether the module, a part of it or one of its parameters is used by code that was read."""
        return id(module) in self._touched

    def _read(self, entry: MethodEntry) -> list[MethodEntry]:
        module = entry.module
        if is_opaque(module) or (type(module).__module__.startswith("torch.") and not self._has_parts(module)):
            self.active[id(module), entry.name] = True
            return []
        kind = (type(module), entry.name)
        if kind in self._failed:
            return self._give_up(entry)
        try:
            analysis = self._analyse(entry)
            why = "no source"
        except Exception as error:  # whatever odd code does to the reader, the rest of the model is still read
            analysis, why = None, f"{type(error).__name__}: {error}"
        if analysis is not None:
            return self._keep(analysis, entry)
        self._failed.add(kind)
        if module._modules:
            name = f"{type(module).__qualname__}.{entry.name}"
            self.notes.append(f"{name} could not be read ({why}): its parts count as called")
        return self._give_up(entry)

    def _has_parts(self, module: nn.Module) -> bool:
        return any(id(child) not in self.places.internal for child in module.children())

    def _analyse(self, entry: MethodEntry) -> Analysis | None:
        module = entry.module
        analysis = Analysis(self.places)
        frame = Frame(analysis, (module,), None, {}, receiver=module)
        own = vars(module).get(entry.name)
        result = start(own if own is not None else inspect.getattr_static(type(module), entry.name), module, frame)
        if result is None:
            return None
        frame.record_escape(result)
        entered = inspect.getattr_static(type(module), "__call__")
        if entry.name == "forward" and entered is not nn.Module.__call__:
            analysis.counts = {}
            start(entered, module, frame)
        return analysis

    def _give_up(self, entry: MethodEntry) -> list[MethodEntry]:
        module = entry.module
        self.active[id(module), entry.name] = True
        if module._modules:
            self.unreadable[type(module).__qualname__] = None
        entries = []
        for child in _callable_children(module):
            if id(child) not in self.places.internal:
                self._add(Fact("call", (module,), child), entry)
                entries.append(MethodEntry(child, "forward"))
        return entries

    def _keep(self, analysis: Analysis, entry: MethodEntry) -> list[MethodEntry]:
        self.active[id(entry.module), entry.name] = analysis.activity > 0
        modules = {id(fact.target): fact.target for fact in analysis.facts.values()}
        for identity, count in analysis.counts.items():
            analysis.add(Fact("count", (entry.module,), modules[identity], str(count)))
        for fact in analysis.facts.values():
            self._add(fact, entry)
        return [MethodEntry(fact.target, "forward") for fact in analysis.facts.values() if fact.kind == "call"]

    def _add(self, fact: Fact, entry: MethodEntry) -> None:
        self.facts.setdefault((*fact.key(), id(entry.module), entry.name), (fact, entry))
        if fact.kind in ("call", "method", "read"):
            self._touched |= self.places.covered([fact.target])


def _callable_children(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        found += [child] if has_forward(child) else _callable_children(child)
    return found


_MACHINERY = (
    "torch.", "transformers.modeling_utils", "transformers.generation", "transformers.integrations",
    "transformers.utils", "transformers.trainer", "diffusers.models.modeling_utils", "diffusers.loaders",
    "diffusers.configuration_utils", "huggingface_hub", "pytorch_lightning.", "lightning.",
    "peft.mixed_model",
)  # fmt: skip
_BOOKKEEPING = (
    "reset_", "init", "tie_", "load", "save", "set_", "from_", "to_", "num_", "count_",
    "gradient_checkpointing", "resize_", "prune_", "fuse_", "unfuse_", "enable_", "disable_", "freeze",
    "unfreeze", "merge_", "unmerge_", "add_", "remove_", "register_", "prepare_inputs_for_generation",
    "configure_", "quantize", "dequantize", "push_", "export", "extra_repr", "train", "eval",
)  # fmt: skip
_ENTRIES = {"training_step", "train_step", "eval_step"}


def _public_methods(model: nn.Module, book: FactBook) -> list[str]:
    """Read the root's public methods; return those that compute."""
    found: list[str] = []
    for name in _candidates(type(model)):
        function = underlying(inspect.getattr_static(type(model), name))[0]
        node = find_node(function) if function is not None else None
        if name == "generate" and function is not None and (function.__module__ or "").startswith("transformers."):
            found.append(name)  # thousands of lines that end in self(...)
            continue
        if node is None or not book.follow(MethodEntry(model, name)):
            continue
        if is_generator(node) or inspect.iscoroutinefunction(function):
            book.notes.append(f"{name}() computes step by step as its caller asks; it cannot be an entry point")
        else:
            found.append(name)
    return found


def _candidates(cls: type) -> list[str]:
    names: dict[str, None] = {}
    for base in cls.__mro__:
        module = base.__module__ or ""
        for name, attribute in vars(base).items():
            if name in names or name.startswith("_") or name == "forward" or base is nn.Module or base is object:
                continue
            if hasattr(nn.Module, name) or not isinstance(attribute, types.FunctionType):
                continue
            if name != "generate" and (module.startswith(_MACHINERY) or ".generation" in module):
                continue
            if name in _ENTRIES or not name.startswith(_BOOKKEEPING):
                names[name] = None
    return list(names)


def read_calls(model: nn.Module, traced: Calls | None = None) -> Calls:
    """Find who calls what by reading the source of the model's classes. Nothing of the model is run.

    Args:
        model: Any module.
        traced: What a complete trace of the forward saw. It is exact on the path it took, so its word stands there.
            Conditional modules keep their mark: one run cannot show that another would route the same way.
    """
    places = Places(model)
    book = FactBook(places)
    if has_forward(model):
        book.follow(MethodEntry(model, "forward"))
    num_below_forward = len(book.facts)
    public_methods = _public_methods(model, book)
    for name, module in places.modules.items():
        # Nothing was found to enter it: the user's script may call it, so read it as if it did.
        skipped = not name or is_holder(module) or id(module) in places.internal or not has_parameters(module)
        if not skipped and not book.is_touched(module):
            book.assume(module)
    seen = traced or Calls()
    table = CallTable(places, seen)
    called = {""} if has_forward(model) else set()
    for index, (fact, _) in enumerate(book.facts.values()):
        target = places.name(fact.target)
        called |= {target} if fact.kind == "call" else set()
        is_met = index < num_below_forward and target in seen.called
        if not (is_met and fact.kind == "read" and table.parameter_name(fact) not in seen.foreign_reads):
            table.enter(fact, bypasses=not is_met and id(fact.target) not in book.assumed)
    for fact in _escaped(book):
        table.enter(fact)
    table.called |= called
    unconditional = {"", *_unconditional(book)}
    assumed = {places.name(module) for module in places.modules.values() if id(module) in book.assumed}
    return table.calls(
        assumed=frozenset(assumed - seen.called),
        conditional=frozenset(name for name in called - unconditional if has_parameters(places.modules[name])),
        repeated=seen.repeated | _repeated(book),
        public_methods=tuple(public_methods),
        unreadable=tuple(book.unreadable),
        notes=tuple(dict.fromkeys(book.notes)),
    )


def _escaped(book: FactBook) -> list[Fact]:
    """Reads by the callers of modules that return a parameter, unless its owner is still entered."""
    places = book.places
    returned: dict[int, list[Fact]] = defaultdict(list)
    for fact, entry in book.facts.values():
        if fact.kind == "escape" and entry.name == "forward":
            returned[id(entry.module)].append(fact)
    return [
        Fact("read", call.chain, fact.target, fact.name)
        for call, _ in (list(book.facts.values()) if returned else ())
        if call.kind == "call"
        for fact in returned[id(call.target)]
        if id(fact.target) not in places.covered(call.chain)
    ]


def _unconditional(book: FactBook) -> set[str]:
    """Modules that run whatever the data, from the root down."""
    by_caller: dict[tuple[int, str], list[Fact]] = defaultdict(list)
    for fact, entry in book.facts.values():
        if not fact.conditional and fact.kind in ("call", "method"):
            by_caller[id(entry.module), entry.name].append(fact)
    root = book.places.root
    pending = [key for key in book.active if key[0] == id(root)] + [(id(root), "?")]
    seen = set(pending)
    certain: set[str] = set()
    while pending:
        for fact in by_caller[pending.pop()]:
            if fact.kind == "call":
                certain.add(book.places.name(fact.target))
            key = (id(fact.target), "forward" if fact.kind == "call" else fact.name)
            if key not in seen:
                seen.add(key)
                pending.append(key)
    return certain


def _repeated(book: FactBook) -> set[str]:
    """Modules with parameters that one pass through the root's forward calls at least twice."""
    callers: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for fact, entry in book.facts.values():
        if fact.kind == "count" and entry.name == "forward" and fact.target is not entry.module:
            callers[id(fact.target)].append((id(entry.module), int(fact.name)))
    totals = {id(book.places.root): 1}

    def total(module: int) -> int:
        if module not in totals:
            totals[module] = 0  # a module that calls itself through others counts once
            totals[module] = min(2, sum(count * total(caller) for caller, count in callers[module]))
        return totals[module]

    return {
        name
        for name, module in book.places.modules.items()
        if total(id(module)) > 1 and has_parameters(module) and name == book.places.name(module)
    }
