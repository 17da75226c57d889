"""The Python side of the contract: public names with their signatures, and every class that they lead to."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from tests.contract.annotations import type_text, value_text

PACKAGES = ("shardwise", "shardwise.fsdp1")
# Objects that only we make; how is nobody else's business.
NOT_CONSTRUCTED = ("Guard",)
# As torch.distributed.fsdp has them; FSDP1 scripts import from these too.
FSDP1_MODULES = ("api", "fully_sharded_data_parallel", "sharded_grad_scaler", "wrap")
_PROTOCOLS = (
    "__call__", "__contains__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__", "__next__",
)  # fmt: skip


def describe_python() -> dict[str, Any]:
    """Every public name, and under `reached` the classes of ours that their signatures lead to."""
    describer = Describer()
    described: dict[str, Any] = {}
    for package in PACKAGES:
        module = import_module(package)
        described[package] = {name: describer.describe(getattr(module, name)) for name in module.__all__}
    for name in FSDP1_MODULES:
        module = import_module(f"shardwise.fsdp1.{name}")
        names = getattr(module, "__all__", None) or [each for each in vars(module) if not each.startswith("_")]
        fsdp1 = [each for each in names if hasattr(import_module(f"torch.distributed.fsdp.{name}"), each)]
        described[f"shardwise.fsdp1.{name}"] = {
            each: describer.describe(getattr(module, each))
            for each in fsdp1
            if _is_part_of_fsdp1(getattr(module, each))
        }
    described["reached"] = describer.reached(but=_public())
    return described


def _public() -> set[int]:
    modules = [import_module(package) for package in PACKAGES]
    return {id(getattr(module, name)) for module in modules for name in module.__all__ if name != "__version__"}


def _is_part_of_fsdp1(value: object) -> bool:
    home = getattr(value, "__module__", "") or ""
    return home.startswith(("torch.distributed.fsdp", "shardwise.fsdp1"))


class Describer:
    """Describes objects, and remembers the classes of ours that it met on the way."""

    def __init__(self) -> None:
        self._met: dict[int, type] = {}

    def describe(self, value: Any) -> Any:
        """What a user can rely on, as plain values."""
        if isinstance(value, str):
            return "text"
        if isinstance(value, types.ModuleType):
            return {"kind": "module"}
        home = getattr(value, "__module__", "") or ""
        if not home.startswith("shardwise"):
            return {"kind": "class" if isinstance(value, type) else "object", "from": home.partition(".")[0]}
        if isinstance(value, type):
            return self._class(value)
        if callable(value):
            return {"kind": "function", "signature": self._signature(value)}
        return {"kind": "value", "type": type(value).__name__}

    def reached(self, but: set[int]) -> dict[str, Any]:
        """The classes met, and those met in describing them, by name."""
        done: dict[int, Any] = {}
        while waiting := [kind for key, kind in self._met.items() if key not in done]:
            for kind in waiting:
                done[id(kind)] = self._class(kind)
        named: dict[str, Any] = {}
        for key in sorted(done, key=lambda key: (self._met[key].__name__, self._met[key].__module__)):
            if key in but:
                continue
            name, number = self._met[key].__name__, 2
            while name in named:
                name, number = f"{self._met[key].__name__} ({number})", number + 1
            named[name] = done[key]
        return named

    def _meet(self, kind: type) -> None:
        if (kind.__module__ or "").startswith("shardwise") and not kind.__name__.startswith("_"):
            self._met[id(kind)] = kind

    def _text(self, annotation: Any, module: str) -> str:
        return type_text(annotation, module, met=self._meet)

    def _signature(self, function: Callable[..., Any], *, method: bool = False) -> str:
        wrapped, function = function, inspect.unwrap(function)
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[1 if method else 0 :]
        module = function.__module__
        shown = []
        for parameter in parameters:
            annotation, default = self._text(parameter.annotation, module), value_text(parameter.default)
            shown.append(
                parameter.replace(
                    annotation=_Text(annotation) if annotation else parameter.empty,
                    default=_Text(default) if default else parameter.empty,
                )
            )
        returned = self._text(signature.return_annotation, module)
        if wrapped is not function and inspect.isgeneratorfunction(function):
            returned = re.sub(r"^(Iterator|Generator)\[(.*?)(, None, None)?\]$", r"context of \2", returned)
        text = str(signature.replace(parameters=shown, return_annotation=inspect.Signature.empty))
        return text + (f" -> {returned}" if returned else "")

    def _class(self, kind: type) -> dict[str, Any]:
        described: dict[str, Any] = {"kind": "class"}
        if bases := _bases(kind):
            described["bases"] = bases
        if issubclass(kind, enum.Enum):
            return {**described, "members": {member.name: value_text(member.value) for member in kind}}
        if not getattr(kind, "_is_protocol", False) and kind.__name__ not in NOT_CONSTRUCTED:
            described["constructor"] = self._constructor(kind)
        if dataclasses.is_dataclass(kind):
            described["frozen"] = kind.__dataclass_params__.frozen  # pyrefly: ignore[missing-attribute]
        attributes, methods = dict(self._attributes(kind)), dict(self._methods(kind))
        if attributes:
            described["attributes"] = attributes
        if methods:
            described["methods"] = methods
        return described

    def _constructor(self, kind: type) -> str:
        if dataclasses.is_dataclass(kind):
            return f"({', '.join(self._dataclass_arguments(kind))})"
        init = kind.__init__
        if not (getattr(init, "__module__", "") or "").startswith("shardwise"):
            return f"as {_name_of_home(init, kind)}"
        return self._signature(init, method=True).removesuffix(" -> None")

    def _dataclass_arguments(self, kind: type) -> Iterator[str]:
        fields = [field for field in dataclasses.fields(kind) if field.init]
        starred = False
        for field in sorted(fields, key=lambda field: bool(field.kw_only)):
            if field.kw_only and not starred:
                starred = True
                yield "*"
            default = ""
            if field.default is not dataclasses.MISSING:
                default = f" = {value_text(field.default)}"
            elif field.default_factory is not dataclasses.MISSING:
                default = f" = {_made(field.default_factory)}"
            yield f"{field.name}: {self._text(field.type, _home(kind, field.name))}{default}"

    def _attributes(self, kind: type) -> Iterator[tuple[str, str]]:
        """What can be read from an object: fields, properties, what the constructor sets, class variables."""
        found: dict[str, str] = {}
        for base in reversed(_ours(kind)):
            for name, value in vars(base).items():
                if name.startswith("_"):
                    continue
                if isinstance(value, property) and value.fget is not None:
                    annotation = inspect.signature(value.fget).return_annotation
                    found[name] = self._text(annotation, base.__module__)
                elif isinstance(value, str | int | float | bool) and not dataclasses.is_dataclass(base):
                    found[name] = f"= {value_text(value)}"
            for name, annotation in _set_by_constructor(base).items():
                found[name] = self._text(annotation, base.__module__) if annotation else ""
        if dataclasses.is_dataclass(kind):
            for field in dataclasses.fields(kind):
                if not field.name.startswith("_"):
                    found[field.name] = self._text(field.type, _home(kind, field.name))
        yield from sorted(found.items())

    def _methods(self, kind: type) -> Iterator[tuple[str, str]]:
        found: dict[str, str] = {}
        for base in reversed(_ours(kind)):
            for name, value in vars(base).items():
                if name.startswith("_") and name not in _PROTOCOLS:
                    continue
                if isinstance(value, classmethod):
                    found[name] = f"classmethod {self._signature(value.__func__, method=True)}"
                elif isinstance(value, staticmethod):
                    found[name] = f"staticmethod {self._signature(value.__func__)}"
                elif isinstance(value, types.FunctionType):
                    found[name] = self._signature(value, method=True)
        yield from sorted(found.items())


class _Text(str):
    """Shown in a signature without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _ours(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.startswith("shardwise")]


def _bases(kind: type) -> list[str]:
    """Public bases: those of other libraries, and our own that have a public name; not how we share code."""
    hidden = ("object", "Generic", "Protocol", "ABC", "ReprEnum")
    return [
        base.__name__
        for base in kind.__mro__[1:]
        if base.__name__ not in hidden
        and not base.__name__.startswith("_")
        and (id(base) in _public() or base.__module__.partition(".")[0] in ("builtins", "enum", "torch"))
    ]


def _home(kind: type, field: str) -> str:
    """The module in which a field was written."""
    for base in kind.__mro__:
        if field in vars(base).get("__annotations__", {}):
            return base.__module__
    return kind.__module__


def _name_of_home(init: Any, kind: type) -> str:
    for base in kind.__mro__:
        if vars(base).get("__init__") is init:
            return base.__name__
    return "object"


def _made(factory: Callable[[], Any]) -> str:
    value = factory()
    return (
        value_text(value)
        if isinstance(value, dict | list | set | tuple) or dataclasses.is_dataclass(value)
        else factory.__name__
    )


def _set_by_constructor(kind: type) -> dict[str, str]:
    """Public attributes that `__init__` gives an object, with their annotations where they have one."""
    init = vars(kind).get("__init__")
    if not isinstance(init, types.FunctionType) or dataclasses.is_dataclass(kind) or kind.__name__ in NOT_CONSTRUCTED:
        return {}
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(init)))):
        targets: list[ast.expr] = []
        annotation = ""
        if isinstance(node, ast.AnnAssign):
            targets.append(node.target)
            annotation = ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign):
            targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and target.attr[0] != "_":
                found[target.attr] = annotation or found.get(target.attr, "")
    return found
