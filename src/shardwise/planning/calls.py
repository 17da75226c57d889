"""Calls between the modules of a model."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from torch import nn

_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def has_forward(module: nn.Module) -> bool:
    """Whether the module has a forward."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def is_holder(module: nn.Module) -> bool:
    """Whether the module is a container without its own forward."""
    return not has_forward(module) or (isinstance(module, _HOLDERS) and type(module) in _HOLDERS)


def is_opaque(module: nn.Module) -> bool:
    """Whether the module uses its children's weights itself and never calls them."""
    return isinstance(module, nn.MultiheadAttention)


def has_parameters(module: nn.Module) -> bool:
    """Whether the module or a descendant has parameters."""
    return next(module.parameters(), None) is not None


def callable_children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children with a forward, by name; a list or dictionary is replaced by its elements."""
    for name, child in module.named_children():
        if has_forward(child):
            yield prefix + name, child
        else:
            yield from callable_children(child, f"{prefix}{name}.")


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
        """Whether this object is a parameter of the model."""
        return id(parameter) in self._parameter_names

    def parameter_name(self, parameter: nn.Parameter) -> str:
        """The first name of a parameter; its other names are ties."""
        return self._parameter_names[id(parameter)]

    def owners(self, parameter: nn.Parameter) -> list[nn.Module]:
        """The modules whose call unshards the parameter, one per registration."""
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
        """Identities of modules inside an opaque or parametrized one."""
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
                    if is_within(name, prefix):
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

    def bypassed(self, name: str, entered: tuple[str, ...]) -> Iterator[str]:
        """The modules around module `name` that are not entered when code of `entered` calls it."""
        running = [self.modules[outer] for outer in entered]
        covered = self.covered(running)
        for above in enclosing(self.name_under(self.modules[name], reversed(running))):
            outer = self.modules[above]
            if id(outer) not in covered and not is_holder(outer) and id(outer) not in self.internal:
                yield self.name(outer)


def is_within(name: str, outer: str) -> bool:
    """Whether module `name` is `outer` or a descendant of it; the root contains every module."""
    return not outer or f"{name}.".startswith(f"{outer}.")


def enclosing(name: str) -> Iterator[str]:
    """Names of the modules around `name`, innermost first, the root last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _is_parametrization(name: str, above: str) -> bool:
    inner = name[len(above) + 1 :] if above else name
    return inner == "parametrizations" or inner.startswith("parametrizations.")


UseKind = Literal["call", "method", "read", "escape"]


class Use(NamedTuple):
    """A module or parameter, by its first name, that the code of the last module in `chain` uses."""

    kind: UseKind
    """Call of a module or another method; computation with a parameter, or its return to the caller."""
    chain: tuple[str, ...]
    """The modules whose code is running, the innermost last."""
    target: str
    method: str = "forward"
    conditional: bool = False

    @property
    def module(self) -> str:
        """The module that is used, or that owns the parameter."""
        return self.target if self.kind in ("call", "method") else self.target.rpartition(".")[0]


Names = frozenset[str]
NamesBy = Mapping[str, frozenset[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """Calls of a model's modules. Names are FQNs relative to the root, which is ""."""

    called: Names = frozenset()
    """Modules entered through `module(...)`, where FSDP2's hooks sit."""
    assumed: Names = frozenset()
    """Subset of `called` without any known call or use; a script may call these modules."""
    conditional: Names = frozenset()
    """Modules whose execution depends on the data: an expert selected by a router, and modules that only it calls."""
    bypassed: NamesBy = field(default_factory=dict)
    """Module with a forward → its descendants entered by code that runs outside it."""
    methods: NamesBy = field(default_factory=dict)
    """Module → methods other than `__call__` that compute and that other modules call."""
    foreign_reads: NamesBy = field(default_factory=dict)
    """Parameter → modules whose code computes with it while its owner is not entered."""
    repeated: Names = frozenset()
    """Modules called more than once a pass."""
    roots: tuple[str, ...] = ("",)
    """Modules that a script calls: the root, or the networks in it if the root is a container without a forward."""
    public_methods: tuple[str, ...] = ()
    """Methods of the root that compute and that a script may call instead of its forward."""
    unreadable: tuple[str, ...] = ()
    """Classes whose code could not be followed; their children count as called."""
    notes: tuple[str, ...] = ()
    """Notes for the plan about the origin of these facts."""
    complete: bool = True
    """False if tracing stopped early; the facts then cover only the calls before that point."""

    def is_known(self, name: str) -> bool:
        """Whether the calls of module `name` were found, not assumed."""
        return self.complete and not self.unreadable and name not in self.assumed


def collect_uses(places: Places, uses: Iterable[tuple[Use, bool]], start: Calls, **more: Any) -> Calls:
    """Return `start` extended by these uses and by more fields of `Calls`.

    The flag of each use says whether modules around its target that are not entered count as bypassed.
    """
    called = set(start.called)
    bypassed, methods, reads = (
        defaultdict[str, set[str]](set, {name: set(names) for name, names in table.items()})
        for table in (start.bypassed, start.methods, start.foreign_reads)
    )
    for use, bypasses in uses:
        if use.kind == "call":
            called.add(use.target)
        elif use.kind == "method":
            methods[use.target].add(use.method)
        elif use.kind == "read":
            reads[use.target].add(use.chain[-1])
        if bypasses and use.kind in ("call", "method"):
            for outer in places.bypassed(use.target, use.chain):
                bypassed[outer].add(use.target)
    around, entered, read = (
        {name: frozenset(names) for name, names in sorted(table.items())} for table in (bypassed, methods, reads)
    )
    return Calls(called=frozenset(called), bypassed=around, methods=entered, foreign_reads=read, **more)
