"""From facts about modules to the names in `Calls`."""

from collections import defaultdict
from collections.abc import Iterable

from shardwise.planning.calls import Calls
from shardwise.planning.places import has_forward, has_parameters
from shardwise.planning.source.facts import FactBook
from shardwise.planning.source.frames import Fact

Table = dict[str, frozenset[str]]


def summarise(book: FactBook, facts: Iterable[Fact], public_methods: Iterable[str] = ()) -> Calls:
    """Name these facts of a book; what is conditional or repeated is judged from all of them."""
    places = book.places
    tables: dict[str, dict[str, set[str]]] = {
        kind: defaultdict(set) for kind in ("bypassed", "methods", "dispatched", "reads")
    }
    called: set[str] = {""} if has_forward(places.root) else set()
    for fact in (*facts, *_escaped(book)):
        _enter(fact, tables, called, book)
    unconditional = {"", *_unconditional(book)}
    return Calls(
        called=frozenset(called),
        assumed=frozenset(places.name(module) for module in _modules(book) if id(module) in book.assumed),
        conditional=frozenset(name for name in called - unconditional if has_parameters(places.modules[name])),
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


def _modules(book: FactBook):
    return book.places.modules.values()


def _enter(fact: Fact, tables: dict[str, dict[str, set[str]]], called: set[str], book: FactBook) -> None:
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


def _freeze(table: dict[str, set[str]]) -> Table:
    return {name: frozenset(inner) for name, inner in sorted(table.items())}
