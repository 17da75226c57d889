"""Rules about calls of a model and their order: calls without hooks, before the root's, before the optimizer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.findings import Safety
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source import facts
from shardwise.source.edits import change
from shardwise.source.syntax import FileContext, Function, calls_in, name_on_self
from shardwise.source.trace import Optimizer, Shard, Trace
from shardwise.source.values import Constant, ObjectRef, Param, ProgramEvent, modules

_REGISTER = "torch.distributed.fsdp.register_fsdp_forward_method"


@rule("SW229", fix="call the model itself", safety=Safety.SAFE)
def forward_called_directly(context: LintContext) -> Iterator[Hit]:
    """`model.forward(x)` bypasses the hooks that unshard a sharded model's parameters.

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
    """Whether only hooks unshard the module: it is sharded by `fully_shard`, and `unshard()` is not called."""
    return trace.is_sharded_by_hand(module, event) and not any(
        one.method == "unshard" and module in one.receiver and trace.precedes(one, event) for one in trace.events
    )


@rule("SW230", fix="remove this call: the module is entered by calling it")
def registered_method_reached_from_forward(context: LintContext) -> Iterator[Hit]:
    """A method that `forward` calls must not be registered as a forward method.

    Why: FSDP's hooks run twice; at the end of the inner method the parameters are resharded while `forward` needs them.
    Symptom: `got mixed torch.Tensor and DTensor`; up to torch 2.5 `Expects to be in one of (UNSHARDED)`.
    """
    for _, event in context.events_of(_REGISTER):
        for name in _registered(event):
            if name == "forward":
                yield Hit(event.node, "forward is hooked already, so FSDP's hooks run twice")
            elif _is_reached(context, event, name):
                yield Hit(event.node, f"forward itself calls {name}, so FSDP's hooks run twice")


def _registered(event: ProgramEvent) -> list[str]:
    return [str(value.value) for value in event.argument(1, "method_name") if isinstance(value, Constant)]


def _is_reached(context: LintContext, event: ProgramEvent, name: str) -> bool:
    """Whether `forward` of the module's class calls the method; if the class is unknown, of all classes with both."""
    classes = [one.definition for one in modules(event.argument(0, "module")) if one.definition is not None]
    classes = classes or [one for one in context.file.classes.values() if {name, "forward"} <= _methods(one).keys()]
    forwards = [_methods(one).get("forward") for one in classes]
    called = [{name_on_self(call.func) for call in calls_in(one)} if one is not None else set() for one in forwards]
    return bool(classes) and all(name in one for one in called)


def _methods(definition: ast.ClassDef) -> dict[str, Function]:
    return {one.name: one for one in definition.body if isinstance(one, Function)}


@rule("SW231")
def unregistered_entry_point(context: LintContext) -> Iterator[Hit]:
    """A method other than `forward` that uses the model's own parameters has to be registered.

    Why: only `forward` is hooked; in other methods the parameters of this group are DTensors.
    Symptom: `got mixed torch.Tensor and DTensor`.
    """
    for trace in context.traces:
        calls = trace.calls_to(_REGISTER)
        registered = {name for event in calls for name in _registered(event)}
        if calls and not registered:
            continue  # names are computed at run time
        for event in trace.events:
            name = event.method
            for model in modules(event.receiver) if name not in registered | {"forward"} else ():
                method = _methods(model.definition).get(name) if model.definition is not None else None
                if method is None or _calls_itself(method) or not _is_hooked(trace, model, event):
                    continue
                child = _child_used(trace, event, model)
                if child:
                    message = f"{name}() uses {child}, whose parameters only forward() unshards"
                    yield Hit(event.node, message, f'register_fsdp_forward_method(model, "{name}") after fully_shard')


def _calls_itself(method: Function) -> bool:
    called = [call.func for call in calls_in(method)]
    return any(
        getattr(one, "id", "") == "self" or getattr(one, "attr", "") in ("forward", "__call__", "unshard")
        for one in called
    )


def _child_used(trace: Trace, event: ProgramEvent, model: ObjectRef) -> str:
    """Return the name of a module of the model's own group that the method calls."""
    for later, module in trace.entered:
        is_inside = len(later.chain) == len(event.chain) + 1 and later.chain[-1] is event.node
        function = getattr(later.node, "func", later.node)
        name = name_on_self(function) if is_inside and later.order > event.order else ""
        if not name or model.definition is None or name in _methods(model.definition) or not _is_module(module):
            continue
        has_groups = any(trace.is_part_of(shard.subject, module) for shard in trace.shards)
        if not has_groups and not trace.is_sharded(module, event):
            return f"self.{name}"
    return ""


def _is_module(module: ObjectRef) -> bool:
    """Whether it is made by torch.nn, or by a class of this file that has a forward."""
    if module.definition is not None:
        return "forward" in _methods(module.definition)
    return any(origin.startswith("torch.nn.") for origin in module.origins)


# `group["params"] = ...`: the program updates the parameters of its optimizers itself.
_REPOINTS = re.compile(r"""\[["']params["']\]\s*=[^=]""")


@rule("SW201", fix="build the optimizer after the last fully_shard call")
def optimizer_before_shard(context: LintContext) -> Iterator[Hit]:
    """An optimizer built before `fully_shard` updates tensors that the model no longer uses.

    Why: sharding replaces each parameter by a DTensor; the optimizer keeps the old ones.
    Symptom: the loss stays flat and no error is raised.
    """
    for trace in context.traces if not _REPOINTS.search(context.file.text) else ():
        for optimizer in trace.optimizers:
            shard = _sharded_after(trace, optimizer)
            if shard is not None:
                message = f"the optimizer is built before the model is sharded (line {shard.event.line}); "
                yield Hit(optimizer.event.node, message + "it keeps the old parameters and its steps change nothing")


def _sharded_after(trace: Trace, optimizer: Optimizer) -> Shard | None:
    for shard in trace.shards:
        event = shard.event
        if shard.is_automatic and (event.keywords.keys() & {"optimizers", "optimizer"} or len(event.args) > 1):
            continue  # shardwise updates these to the new parameters
        is_of_model = any(trace.are_related(owner, shard.subject) for owner in optimizer.owners)
        if is_of_model and trace.precedes(optimizer.event, event):
            # If another optimizer for the same parameters follows, the first one has another purpose.
            others = [one for one in trace.optimizers if one.owners & optimizer.owners]
            return None if any(trace.precedes(event, one.event) for one in others) else shard
    return None


@rule("SW216", fix="build the optimizer before that forward, or call model.reshard() after it")
def optimizer_after_forward(context: LintContext) -> Iterator[Hit]:
    """An optimizer built after a forward without backward holds the root's unsharded parameters.

    Why: the root group stays unsharded after forward until the end of backward; `model.parameters()` then returns plain
    tensors, which are freed at the next reshard. No error is raised, and the root's parameters never train.
    """
    for trace in context.traces:
        for optimizer in trace.optimizers:
            for event, module in trace.entered:
                if (
                    module in optimizer.owners
                    and any(around.is_call_to(*facts.NO_GRAD) for around in event.contexts)
                    and trace.is_sharded_by_hand(module, event)
                    and trace.precedes(event, optimizer.event)
                    and not _is_resharded(trace, module, event, optimizer.event)
                ):
                    message = f"the forward on line {event.line} left the root group unsharded; "
                    message += "the optimizer gets tensors that are freed at the next reshard"
                    yield Hit(optimizer.event.node, message)
                    break


def _is_resharded(trace: Trace, module: ObjectRef, after: ProgramEvent, before: ProgramEvent) -> bool:
    calls = [one.event.keywords for one in trace.shards if one.subject == module]
    given = [keywords["reshard_after_forward"] for keywords in calls if "reshard_after_forward" in keywords]
    if any(not one.values & {Constant(False), Constant(None)} for one in given):
        return True
    return any(event.method in ("reshard", "backward") for event in trace.events[after.order : before.order])


@rule("SW217", fix="call the root module first, or shard this one without a root around it")
def submodule_before_root(context: LintContext) -> Iterator[Hit]:
    """Calling a sharded submodule before its root makes the submodule another root.

    Why: the first module that is called initializes FSDP for all modules inside it.
    Symptom: `FSDP state has already been lazily initialized for layers.0`.
    """
    for trace in context.traces:
        subjects = {shard.subject for shard in trace.shards if not shard.is_automatic}
        entered = [(event, module) for event, module in trace.entered if module in subjects]
        for later, root in entered:
            for early, inner in entered:
                if (
                    trace.is_part_of(inner, root)
                    and early.chain == later.chain
                    and early.loop in (None, later.loop)
                    and trace.precedes(early, later)
                    and trace.is_sharded(root, early)
                    and not any(module == root and trace.precedes(event, early) for event, module in entered)
                ):
                    yield Hit(early.node, f"this submodule is called before its sharded root (line {later.line})")


@rule("SW240", fix="clear gradients before the forward, or with optimizer.zero_grad()")
def zero_grad_after_forward(context: LintContext) -> Iterator[Hit]:
    """`model.zero_grad()` between forward and backward does not clear the gradients of the root's parameters.

    Why: the root group stays unsharded after forward. Unsharded parameters are then registered; the sharded ones, which
    the optimizer steps, keep their gradients, which accumulate over steps. No error is raised.
    """
    for trace, event in context.events:
        for module in _cleared(context.file, event):
            is_trained = any(later.method == "backward" for later in trace.events[event.order :])
            forwards = [one for one, entered in trace.forwards if entered == module and trace.precedes(one, event)]
            last = max(forwards, key=lambda one: one.order, default=None)
            if last is None or not is_trained or not trace.is_sharded_by_hand(module, event):
                continue
            if not _is_resharded(trace, module, last, event):
                message = f"since the forward on line {last.line} the root's unsharded parameters are registered; "
                yield Hit(event.node, message + "the gradients of its shards are kept and accumulate")


def _cleared(file: FileContext, event: ProgramEvent) -> list[ObjectRef]:
    """Return modules whose gradients an event clears: `model.zero_grad()`, or `p.grad = None` for its parameters."""
    if event.method == "zero_grad" and not event.is_store:
        return modules(event.receiver)
    value = getattr(file.statement(event.node), "value", event.node)
    if event.method == "grad" and event.is_store and getattr(value, "value", value) is None:
        return [value.owner for value in event.receiver if isinstance(value, Param)]
    return []
