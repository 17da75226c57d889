"""Calls that go past a module's forward hooks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.findings import Safety
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source.edits import change
from shardwise.source.syntax import Function, calls_in, last_name
from shardwise.source.trace import Trace
from shardwise.source.values import Constant, ObjectRef, ProgramEvent, modules

_REGISTER = "torch.distributed.fsdp.register_fsdp_forward_method"


@rule("SW229", fix="call the model itself", safety=Safety.SAFE)
def forward_called_directly(context: LintContext) -> Iterator[Hit]:
    """`model.forward(x)` bypasses the hooks that gather a sharded model's parameters.

    Symptom: `got mixed torch.Tensor and DTensor`.
    """
    for trace, event in context.events:
        function = getattr(event.node, "func", None)
        if event.method != "forward" or not isinstance(function, ast.Attribute):
            continue
        if any(_is_hooked(trace, module, event) for module in modules(event.receiver)):
            start, end = (context.file.positions.span(node)[1] for node in (function.value, function))
            message = "forward() does not run FSDP's hooks; the parameters stay sharded"
            yield Hit(event.node, message, edits=(change(start, end, ""),))


def _is_hooked(trace: Trace, module: ObjectRef, event: ProgramEvent) -> bool:
    """Whether only hooks gather the module's parameters: sharded by hand, and not unsharded by hand."""
    return trace.is_sharded_by_hand(module, event) and not any(
        one.method == "unshard" and module in one.receiver and trace.precedes(one, event) for one in trace.events
    )


@rule("SW230", fix="remove this call: the module is entered by calling it")
def registered_method_reached_from_forward(context: LintContext) -> Iterator[Hit]:
    """A method that `forward` calls must not be registered as a second way in.

    Why: the call enters FSDP twice; when the inner method ends, the parameters are freed under `forward`'s feet.
    Symptom: `got mixed torch.Tensor and DTensor`; up to torch 2.5 `Expects to be in one of (UNSHARDED)`.
    """
    for _, event in context.events_of(_REGISTER):
        for name in _registered(event):
            if name == "forward":
                yield Hit(event.node, "forward is hooked already, so FSDP is entered twice")
            elif _is_reached(context, event, name):
                yield Hit(event.node, f"forward itself calls {name}, so FSDP is entered twice")


def _registered(event: ProgramEvent) -> list[str]:
    return [str(value.value) for value in event.argument(1, "method_name") if isinstance(value, Constant)]


def _is_reached(context: LintContext, event: ProgramEvent, name: str) -> bool:
    """Whether `forward` of the module's class calls the method; of every class that has both, where it is unknown."""
    classes = [one.definition for one in modules(event.argument(0, "module")) if one.definition is not None]
    classes = classes or [one for one in context.file.classes.values() if {name, "forward"} <= _methods(one).keys()]
    forwards = [_methods(one).get("forward") for one in classes]
    return bool(classes) and all(forward is not None and name in _called_on_self(forward) for forward in forwards)


def _methods(definition: ast.ClassDef) -> dict[str, Function]:
    return {one.name: one for one in definition.body if isinstance(one, Function)}


def _called_on_self(function: Function) -> set[str]:
    """The methods and modules that a method calls by `self.name(...)`."""
    return {_name_on_self(call) for call in calls_in(function)}


def _name_on_self(call: ast.AST) -> str:
    function = getattr(call, "func", None)
    is_own = isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "self"
    return last_name(function) if is_own else ""


@rule("SW231")
def unregistered_entry_point(context: LintContext) -> Iterator[Hit]:
    """A method other than `forward` that uses the model's own parameters has to be registered.

    Why: only `forward` is hooked; in any other method the parameters of this group are still DTensors.
    Symptom: `got mixed torch.Tensor and DTensor`.
    """
    for trace in context.traces:
        calls = trace.calls_to(_REGISTER)
        registered = {name for event in calls for name in _registered(event)}
        if calls and not registered:
            continue  # names computed at run time
        for event in trace.events:
            name = event.method
            for model in modules(event.receiver) if name not in registered | {"forward"} else ():
                method = _methods(model.definition).get(name) if model.definition is not None else None
                if method is None or _calls_itself(method) or not _is_hooked(trace, model, event):
                    continue
                child = _child_used(trace, event, model)
                if child:
                    message = f"{name}() uses {child}, whose parameters only forward() gathers"
                    yield Hit(event.node, message, f'register_fsdp_forward_method(model, "{name}") after fully_shard')


def _calls_itself(method: Function) -> bool:
    called = [call.func for call in calls_in(method)]
    return any(
        getattr(one, "id", "") == "self" or getattr(one, "attr", "") in ("forward", "__call__", "unshard")
        for one in called
    )


def _child_used(trace: Trace, event: ProgramEvent, model: ObjectRef) -> str:
    """A module of the model's own group that runs inside the method, by its name."""
    for later, module in trace.entered:
        is_inside = len(later.chain) == len(event.chain) + 1 and later.chain[-1] is event.node
        name = _name_on_self(later.node) if is_inside and later.order > event.order else ""
        if not name or model.definition is None or name in _methods(model.definition) or not _is_module(module):
            continue
        has_groups = any(trace.is_part_of(shard.subject, module) for shard in trace.shards)
        if not has_groups and not trace.is_sharded(module, event):
            return f"self.{name}"
    return ""


def _is_module(module: ObjectRef) -> bool:
    """Made by torch.nn, or by a class of this file that has a forward."""
    if module.definition is not None:
        return "forward" in _methods(module.definition)
    return any(origin.startswith("torch.nn.") for origin in module.origins)
