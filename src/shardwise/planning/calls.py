"""Who calls what in a model: the result that reading its source and tracing it share. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Names = frozenset[str]
NamesBy = Mapping[str, frozenset[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """How the modules of a model are entered. Names are FQNs relative to the root, which is ""."""

    called: Names = frozenset()
    """Modules entered through `module(...)`, where FSDP2's hooks sit."""
    assumed: Names = frozenset()
    """Part of `called`: nothing that was read calls or uses them, so a script may call them."""
    conditional: Names = frozenset()
    """Modules that run only if the data says so: an expert picked by a router, and all that only it calls."""
    internal: Names = frozenset()
    """Modules whose owner uses their weights itself (`MultiheadAttention.out_proj`, parametrizations)."""
    bypassed: NamesBy = field(default_factory=dict)
    """Module with a forward → its descendants entered by code that runs outside it."""
    methods: NamesBy = field(default_factory=dict)
    """Module → methods other than `__call__` that other modules enter it by, if they compute anything."""
    dispatched: NamesBy = field(default_factory=dict)
    """Module → own methods its forward reaches, if they compute anything."""
    foreign_reads: NamesBy = field(default_factory=dict)
    """Parameter → modules whose code computes with it while its owner is not entered."""
    repeated: Mapping[str, int] = field(default_factory=dict)
    """Modules called more than once a pass, and how often; 2 means "at least twice" unless traced."""
    order: tuple[str, ...] = ()
    """Modules by first call. Only tracing knows."""
    public_methods: tuple[str, ...] = ()
    """Methods of the root that compute, and that a script may call in place of the root's forward."""
    unreadable: tuple[str, ...] = ()
    """Classes whose code could not be followed; their children count as called."""
    notes: tuple[str, ...] = ()
    """What a reader of the plan should know about how these facts came to be."""
    complete: bool = True
    """False when tracing had to stop: the facts are then only those seen before."""

    def is_known(self, name: str) -> bool:
        """Whether the way module `name` is entered was really found, not assumed."""
        return self.complete and not self.unreadable and name not in self.assumed

    def merge(self, other: "Calls") -> "Calls":
        """The facts of both; nothing of either is lost."""
        known = (self.called - self.assumed) | (other.called - other.assumed)
        return replace(
            self,
            called=self.called | other.called,
            assumed=(self.assumed | other.assumed) - known,
            conditional=(self.conditional | other.conditional) - _certain(self) - _certain(other),
            internal=self.internal | other.internal,
            bypassed=_union(self.bypassed, other.bypassed),
            methods=_union(self.methods, other.methods),
            dispatched=_union(self.dispatched, other.dispatched),
            foreign_reads=_union(self.foreign_reads, other.foreign_reads),
            repeated={**other.repeated, **self.repeated},
            order=self.order or other.order,
            public_methods=tuple(dict.fromkeys(self.public_methods + other.public_methods)),
            unreadable=tuple(dict.fromkeys(self.unreadable + other.unreadable)),
            notes=tuple(dict.fromkeys(self.notes + other.notes)),
            complete=self.complete or other.complete,
        )

    def without(self, seen: "Calls") -> "Calls":
        """These facts, less what is said about modules and parameters that a complete trace, `seen`, has met.

        A trace is exact on the path it took, so its word stands there. Conditional modules keep their mark:
        one run cannot show that another would route the same way.
        """
        met = seen.called
        read = {
            name for name in self.foreign_reads if name.rpartition(".")[0] in met and name not in seen.foreign_reads
        }
        bypassed = {name: inner - met for name, inner in self.bypassed.items()}
        return replace(
            self,
            assumed=self.assumed - met,
            bypassed={name: inner for name, inner in bypassed.items() if inner},
            foreign_reads={name: by for name, by in self.foreign_reads.items() if name not in read},
            repeated={name: count for name, count in self.repeated.items() if name not in met},
        )


def _certain(calls: Calls) -> Names:
    """Modules a source reader found called whatever the data; a trace cannot tell and has none."""
    return frozenset() if calls.order else calls.called - calls.conditional - calls.assumed


def _union(left: NamesBy, right: NamesBy) -> NamesBy:
    names = {**left, **right}
    return {name: left.get(name, frozenset()) | right.get(name, frozenset()) for name in names}
