"""Types and default values as text that does not depend on where a class lives, nor on how an alias is called."""

from __future__ import annotations

import ast
import builtins
import enum
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def type_text(annotation: Any, module: str, *, met: Callable[[type], None] = lambda kind: None) -> str:
    """An annotation as text: aliases resolved, class names without their modules.

    Args:
        annotation: As `inspect` gives it: an object, or a string under `from __future__ import annotations`.
        module: Where it was written.
        met: Is told every class in it.
    """
    if annotation is inspect.Parameter.empty:
        return ""
    if annotation is None or annotation is type(None):
        return "None"
    if annotation is Ellipsis:
        return "..."
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        return type_text(evaluate(annotation, module), module, met=met)
    if isinstance(annotation, list):
        return f"[{', '.join(type_text(part, module, met=met) for part in annotation)}]"
    if isinstance(annotation, typing.TypeVar | typing.ParamSpec):
        return annotation.__name__
    return _composed(annotation, module, met)


def value_text(value: Any) -> str:
    """A default value as text."""
    if value is inspect.Parameter.empty:
        return ""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type):
        return value.__name__
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    if isinstance(value, tuple) and type(value) is tuple:
        return f"({', '.join(map(value_text, value))}{',' if len(value) == 1 else ''})"
    if hasattr(value, "__dataclass_fields__") or type(value) is object:
        return f"{type(value).__name__}()"
    return _ADDRESS.sub("", repr(value))


def _composed(annotation: Any, module: str, met: Callable[[type], None]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return f"Literal[{', '.join(map(value_text, arguments))}]"
    if origin is typing.Annotated:
        return type_text(arguments[0], module, met=met)
    parts = [type_text(part, module, met=met) for part in arguments]
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(parts))
    if origin is not None:
        if isinstance(origin, type):
            met(origin)
        return f"{_name(origin)}[{', '.join(parts)}]"
    if isinstance(annotation, type):
        met(annotation)
    return _name(annotation)


def _name(kind: Any) -> str:
    name = getattr(kind, "__qualname__", None) or getattr(kind, "_name", None) or str(kind)
    return str(name).rpartition(".")[2]


def evaluate(annotation: Any, module: str) -> Any:
    """What an annotation stands for; names that only type checkers import are looked up where they come from."""
    if not isinstance(annotation, str):
        return annotation
    code = compile(annotation.strip(), f"<annotation in {module}>", "eval")
    return eval(code, {}, _Names(module))  # type: ignore[arg-type]


class _Names(Mapping[str, Any]):
    """Names as an annotation in a module sees them."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        module = sys.modules.get(self._module)
        for names in (vars(module) if module else {}, vars(builtins)):
            if name in names:
                return names[name]
        return _for_type_checkers(self._module).get(name) or _placeholder(name)

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


def _for_type_checkers(module: str) -> dict[str, Any]:
    """What stands under `if TYPE_CHECKING:` in a module."""
    found: dict[str, Any] = {}
    source = inspect.getsource(sys.modules[module]) if module in sys.modules else ""
    for block in ast.walk(ast.parse(source)):
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING"):
            for node in block.body:
                if isinstance(node, ast.Import | ast.ImportFrom):
                    exec(compile(ast.Module([node], []), f"<imports of {module}>", "exec"), found)
    return found


class _Unknown(type):
    """A name that cannot be found: a class of that name, whatever is asked of it."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(name)


def _placeholder(name: str) -> type:
    return _Unknown(name, (), {"__class_getitem__": classmethod(types.GenericAlias)})
