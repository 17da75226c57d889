"""From facts about modules to the names in `Calls`."""

from collections import defaultdict
from typing import TYPE_CHECKING

from shardwise.planning.calls import Calls
from shardwise.planning.source_frames import Fact

if TYPE_CHECKING:
    from shardwise.planning.source_facts import Entry, FactBook

Table = dict[str, frozenset[str]]


def summarise(book: "FactBook", public_methods: list[str]) -> Calls:
    """Name everything that the book holds."""
    places = book.places
    tables: dict[str, dict[str, set[str]]] = {
        kind: defaultdict(set) for kind in ("bypassed", "methods", "dispatched", "reads")
    }
    called: set[str] = set()
    for fact, _ in book.facts.values():
        _enter(fact, tables, called, book)
    unconditional = _unconditional(book)
    return Calls(
        called=frozenset(called),
        assumed=frozenset(places.name(module) for module in _modules(book) if id(module) in book.assumed),
        conditional=frozenset(called - unconditional),
        internal=frozenset(name for name, module in places.modules.items() if id(module) in places.internal),
        bypassed=_freeze(tables["bypassed"]),
        methods=_freeze(tables["methods"]),
        dispatched=_freeze(tables["dispatched"]),
        foreign_reads=_freeze(tables["reads"]),
        repeated=dict.fromkeys(sorted(_repeated(book)), 2),
        public_methods=tuple(public_methods),
        unreadable=tuple(book.unreadable),
        notes=tuple(dict.fromkeys(book.notes)),
    )


def _modules(book: "FactBook"):
    return book.places.modules.values()


def _enter(fact: Fact, tables: dict[str, dict[str, set[str]]], called: set[str], book: "FactBook") -> None:
    places = book.places
    target = places.name(fact.target)
    reader = places.name(fact.chain[-1])
    if fact.kind == "call":
        called.add(target)
    if fact.kind == "method" and book.active.get((id(fact.target), fact.name), True):
        tables["methods"][target].add(fact.name)
    if fact.kind == "dispatch":
        tables["dispatched"][target].add(fact.name)
    if fact.kind == "read":
        tables["reads"][f"{target}.{fact.name}" if target else fact.name].add(reader)
    if fact.kind in ("call", "method") and id(fact.target) not in book.assumed:
        for outer in places.bypassed(fact.target, fact.chain):
            tables["bypassed"][places.name(outer)].add(target)


def _unconditional(book: "FactBook") -> set[str]:
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


def _repeated(book: "FactBook") -> set[str]:
    """Modules called more than once a pass, and all that they call in turn, if they have parameters."""
    below: dict[int, set[int]] = defaultdict(set)
    modules = {id(module): module for module in _modules(book)}
    again: set[int] = set()
    for fact, entry in book.facts.values():
        if fact.kind == "repeat":
            again.add(id(fact.target))
        elif fact.kind == "call":
            below[id(entry.module)].add(id(fact.target))
    pending = list(again)
    while pending:
        for inner in below[pending.pop()] - again:
            again.add(inner)
            pending.append(inner)
    root = id(book.places.root)
    return {
        book.places.name(modules[one])
        for one in again
        if one != root and next(modules[one].parameters(), None) is not None
    }


def _freeze(table: dict[str, set[str]]) -> Table:
    return {name: frozenset(inner) for name, inner in sorted(table.items())}


