"""Which modules' methods are running right now, found on Python's own stack."""

import sys
import types
from typing import NamedTuple

from torch import nn

from shardwise.planning.places import Places
from shardwise.planning.source.files import underlying


class Method(NamedTuple):
    """A method of a module that runs without the module having been called."""

    module: nn.Module
    name: str


def running_methods(places: Places, entered: nn.Module | None) -> list[Method]:
    """Methods running inside the call of `entered`, outermost first, each module once in a row."""
    found: list[Method] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, nn.Module):
                if first is entered and code.co_name == "_call_impl":
                    break
                if first in places and _is_method(first, code):
                    if found and found[-1].module is first:
                        found.pop()
                    found.append(Method(first, code.co_name))
        frame = frame.f_back
    inside = [method for method in reversed(found) if method.module is not entered]
    return [method for method in inside if method.name != "__call__"]


def failing_module(error: BaseException, places: Places) -> str:
    """The name of the innermost module whose call an error came out of."""
    name, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        module = trace.tb_frame.f_locals.get("self") if code.co_name == "_call_impl" else None
        if isinstance(module, nn.Module) and module in places:
            name = places.name(module)
        trace = trace.tb_next
    return name


def _is_method(module: nn.Module, code: types.CodeType) -> bool:
    for cls in type(module).__mro__:
        if cls is nn.Module:
            return False
        function = underlying(vars(cls).get(code.co_name))[0]
        if function is not None and function.__code__ is code:
            return True
    return False
