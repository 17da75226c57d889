"""Where modules and parameters sit in a model, and what "running outside a module" means there."""

from collections.abc import Iterable, Iterator
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
