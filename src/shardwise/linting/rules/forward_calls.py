"""Calls that go past a module's forward hooks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.findings import Edit, Safety, Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source.syntax import Function
from shardwise.source.usage import Module, Usage, modules
from shardwise.source.values import Constant, ObjectRef, PartRef, ProgramEvent

_REGISTER = "torch.distributed.fsdp.register_fsdp_forward_method"


@rule("SW229", "forward-called-directly", severity=Severity.ERROR, safety=Safety.SAFE)
def forward_called_directly(reading: LintContext) -> Iterator[Hit]:
    """`model.forward(x)` bypasses the hooks that gather a sharded model's parameters.

    Symptom: `got mixed torch.Tensor and DTensor`.
    """
    for usage, event in reading.events:
        function = event.node.func if isinstance(event.node, ast.Call) else None
        if event.method != "forward" or not isinstance(function, ast.Attribute):
            continue
        if any(_is_hooked(usage, module, event) for module in modules(event.receiver)):
            start = reading.file.positions.span(function.value)[1]
            end = reading.file.positions.span(function)[1]
            yield Hit(
                node=event.node,
                message="forward() does not run FSDP's hooks; the parameters stay sharded",
                fix="call the model itself",
                edits=(Edit(start=start, end=end, text=""),),
            )


def _is_hooked(usage: Usage, module: Module, event: ProgramEvent) -> bool:
    """Whether only hooks gather the module's parameters: sharded by hand, and not unsharded by hand."""
    return usage.is_sharded_by_hand(module, event) and not usage.is_gathered_by_hand(module, event)


@rule("SW230", "registered-method-reached-from-forward", severity=Severity.ERROR)
def registered_method_reached_from_forward(reading: LintContext) -> Iterator[Hit]:
    """A method that `forward` calls must not be registered as a second way in.

    Why: the call enters FSDP twice; when the inner method ends, the parameters are freed under `forward`'s feet.
    Symptom: `got mixed torch.Tensor and DTensor`; up to torch 2.5 `Expects to be in one of (UNSHARDED)`.
    """
    for _, event in reading.events_of(_REGISTER):
        for value in event.argument(1, "method_name"):
            name = value.value if isinstance(value, Constant) else None
            if isinstance(name, str) and _is_reached(reading, event, name):
                yield Hit(
                    node=event.node,
                    message=f"forward itself calls {name}, so FSDP is entered twice"
                    if name != "forward"
                    else "forward is hooked already, so FSDP is entered twice",
                    fix="remove this call: the module is entered by calling it",
                )


def _is_reached(reading: LintContext, event: ProgramEvent, name: str) -> bool:
    """Whether `forward` of the module's class calls the method; of every class that has both, where it is unknown."""
    if name == "forward":
        return True
    definitions = [
        one.definition for one in modules(event.argument(0, "module")) if isinstance(one, ObjectRef) and one.definition
    ]
    if not definitions:
        definitions = [one for one in reading.file.classes.values() if {name, "forward"} <= _methods(one).keys()]
    return bool(definitions) and all(_calls_own(_methods(one).get("forward"), name) for one in definitions)


def _methods(definition: ast.ClassDef) -> dict[str, Function]:
    return {one.name: one for one in definition.body if isinstance(one, Function)}


def _calls_own(function: Function | None, name: str) -> bool:
    if function is None:
        return False
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
        and getattr(node.func.value, "id", "") == "self"
        for node in ast.walk(function)
    )


@rule("SW231", "unregistered-entry-point", severity=Severity.ERROR)
def unregistered_entry_point(reading: LintContext) -> Iterator[Hit]:
    """A method other than `forward` that uses the model's own parameters has to be registered.

    Why: only `forward` is hooked; in any other method the parameters of this group are still DTensors.
    Symptom: `got mixed torch.Tensor and DTensor`.
    """
    for usage in reading.usages:
        registered = {
            value.value
            for event in usage.trace.calls_to(_REGISTER)
            for value in event.argument(1, "method_name")
            if isinstance(value, Constant)
        }
        if usage.trace.calls_to(_REGISTER) and not registered:
            continue  # names computed at run time
        for event in usage.events:
            for model in event.receiver:
                if not (isinstance(model, ObjectRef) and model.definition and _is_hooked(usage, model, event)):
                    continue
                method = _methods(model.definition).get(event.method)
                if method is None or event.method == "forward" or event.method in registered:
                    continue
                child = _child_used(usage, event, model)
                if child and not _calls_itself(method):
                    yield Hit(
                        node=event.node,
                        message=f"{event.method}() uses {child}, whose parameters only forward() gathers",
                        fix=f'register_fsdp_forward_method(model, "{event.method}") after fully_shard',
                    )


def _calls_itself(method: Function) -> bool:
    return any(
        isinstance(node, ast.Call)
        and (
            getattr(node.func, "id", "") == "self"
            or getattr(node.func, "attr", "") in ("forward", "__call__", "unshard")
        )
        for node in ast.walk(method)
    )


def _child_used(usage: Usage, event: ProgramEvent, model: ObjectRef) -> str:
    """A module of the model's own group that runs inside the method, by its name."""
    for later, module in usage.entered:
        is_inside = len(later.chain) == len(event.chain) + 1 and later.chain[-1] is event.node
        name = _name_on_self(later) if is_inside and later.order > event.order else ""
        if not name or model.definition is None or name in _methods(model.definition) or not _is_module(module):
            continue
        has_groups = any(usage.trace.is_part_of(shard.subject, module) for shard in usage.shards)
        if not has_groups and not usage.is_sharded(module, event):
            return f"self.{name}"
    return ""


def _name_on_self(event: ProgramEvent) -> str:
    """`x` of a call `self.x(...)`."""
    function = event.node.func if isinstance(event.node, ast.Call) else None
    if isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "self":
        return function.attr
    return ""


def _is_module(module: Module) -> bool:
    """Made by torch.nn, or by a class of this file that has a forward."""
    if isinstance(module, PartRef):
        return False
    if module.definition is not None:
        return "forward" in _methods(module.definition)
    return any(origin.startswith("torch.nn.") for origin in module.origins)
