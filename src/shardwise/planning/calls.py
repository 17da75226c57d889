"""Which modules a model calls, where and how often."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called at all."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def is_holder(module: nn.Module) -> bool:
    """Whether the module only holds others and has no forward of its own."""
    return not has_forward(module) or (isinstance(module, _HOLDERS) and type(module) in _HOLDERS)


def is_opaque(module: nn.Module) -> bool:
    """Whether the module uses its children's weights itself and never calls them."""
    return isinstance(module, nn.MultiheadAttention)


def has_parameters(module: nn.Module) -> bool:
    """Whether there is anything to shard at or below the module."""
    return next(module.parameters(), None) is not None


class Places:
    """Names of a model's modules and parameters, by identity; shared ones have several names."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.names: dict[int, list[str]] = {}
        self.modules: dict[str, nn.Module] = {}
        for name, module in root.named_modules(remove_duplicate=False):
            self.names.setdefault(id(module), []).append(name)
            self.modules[name] = module
        self._owners: dict[int, list[nn.Module]] = {}
        self._parameter_names: dict[int, str] = {}
        for name, module in self.modules.items():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._parameter_names.setdefault(id(parameter), f"{name}.{key}" if name else key)
                    self._owners.setdefault(id(parameter), []).append(self.user_of(name))

    def __contains__(self, module: object) -> bool:
        return id(module) in self.names

    def name(self, module: nn.Module) -> str:
        """The first name of a module."""
        return self.names[id(module)][0]

    def has_parameter(self, parameter: object) -> bool:
        """Whether this very object is a parameter of the model."""
        return id(parameter) in self._parameter_names

    def parameter_name(self, parameter: nn.Parameter) -> str:
        """The first name of a parameter; the others are its ties."""
        return self._parameter_names[id(parameter)]

    def owners(self, parameter: nn.Parameter) -> list[nn.Module]:
        """The modules whose call makes the parameter available, one for each place it is registered."""
        return self._owners[id(parameter)]

    def user_of(self, name: str) -> nn.Module:
        """The nearest module at or above `name` that is called and not inside an opaque one."""
        user = self.modules[name]
        for above in enclosing(name):
            module = self.modules[above]
            if is_holder(user) or is_opaque(module) or _is_parametrization(name, above):
                user = module
        return user

    @cached_property
    def internal(self) -> frozenset[int]:
        """Identities of modules inside an opaque or parametrised one."""
        return frozenset(
            id(module)
            for name, module in self.modules.items()
            if any(is_opaque(self.modules[above]) or _is_parametrization(name, above) for above in enclosing(name))
        )

    def name_under(self, module: nn.Module, outer: Iterable[nn.Module]) -> str:
        """The name of a module as seen from the first of `outer` that contains it."""
        for other in outer:
            for prefix in self.names.get(id(other), ()):
                for name in self.names[id(module)]:
                    if not prefix or name == prefix or name.startswith(prefix + "."):
                        return name
        return self.name(module)

    def covered(self, entered: Iterable[nn.Module]) -> set[int]:
        """Identities of the modules entered and of everything that encloses them."""
        return {
            id(self.modules[above])
            for module in entered
            for name in self.names.get(id(module), ())
            for above in (name, *enclosing(name))
        }

    def bypassed(self, module: nn.Module, entered: tuple[nn.Module, ...]) -> Iterator[nn.Module]:
        """The modules around `module` that are not entered when code of `entered` calls it."""
        covered = self.covered(entered)
        for above in enclosing(self.name_under(module, reversed(entered))):
            outer = self.modules[above]
            if id(outer) not in covered and not is_holder(outer) and id(outer) not in self.internal:
                yield outer


def enclosing(name: str) -> Iterator[str]:
    """The names around `name`, innermost first, the root last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _is_parametrization(name: str, above: str) -> bool:
    inner = name[len(above) + 1 :] if above else name
    return inner == "parametrizations" or inner.startswith("parametrizations.")


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
    bypassed: NamesBy = field(default_factory=dict)
    """Module with a forward → its descendants entered by code that runs outside it."""
    methods: NamesBy = field(default_factory=dict)
    """Module → methods other than `__call__` that other modules enter it by, if they compute anything."""
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
            bypassed=_union(self.bypassed, other.bypassed),
            methods=_union(self.methods, other.methods),
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
